"""`bench status`: where every run of a study stands."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Annotated, Any

import typer

from bench.commands.common import (
    JsonOption,
    ResultsOption,
    StudyArgument,
    find_study,
    print_json,
    print_table,
    say,
)
from bench.commands.submit import counts_line
from bench.executors import executor_for
from bench.slurm.client import SlurmUnavailableError
from bench.study.ledger import RunRecord, RunState
from bench.study.plan_json import PlannedStudy, open_study

SHOWN_RUNS = 60


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status_command)


def status_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds, until nothing is under way.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.5, help="Seconds between two looks (--watch).")
    ] = 5.0,
    everything: Annotated[
        bool, typer.Option("--all", help=f"List every run, not only {SHOWN_RUNS}.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Show where each run stands, and why a failed one failed.

    What ended since the last look is settled first: a run whose harness was killed is
    failed, with that reason. Exit code 1 where a run has failed, or Slurm has forgotten it.
    """
    folder = find_study(study, results)
    while True:
        planned = open_study(folder)
        try:
            records = executor_for(planned).refresh()
        except SlurmUnavailableError as absent:
            if not watch:
                if not as_json:
                    say("Slurm cannot be asked: this is what was known before")
                    show(planned, planned.records(), everything=everything)
                raise
            say(f"{absent.message}: waiting for Slurm")
            time.sleep(interval)
            continue
        if as_json:
            print_json(as_content(planned, records))
        else:
            if watch and sys.stdout.isatty():
                typer.echo("\033[2J\033[H", nl=False)
            show(planned, records, everything=everything)
        under_way = any(record.state.active for record in records.values())
        if watch and not under_way and not all(record.state.ended for record in records.values()):
            say(f"nothing is under way: `bench submit {folder.name}` starts what is planned")
        if not watch or not under_way:
            bad = (RunState.FAILED, RunState.UNKNOWN)
            return 1 if any(record.state in bad for record in records.values()) else 0
        time.sleep(interval)


def show(planned: PlannedStudy, records: dict[str, RunRecord], *, everything: bool = False) -> None:
    """Print a table of runs, what needs a look first, and a line of counts."""
    order = {
        RunState.FAILED: 0,
        RunState.UNKNOWN: 1,
        RunState.RUNNING: 2,
        RunState.QUEUED: 3,
        RunState.CANCELLED: 4,
    }
    ranked = sorted(records.values(), key=lambda record: order.get(record.state, 5))
    shown = ranked if everything else ranked[:SHOWN_RUNS]
    rows = [
        (record.run_id, str(record.state), record.attempt or None, record.job_id, _why(record))
        for record in shown
    ]
    print_table(
        f"Study {planned.folder.name}", ["run", "state", "attempt", "job", "reason"], rows, right=["attempt"]
    )
    if len(shown) < len(ranked):
        print(f"... and {len(ranked) - len(shown)} more runs (--all lists them)")
    print(counts_line(Counter(str(record.state) for record in records.values())))


def _why(record: RunRecord) -> str:
    """Return the reason, and the doctor's cause where it knows one."""
    return f"{record.reason} [{record.cause}]" if record.cause else record.reason


def as_content(planned: PlannedStudy, records: dict[str, RunRecord]) -> dict[str, Any]:
    """Return what `bench status --json` prints."""
    counts = Counter(str(record.state) for record in records.values())
    repeats = {run.run_id: run for run in planned.runs}
    return {
        "study": planned.folder.name,
        "folder": str(planned.folder.path),
        "counts": {str(state): counts[str(state)] for state in RunState},
        "runs": [
            {
                "run_id": record.run_id,
                "cell_id": repeats[record.run_id].cell_id,
                "repeat": repeats[record.run_id].repeat,
                "attempt": record.attempt,
                "state": str(record.state),
                "reason": record.reason,
                "cause": record.cause,
                "failure_class": record.failure_class,
                "exit_code": record.exit_code,
                "job_id": record.job_id,
            }
            for record in records.values()
        ],
    }
