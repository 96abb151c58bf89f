"""State what the runs of a study executed, each value with its source.

Of a user's command, only recorded facts are stated: its words, its script, the options that it names as
placeholders, and the source of its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.compare.matching import spelled
from analysis.data.environment import Environment, sampled
from analysis.data.load import Study, is_average, metrics_of_cells, reads_values
from analysis.report.summary import certainty
from analysis.report.words import WORDS
from analysis.stats.columns import ScalingRow
from analysis.text import clean, one_line
from bench.matrix.cell import canonical, command_label
from bench.matrix.models import models_using
from bench.matrix.workload import names_in
from bench.secret_values import shown_command, without_secret_variables
from bench.study.run_json import read_run
from bench.units import count, known, listed, whole
from bench.words import term

#: Options of the built-in training that determine the computation.
_SETTINGS = (
    *("model", "strategy", "parameters", "seq_len", "image_size", "precision", "memory_format", "optimizer"),
    *("grad_accum", "bucket_cap_mb", "activation_checkpointing", "compile", "num_workers"),
)
#: Placeholders whose values are names, or are known in the job only.
_NAMES = frozenset({"study", "cell_id", "run_dir", "master_addr", "master_port"})
_MODEL = (("parameters", "parameters"), ("gradient_bytes", "of gradients"))
_SOFTWARE = ("python", "torch", "cuda", "nccl")
_INTERVALS = (
    " Throughputs are harmonic means over the runs. 95 % intervals of throughputs and efficiencies are for "
    "geometric means, by Student's t (of a ratio: Welch's t) on the logarithms, from three runs on."
)


_PLAN = "the plan (plan.json)"
#: The source of a value that is not known.
MISSING_SOURCE = "none"


class Line(NamedTuple):
    """A quantity, its value, and the source of the value."""

    what: str
    value: str
    source: str


@dataclass(frozen=True)
class Executed:
    """A study and the runs that a page or proposal describes; ``runs`` are rows of the runs DataFrame."""

    study: Study
    runs: pd.DataFrame

    @cached_property
    def cells(self) -> list[Mapping[str, Any]]:
        """The cells of the runs, as in plan.json."""
        shown = set(self.runs["cell_id"])
        return [cell for cell in self.study.plan.get("cells") or [] if clean(cell["cell_id"]) in shown]

    @property
    def reads_values(self) -> bool:
        """True if values come from the output or a file of a command, without the recorder."""
        return any(map(reads_values, metrics_of_cells({"cells": self.cells}).values()))

    @property
    def has_averages(self) -> bool:
        """True if the throughput of a cell is one average of the whole run, reported by a command."""
        return any(map(is_average, metrics_of_cells({"cells": self.cells}).values()))

    @property
    def has_command(self) -> bool:
        """True if a user's command ran instead of the built-in training."""
        return any((cell.get("workload") or {}).get("command") for cell in self.cells)

    def kinds(self) -> list[list[Mapping[str, Any]]]:
        """Return the cells in groups; a group has one command and one source of values."""
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for cell in self.cells:
            workload = cell.get("workload") or {}
            key = canonical([workload.get("command"), workload.get("metrics")])
            groups.setdefault(key, []).append(cell)
        return list(groups.values())

    def commands(self, cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return ``command`` of run.json for the runs of ``cells``; of many runs, only a sample is read."""
        wanted, ids = {clean(cell["cell_id"]) for cell in cells}, set(self.runs["run_id"])
        runs = self.study.runs
        places = [
            place
            for place, (run_id, cell_id) in enumerate(zip(runs["run_id"], runs["cell_id"], strict=True))
            if run_id in ids and cell_id in wanted
        ]
        attempts = [self.study.attempts[place] for place in sampled(self.study, places)]
        described = [read_run(Path(attempt))[0] or {} for attempt in attempts if attempt]
        return [run["command"] for run in described if isinstance(run.get("command"), dict)]


def what_was_run(executed: Executed, rows: Sequence[ScalingRow], environment: Environment) -> list[Line]:
    """Return what the runs executed, where, when and how often; ``rows`` is the scaling table."""
    lines = [Line("Runs", _runs(executed.runs, in_study=len(executed.study.runs)), "runs.csv")]
    if source := executed.study.table:
        lines = [Line("Values", "measured elsewhere and taken from a table", source.name)]
    else:
        for cells in executed.kinds():
            lines += _of_kind(executed, cells)
        lines += _launch(executed.cells)
        lines += _machine(environment, is_recorded=not executed.reads_values)
    ids = set(executed.runs["cell_id"])
    has_interval = any(known(row.throughput_low) for row in rows if row.cell_id in ids)
    intervals = _INTERVALS if has_interval else ""
    return [*lines, Line("Statistics", f"{certainty(rows)}{intervals}", "scaling.csv")]


def constant_batch(mode: str, executed: Executed) -> str:
    """Return the name of the constant batch; a command that reports its own values may use another one."""
    batch = str(WORDS["modes"][mode]["constant"])
    return f"{batch} in the matrix" if batch and executed.reads_values else batch


def _runs(runs: pd.DataFrame, *, in_study: int) -> str:
    """Return the number of runs and sizes, and the days of the runs."""
    text = f"{count(len(runs), 'run')} of {count(runs['cell_id'].nunique(), 'configuration')}"
    text += f" ({in_study:,} runs in the study)" if in_study > len(runs) else ""
    text += "" if runs["measured"].any() else ", none with a throughput"
    first, last = runs["started_at"].min(), runs["ended_at"].max()
    if pd.isna(first) or pd.isna(last):
        return text
    days = list(dict.fromkeys(f"{time:%Y-%m-%d}" for time in (first, last)))
    return f"{text}, {'on' if len(days) == 1 else 'between'} {' and '.join(days)} (UTC)"


# -- the training ---------------------------------------------------------------------


def _of_kind(executed: Executed, cells: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Describe what ``cells`` executed: all of them one command, or all the built-in training."""
    workload = cells[0].get("workload") or {}
    runs = executed.runs[executed.runs["cell_id"].isin([clean(cell["cell_id"]) for cell in cells])]
    if words := [str(word) for word in workload.get("command") or []]:
        label = one_line(command_label(workload, cells[0].get("swept") or {}), limit=60)
        yield Line(f"Command {label}".rstrip(), one_line(shown_command(words), limit=400), "matrix.yaml")
        yield from _scripts(executed.commands(cells))
        passed = [name for name in _named(words) if not name.startswith("env.")]
        if options := _options(cells, [name for name in passed if name not in _NAMES]):
            yield Line("Values of the matrix in it", options, _PLAN)
        if runs["measured"].any():
            yield from _values_of_command(workload, runs)
        return
    models = {(cell.get("workload") or {}).get("model") for cell in cells}
    used = [name for name in _SETTINGS if models & set(models_using(name) or models)]
    options = _options(cells, [*used, "backend"])
    yield Line("Training", f"the built-in training of ddp-scaling-bench: {options}", _PLAN)
    yield Line("Input", _distinct(_input(cell["workload"]) for cell in cells), _PLAN)
    yield Line("Output", _distinct(_output(cell["workload"]) for cell in cells), _PLAN)
    if runs["measured"].any():
        text = f"{_windows(runs)}, after a warm-up, without instrumentation"
        yield Line("Measured", text, "runs.csv (epochs, steps)")


def _named(words: Sequence[str]) -> list[str]:
    try:
        return names_in(words)
    except ValueError:  # a plan of another version
        return []


def _options(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return options with their values; an option that varies has up to eight values."""
    found = []
    for name in names:
        key = "tasks_per_node" if name == "gpus_per_node" else name
        values = [cell.get(key, (cell.get("workload") or {}).get(key)) for cell in cells]
        texts = list(dict.fromkeys(spelled(value) for value in values if value is not None))
        if texts:
            found.append(f"{name} {' or '.join(texts[:8])}")
    return ", ".join(found)


def _scripts(commands: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield the script, its SHA-256 and its commit at the submission, or that they were not recorded."""
    found = Counter(_script(command) for command in commands if command.get("script"))
    source = f"run.json of {count(len(commands), 'run')}"
    if len(found) == 1:
        yield Line("First file of the command, when submitted", next(iter(found)), source)
    elif found:
        texts = [f"{text} ({count(runs, 'run')})" for text, runs in found.most_common()]
        yield Line("First files of the commands, when submitted", listed(texts, limit=4), source)
    else:
        yield Line("Code of the command", "not recorded", MISSING_SOURCE)


def _script(command: Mapping[str, Any]) -> str:
    text = one_line(command["script"], limit=120)
    if command.get("script_sha256"):
        text += f", SHA-256 {one_line(command['script_sha256'], limit=64)[:12]}"
    if command.get("git_commit"):
        text += f", git commit {one_line(command['git_commit'], limit=64)[:12]}"
        state = {"True": " with uncommitted changes", "False": " without changes of tracked files"}
        text += state.get(str(command.get("git_dirty")), "")
    return text


def _values_of_command(workload: Mapping[str, Any], runs: pd.DataFrame) -> Iterator[Line]:
    """Yield the source of a command's values, how they are converted, and what was not recorded."""
    metrics = workload.get("metrics") or {}
    if not reads_values(metrics):
        text = f"{_windows(runs)}, by the recorder in the command"
        yield Line("Measured", text, "runs.csv (epochs, steps)")
        unknown = "input, output and the kind of model of the command; files that its first file imports"
        yield Line("Not examined", unknown, MISSING_SOURCE)
        return
    file = metrics.get("csv") or metrics.get("jsonl")
    origin = f"its file {one_line(file, limit=120)}" if file else "its standard output"
    skip = int(metrics.get("skip") or 0)
    skipped = f", after {count(skip, 'value')} that {'was' if skip == 1 else 'were'} skipped" if skip else ""
    read = [
        name
        for name in ("throughput", "step_time")
        if name in (metrics.get("columns") or metrics.get("output") or {})
    ]
    what = " and ".join(name.replace("_", " ") for name in read)
    source = "plan.json; metrics.csv of the runs"
    if is_average(metrics):
        text = f"{what}: one average of the whole run, including its start-up, as the command reported it in "
        text += f"{origin}. If several ranks reported it, the lowest rate counts"
    else:
        text = f"{what}, as the command reported it in {origin}: {_range(runs['epochs'])} per run{skipped}"
    yield Line("Measured", text, source)
    units = metrics.get("units") or {}
    if units.get("throughput") == "it/s" or "throughput" not in read:
        yield Line("Samples/s", "computed with the batch of the matrix", source)
    elif metrics.get("scope") == "per_gpu":
        yield Line("Samples/s", "the reported value times the number of ranks", source)
    if "throughput" in read and units.get("throughput") != "it/s":
        yield Line("Time per step", "computed with the batch of the matrix", source)
    text = "of the whole command, including its start: CPU time of foreign processes, network counters"
    yield Line("Conditions", text, "conditions.json of the runs")
    text = "whether the command used the batches of the matrix; its input, output, model and memory; whether "
    text += "the step time was stable and the ranks were equally fast; files that its first file imports"
    yield Line("Not examined", text, MISSING_SOURCE)


def _windows(runs: pd.DataFrame) -> str:
    """Return the number of throughput windows of a run, and of their steps."""
    windows, steps = (_range(runs[name]) for name in ("epochs", "steps"))
    noun = "window" if windows == "1" else "windows"
    return f"{windows} {noun} with {steps} steps in total per run"


def _range(values: pd.Series) -> str:
    """Return ``3``, or ``3 to 5`` if the values differ."""
    low, high = values.min(), values.max()
    if pd.isna(low):
        return "an unknown number of"
    return whole(low) if low == high else f"{whole(low)} to {whole(high)}"


def _distinct(texts: Iterator[str]) -> str:
    return "; or ".join(dict.fromkeys(texts))


def _input(workload: Mapping[str, Any]) -> str:
    data = workload.get("data")
    if data in (None, "synthetic"):
        return "synthetic batches, drawn anew for each step; reading from storage is not included"
    workers = count(int(workload.get("num_workers") or 0), "loading process", "loading processes")
    return f"{one_line(data, limit=120)}, read by {workers} per rank"


def _output(workload: Mapping[str, Any]) -> str:
    if workload.get("checkpoint"):
        return "a checkpoint after each window, timed separately"
    return "no checkpoints were written"


# -- launch and machine ---------------------------------------------------------------


def _launch(cells: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    launchers = listed(list(dict.fromkeys(spelled(cell.get("launcher")) for cell in cells)))
    on_gpus = any((cell.get("workload") or {}).get("device") == "cuda" for cell in cells)
    rank = "one process with one GPU" if on_gpus else "one process"
    yield Line("Launcher", f"{launchers}; a rank is {rank}", _PLAN)
    variables: dict[str, dict[str, None]] = {}
    for cell in cells:
        for name, value in without_secret_variables(cell.get("env") or {}).items():
            variables.setdefault(one_line(name, limit=60), {})[one_line(value, limit=80)] = None
    texts = [f"{name}={' or '.join(list(values)[:4])}" for name, values in variables.items()]
    if texts:
        yield Line("Variables", listed(texts, limit=12), _PLAN)


def _machine(environment: Environment, *, is_recorded: bool) -> Iterator[Line]:
    """Yield device, hosts and software; without the recorder, the harness knows only what is installed."""
    facts, source = dict(environment.facts), f"env.json of {count(environment.read, 'run')}"
    # One host has several entries if its cores differ between runs.
    hosts = list(dict.fromkeys(host.name for host in environment.hosts))
    number = count(len(hosts) + environment.hosts_left_out, "host")
    parts = [facts.get("device_name"), f"{number}: {listed(hosts, limit=8)}" if hosts else None]
    cores = listed(list(dict.fromkeys(host.cores for host in environment.hosts if host.cores)))
    parts.append(f"cores for the ranks of a host: {cores}" if cores else None)
    if text := "; ".join(filter(None, parts)):
        yield Line("Machine", text, source)
    for what, names in (("Software", _SOFTWARE), ("Network", ("backend", "network", "interface"))):
        texts = [f"{term('environment', name)} {facts[name]}" for name in names if facts.get(name)]
        if text := ", ".join(texts):
            yield Line(what if is_recorded else f"{what} of the command's python", text, source)
    if is_recorded and (model := [f"{facts[name]} {word}" for name, word in _MODEL if facts.get(name)]):
        yield Line("Size of the model", ", ".join(model), source)
    if threads := facts.get("threads_per_rank"):
        yield Line("Threads per rank" if is_recorded else "Threads requested per rank", threads, source)
