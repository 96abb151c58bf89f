"""`bench submit`: start what is not yet done."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import typer

from bench.commands.common import ResultsOption, StudyArgument, find_study, print_json, say
from bench.commands.packing import check_pack, show_pack
from bench.commands.progress import watch_runs
from bench.errors import BenchError
from bench.executors import executor_for
from bench.executors.base import Executor, PlannedStudy, QueueFullError, open_study
from bench.ledger import RunRecord, RunState
from bench.matrix.cell import Run
from bench.selection import only, pending
from bench.slurm.errors import SlurmUnavailableError
from bench.units import count
from bench.verify import verify_run

T = TypeVar("T")

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
PackOption = Annotated[
    bool,
    typer.Option("--pack", help="One job of the largest size, in which the runs go one after another."),
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
    canary: Annotated[
        bool, typer.Option("--canary", help="One small multi-node run first; the rest when it has passed.")
    ] = False,
    pack: PackOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: JSON for programs.")] = False,
) -> int:
    """Start the runs of a study that are neither done nor under way.

    Safe to type at any time: what is completed or under way is left alone, what was
    interrupted is started again, what failed waits for --retry-failed. With executor local
    and ssh the runs go one after another, here or on the hosts; Ctrl-C stops, and the next call goes on.
    """
    if as_json and not dry_run:
        raise BenchError("--json goes with --dry-run", remedy="`bench status --json` says where runs stand")
    if pack and max_queued is not None:
        raise BenchError("--max-queued counts jobs, and a pack is one", remedy="leave one of the two away")
    planned = open_study(find_study(study, results))
    with_patience = wait or canary
    runs = when_slurm_answers(
        lambda: runs_to_start(planned, filters=filters or [], retry_failed=retry_failed), wait=with_patience
    )
    if pack:
        check_pack(planned, runs, budget)
    else:
        check_budget(planned, runs, budget)
    if dry_run:
        show_commands(planned, runs, as_json=as_json, pack=pack)
        return 0
    if canary:
        if not canary_passes(planned, runs, pack=pack):
            return 1
        begun = planned.records()
        runs = [run for run in runs if begun[run.run_id].state is not RunState.COMPLETED]
    return start(planned, runs, max_queued=max_queued, wait=wait, pack=pack)


def show_commands(planned: PlannedStudy, runs: Sequence[Run], *, as_json: bool, pack: bool = False) -> None:
    """Print the commands that would start ``runs``."""
    if pack:
        show_pack(planned, runs, as_json=as_json)
        return
    executor = executor_for(planned)
    commands = [(run, executor.command_line(run)) for run in runs]
    if as_json:
        shown = [
            {
                "run_id": run.run_id,
                "cell_id": run.cell_id,
                "command": line,
                "script": str(planned.script(run.cell_id)),
            }
            for run, line in commands
        ]
        print_json({"study": planned.folder.name, "planned": len(planned.runs), "runs": shown})
        return
    for _, line in commands:
        print(line)
    print(f"{len(runs)} of {len(planned.runs)} runs would be started")


def canary_passes(planned: PlannedStudy, runs: Sequence[Run], *, pack: bool = False) -> bool:
    """Run the smallest multi-node cell alone; say why the rest stays back where it does not pass.

    Raises:
        BenchError: Slurm would not take the rest, however the canary fares.
    """
    records = planned.records()
    proven = [run for run in planned.runs if records[run.run_id].state is RunState.COMPLETED]
    if not runs or any(planned.cells[run.cell_id].nodes > 1 for run in proven):
        return True
    chosen = choose_canary(planned, runs)
    say(f"canary: {chosen.run_id} goes first; {count(len(runs) - 1, 'run')} held back until it has passed")
    executor, told = executor_for(planned), set[str]()
    if rest := [run for run in runs if run is not chosen]:
        when_slurm_answers(lambda: executor_for(planned, pack=pack).judge(rest))
    _submit(executor, [chosen], None)
    while (record := when_slurm_answers(executor.refresh)[chosen.run_id]).state in (
        RunState.QUEUED,
        RunState.RUNNING,
    ):
        _point_out_stuck(told, record)
        time.sleep(POLL_S)
    verdict = verify_run(planned.folder.attempt(record.run_id, record.attempt).path)
    if not verdict.passed:
        for check in verdict.checks:
            if not check.passed:
                say(f"  {check}")
        say(f"the canary {chosen.run_id} did not pass: nothing else was submitted")
    return verdict.passed


def choose_canary(planned: PlannedStudy, runs: Sequence[Run]) -> Run:
    """Return the run that shows soonest and cheapest whether nodes find each other."""

    def size(run: Run) -> tuple[bool, int, int, int]:
        cell = planned.cells[run.cell_id]
        return (cell.nodes == 1, cell.nodes, cell.world_size, run.order)

    return min(runs, key=size)


def runs_to_start(planned: PlannedStudy, *, filters: Sequence[str], retry_failed: bool) -> list[Run]:
    """Return what a submission starts, in the planned order."""
    records = executor_for(planned).refresh()
    # Judged against all runs: a filter that agrees with none is a mistake, also when nothing is left.
    chosen = set(only(planned.runs, planned.cells, filters))
    return [run for run in pending(planned.runs, records, retry_failed=retry_failed) if run in chosen]


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
        what = f"{count(len(runs), 'run')} could use {total:g} GPU-hours, more than the budget of {budget:g}"
        raise BenchError(what, remedy="raise --budget, lower cluster.time_limit, or choose runs with --only")


def start(
    planned: PlannedStudy,
    runs: Sequence[Run],
    *,
    max_queued: int | None = None,
    wait: bool = False,
    pack: bool = False,
) -> int:
    """Start ``runs`` and say where the study stands; 1 where a run has failed."""
    executor = executor_for(planned, pack=pack)
    left: list[Run] = []
    before = planned.records()
    if runs:
        try:
            left = _submit(executor, runs, max_queued)
        except QueueFullError as full:
            if not wait:
                raise
            left = full.left
            say(f"{full.message}: waiting for room")
        except SlurmUnavailableError as absent:
            if not wait or absent.lasting:
                raise
            left = list(runs)
            say(f"{absent.message}: waiting for Slurm")
    else:
        say("nothing to start")
    if left:
        when = "until others end" if wait else "until the next `bench submit`, or use --wait"
        say(f"{count(len(left), 'run')} held back {when}")
    if wait:
        attempts = {run_id: _begun(record) for run_id, record in before.items()}
        records = wait_for_end(executor, left, attempts=attempts, max_queued=max_queued)
    else:
        records = planned.records()
    counts = Counter(str(record.state) for record in records.values())
    name = planned.folder.name
    say(f"study {name}: {counts_line(counts)}")
    failed, unknown = counts[RunState.FAILED], counts[RunState.UNKNOWN]
    if failed:
        say(f"{failed} failed: `bench status {name}` says why; `bench submit {name} --retry-failed` goes on")
    if unknown:
        say(f"{unknown} unknown: `bench status {name}` says why; `bench cancel {name}` gives them up")
    return 1 if failed or (wait and unknown) else 0


POLL_S = 3.0
#: Runs of which Slurm knows nothing are not waited for longer than this.
UNKNOWN_WAIT_S = 60.0
#: After a full queue we try again when a job of ours has ended, or after this time.
FULL_WAIT_S = 30.0


def wait_for_end(
    executor: Executor,
    left: Sequence[Run] = (),
    *,
    attempts: Mapping[str, int] | None = None,
    max_queued: int | None = None,
) -> dict[str, RunRecord]:
    """Stay until nothing of the study is under way; start what is left as room appears.

    Slurm's absence is waited out, too. What nobody knows anything of is not waited for.
    ``attempts`` are those of the runs ``left`` before they were to be started.
    """
    attempts, told = attempts or {}, set[str]()
    wanted = list(left)  # a job whose answer was lost, and of which nothing came, is to be started again
    known_until = time.monotonic()
    full_with, full_until = math.inf, 0.0  # how many of ours were in a full queue
    for turn in itertools.count():
        if turn:
            time.sleep(POLL_S)
        try:
            records = executor.refresh()
            active = [record for record in records.values() if record.state.active]
            left = [run for run in wanted if _is_left(records[run.run_id], attempts.get(run.run_id, 0))]
            room = max_queued is None or len(active) < max_queued
            if left and room and (len(active) < full_with or time.monotonic() > full_until):
                left = _submit(executor, left, max_queued)
                continue
        except QueueFullError as full:
            _say_once(told, f"{full.message}: waiting for room")
            left, full_with, full_until = full.left, len(active), time.monotonic() + FULL_WAIT_S
        except SlurmUnavailableError as absent:
            if absent.lasting:
                raise
            _say_once(told, f"{absent.message}: waiting for Slurm")
        else:
            for record in active:
                _point_out_stuck(told, record)
            if left or any(record.state is not RunState.UNKNOWN for record in active):
                known_until = time.monotonic()
            elif not active or time.monotonic() - known_until > UNKNOWN_WAIT_S:
                return records
    raise AssertionError("count() has no end")


def when_slurm_answers(ask: Callable[[], T], *, wait: bool = True) -> T:
    """Return what ``ask`` returns; where Slurm cannot be asked now, ask again until it can.

    Raises:
        SlurmUnavailableError: it never can be here, or there is no ``wait``.
    """
    told: set[str] = set()
    while True:
        try:
            return ask()
        except SlurmUnavailableError as absent:
            if not wait or absent.lasting:
                raise
            _say_once(told, f"{absent.message}: waiting for Slurm")
            time.sleep(POLL_S)


def _begun(record: RunRecord) -> int:
    """Return the last attempt that became a job: one that was refused is made again under its number."""
    return record.attempt - (record.state is RunState.PLANNED and record.attempt > 0)


def _is_left(record: RunRecord, attempt_before: int) -> bool:
    """Whether a run was not submitted since; it may have been, and failed, before Slurm went away."""
    return record.attempt == attempt_before or record.state is RunState.PLANNED


def _submit(executor: Executor, runs: Sequence[Run], max_queued: int | None) -> list[Run]:
    with watch_runs(len(runs)) as watch:
        return executor.submit(runs, max_queued=max_queued, watch=watch)


def _point_out_stuck(told: set[str], record: RunRecord) -> None:
    if record.details.get("stuck"):
        _say_once(told, f"{record.run_id} does not start by itself: {record.reason}")


def _say_once(told: set[str], words: str) -> None:
    if words not in told:
        told.add(words)
        say(words)


def counts_line(counts: Counter[str]) -> str:
    """Return ``16 completed, 2 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in map(str, RunState) if counts[state]) or "no runs"
