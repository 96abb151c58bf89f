"""`bench submit`: start the runs of a study that are not yet done."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.units import count, human_duration

from ..cost import Cost, Costs, hours, named, parse_step_times, total
from ..jobs.commands import passed_variables
from ..jobs.contract import Pack
from ..jobs.engine import Callbacks, Engine
from ..jobs.submission import HaltedError, Submission
from ..matrix.cell import Run
from ..study.layout import StudyFolder
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..study.run_json import next_attempt
from ..terminal import print_commands, say, show, show_progress
from .next_step import shown_name, step_of_study
from .options import (
    AdoptOption,
    BudgetOption,
    OnlyOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    StepTimeOption,
    StudyArgument,
    YesOption,
    choose_runs,
    find_study,
    say_if_copy,
)

_PACK = "Submit few jobs, each of which executes many runs in turn, with the nodes of its largest run."


#: The largest number of GPUs of a node, for nodes with an unknown number.
MOST_GPUS = 16


class DeclinedError(BenchError):
    """The user does not want the cost."""

    exit_code = 1


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
    yes: YesOption = False,
    step_time: StepTimeOption = None,
) -> int:
    """Start the runs of a study that are neither completed nor in progress.

    Submitting again is safe: interrupted runs are started again, but completed and active runs are not.
    Failed and disturbed runs are started again only with --retry-failed and --retry-disturbed. Executors
    local and ssh start one run after another; Ctrl-C stops them, and the next call continues.
    """
    if pack and max_queued is not None:
        what = "--max-queued limits the number of queued jobs, so it has no effect on packs, which are few"
        raise BenchError(what, remedy="omit --max-queued or --pack")
    planned = open_study(find_study(study, results))
    if changed := planned.changed_matrix():
        remedy = f"to use it, call: bench plan {shlex.quote(changed)}"
        say(f"warning: {changed} was changed after the plan; {remedy}")
    submission = new_submission(planned, max_queued=max_queued, pack=pack)
    if max_queued is not None and submission.one_by_one:
        has_none = f"executor {planned.executor} has no queue and starts one run at a time"
        say(f"--max-queued is ignored: {has_none}")
    seen = submission.records(wait=wait)
    runs = choose_runs(planned, seen, filters, retry_failed=retry_failed, retry_disturbed=retry_disturbed)
    packs = _packs(submission.engine, runs, seen) if pack else None
    check_cost(planned, runs, packs, budget=budget, step_time=step_time, ask=not (yes or dry_run))
    passed_variables(planned)
    _check_scripts(planned, runs)
    if dry_run:
        _show(submission.engine, runs, seen, packs)
        return 0
    if adopt:
        submission.engine.adopt()
    code = start(submission, runs, seen, wait=wait, pack=pack)
    say(f"next: {step_of_study(planned.folder, planned.records())}")
    return code


def _check_scripts(planned: PlannedStudy, runs: Sequence[Run]) -> None:
    """Raise BenchError if the script of a run does not exist."""
    scripts = {planned.script(run.cell_id) for run in runs}
    if missing := sorted(path for path in scripts if not path.is_file()):
        again = f"plan the study again: bench plan {shlex.quote(planned.matrix_path or 'MATRIX')}"
        raise missing_file(missing[0], what="the script of its runs", remedy=again)


def new_submission(planned: PlannedStudy, *, max_queued: int | None = None, pack: bool = False) -> Submission:
    """Return the submission of a command that prints messages as lines until the runs are started."""
    return Submission(Engine(planned), Callbacks(on_message=say), max_queued=max_queued, pack=pack)


def _packs(engine: Engine, runs: Sequence[Run], seen: Mapping[str, Record]) -> Sequence[Pack]:
    """Return the packs that would execute ``runs``; raise BenchError if the scheduler has none."""
    if not runs and engine.study.scheduler.packs:
        return ()
    return engine.scheduler.packs([next_attempt(engine.study, run, seen[run.run_id]) for run in runs])


def check_cost(
    planned: PlannedStudy,
    runs: Sequence[Run],
    packs: Sequence[Pack] | None = None,
    *,
    budget: float | None,
    step_time: Sequence[str] | None,
    ask: bool,
) -> None:
    """Print the jobs of this call and their cost; with ``ask``, ask if it is above the limits of the site.

    Raises:
        BenchError: the runs could use more GPU-hours than ``budget``, or nobody can be asked.
        DeclinedError: the answer is not yes.
    """
    if not runs:
        return
    jobs = [[planned.cells[run.cell_id]] for run in runs] if packs is None else [one.cells for one in packs]
    costs = Costs(planned, parse_step_times(step_time or ())).of(jobs)
    cost, amount = total(costs), count(len(runs), "run")
    if packs is not None:
        nodes, limit_s = max(one.nodes for one in packs), max(one.limit_s for one in packs)
        size = f"up to {count(nodes, 'node')} for {human_duration(limit_s)}"
        amount += f" in {count(len(packs), 'pack')} ({size})"
    if budget is not None and not cost.gpu_hours:
        what = "--budget is a number of GPU-hours, but the study uses no GPUs"
        raise BenchError(what, remedy="omit it, and choose runs with --only")
    if budget is not None and round(cost.gpu_hours, 6) > budget:
        fewer = "or choose runs with --only" if packs is None else "choose runs with --only, or omit --pack"
        text = f"{amount} could use {hours(cost.gpu_hours)} GPU-hours, more than the budget of {budget:g}"
        raise BenchError(text, remedy=f"raise --budget, lower cluster.time_limit, {fewer}")
    if budget is not None and not cost.exact:
        why = "they reserve all GPUs of their nodes; set cluster.node_gpus for the exact number"
        counted = f"the runs could use more than the counted {hours(cost.gpu_hours)} GPU-hours"
        say(f"--budget: {counted}, because {why}")
    if planned.scheduler.queues:
        say(f"{count(cost.jobs, 'job')}: {amount}, {cost}")
        for line in named(costs):
            say(line)
    if ask and (above := list(_above(planned, cost))):
        _ask(f"this is above ask_above ({', '.join(above)}; a site file can change it)", f"{amount}, {cost}")


def _above(planned: PlannedStudy, cost: Cost) -> Iterator[str]:
    """Yield each limit of the site that a cost exceeds, or can exceed if whole nodes have many GPUs."""
    from ..matrix.schema import AskAbove

    limits = AskAbove.model_validate((planned.plan.get("inherited") or {}).get("ask_above") or {})
    if not cost.exact:
        cost = replace(cost, gpu_hours=max(cost.gpu_hours, cost.node_hours * MOST_GPUS))
    for name, limit in limits.model_dump().items():
        if limit is not None and getattr(cost, name) > limit:
            yield f"{name}: {limit:,g}"


def _ask(what: str, amount: str) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BenchError(f"{what}: {amount}", remedy="give --yes if this is intended")
    try:
        sys.stderr.write(f"{what}. Start the runs? [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):  # Ctrl-C or the end of input
        sys.stderr.write("\n")
    if answer.strip().lower() not in ("y", "yes"):
        raise DeclinedError("nothing was started")


def _show(
    engine: Engine, runs: Sequence[Run], seen: Mapping[str, Record], packs: Sequence[Pack] | None
) -> None:
    """Print the commands that would start ``runs``."""
    planned, scheduler = engine.study, engine.scheduler
    say_if_copy(engine)
    for pack in packs or ():
        show(scheduler.words(pack.job), to_copy=True)
        for place, (attempt, _) in enumerate(pack.attempts, 1):
            nodes = ",".join(map(str, pack.nodes_of(attempt)))
            show(f"{place:>4}  {attempt.run.run_id}  on nodes {nodes} of {pack.nodes}")
    if packs is None:
        for run in runs:
            show(scheduler.words(engine.job(next_attempt(planned, run, seen[run.run_id]))), to_copy=True)
        print_commands(planned.cells[cell_id] for cell_id in dict.fromkeys(run.cell_id for run in runs))
    if planned.scheduler.queues and planned.max_running is not None and (packs is None or len(packs) > 1):
        say("max_running: `bench submit` also lets jobs wait for the end of earlier jobs")
    total_runs = f"{len(runs)} of {len(planned.runs)} runs would be started"
    show(total_runs if packs is None else f"{total_runs}, in {count(len(packs), 'job')}")


def start(
    submission: Submission, runs: Sequence[Run], seen: Mapping[str, Record], *, wait: bool, pack: bool = False
) -> int:
    """Start ``runs``, print the state of the study, and return the exit code.

    ``seen`` are the records by which ``runs`` were chosen. With ``wait``, and without a queue, wait until all
    runs have ended. The exit code is 1 if a run has failed or the study was cancelled.
    """
    planned = submission.engine.study
    name = shown_name(planned.folder)
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
    return _conclude(planned.folder, records, waited=waits, halted=submission.halted)


def _conclude(folder: StudyFolder, records: Mapping[str, Record], *, waited: bool, halted: bool) -> int:
    """Print the state of the study, and how to start failed runs again; return the exit code."""
    name = shown_name(folder)
    counts = Counter(str(record.state) for record in records.values())
    stopped = halted and counts[RunState.COMPLETED] < len(records)
    if stopped:
        say(str(HaltedError()))
    if disturbed := sum(record.is_disturbed for record in records.values()):
        runs = count(disturbed, "completed run was", "completed runs were")
        retry = f"`bench submit {name} --retry-disturbed` starts them again"
        say(f"{runs} disturbed: `bench status {name}` shows why; {retry}")
    say(f"study {folder.name}: {counts_line(counts)}")
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
