"""`bench submit`: start what is not yet done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from bench.commands.canary import canary_passes
from bench.commands.common import ResultsOption, StudyArgument, find_study, print_json, say
from bench.commands.packing import check_pack, show_pack
from bench.commands.waiting import HaltedError, Waiting, begin, when_slurm_answers
from bench.errors import BenchError
from bench.executors import executor_for
from bench.executors.base import Executor, QueueFullError
from bench.matrix.cell import Run
from bench.slurm.client import SlurmUnavailableError
from bench.study.ledger import HaltWatch, RunRecord, RunState
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.selection import only, pending
from bench.units import count

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be started; start nothing.")]
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
WaitOption = Annotated[bool, typer.Option("--wait", help="Stay until every run has ended.")]
CanaryOption = Annotated[
    bool, typer.Option("--canary", help="One small multi-node run first; the rest when it has passed.")
]
PackOption = Annotated[
    bool,
    typer.Option("--pack", help="One job of the largest size, in which the runs go one after another."),
]
DryRunJsonOption = Annotated[bool, typer.Option("--json", help="With --dry-run: JSON for programs.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit")(submit_command)


def submit_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    dry_run: DryRunOption = False,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    max_queued: QueuedOption = None,
    wait: WaitOption = False,
    canary: CanaryOption = False,
    pack: PackOption = False,
    as_json: DryRunJsonOption = False,
) -> int:
    """Start the runs of a study that are neither done nor under way.

    Safe to type at any time: what is completed or under way is left alone, what was
    interrupted is started again, what failed waits for --retry-failed. With executor local
    and ssh the runs go one after another, here or on the hosts; Ctrl-C stops, and the next call goes on.
    """
    if as_json and not dry_run:
        raise BenchError("--json goes with --dry-run", remedy="`bench status --json` says where runs stand")
    planned = open_study(find_study(study, results))
    if max_queued is not None:
        _check_queue(planned, pack=pack)
    halt = HaltWatch(planned.ledger)
    runs = when_slurm_answers(
        lambda: runs_to_start(planned, filters=filters or [], retry_failed=retry_failed),
        wait=wait or canary,
    )
    if pack:
        check_pack(planned, runs, budget)
    else:
        check_budget(planned, runs, budget)
    if dry_run:
        show_commands(planned, runs, as_json=as_json, pack=pack)
        return 0
    if canary:
        if not canary_passes(planned, runs, halt=halt, pack=pack):
            return 1
        begun = planned.records()
        runs = [run for run in runs if begun[run.run_id].state is not RunState.COMPLETED]
    return start(planned, runs, max_queued=max_queued, wait=wait, pack=pack, halt=halt)


def _check_queue(planned: PlannedStudy, *, pack: bool) -> None:
    """Refuse --max-queued with a pack; say where it does nothing."""
    if pack:
        raise BenchError("--max-queued counts jobs, and a pack is one", remedy="leave one of the two away")
    if planned.executor != "slurm":
        say(f"--max-queued is ignored: executor {planned.executor} has no queue, runs go one after another")


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
    halt: HaltWatch | None = None,
) -> int:
    """Start ``runs`` and say where the study stands.

    ``halt`` watches for its being cancelled; by default from now on.

    Returns:
        1 where a run has failed, or the study was cancelled meanwhile.
    """
    halt = halt or HaltWatch(planned.ledger)
    executor, before = executor_for(planned, pack=pack), planned.records()
    left = _start_now(executor, runs, halt=halt, max_queued=max_queued, wait=wait)
    if wait:
        records = Waiting(executor, left, before=before, halt=halt, max_queued=max_queued).until_over()
    else:
        records = planned.records()
    return _conclude(planned.folder.name, records, waited=wait, halted=halt.halted())


def _start_now(
    executor: Executor, runs: Sequence[Run], *, halt: HaltWatch, max_queued: int | None, wait: bool
) -> list[Run]:
    """Start what can be started now; return what is left for later."""
    if not runs:
        say("nothing to start")
        return []
    try:
        left = begin(executor, runs, halt=halt, max_queued=max_queued)
    except HaltedError:
        return []
    except QueueFullError as full:
        if not wait:
            raise
        say(f"{full.message}: waiting for room")
        left = full.left
    except SlurmUnavailableError as absent:
        if not wait or absent.permanent:
            raise
        say(f"{absent.message}: waiting for Slurm")
        return list(runs)  # some of them may be submitted: who waits sees which are left
    if left:
        when = "until others end" if wait else "until the next `bench submit`, or use --wait"
        say(f"{count(len(left), 'run')} held back {when}")
    return left


def _conclude(name: str, records: Mapping[str, RunRecord], *, waited: bool, halted: bool) -> int:
    """Say where the study stands and what to do about it; return the exit code."""
    counts = Counter(str(record.state) for record in records.values())
    stopped = halted and counts[RunState.COMPLETED] < len(records)
    if stopped:
        say(str(HaltedError()))
    say(f"study {name}: {counts_line(counts)}")
    failed, unknown = counts[RunState.FAILED], counts[RunState.UNKNOWN]
    if failed:
        say(f"{failed} failed: `bench status {name}` says why; `bench submit {name} --retry-failed` goes on")
    if unknown:
        say(f"{unknown} unknown: `bench status {name}` says why; `bench cancel {name}` gives them up")
    return 1 if failed or stopped or (waited and unknown) else 0


def counts_line(counts: Counter[str]) -> str:
    """Return ``16 completed, 2 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in map(str, RunState) if counts[state]) or "no runs"
