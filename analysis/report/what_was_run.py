"""Describe the method of a study for its proposal: what its runs executed, where, when and how often.

Of a user's command, only recorded facts are stated: its words, its script, the options that it names as
placeholders, and the source of its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from analysis.data.columns import RunRow
from analysis.data.environment import Environment, fact_title, sampled
from analysis.data.load import Study
from analysis.data.settings import spelled
from analysis.report.words import WORDS
from analysis.text import clean, one_line
from bench.matrix.cell import Cell, canonical, shown_command
from bench.matrix.workload import CELL_VALUES, names_in, tokens
from ddp_scaling_bench.known_models import models_using
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.run_folder import read_run
from ddp_scaling_bench.train.options import OPTIONS
from ddp_scaling_bench.units import capital, count, known, listed, whole
from ddp_scaling_bench.variables import shown_variables

#: Options of the built-in training that determine its computation, and others that are named if they are set.
_SETTINGS = ("model", "strategy", "seq_len", "image_size", "precision", "optimizer")
_FURTHER = ("memory_format", "grad_accum", "bucket_cap_mb", "activation_checkpointing", "compile")
_TITLES = {
    "seq_len": "sequence length",
    "grad_accum": "gradient accumulation",
    "bucket_cap_mb": "size of the gradient buckets in MiB",
    "compile": "torch.compile",
}
#: Placeholders whose values are names, or are known in the job only.
_NAMES = frozenset({"study", "cell_id", "run_dir", "master_addr", "master_port"})
Cells: TypeAlias = Sequence[Cell]
_SOFTWARE, _TRANSPORT = ("python", "torch", "cuda", "nccl"), ("backend", "network", "interface")


@dataclass(frozen=True)
class Executed:
    """A study and the runs that a page or proposal describes."""

    study: Study
    runs: Sequence[RunRow]

    @cached_property
    def cells(self) -> list[Cell]:
        """The planned cells of the runs."""
        shown = {run.cell_id for run in self.runs}
        return [cell for cell in self.study.planned if clean(cell.cell_id) in shown]

    @property
    def reads_values(self) -> bool:
        """True if values come from the output or a file of a command, without the recorder."""
        return any(cell.reads_values for cell in self.cells)

    @property
    def kind(self) -> str:
        """The name of the source of values: ``average``, ``values``, ``recorder`` or ``built_in``."""
        if any(cell.is_average for cell in self.cells):
            return "average"
        if self.reads_values:
            return "values"
        return "built_in" if all(cell.follows_plan for cell in self.cells) else "recorder"

    def kinds(self) -> list[list[Cell]]:
        """Return the cells in groups; a group has one command and one source of values."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(canonical([cell.argv, cell.metrics]), []).append(cell)
        return list(groups.values())

    def runs_of(self, cells: Cells) -> list[RunRow]:
        """Return the runs of some cells."""
        ids = {clean(cell.cell_id) for cell in cells}
        return [run for run in self.runs if run.cell_id in ids]

    def commands(self, cells: Cells) -> list[Mapping[str, Any]]:
        """Return ``command`` of run.json for the runs of ``cells``; of many runs, only a sample is read."""
        folders = [run.folder for run in sampled(self.study, self.runs_of(cells))]
        described = [read_run(Path(folder))[0] or {} for folder in folders if folder]
        return [run["command"] for run in described if isinstance(run.get("command"), dict)]


def what_was_run(executed: Executed, environment: Environment) -> Iterator[str]:
    """Yield sentences about what the runs executed, where, when and how often."""
    if executed.study.table:
        yield (
            "The values were measured elsewhere and are taken from a table. A throughput is the harmonic "
            "mean over the rows of a size."
        )
        return
    tool = f"the tool ddp-scaling-bench {dict(environment.facts).get('bench_version', '')}".strip()
    yield _runs(executed.runs, tool, in_study=len(executed.study.runs))
    kinds = executed.kinds()
    for cells in kinds:
        yield from _of_kind(executed, cells, is_only=len(kinds) == 1)
    facts = dict(environment.facts)
    if executed.kind == "built_in" and not any(facts.get(name) for name in _SOFTWARE):
        yield "No run recorded its software, so the training is described as planned."
    yield _launch(executed.cells)
    yield from _machine(environment, executed)
    if any(run.measured for run in executed.runs):
        yield "A throughput is the harmonic mean over the runs of a size."


def constant_batch(mode: str, executed: Executed) -> str:
    """Return the name of the constant batch; a command that reports its own values may use another one."""
    batch = str(WORDS["modes"][mode]["constant"])
    return f"{batch} in the plan" if batch and executed.reads_values else batch


