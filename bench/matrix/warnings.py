"""Warnings about a matrix: questions that the study cannot answer, and settings with no or an odd effect."""

from __future__ import annotations

from typing import Any

from ddp_scaling_bench.finding import Recorded
from ddp_scaling_bench.units import count, join_names, listed

#: Number of cells that a warning names.
NAMED_CELLS = 6


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
    """Too few repeats for confidence intervals, which need ``needed``."""

    repeats: int
    needed: int

    def _message(self) -> str:
        needed = f"they need {self.needed} or more"
        return f"{count(self.repeats, 'repeat')}: no confidence intervals ({needed})"


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


class MixedNodes(PlanWarning, kind="mixed-nodes"):
    """Nodes with different numbers of ranks, each of which gets the most GPUs that one of them needs."""

    ranks_per_node: tuple[int, ...]

    def _message(self) -> str:
        asked = f"the job requests {max(self.ranks_per_node)} GPUs on each node"
        return f"mixed nodes {list(self.ranks_per_node)}: {asked}; some of these GPUs stay idle"


class SharedNodes(PlanWarning, kind="shared-nodes"):
    """Jobs of others, and runs of these ``cells``, can run on the nodes of a run.

    ``of_plan`` is true if the setting comes from the study's existing plan.
    """

    cells: tuple[str, ...] = ()
    of_plan: bool = False

    def _message(self) -> str:
        remedy = "remove this line for whole nodes"
        if self.of_plan:
            remedy = "give the matrix another `study:` name for whole nodes"
        what = "cluster.exclusive is false: other jobs can run on the same nodes and disturb a run"
        if not self.cells:
            return f"{what}; {remedy}"
        names = join_names(self.cells, most=NAMED_CELLS)
        remedy = f"{remedy}, or use `bench submit --pack` or max_running: 1"
        return f"{what}. Runs of these cells can also share a node: {names}; {remedy}"


class SharedNetwork(PlanWarning, kind="shared-network"):
    """Runs on several nodes can execute at the same time."""

    runs: int

    def _message(self) -> str:
        return (
            f"up to {self.runs} runs on several nodes can execute side by side and share the network, which "
            "disturbs their communication times; `bench submit --pack` (one job, one run after another) "
            "avoids this, and so does max_running: 1"
        )


class RootOnly(PlanWarning, kind="fsdp-root"):
    """FSDP wraps only the whole model."""

    message = (
        "with fsdp_wrap root, FSDP gathers all weights before it computes, so communication "
        "cannot overlap computation (pytorch#176318); use block"
    )


class RunsAs(PlanWarning, kind="runs-as"):
    """A strategy that is another one at the sizes of ``cells``."""

    strategy: str
    other: str
    cells: tuple[str, ...]

    def _message(self) -> str:
        return f"strategy {self.strategy} runs as {self.other} in {join_names(self.cells, most=NAMED_CELLS)}"


class NestedLaunch(PlanWarning, kind="nested-launch"):
    """The command contains a ``launcher``, of which each rank would start one.

    ``axis`` is the value of axes.launcher to use instead, if it is not set yet; ``program`` is the rest.
    """

    launcher: str
    axis: str = ""
    program: str = ""

    def _message(self) -> str:
        axis = f"`launcher: [{self.axis}]` and " if self.axis else ""
        program = f"`command: {self.program}`" if self.program else "only the program as the command"
        return (
            f"bench starts the command once per rank, and {self.launcher} in it starts ranks again; "
            f"use {axis}{program}"
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


# -- settings without effect ----------------------------------------------------------------


class UnusedExclusion(PlanWarning, kind="unused-exclusion"):
    """An entry of ``exclude`` that matches no cell."""

    index: int

    def _message(self) -> str:
        return f"exclude[{self.index}] matches no cell and has no effect"


class NotInCommand(PlanWarning, kind="not-in-command"):
    """A setting that the command has no placeholder for."""

    section: str
    name: str

    def _message(self) -> str:
        what = "varies, but" if self.section == "axes" else "is ignored:"
        return f"{self.section}.{self.name} {what} the command does not contain {{{self.name}}}"


class IgnoredSetting(PlanWarning, kind="ignored-setting"):
    """A setting that has no effect with the executor or the device; without either: without a command."""

    setting: str
    executor: str = ""
    device: str = ""

    def _message(self) -> str:
        why = f" by executor {self.executor}" if self.executor else f" on device {self.device}"
        if not (self.executor or self.device):
            why = ": there is no workload.command"
        return f"{self.setting} is ignored{why}"


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


class ImageSizeIgnored(PlanWarning, kind="image-size-ignored"):
    """The images of a folder have their own size."""

    message = "image_size is ignored: the images of a folder keep their size"
