"""What a matrix says of commands, held against the rest of it: what cannot run, and what does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from bench.matrix.cell import Cell
from bench.matrix.command import names_in
from bench.matrix.document import Document, Place
from bench.matrix.points import Problems
from bench.matrix.schema import Matrix
from bench.matrix.workload import WorkloadOptions

#: Options that steer a recorder, the launch or nothing but the matrix: a command need not name them.
_HEARD = {
    *("device", "warmup_steps", "steps_per_epoch", "attribution_steps", "epochs", "grad_accum"),
    "join_timeout",
}
_SHELL_WORDS = re.compile(r"\$|`|^(?:&&|\|\|?|;|[0-9]?>>?|<|&)$")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def commands_of(matrix: Matrix) -> list[tuple[Place, list[str]]]:
    """Return every command of a matrix with its place."""
    found: list[tuple[Place, list[str]]] = [
        (("axes", "command", i), words) for i, words in enumerate(matrix.axes.given.get("command") or [])
    ]
    if matrix.workload.command is not None and not found:
        found.append((("workload", "command"), matrix.workload.command))
    for section in ("include", "exclude"):
        for i, entry in enumerate(getattr(matrix, section)):
            if "command" in entry.given:
                found.append(((section, i, "command"), entry.given["command"]))
    return found


def check_commands(matrix: Matrix, problems: Problems) -> None:
    """Note values that a command names and its cells do not have."""
    given = matrix.axes.given
    env = {*matrix.cluster.env, *(name.removeprefix("env.") for name in given if name.startswith("env."))}
    for place, words in commands_of(matrix):
        for name in names_in(words):
            if name.startswith("env.") and name.removeprefix("env.") not in env:
                what = f"the command names {{{name}}}, which neither cluster.env nor an axis sets"
                known = ", ".join(sorted(env)) or "nothing"
                problems.add(place, what, f"set it there ({known} is set)")
            elif name in ("master_addr", "master_port") and matrix.cluster.executor != "slurm":
                what = f"the command names {{{name}}}, which executor {matrix.cluster.executor} does not know"
                problems.add(place, what, f"torchrun sets ${name.upper()} for each rank: read it there")
            elif name not in given and getattr(matrix.workload, name, "") is None:
                what = f"the command names {{{name}}}, which has no value"
                problems.add(place, what, f"set workload.{name}, or an axis of that name")


def command_remarks(matrix: Matrix, document: Document) -> Iterator[str]:
    """Yield a remark for each word that does something else than people expect, and each idle setting."""
    commands = commands_of(matrix)
    path = document.path
    if not commands:
        if "metrics" in matrix.workload.model_fields_set:
            line = document.line(("workload", "metrics"))
            yield f"{path}:{line}: workload.metrics is ignored: there is no workload.command"
        return
    for place, words in commands:
        yield from (f"{path}:{document.line(place)}: {words}" for words in _odd_words(words))
    named = {name for _, words in commands for name in names_in(words)}
    line = document.line(commands[0][0])
    if not named & {"per_gpu_batch", "global_batch"}:
        yield (
            f"{path}:{line}: the command names neither {{per_gpu_batch}} nor {{global_batch}}: "
            "it must read $BENCH_PER_GPU_BATCH, or have the cells' batch by chance"
        )
    yield from _shared_files(matrix, document)
    options = set(WorkloadOptions.model_fields) - _HEARD
    for name in sorted(options & matrix.axes.given.keys() - named):
        where = f"{path}:{document.line(('axes', name))}"
        yield f"{where}: axes.{name} varies, but the command does not name {{{name}}}"
    for name in sorted(options & matrix.workload.model_fields_set - named):
        where = f"{path}:{document.line(('workload', name))}"
        yield f"{where}: workload.{name} is ignored: the command does not name {{{name}}}"


def _shared_files(matrix: Matrix, document: Document) -> Iterator[str]:
    for kind in ("csv", "jsonl"):
        file = getattr(matrix.workload.metrics, kind, None)
        if file is not None and PurePosixPath(file).is_absolute():
            line = document.line(("workload", "metrics", kind))
            yield (
                f"{document.path}:{line}: workload.metrics.{kind} is one file for all runs: a command that"
                " appends to it, and runs beside each other, mix their numbers; write it below {run_dir}"
                " and name it relative to the run's folder"
            )


def _odd_words(words: Sequence[str]) -> Iterator[str]:
    if words[0].rpartition("/")[2] in _SHELLS:
        return
    for word in words:
        if _SHELL_WORDS.search(word):
            yield (
                f"{word!r} in the command arrives literally, no shell reads it; "
                'for a shell write [bash, -c, "...", bash, WORDS]'
            )


# What a study cannot answer as it is planned, and settings that do nothing: in words.

FORECAST_SIZES = 5
INTERVAL_REPEATS = 3

#: What every executor heeds; `hosts` is told by itself.
_FOR_ALL_EXECUTORS = {"executor", "hosts", "cpus_per_task", "time_limit", "setup", "env"}
_ONLY_FOR_MODELS = {
    "seq_len": ("transformer",),
    "image_size": ("resnet50",),
    "parameters": ("transformer", "mlp"),
}


def remarks(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> list[str]:
    """Return the plan's warnings, the ones about the answers first."""
    return [
        *_unanswerable(matrix, cells),
        *_surprising(matrix, document, cells),
        *command_remarks(matrix, document),
        *_ignored(matrix, document),
    ]


