"""Warnings about a matrix: questions that the study cannot answer, and settings with no or an odd effect."""

from __future__ import annotations

from typing import Any

from ddp_scaling_bench.finding import Recorded
from ddp_scaling_bench.units import count, join_names, listed, short_name

#: Number of cells that a warning names.
NAMED_CELLS = 3


class PlanWarning(Recorded):
    """The base of these warnings; ``path`` and ``line`` are the setting's, if the warning is about one."""

    path: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.path, self.line) if part)
        return f"{where}: {self.message}" if where else self.message

    def told(self) -> dict[str, Any]:
        """Return the warning for ``--json``; ``message`` begins with the place."""
        return {**super().told(), "message": str(self)}


# -- questions without an answer ----------------------------------------------------------


class OneSize(PlanWarning, kind="one-size"):
    """Series with only one size; ``of_all`` is true if all series are such."""

    series: tuple[str, ...]
    of_all: bool = False

    def _message(self) -> str:
        if self.of_all:
            return "every series has only one size, so speedups and efficiencies cannot be computed"
        return f"no efficiency for series with one size only: {join_names(self.series, most=3)}"


class FewRepeats(PlanWarning, kind="few-repeats"):
    """Too few repeats of some ``cells`` or of all for confidence intervals, which need ``needed``."""

    repeats: int
    needed: int
    cells: tuple[str, ...] = ()

    def _message(self) -> str:
        where = f" of {join_names(self.cells, most=NAMED_CELLS)}" if self.cells else ""
        needed = f"they need {self.needed} or more"
        return f"{count(self.repeats, 'repeat')}{where}: no confidence intervals ({needed})"


class OneNodeCount(PlanWarning, kind="one-node-count"):
    """All cells have the same number of nodes."""

    nodes: int

    def _message(self) -> str:
        return f"one node count ({self.nodes}): no efficiency across nodes, only within a node"


# -- settings that do something other than people expect ------------------------------------


class LiteralDollar(PlanWarning, kind="literal-dollar"):
    """The value of a variable contains a $, which the shell does not expand."""

    variable: str

    def _message(self) -> str:
        return (
            f"cluster.env.{self.variable} contains a $, which is passed literally; to refer to another "
            "variable, use export in a line of cluster.setup"
        )


class DataNotMounted(PlanWarning, kind="data-not-mounted"):
    """The container may not see the folder of the data."""

    message = "the container sees workload.data only if cluster.container.mounts binds it"


class MissingData(PlanWarning, kind="missing-data"):
    """The folder of the data is not on this machine."""

    folder: str

    def _message(self) -> str:
        return (
            f"the folder {self.folder} of workload.data does not exist here; give one with inputs.pt and "
            "targets.pt that every node can read, or write data: synthetic"
        )


class ContainerProgram(PlanWarning, kind="container-program"):
    """A container that is one word, which is started as a program."""

    program: str

    def _message(self) -> str:
        return (
            f"{self.program} is started as a program, with the training as its arguments; if it is an image, "
            f"write container: {{runtime: apptainer, image: {self.program}}}"
        )


class SharedNodes(PlanWarning, kind="shared-nodes"):
    """Jobs of others can run on the nodes of a run, of some ``cells`` or of all."""

    cells: tuple[str, ...] = ()

    def _message(self) -> str:
        where = f" for {join_names(self.cells, most=NAMED_CELLS)}" if self.cells else ""
        return (
            f"cluster.exclusive is false{where}: other jobs can run on the same nodes and disturb a run; "
            "write true for whole nodes"
        )


class SideBySide(PlanWarning, kind="side-by-side"):
    """Runs can execute at the same time: ``runs`` on several nodes, and on one node those of ``cells``."""

    runs: int = 0
    cells: tuple[str, ...] = ()

    def _message(self) -> str:
        what = [f"up to {self.runs} runs on several nodes share the network"] if self.runs else []
        if self.cells:
            what.append(f"these can share a node: {join_names(self.cells, most=NAMED_CELLS)}")
        return (
            f"runs can execute side by side and disturb each other ({'; '.join(what)}); set "
            "max_running: 1, or use `bench submit --pack`"
        )


class OneCore(PlanWarning, kind="one-core"):
    """A rank on a GPU has one core, because the matrix says so or does not say how many."""

    num_workers: int = 0
    is_set: bool = False

    def _message(self) -> str:
        workers = f" for itself and its num_workers {self.num_workers}" if self.num_workers else ""
        why = "is 1, so each rank has" if self.is_set else "is not set, so each rank gets"
        remedy = "set it to the cores of a node divided by its ranks"
        return f"cluster.cpus_per_task {why} one core{workers}; {remedy}"


class MoreWorkers(PlanWarning, kind="more-workers-than-cores"):
    """A rank has more loader workers than cores."""

    num_workers: int
    cores: int

    def _message(self) -> str:
        cores = count(self.cores, "core")
        return (
            f"num_workers {self.num_workers}: each rank has {cores} for itself and these workers; raise "
            f"cluster.cpus_per_task, or use num_workers {max(0, self.cores - 1)}"
        )


class LongNodelist(PlanWarning, kind="long-nodelist"):
    """The nodelist has more ``hosts`` than the smallest run has ``nodes``."""

    hosts: int
    nodes: int

    def _message(self) -> str:
        return (
            f"cluster.nodelist names {self.hosts} nodes, all of which a job must include, but the smallest "
            f"run has {count(self.nodes, 'node')}; name fewer, or use cluster.exclude or constraint"
        )


