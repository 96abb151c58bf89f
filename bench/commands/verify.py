"""`bench verify`: check that runs did what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import BenchError
from ..study.layout import RunFolder, StudyFolder
from ..study.ledger import RunRecord
from ..study.plan_json import PlannedStudy, open_study
from ..study.verify import Check, Verification, verify_run
from .console import print_json, show
from .options import (
    JsonOption,
    ResultsOption,
    find_attempts,
    find_study,
    results_folder,
    settled_records,
)


def verify_command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder or name, a job id, or a study; default: the study planned last.",
            show_default=False,
        ),
    ] = None,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check the state, files, ranks, backend, epochs and metrics of runs against the plan.

    The exit code is 1 if a check fails or a run of the study has not ended.
    """
    verdicts = _verdicts(target, results)
    passed = sum(verdict.passed for verdict in verdicts)
    if as_json:
        runs = [
            {
                "run_id": verdict.run_id,
                "state": verdict.state,
                "failure_class": verdict.failure_class,
                "folder": str(verdict.folder),
                "passed": verdict.passed,
                "checks": [check.as_json() for check in verdict.checks],
                "warnings": verdict.warnings,
            }
            for verdict in verdicts
        ]
        print_json({"passed": passed == len(verdicts), "runs": runs})
    else:
        for verdict in verdicts:
            _show(verdict, all_checks=len(verdicts) == 1)
        show(f"{passed} of {len(verdicts)} runs pass")
    return 0 if passed == len(verdicts) else 1


def _show(verdict: Verification, *, all_checks: bool) -> None:
    show(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.run_id}")
    for check in verdict.checks:
        if all_checks or check in verdict.failures:
            show(f"  {check}")
    for warning in verdict.warnings:
        show(f"  warn  {warning}")


def _verdicts(target: str | None, results: Path | None) -> list[Verification]:
    if target is not None:
        root = results_folder(results)
        path = Path(target)
        if RunFolder(path).is_described:
            return [verify_run(path, record=_record_of(path))]
        for planned, attempts in find_attempts(target, root):
            records = settled_records(planned)
            return [_verdict(planned, records[run_id], attempt) for run_id, attempt in attempts]
        if target.isdigit() and not (root / target).is_dir():
            what = f"no study below {root} has submitted a job {target}"
            raise BenchError(what, remedy="`bench status STUDY` lists the jobs of a study")
    planned = open_study(find_study(target, results))
    return [_verdict(planned, record, record.attempt) for record in settled_records(planned).values()]


def _record_of(path: Path) -> RunRecord | None:
    """Return the record of a run if ``path`` is the folder of the last attempt of the run, otherwise None."""
    parents = path.resolve().parents
    if len(parents) < 3 or not StudyFolder(parents[2]).is_planned:
        return None
    record = settled_records(open_study(StudyFolder(parents[2]))).get(parents[0].name)
    is_latest = record is not None and path.resolve().name == f"attempt-{record.attempt}"
    return record if is_latest else None


def _verdict(planned: PlannedStudy, record: RunRecord, attempt: int) -> Verification:
    """Verify an attempt of a run. A run that was never started (``attempt`` is 0) does not pass."""
    folder = planned.folder.attempt(record.run_id, max(attempt, 1)).path
    if attempt != record.attempt:
        return verify_run(folder)
    if attempt == 0:
        return Verification(
            record.run_id,
            folder,
            [Check("state", False, "planned, not started", "completed")],
            state=str(record.state),
        )
    return verify_run(folder, record=record)
