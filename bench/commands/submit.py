"""`bench submit`: start the runs of a study that are not yet done."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, human_duration

from ..jobs.commands import passed_variables
from ..jobs.engine import Callbacks, Engine
from ..jobs.slurm.pack import allocation_of
from ..jobs.submission import HaltedError, Submission
from ..matrix.cell import Run
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..study.run_json import next_attempt
from .console import print_commands, say, show, show_progress
from .options import (
    AdoptOption,
    BudgetOption,
    OnlyOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    StudyArgument,
    choose_runs,
    find_study,
    results_folder,
    say_if_copy,
)

_PACK = "Submit one job that executes all runs in turn, with the nodes of the largest run."


def submit_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which runs would be started; start nothing.")
    ] = False,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    retry_disturbed: RetryDisturbedOption = False,
    budget: BudgetOption = None,
    max_queued: Annotated[
        int | None, typer.Option("--max-queued", min=1, help="Maximum number of queued jobs of the study.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every run has ended.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help=_PACK)] = False,
    adopt: AdoptOption = False,
) -> int:
    """Start the runs of a study that are neither completed nor in progress.

    Submitting again is safe: interrupted runs are started again, but completed and active runs are not.
    Failed and disturbed runs are started again only with --retry-failed and --retry-disturbed. Executors
    local and ssh start one run after another; Ctrl-C stops them, and the next call continues.
    """
    if pack and max_queued is not None:
        what = "--max-queued limits the number of queued jobs, so it has no effect on a pack,"
        raise BenchError(f"{what} which is a single job", remedy="omit --max-queued or --pack")
    planned = open_study(find_study(study, results))
    submission = new_submission(planned, max_queued=max_queued, pack=pack)
    if max_queued is not None and submission.one_by_one:
        has_none = f"executor {planned.executor} has no queue and starts one run at a time"
        say(f"--max-queued is ignored: {has_none}")
    seen = submission.records(wait=wait)
    runs = choose_runs(planned, seen, filters, retry_failed=retry_failed, retry_disturbed=retry_disturbed)
    check_budget(planned, runs, budget, pack=pack)
    passed_variables(planned)
    if dry_run:
        _show(submission.engine, runs, seen, pack=pack)
        return 0
    if adopt:
        submission.engine.adopt()
    return start(submission, runs, seen, wait=wait, pack=pack)


def new_submission(planned: PlannedStudy, *, max_queued: int | None = None, pack: bool = False) -> Submission:
    """Return the submission of a command that prints messages as lines until the runs are started."""
    return Submission(Engine(planned), Callbacks(on_message=say), max_queued=max_queued, pack=pack)


def check_budget(
    planned: PlannedStudy, runs: Sequence[Run], budget: float | None, *, pack: bool = False
) -> None:
    """Raise BenchError if ``runs`` could use more GPU-hours than ``budget``; print the cost of a pack."""
    amount = count(len(runs), "run")
    if pack:
        scheduler = Engine(planned).scheduler
        if not planned.scheduler.packs:
            scheduler.pack(())  # raises the error
        if not runs:
            return
        job = allocation_of(planned, runs)
        limit, hours = human_duration(job.limit_s), job.gpu_hours
        what, fewer = f"a pack of {amount}", ", choose runs with --only, or omit --pack"
        size = f" ({job.nodes} x {job.reserved_per_node} GPUs for {limit})"
    else:
        limit_s, node_gpus = planned.plan["time_limit_s"], planned.reserved_node_gpus
        cells = [planned.cells[run.cell_id] for run in runs]
        hours = sum(cell.reserved_gpus(node_gpus=node_gpus) * limit_s / 3600 for cell in cells)
        what, fewer, size = amount, ", or choose runs with --only", ""
    if budget is not None and hours > budget:
        text = f"{what} could use {hours:g} GPU-hours{size}, more than the budget of {budget:g}"
        raise BenchError(text, remedy=f"raise --budget, lower cluster.time_limit{fewer}")
    if budget is not None and hours and planned.exclusive and planned.reserved_node_gpus is None:
        why = "they reserve all GPUs of their nodes; set cluster.node_gpus for the exact number"
        say(f"--budget: the runs could use more than the counted {hours:g} GPU-hours, because {why}")
    if pack:
        cost = f"{hours:g} GPU-hours" if hours else f"{job.node_hours:g} node-hours"
        say(f"pack: {amount} in one job of {count(job.nodes, 'node')} for at most {limit}, {cost} at most")


def _show(engine: Engine, runs: Sequence[Run], seen: Mapping[str, Record], *, pack: bool) -> None:
    """Print the commands that would start ``runs``."""
    planned, scheduler = engine.study, engine.scheduler
    attempts = [next_attempt(planned, run, seen[run.run_id]) for run in runs]
    total = f"{len(runs)} of {len(planned.runs)} runs would be started"
    say_if_copy(engine)
    if not pack:
        for attempt in attempts:
            show(scheduler.words(engine.job(attempt)))
        print_commands(planned.cells[cell_id] for cell_id in dict.fromkeys(run.cell_id for run in runs))
        if planned.scheduler.queues and planned.max_running is not None:
            say("max_running: `bench submit` also lets jobs wait for the end of earlier jobs")
        show(total)
        return
    if runs:
        job = scheduler.pack(attempts)
        show(scheduler.words(job.job))
        for place, (attempt, _) in enumerate(job.attempts, 1):
            nodes = ",".join(map(str, job.nodes_of(attempt)))
            show(f"{place:>4}  {attempt.run.run_id}  on nodes {nodes} of {job.nodes}")
    show(f"{total}, in one job")


def start(
    submission: Submission, runs: Sequence[Run], seen: Mapping[str, Record], *, wait: bool, pack: bool = False
) -> int:
    """Start ``runs``, print the state of the study, and return the exit code.

    ``seen`` are the records by which ``runs`` were chosen. With ``wait``, and without a queue, wait until all
    runs have ended. The exit code is 1 if a run has failed or the study was cancelled.
    """
    planned = submission.engine.study
    is_found = planned.folder.path.parent.resolve() == results_folder(None).resolve()
    name = planned.folder.name if is_found else shlex.quote(str(planned.folder.path))
    waits, records, left = wait or (submission.one_by_one and bool(runs)), seen, list[Run]()
    if not runs:
        say("nothing to start")
    with show_progress(len(runs)) as submission.callbacks:
        if waits:
            records = submission.finish(runs, seen=seen)
        elif runs:
            with suppress(HaltedError):  # printed below
                left = submission.start(runs, seen=seen)
            records = planned.records()
    if left:
        say(f"{count(len(left), 'run')} held back until the next `bench submit` (or use --wait)")
    if not waits and submission.say_stuck(submission.engine.stuck(runs)):
        fewer = ", or pack fewer runs (--only), or submit without --pack" if pack else ""
        say(f"`bench cancel {name}` removes them from the queue; then correct the matrix{fewer}")
    return _conclude(planned.folder.name, name, records, waited=waits, halted=submission.halted)


def _conclude(study: str, name: str, records: Mapping[str, Record], *, waited: bool, halted: bool) -> int:
    """Print the state of the study and the next command; return the exit code."""
    counts = Counter(str(record.state) for record in records.values())
    stopped = halted and counts[RunState.COMPLETED] < len(records)
    if stopped:
        say(str(HaltedError()))
    if disturbed := sum(record.is_disturbed for record in records.values()):
        runs = count(disturbed, "completed run was", "completed runs were")
        retry = f"`bench submit {name} --retry-disturbed` starts them again"
        say(f"{runs} disturbed: `bench status {name}` shows why; {retry}")
    say(f"study {study}: {counts_line(counts)}")
    failed, unknown = counts[RunState.FAILED], counts[RunState.UNKNOWN]
    for amount, state, remedy in (
        (failed, "failed", f"`bench submit {name} --retry-failed` starts them again"),
        (unknown, "unknown", f"`bench cancel {name}` marks them as cancelled"),
    ):
        if amount:
            say(f"{amount} {state}: `bench status {name}` shows why; {remedy}")
    return 1 if failed or stopped or (waited and unknown) else 0


def counts_line(counts: Counter[str]) -> str:
    """Format the number of runs in each state: ``16 completed, 2 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in map(str, RunState) if counts[state]) or "no runs"
