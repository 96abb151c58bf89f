"""`bench verify`: pass, or why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.commands.common import (
    JsonOption,
    ResultsOption,
    attempts_meant,
    find_study,
    print_json,
    root_of,
    settled_records,
)
from bench.errors import BenchError
from bench.study.layout import RunFolder, StudyFolder
from bench.study.ledger import RunRecord
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.verify import Check, Verdict, verify_run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify_command)


def verify_command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder or name, a job id, or a study; left out: the study planned last.",
            show_default=False,
        ),
    ] = None,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check that runs did what they were asked for: state, files, ranks, backend, epochs, metrics.

    Exit code 1 where a check fails or a run of the study is still to come.
    """
    verdicts = _verdicts(target, results)
    passed = sum(verdict.passed for verdict in verdicts)
    if as_json:
        print_json(
            {
                "passed": passed == len(verdicts),
                "runs": [
                    {
                        "run_id": verdict.run_id,
                        "folder": str(verdict.folder),
                        "passed": verdict.passed,
                        "checks": [check.as_json() for check in verdict.checks],
                    }
                    for verdict in verdicts
                ],
            }
        )
    else:
        for verdict in verdicts:
            _show(verdict, alone=len(verdicts) == 1)
        print(f"{passed} of {len(verdicts)} runs pass")
    return 0 if passed == len(verdicts) else 1


def _show(verdict: Verdict, *, alone: bool) -> None:
    print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.run_id}")
    for check in verdict.checks:
        if alone or not check.passed:
            print(f"  {check}")


def _verdicts(target: str | None, results: Path | None) -> list[Verdict]:
    if target is not None:
        root = root_of(results)
        path = Path(target)
        if RunFolder(path).is_described:
            return [verify_run(path, record=_record_of(path))]
        found = _by_run_or_job(target, root)
        if found:
            return found
        if target.isdigit() and not (root / target).is_dir():
            what = f"no study below {root} has submitted a job {target}"
            raise BenchError(what, remedy="`bench status STUDY` lists the jobs of a study")
    planned = open_study(find_study(target, results))
    return [_latest(planned, record) for record in settled_records(planned).values()]


def _record_of(path: Path) -> RunRecord | None:
    """Return where the attempt in ``path`` stands, if a study is around it and it is a run's latest."""
    parents = path.resolve().parents
    if len(parents) < 3 or not StudyFolder(parents[2]).is_planned:
        return None
    record = settled_records(open_study(StudyFolder(parents[2]))).get(parents[0].name)
    latest = record is not None and path.resolve().name == f"attempt-{record.attempt}"
    return record if latest else None


def _by_run_or_job(target: str, root: Path) -> list[Verdict]:
    """Return the verdict on the run of this name, or on those of this job."""
    for planned, attempts in attempts_meant(target, root):
        records = settled_records(planned)
        return [_verdict(planned, records[run_id], attempt) for run_id, attempt in attempts]
    return []


def _verdict(planned: PlannedStudy, record: RunRecord, attempt: int) -> Verdict:
    """Return the verdict on one attempt of a run: its latest, or an older one that was kept."""
    if attempt == record.attempt:
        return _latest(planned, record)
    return verify_run(planned.folder.attempt(record.run_id, attempt).path)


def _latest(planned: PlannedStudy, record: RunRecord) -> Verdict:
    """Return the verdict on a run's latest attempt; one that was never started fails."""
    folder = planned.folder.attempt(record.run_id, max(record.attempt, 1))
    if record.attempt == 0:
        return Verdict(
            record.run_id, folder.path, [Check("state", False, "planned, not started", "completed")]
        )
    return verify_run(folder.path, record=record)
