"""`bench doctor`: find out from a job's logs why it failed."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.commands.options import JsonOption, ResultsOption, find_attempts, results_folder
from bench.errors import BenchError, missing_file
from bench.study.layout import RunFolder
from bench.study.ledger import RunState

if TYPE_CHECKING:
    from bench.doctor.scan import Source


def doctor_command(
    targets: Annotated[
        list[str],
        typer.Argument(help="Logs, a run's folder or name, a job id, or - for stdin.", show_default=False),
    ],
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Find out why a job failed: print the first cause, the line that shows it, and the remedy.

    Several logs are read together. If no known cause matches, it prints "unknown" and the most
    informative lines. Example: bench doctor slurm-4711.out
    """
    logs = [log for target in targets for log in _logs(target, results_folder(results))]
    return run_doctor(logs, json=as_json)


def _logs(target: str, root: Path) -> list[Path | Literal["-"]]:
    """Return the logs of a target: a file, the logs of a run, or standard input."""
    if target == "-":
        return ["-"]
    path = Path(target)
    if path.is_file():
        return [path]
    folder = RunFolder(path) if path.is_dir() else _find_run(target, root)
    if folder is None:
        raise BenchError(
            f"{target} is not a known log, run or job",
            remedy="give a log file, a run's name or folder, or the id of a job that a study submitted",
        )
    logs = [log for log in (folder.err, folder.out) if log.is_file()]
    if not logs:
        what = f"{folder.path}: contains no job.out and no job.err"
        raise BenchError(what, remedy="give a run's attempt-N folder")
    return [*logs]


def _find_run(target: str, root: Path) -> RunFolder | None:
    """Return the folder of the run or job ``target``; of a pack, that of a failed run if there is one."""
    for planned, attempts in find_attempts(target, root):
        records = planned.records()
        begun = [(run_id, attempt) for run_id, attempt in attempts if attempt]
        begun.sort(key=lambda one: records[one[0]].state is not RunState.FAILED)
        if begun:
            return planned.folder.attempt(*begun[0])
    return None


def run_doctor(targets: Sequence[Path | Literal["-"]], *, json: bool) -> int:
    """Diagnose the logs of one job (``-`` is standard input) and print text or JSON.

    Returns:
        0 if the logs show that the job succeeded, otherwise 1.
    """
    from bench.doctor import diagnose
    from bench.doctor.report import as_text

    if not targets:
        raise BenchError("no log to read", remedy="give the job's logs, or - for standard input")
    logs = dict(_open_log(target) for target in targets)
    try:
        diagnosis = diagnose(logs)
    except OSError as error:
        raise BenchError(f"cannot read {error.filename or 'the log'}: {error.strerror}") from error
    text = json_format.dumps(diagnosis.as_json(), indent=2) + "\n" if json else as_text(diagnosis)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    return 0 if diagnosis.verdict == "ok" else 1


def _open_log(target: Path | Literal["-"]) -> tuple[str, Source]:
    if not isinstance(target, Path):
        return "-", sys.stdin.buffer
    if not target.exists() or target.is_dir():
        raise missing_file(target, what="log", remedy="give a log file, such as slurm-<job>.out")
    return str(target), target