class RunsAs(PlanWarning, kind="runs-as"):
    """A strategy that is another one at the sizes of ``cells``."""

    strategy: str
    other: str
    cells: tuple[str, ...]

    def _message(self) -> str:
        return f"strategy {self.strategy} runs as {self.other} in {join_names(self.cells, most=NAMED_CELLS)}"


class NodesNotNamed(PlanWarning, kind="nodes-not-named"):
    """A command of launcher own may not know its nodes; its ``launcher`` lacks the words ``missing``."""

    launcher: str = ""
    missing: tuple[str, ...] = ()

    def _message(self) -> str:
        if self.missing:
            return f"on several nodes, {self.launcher} needs more words: {' '.join(self.missing)}"
        return (
            "the command is started on each node and names neither {node_rank} nor {master_addr}, {hosts} or "
            "{hostfile}: unless it reads $NODE_RANK and $MASTER_ADDR, each node trains alone"
        )


class RanksGoOn(PlanWarning, kind="ranks-go-on"):
    """A command that starts ranks on other nodes by itself is ended after its measurement."""

    message = (
        "stop_after_measurement ends the command on the first node: with command_per: job, ranks on other "
        "nodes can go on until the job ends; use command_per: node if the launcher allows it"
    )


class BatchNotNamed(PlanWarning, kind="batch-not-named"):
    """The command does not contain the batch."""

    message = (
        "the command contains neither {per_gpu_batch} nor {global_batch}: unless it reads "
        "$BENCH_PER_GPU_BATCH, its batch may differ from the cell's"
    )


class SharedOutput(PlanWarning, kind="shared-output"):
    """An option of the command names a folder or file of results that all runs would share."""

    option: str
    value: str

    def _message(self) -> str:
        return (
            f"all runs would write to the same {self.option} {self.value}, so that a run can resume from the "
            "checkpoint of another, or replaces its files; use a path below {run_dir}"
        )


class ShellVariable(PlanWarning, kind="shell-variable"):
    """A command contains a variable, which no shell replaces."""

    variable: str

    def _message(self) -> str:
        return (
            f"{self.variable} is passed literally, because no shell reads the command; write a placeholder "
            "such as {per_gpu_batch}, or bash -c and the command in quotes"
        )


class TypographicQuote(PlanWarning, kind="typographic-quote"):
    """A command contains a quotation mark of a text, as from a web page."""

    word: str

    def _message(self) -> str:
        return f"{short_name(self.word)} has a quotation mark that does not quote; write ' or \" instead"


class MissingScript(PlanWarning, kind="missing-script"):
    """A command names a script that does not exist in the folder from which jobs start."""

    script: str

    def _message(self) -> str:
        return (
            f"{self.script} does not exist here, and a run starts in the folder in which `bench submit` is "
            "called: call it where the script is, or give an absolute path"
        )


# -- settings without effect ----------------------------------------------------------------


class UnusedExclusion(PlanWarning, kind="unused-exclusion"):
    """An entry of ``exclude`` that matches no cell."""

    index: int

    def _message(self) -> str:
        remedy = "compare its values with those of axes and scaling, or remove it"
        return f"exclude[{self.index}] matches no cell and has no effect; {remedy}"


class UnusedTarget(PlanWarning, kind="unused-target"):
    """A target that is for no cell: ``cells`` are the settings that it asks for, as text.

    ``only_base`` is true for an efficiency of the smallest sizes, to which efficiencies refer.
    """

    limited: str
    cells: str
    only_base: bool = False

    def _message(self) -> str:
        about = f" for {self.cells}" if self.cells else ""
        matched = "only smallest sizes, whose efficiency is 1 by definition" if self.only_base else "no cell"
        what = f"the target of {self.limited}{about} matches {matched}, so it is never met"
        return (
            f"{what}; name {'larger sizes' if self.only_base else 'values that the plan has'}, or remove it"
        )


class NotInCommand(PlanWarning, kind="not-in-command"):
    """Settings of a section that the command has no placeholders for."""

    section: str
    names: tuple[str, ...]

    def _message(self) -> str:
        settings = listed([f"{self.section}.{name}" for name in self.names])
        are = "is" if len(self.names) == 1 else "are"
        what = f"{'varies' if are == 'is' else 'vary'}, but" if self.section == "axes" else f"{are} ignored:"
        placeholders = " or ".join(f"{{{name}}}" for name in self.names)
        return f"{settings} {what} the command does not contain {placeholders}"


class IgnoredSetting(PlanWarning, kind="ignored-setting"):
    """Settings that have no effect ``by`` another one: ``executor local``, ``device cpu``."""

    settings: tuple[str, ...]
    by: str

    def _message(self) -> str:
        return f"{listed([*self.settings])} {'is' if len(self.settings) == 1 else 'are'} ignored by {self.by}"


class IgnoredOption(PlanWarning, kind="ignored-option"):
    """An option that some models or strategies do not use.

    ``by`` has the model or strategy of a cell and the one that it really uses, ``users`` are those that use
    the option. ``is_repeated`` is true if cells that differ only in the option measure the same.
    """

    option: str
    by: tuple[tuple[str, str], ...]
    users: tuple[str, ...]
    is_repeated: bool = False

    def _message(self) -> str:
        names = [one if one == own else f"{one} (as {own})" for one, own in self.by]
        remedy = "; exclude all but one of its values there, or the same is measured repeatedly"
        only = f"only {listed(list(self.users))} can use it{remedy * self.is_repeated}"
        return f"{self.option} is ignored by {listed(names)}; {only}"
