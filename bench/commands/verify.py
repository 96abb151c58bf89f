"""`bench verify`: check that runs did what was planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.run_folder import RunFolder

from ..archive import is_archive
from ..jobs.engine import Engine
from ..jobs.slurm.parsing import expand_hosts
from ..study.findings import Disturbance
from ..study.layout import StudyFolder
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..study.verify import Verification, verify_run
from ..terminal import print_json, say, show
from .completion import complete_run
from .next_step import shown_name
from .options import (
    JsonOption,
    ResultsOption,
    find_attempts,
    find_study,
    refuse_part_of_run,
    results_folder,
    say_if_copy,
)

_WORDS = {"error": "error", "warning": "warn", "info": "info"}


def verify_command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder or name, a job id, a study or archive; default: the study planned last.",
            autocompletion=complete_run,
        ),
    ] = None,
    results: ResultsOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if no check fails, but a value was not measured.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Check the state, files, ranks, backend, epochs and metrics of runs against the plan.

    The exit code is 1 if a check fails or a run of the study has not ended. With --strict, it is 3 if no
    check fails, but a value was not measured, such as the ranks of a command without the recorder.
    """
    verdicts = _verdicts(target, results)
    passed = [verdict for verdict in verdicts if verdict.passed]
    unmeasured = Counter(name for verdict in passed for name in verdict.unmeasured)
    if as_json:
        runs = [
            {
                "run_id": verdict.record.run_id,
                "state": str(verdict.record.state),
                "failure_class": verdict.record.failure_class,
                "folder": str(verdict.folder.path),
                "passed": verdict.passed,
                "checks": [check.as_json() for check in verdict.checks],
                "warnings": [warning.told() for warning in verdict.warnings],
            }
            for verdict in verdicts
        ]
        print_json({"passed": len(passed) == len(verdicts), "runs": runs})
    else:
        _show(verdicts)
        _show_sums(verdicts)
        for name, runs_without in unmeasured.items():
            show(f"{runs_without} of {len(verdicts)} runs: {name} not measured")
        folder = StudyFolder(verdicts[0].folder.path.parents[2])
        if any(verdict.record.state is RunState.FAILED for verdict in verdicts):
            say(f"next: bench doctor {target if target and is_archive(target) else shown_name(folder)}")
        elif any(verdict.failures for verdict in verdicts):
            again = f"bench submit {shown_name(folder)} --retry-failed"
            say(f"to execute a run again, delete its folder below {folder.runs}, and call `{again}`")
        elif len(passed) == len(verdicts) > 1:
            say("these checks are about what was run; `bench report` judges whether the values are valid")
    if len(passed) < len(verdicts):
        return 1
    return 3 if strict and unmeasured else 0


def _show_sums(verdicts: Sequence[Verification]) -> None:
    """Print how many runs pass, fail, were measured in part, and have not ended."""
    in_part = sum(verdict.passed and bool(verdict.unmeasured) for verdict in verdicts)
    sums = {
        "fail": sum(bool(verdict.failures) for verdict in verdicts),
        "measured in part, without a failed check": in_part,
        "not yet run": sum(not verdict.has_ended for verdict in verdicts),
    }
    others = "".join(f"; {number} {what}" for what, number in sums.items() if number)
    show(f"{sum(one.passed for one in verdicts) - in_part} of {len(verdicts)} runs pass{others}")


def _show(verdicts: Sequence[Verification]) -> None:
    """Print the checks of one run, or those of several that failed; equal ones once, below their runs."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        run, alone = verdict.record, len(verdicts) == 1
        if verdict.has_ended:
            word = "FAIL" if verdict.failures else "--  " if verdict.unmeasured else "pass"
            lines = [f"  {check}" for check in (verdict.checks if alone else verdict.failures)]
            for warning in verdict.warnings if alone or verdict.passed else ():
                what = f"disturbed: {warning.message}" if isinstance(warning, Disturbance) else warning
                lines.append(f"  {_WORDS[warning.severity]}  {what}")
            groups.setdefault(tuple(lines), []).append(f"{word}  {run.run_id}")
        elif alone:
            state = f"{run.state}: {run.reason}" if run.reason else run.state
            groups[()] = [f"--    {run.run_id}: not yet run ({state})"]
    for texts, names in groups.items():
        for text in (*names, *texts):
            show(text)


def _verdicts(target: str | None, results: Path | None) -> list[Verification]:
    planned, attempts = _find(target, results)
    if planned.folder.archive:
        records = planned.records()
    else:
        engine = Engine(planned)
        say_if_copy(engine)
        records = engine.settled()
    if attempts is None:
        return [_verdict(planned, record) for record in records.values()]
    earlier = planned.ledger.attempts()
    found = []
    for run_id, number in attempts:
        record = records[run_id]
        if number != record.attempt:
            unknown = Record(run_id=run_id, attempt=number, state=RunState.UNKNOWN)
            record = earlier.get(run_id, {}).get(number, unknown)
        found.append(_verdict(planned, record))
    return found


def _find(target: str | None, results: Path | None) -> tuple[PlannedStudy, Sequence[tuple[str, int]] | None]:
    """Return a study and the (run, attempt) pairs that ``target`` names in it, or None for all its runs."""
    if target is not None and not is_archive(target):
        root = results_folder(results)
        for planned, attempts in find_attempts(target, root):
            return planned, attempts
        if RunFolder(Path(target)).is_described:
            what = f"{target}: is not in the folder of a study that contains the run"
            raise BenchError(what, remedy="give the folder of a run: results/STUDY/runs/RUN/attempt-N")
        if target.isdigit() and not (root / target).is_dir():
            what = f"no study below {root} has submitted a job {target}"
            raise BenchError(what, remedy="`bench status STUDY` lists the jobs of a study")
        if re.search(r"-r\d+$", target) and not Path(target).exists() and not (root / target).exists():
            what = f"no study below {root} has a run {target}"
            raise BenchError(what, remedy="`bench status STUDY` lists the runs of a study")
        refuse_part_of_run(target, root)
    return open_study(find_study(target, results)), None


def _verdict(planned: PlannedStudy, record: Record) -> Verification:
    # A run that was never started has no folder.
    folder = planned.folder.attempt(record.run_id, max(record.attempt, 1))
    allocated = expand_hosts(record.end.hosts) if record.end else ()
    return verify_run(folder, record, planned.cell_of(record.run_id), allocated=allocated)