def _runs(runs: Sequence[RunRow], tool: str, *, in_study: int) -> str:
    """Return the number of runs and sizes, and the days of the runs."""
    starts = [run.started_at for run in runs if run.started_at]
    ends = [run.ended_at for run in runs if run.ended_at]
    what, when = "planned", ""
    if starts and ends:
        days = list(dict.fromkeys(f"{time:%Y-%m-%d}" for time in (min(starts), max(ends))))
        what, when = "executed", f" {'on' if len(days) == 1 else 'between'} {' and '.join(days)} (UTC)"
    of_all = f" (of {in_study:,} runs of the study)" if in_study > len(runs) else ""
    number = (
        f"{count(len(runs), 'run')} of {count(len({run.cell_id for run in runs}), 'configuration')}{of_all}"
    )
    if any(run.measured for run in runs):
        packed = "; the runs shared jobs, one after another" * any(run.allocation == "pack" for run in runs)
        return f"The numbers are those of {number}, executed by {tool}{when}{packed}."
    return f"{capital(tool)} {what} {number}{when}. None of them has a throughput."


# -- the training ---------------------------------------------------------------------


def _of_kind(executed: Executed, cells: Cells, *, is_only: bool) -> Iterator[str]:
    """Describe the only command that ``cells`` executed."""
    runs = executed.runs_of(cells)
    measured = any(run.measured for run in runs)
    if not cells[0].follows_plan:
        label = one_line(cells[0].command_label, limit=60)
        share = "these runs" if is_only else f"{count(len(runs), 'run')} ({label})"
        command, where = _command(cells[0].argv, cells)
        yield f"The command of {share} is {command}{where}."
        yield _scripts(executed.commands(cells))
        if measured:
            yield from _values_of_command(cells, runs)
        return
    models = {cell.workload.get("model") for cell in cells}
    used = [name for name in _SETTINGS if models & set(models_using(name) or models)]
    default = {name: (None, OPTIONS[name].default) for name in _FURTHER}
    used += [name for name in default if any(cell.workload.get(name) not in default[name] for cell in cells)]
    found = {name: [_value_title(name, one) for one in _values(cells, name)] for name in used}
    options = [f"{_TITLES.get(name, name)} {' or '.join(own)}" for name, own in found.items() if own]
    shown = ", ".join(options).replace("_", " ")
    yield f"The training is that of the tool itself: {shown}."
    inputs = "; or ".join(dict.fromkeys(_input(cell.workload) for cell in cells))
    yield f"Input: {inputs}."
    if measured:
        yield _windows(cells, runs, who="The training")


def _value_title(option: str, value: str) -> str:
    if option == "strategy":
        return STRATEGIES[value].title if value in STRATEGIES else value
    return {"true": "on", "false": "off"}.get(value, value)


def _command(words: Sequence[str], cells: Cells) -> tuple[str, str]:
    """Return a command with its values, and those of its placeholders that vary, which are in capitals."""
    try:
        values = {name: [] if name in _NAMES else _values(cells, name) for name in names_in(words)}
    except ValueError:  # a plan of another version
        return one_line(shown_command(words), limit=400), ""
    each = "replica" if any(cell.model_parallel > 1 for cell in cells) else "rank"
    names = {name: name.replace("per_gpu_batch", f"batch_per_{each}").upper() for name in values}
    texts = {name: own[0] if len(own) == 1 else names[name] for name, own in values.items()}
    filled = [
        "".join(texts[text] if kind == "value" else text for kind, text in tokens(word)) for word in words
    ]
    varied = [f"{names[name]} is {' or '.join(own)}" for name, own in values.items() if len(own) > 1]
    varied += ["RUN_DIR is the folder of the run"] * ("run_dir" in values)
    where = f", where {listed(varied)}" if varied else ""
    return one_line(shown_command(filled), limit=400), where


def _values(cells: Cells, name: str) -> list[str]:
    """Return the different values of an option or a placeholder, at most eight and "..." for others."""
    key = "tasks_per_node" if name == "gpus_per_node" else name
    values = [getattr(cell, key) if key in CELL_VALUES else cell.workload.get(key) for cell in cells]
    if name.startswith("env."):
        values = [shown_variables(cell.env, cell.swept).get(name[4:]) for cell in cells]
    texts = list(dict.fromkeys(spelled(value) for value in values if value is not None))
    return [*texts[:8], "..."] if len(texts) > 8 else texts


