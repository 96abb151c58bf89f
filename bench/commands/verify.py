"""`bench verify`: pass, or why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.commands.common import JsonOption, ResultsOption, find_study, print_json, root_of
from bench.errors import BenchError
from bench.executors import executor_for
from bench.executors.base import PlannedStudy, open_study
from bench.layout import StudyFolder, studies
from bench.ledger import RunRecord
from bench.verify import Check, Verdict, verify_run


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
    verdicts = _verdicts(target, root_of(results), results)
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


def _verdicts(target: str | None, root: Path, results: Path | None) -> list[Verdict]:
    if target is not None:
        path = Path(target)
        if (path / "run.json").is_file():
            _settle_study_of(path)
            return [verify_run(path)]
        found = _by_run_or_job(target, root)
        if found is not None:
            return [found]
    planned = open_study(find_study(target, results))
    return [_latest(planned, record) for record in executor_for(planned).refresh().values()]


def _settle_study_of(path: Path) -> None:
    """Settle the study around a run's folder, where there is one."""
    folder = path.resolve().parents
    if len(folder) > 2 and (folder[2] / "plan.json").is_file():
        executor_for(open_study(StudyFolder(folder[2]))).refresh()


def _by_run_or_job(target: str, root: Path) -> Verdict | None:
    """Return the run of this name or job id; the study planned last is looked at first."""
    known = sorted(studies(root), key=lambda study: study.plan.stat().st_mtime_ns, reverse=True)
    for study in known:
        try:
            planned = open_study(study)
        except BenchError:
            continue
        for run_id, record in planned.records().items():
            if target in (run_id, record.job_id):
                return _latest(planned, executor_for(planned).refresh()[run_id])
    return None


def _latest(planned: PlannedStudy, record: RunRecord) -> Verdict:
    """Return the verdict on a run's latest attempt; one that was never started fails."""
    folder = planned.folder.attempt(record.run_id, max(record.attempt, 1))
    if record.attempt == 0:
        return Verdict(
            record.run_id, folder.path, [Check("state", False, "planned, not started", "completed")]
        )
    return verify_run(folder.path)
