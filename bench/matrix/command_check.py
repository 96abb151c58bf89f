"""What a matrix says of commands, held against the rest of it: what cannot run, and what does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from bench.matrix.command import names_in
from bench.matrix.loading import Document, Place
from bench.matrix.options import WorkloadOptions
from bench.matrix.points import Problems
from bench.matrix.schema import Matrix

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
