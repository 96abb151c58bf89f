"""The Typer side of `bench lint` and `bench doctor`: what is meant, then the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.commands.common import JsonOption, ResultsOption, root_of
from bench.errors import BenchError
from bench.study.layout import RunFolder
from bench.study.ledger import RunState


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("lint")(lint_command)
    app.command("doctor")(doctor_command)


def lint_command(
    scripts: Annotated[
        list[str], typer.Argument(help="sbatch scripts; - is standard input.", show_default=False)
    ],
    diff: Annotated[
        bool, typer.Option("--diff", help="Print the certain changes as a patch instead.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Find known multi-node mistakes in sbatch scripts, before they wait in the queue.

    Any script, not only ours; nothing is executed. Exit code 1 where there is an error.
    Example: bench lint job.sbatch
    """
    from bench.commands.lint import run_lint

    return run_lint(scripts, json=as_json, diff=diff)


def doctor_command(
    targets: Annotated[
        list[str], typer.Argument(help="Logs, a run's folder or name, a job id, or - .", show_default=False)
    ],
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say why a job failed: the first cause, the line that shows it, and what to change.

    Several logs are read together. It says "unknown", with the most telling lines, rather
    than guess. Example: bench doctor slurm-4711.out
    """
    from bench.commands.doctor import run_doctor

    found = [log for target in targets for log in _logs(target, root_of(results))]
    return run_doctor(found, json=as_json)


def _logs(target: str, root: Path) -> list[Path | Literal["-"]]:
    """Return the logs that are meant: a file, the files of a run, or standard input."""
    if target == "-":
        return ["-"]
    path = Path(target)
    if path.is_file():
        return [path]
    folder = RunFolder(path) if path.is_dir() else _run_of(target, root)
    if folder is None:
        raise BenchError(
            f"{target} is no log, run or job that is known here",
            remedy="give a log file, a run's name or folder, or the id of a job that a study submitted",
        )
    logs = [log for log in (folder.err, folder.out) if log.is_file()]
    if not logs:
        raise BenchError(
            f"{folder.path}: holds no job.out and no job.err", remedy="give a run's attempt-N folder"
        )
    return [*logs]


def _run_of(target: str, root: Path) -> RunFolder | None:
    """Return the latest attempt of the run of this name, or the attempt that was this job."""
    from bench.commands.common import attempts_meant

    for planned, attempts in attempts_meant(target, root):
        records = planned.records()
        begun = [(run_id, attempt) for run_id, attempt in attempts if attempt]
        # A job may be a pack of many runs: one that failed is what is asked about.
        begun.sort(key=lambda one: records[one[0]].state is not RunState.FAILED)
        if begun:
            return planned.folder.attempt(*begun[0])
    return None
