"""`bench submit`: start what is not yet done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from bench.commands.common import ResultsOption, StudyArgument, find_study, say
from bench.commands.progress import watch_runs
from bench.errors import BenchError
from bench.executors import executor_for
from bench.executors.base import PlannedStudy, open_study
from bench.ledger import RunRecord, RunState
from bench.matrix.cell import Run
from bench.selection import only, pending

OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only", help="Only these: a pattern on names ('n4x4-*') or key=value (nodes=4); repeatable."
    ),
]
RetryOption = Annotated[
    bool, typer.Option("--retry-failed", help="Start failed runs again, as a new attempt.")
]
BudgetOption = Annotated[
    float | None, typer.Option("--budget", min=0.0, help="Refuse if this could use more GPU-hours.")
]
QueuedOption = Annotated[
    int | None,
    typer.Option("--max-queued", min=1, help="Have at most so many of the study's jobs in the queue."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit")(submit_command)


def submit_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be started; start nothing.")
    ] = False,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    max_queued: QueuedOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until every run has ended.")] = False,
) -> int:
    """Start the runs of a study that are neither done nor under way.

    Safe to type at any time: what is completed or under way is left alone, what was
    interrupted is started again, what failed waits for --retry-failed. With executor local
    the runs go one after another on this machine; Ctrl-C stops, and the next call goes on.
    """
    planned = open_study(find_study(study, results))
    runs = runs_to_start(planned, filters=filters or [], retry_failed=retry_failed)
    check_budget(planned, runs, budget)
    if dry_run:
        for run in runs:
            print(executor_for(planned).command_line(run))
        print(f"{len(runs)} of {len(planned.runs)} runs would be started")
        return 0
    return start(planned, runs, max_queued=max_queued, wait=wait)


def runs_to_start(planned: PlannedStudy, *, filters: Sequence[str], retry_failed: bool) -> list[Run]:
    """Return what a submission starts, in the planned order."""
    records = executor_for(planned).refresh()
    return only(pending(planned.runs, records, retry_failed=retry_failed), planned.cells, filters)


def check_budget(planned: PlannedStudy, runs: Sequence[Run], budget: float | None) -> None:
    """Refuse runs that could use more GPU-hours than ``budget``.

    Raises:
        BenchError: with the sum.
    """
    if budget is None:
        return
    hours = planned.plan["time_limit_s"] / 3600
    cells = [planned.cells[run.cell_id] for run in runs]
    total = sum(cell.nodes * max(cell.ranks_per_node) * hours for cell in cells if cell.device == "cuda")
    if total > budget:
        what = f"{len(runs)} runs could use {total:g} GPU-hours, more than the budget of {budget:g}"
        raise BenchError(what, remedy="raise --budget, lower cluster.time_limit, or choose runs with --only")


def start(
    planned: PlannedStudy, runs: Sequence[Run], *, max_queued: int | None = None, wait: bool = False
) -> int:
    """Start ``runs`` and say where the study stands; 1 where a run has failed."""
    executor = executor_for(planned)
    left = list(runs)
    if not left:
        say("nothing to start")
    else:
        with watch_runs(len(left)) as watch:
            executor.submit(left, max_queued=max_queued, watch=watch)
    records = planned.records()
    while wait and not _settled(records, left):
        time.sleep(POLL_S)
        records = executor.refresh()
        left = [run for run in left if records[run.run_id].state is RunState.PLANNED]
        if left:  # --max-queued left them; there may be room now
            with watch_runs(len(left)) as watch:
                executor.submit(left, max_queued=max_queued, watch=watch)
            records = planned.records()
    counts = Counter(str(record.state) for record in records.values())
    name = planned.folder.name
    say(f"study {name}: {counts_line(counts)}")
    failed = counts[RunState.FAILED]
    if failed:
        say(f"{failed} failed: `bench status {name}` says why; `bench submit {name} --retry-failed` goes on")
    return 1 if failed else 0


POLL_S = 3.0


def _settled(records: dict[str, RunRecord], left: Sequence[Run]) -> bool:
    """Whether nothing is under way any more, and nothing that was asked for waits."""
    waiting = any(records[run.run_id].state is RunState.PLANNED for run in left)
    return not waiting and not any(record.state.active for record in records.values())


def counts_line(counts: Counter[str]) -> str:
    """Return ``16 completed, 2 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in map(str, RunState) if counts[state]) or "no runs"