def _unanswerable(matrix: Matrix, cells: Sequence[Cell]) -> Iterator[str]:
    sizes: dict[str, set[int]] = {}
    for cell in cells:
        for member in cell.series:
            sizes.setdefault(member.series, set()).add(cell.world_size)
    alone = [series for series, found in sizes.items() if len(found) == 1]
    if len(alone) == len(sizes):
        yield "every series has one size only: throughput is measured, but no speedup and no efficiency"
    elif alone:
        shown = ", ".join(alone[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
        yield f"series with one size only, so without efficiency: {shown}"
    most = max(len(found) for found in sizes.values())
    if most < FORECAST_SIZES:
        sizes_word = "size" if most == 1 else "sizes"
        needed = f"a fitted model needs {FORECAST_SIZES} or more"
        yield f"at most {most} {sizes_word} per series: no forecast ({needed})"
    if matrix.repeats < INTERVAL_REPEATS:
        noun = "repeat" if matrix.repeats == 1 else "repeats"
        yield f"{matrix.repeats} {noun}: no intervals (they need {INTERVAL_REPEATS} or more)"
    if len({cell.nodes for cell in cells}) == 1:
        yield f"one node count ({cells[0].nodes}): no efficiency over nodes, only within them"


def _surprising(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a remark for each setting that does something else than people expect."""
    cluster, path = matrix.cluster, document.path
    for name, value in cluster.env.items():
        if "$" in value and not document.inherited(f"cluster.env.{name}"):
            line = document.line(("cluster", "env", name))
            yield (
                f"{path}:{line}: cluster.env.{name} holds a $ and arrives literally; "
                "to build on another variable, write a set-up line with export"
            )
    if cluster.container and matrix.workload.data != "synthetic" and not cluster.container.mounts:
        line = document.line(("workload", "data"))
        yield f"{path}:{line}: the container sees workload.data only if cluster.container.mounts binds it"
    if cluster.executor == "slurm" and matrix.workload.device == "cuda":
        for per_node in {tuple(c.tasks_per_node) for c in cells if isinstance(c.tasks_per_node, list)}:
            most = max(per_node)
            yield f"mixed nodes {list(per_node)}: Slurm is asked for {most} GPUs on each; some stay idle"


def _ignored(matrix: Matrix, document: Document) -> Iterator[str]:
    """Yield a remark for each setting that has no effect here."""
    cluster, workload, path = matrix.cluster, matrix.workload, document.path
    axes = matrix.axes.given
    models = set(axes.get("model") or [workload.model])
    by = f"is ignored by executor {cluster.executor}"
    if cluster.executor != "slurm":
        for name in sorted(cluster.model_fields_set - _FOR_ALL_EXECUTORS):
            if document.inherited(f"cluster.{name}"):
                continue
            yield f"{path}:{document.line(('cluster', name))}: cluster.{name} {by}"
    if cluster.hosts and cluster.executor != "ssh" and not document.inherited("cluster.hosts"):
        yield f"{path}:{document.line(('cluster', 'hosts'))}: cluster.hosts {by}"
    if workload.device == "cpu":
        yield from _only_for_gpus(matrix, document)
    if workload.command is not None or "command" in axes:
        return  # the models' options are told with the command
    for name, wanted in _ONLY_FOR_MODELS.items():
        given = name in workload.model_fields_set or name in axes
        if given and not models & set(wanted):
            place = ("workload", name) if name in workload.model_fields_set else ("axes", name)
            readers = (
                f"model {wanted[0]} reads it"
                if len(wanted) == 1
                else f"models {' and '.join(wanted)} read it"
            )
            yield f"{path}:{document.line(place)}: {name} is ignored: only {readers}"


def _only_for_gpus(matrix: Matrix, document: Document) -> Iterator[str]:
    """Yield a remark for each setting that has no effect on a CPU."""
    places = [("workload", name) for name in ("pin_memory",) if name in matrix.workload.model_fields_set]
    places += [("axes", name) for name in ("pin_memory",) if name in matrix.axes.given]
    if matrix.cluster.executor == "slurm":  # other executors ignore them on any device
        given = matrix.cluster.model_fields_set
        places = [("cluster", name) for name in ("gpu_type", "gpu_request") if name in given] + places
    for section, name in places:
        if not document.inherited(f"{section}.{name}"):
            line = document.line((section, name))
            yield f"{document.path}:{line}: {section}.{name} is ignored on device cpu"