def _scripts(commands: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the script, its SHA-256 and its commit at the submission, as far as known."""
    found = Counter(_script(command) for command in commands if command.get("script"))
    if not found:
        return "The code of this command was not recorded."
    texts = list(found)
    if len(texts) > 1:
        texts = [f"{text} for {count(runs, 'run')}" for text, runs in found.most_common()]
    scripts = listed(texts, limit=4)
    return f"When the runs were submitted, the script of this command was {scripts}."


def _script(command: Mapping[str, Any]) -> str:
    parts = []
    if command.get("script_sha256"):
        parts.append(f"SHA-256 begins with {one_line(command['script_sha256'], limit=64)[:12]}")
    if command.get("git_commit"):
        state = {"True": " with uncommitted changes", "False": " without changes of tracked files"}
        commit = one_line(command["git_commit"], limit=64)[:12]
        parts.append(f"git commit {commit}{state.get(str(command.get('git_dirty')), '')}")
    text = one_line(command["script"], limit=120)
    return f"{text} ({', '.join(parts)})" if parts else text


def _values_of_command(cells: Cells, runs: Sequence[RunRow]) -> Iterator[str]:
    """Yield the source of a command's values, and how they are converted."""
    metrics = cells[0].metrics
    if not cells[0].reads_values:
        yield _windows(cells, runs, who="Timers of the tool in the script")
        return
    file = metrics.get("csv")
    origin = f"its file {one_line(file, limit=120)}" if file else "its standard output"
    skip = int(metrics.get("skip") or 0)
    read = metrics.get("columns") or metrics.get("output") or {}
    names = [name for name in ("throughput", "step_time") if name in read]
    reported = f"The command itself reported its {' and '.join(name.replace('_', ' ') for name in names)}"
    if cells[0].is_average:
        yield (
            f"{reported} in {origin}, as an average over the whole run with its start-up; if several ranks "
            "did so, the lowest rate counts."
        )
    else:
        skipped = f", after {count(skip, 'skipped value')}" if skip else ""
        number = f"{_range([run.epochs for run in runs], 'value')} per run"
        yield f"{reported}, {number}, in {origin}{skipped}."
    unit = (metrics.get("units") or {}).get("throughput")
    if unit == "it/s" or "throughput" not in names:
        yield "Samples per second are computed with the batch of the plan."
    else:
        times = {"per_gpu": " times the number of ranks", "per_replica": " times the number of replicas"}
        factor = times.get(metrics.get("scope") or "", "")
        if unit == "tokens/s":
            factor += " divided by the tokens of a sample"
        if factor:
            yield f"Samples per second are the reported rate{factor}."
    if "throughput" in names and unit != "it/s":
        yield "The time per step is the batch of the plan divided by the throughput."


def _windows(cells: Cells, runs: Sequence[RunRow], *, who: str) -> str:
    windows = _range([run.epochs for run in runs], "timed window")
    steps = _range([run.steps for run in runs], "step")
    warmup = " or ".join(dict.fromkeys(str(cell.workload["warmup_steps"]) for cell in cells))
    return (
        f"{who} measured the throughput in {windows} with {steps} in total per run, after at least {warmup} "
        "steps of warm-up."
    )


def _range(values: Iterable[float], noun: str) -> str:
    """Return ``3 values``, or ``3 to 5 values`` if they differ."""
    counted = [value for value in values if known(value)]
    if not counted:
        return f"an unknown number of {noun}s"
    low, high = min(counted), max(counted)
    return f"{whole(low)} to {whole(high)} {noun}s" if low < high else count(int(low), noun)


def _input(workload: Mapping[str, Any]) -> str:
    data = workload.get("data")
    if data in (None, "synthetic"):
        return "synthetic batches, so that reading from storage is not included"
    workers = count(int(workload.get("num_workers") or 0), "loading process", "loading processes")
    return f"{one_line(data, limit=120)}, read by {workers} per rank"


# -- launch and machine ---------------------------------------------------------------


def _launch(cells: Cells) -> str:
    launchers = listed(list(dict.fromkeys(spelled(cell.launcher) for cell in cells)))
    on_gpus = any(cell.device == "cuda" for cell in cells)
    variables: dict[str, dict[str, None]] = {}
    for cell in cells:
        for name, value in shown_variables(cell.env, cell.swept).items():
            variables.setdefault(one_line(name, limit=60), {})[one_line(value, limit=80)] = None
    texts = [f"{name}={' or '.join(list(values)[:4])}".rstrip("=") for name, values in variables.items()]
    rank = "one process with one GPU" if on_gpus else "one process"
    with_variables = f" with the variables {listed(texts, limit=8)}" if texts else ""
    return f"A rank is {rank}, started by {launchers}{with_variables}."


def _machine(environment: Environment, executed: Executed) -> Iterator[str]:
    """Yield device, hosts and software; without the recorder, the harness knows only what is installed."""
    facts = dict(environment.facts)
    # One host has several entries if its cores differ between runs.
    hosts = {host.name for host in environment.hosts}
    number = count(len(hosts) + environment.hosts_left_out, "host")
    parts = [facts.get("device_name"), number if hosts else None]
    cores = listed(list(dict.fromkeys(host.cores for host in environment.hosts if host.cores)))
    parts.append(f"{cores} {'core' if cores == '1' else 'cores'} per host for its ranks" if cores else None)
    if threads := facts.get("threads_per_rank"):
        parts.append(f"{'requested ' if executed.reads_values else ''}threads per rank: {threads}")
    if machine := "; ".join(filter(None, parts)):
        yield f"Machine: {machine}."
    versions = [f"{fact_title(name)} {facts[name]}" for name in _SOFTWARE if facts.get(name)]
    versions += [f"{name} {facts[name]}" for name in _TRANSPORT if facts.get(name)]
    if facts.get("parameters") and not executed.reads_values:
        versions.append(f"{facts['parameters']} parameters")
    if versions:
        what = "Installed for the Python of the command" if executed.reads_values else "Software and model"
        yield f"{what}: {', '.join(versions)}."
    if environment.read < len(executed.runs) and (machine or versions):
        yield f"This was read from {environment.read:,} of {count(len(executed.runs), 'run')}."
