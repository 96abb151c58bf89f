"""`bench submit`: start the runs of a study that are not yet done."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from ..errors import BenchError, UnavailableError
from ..jobs.commands import passed_variables
from ..jobs.engine import Callbacks, Engine, QueueFullError, scheduler_for
from ..jobs.slurm.pack import allocation_of
from ..matrix.cell import Run
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..study.run_json import next_attempt
from ..units import count, human_duration
from .console import print_commands, print_json, say, show, show_progress
from .options import (
    BudgetOption,
    OnlyOption,
    PatienceOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    StudyArgument,
    find_study,
    only,
    parse_patience_s,
    pending,
    results_folder,
    say_if_copy,
)
from .waiting import HaltedError, HaltWatch, Patience, Waiting, say_stuck, start_runs

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show which runs would be started; start nothing.")
]
MaxQueuedOption = Annotated[
    int | None, typer.Option("--max-queued", min=1, help="Maximum number of queued jobs of the study.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until every run has ended.")]
_PACK = "Submit one job that executes all runs in turn, with the nodes of the largest run."
PackOption = Annotated[bool, typer.Option("--pack", help=_PACK)]
AdoptOption = Annotated[
    bool, typer.Option("--adopt", help="Go on with a copied study; the original is no longer used.")
]
DryRunJsonOption = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON for programs.")]


def submit_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    dry_run: DryRunOption = False,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    retry_disturbed: RetryDisturbedOption = False,
    budget: BudgetOption = None,
    max_queued: MaxQueuedOption = None,
    wait: WaitOption = False,
    patience: PatienceOption = None,
    pack: PackOption = False,
    adopt: AdoptOption = False,
    as_json: DryRunJsonOption = False,
) -> int:
    """Start the runs of a study that are neither completed nor in progress.

    Submitting again is safe: interrupted runs are started again, but completed and active runs are not.
    Failed and disturbed runs are started again only with --retry-failed and --retry-disturbed. Executors
    local and ssh start one run after another; Ctrl-C stops them, and the next call continues.
    """
    if as_json and not dry_run:
        raise BenchError("--json requires --dry-run", remedy="`bench status --json` shows the states of runs")
    if patience is not None and not wait:
        raise BenchError("--patience requires --wait", remedy="add --wait")
    limited = Patience(parse_patience_s(patience))
    planned = open_study(find_study(study, results))
    _check_options(planned, pack=pack, max_queued=max_queued)
    halt = HaltWatch(planned)
    choose = partial(
        runs_to_start, planned, filters or [], retry_failed=retry_failed, retry_disturbed=retry_disturbed
    )
    runs, seen = limited.until_answered(choose) if wait else choose()
    if pack:
        _check_pack_budget(planned, runs, budget)
    else:
        check_budget(planned, runs, budget)
    passed_variables(planned)
    if dry_run:
        _show(planned, runs, pack=pack, as_json=as_json)
        return 0
    return start(
        planned,
        runs,
        seen=seen,
        max_queued=max_queued,
        patience=limited if wait else None,
        pack=pack,
        adopt=adopt,
        halt=halt,
    )


def _check_options(planned: PlannedStudy, *, pack: bool, max_queued: int | None) -> None:
    """Reject options that contradict the executor or --pack; print which option has no effect."""
    if max_queued is None:
        return
    if pack:
        raise BenchError(
            "--max-queued limits the number of queued jobs, so it has no effect on a pack,"
            " which is a single job",
            remedy="omit --max-queued or --pack",
        )
    if not planned.scheduler.queues:
        say(f"--max-queued is ignored: executor {planned.executor} has no queue and starts one run at a time")


def runs_to_start(
    planned: PlannedStudy, filters: Sequence[str], *, retry_failed: bool, retry_disturbed: bool
) -> tuple[list[Run], dict[str, Record]]:
    """Return the runs that a submission starts, in the planned order, and all runs' present records."""
    records = Engine(planned).poll()
    # Filters apply to all runs: a filter that matches none is an error even if no run is left to start.
    chosen = set(only(planned.runs, planned.cells, filters))
    wanted = pending(planned.runs, records, retry_failed=retry_failed, retry_disturbed=retry_disturbed)
    return [run for run in wanted if run in chosen], records


def check_budget(planned: PlannedStudy, runs: Sequence[Run], budget: float | None) -> None:
    """Raise BenchError if ``runs`` could use more GPU-hours than ``budget``."""
    if budget is None:
        return
    hours, node_gpus = planned.plan["time_limit_s"] / 3600, planned.reserved_node_gpus
    cells = [planned.cells[run.cell_id] for run in runs]
    total = sum(cell.reserved_gpus(node_gpus=node_gpus) * hours for cell in cells)
    if total > budget:
        what = f"{count(len(runs), 'run')} could use {total:g} GPU-hours, more than the budget of {budget:g}"
        raise BenchError(what, remedy="raise --budget, lower cluster.time_limit, or choose runs with --only")
    _say_if_inexact(planned, total)


def _say_if_inexact(planned: PlannedStudy, gpu_hours: float) -> None:
    """If the runs reserve whole nodes with an unknown number of GPUs, print that they can cost more."""
    if gpu_hours and planned.exclusive and planned.reserved_node_gpus is None:
        why = "they reserve all GPUs of their nodes; set cluster.node_gpus for the exact number"
        say(f"--budget: the runs could use more than the counted {gpu_hours:g} GPU-hours, because {why}")


def _check_pack_budget(planned: PlannedStudy, runs: Sequence[Run], budget: float | None) -> None:
    """Print the maximum cost of one job for all ``runs``; raise BenchError if it exceeds ``budget``."""
    if not planned.scheduler.packs:
        scheduler_for(planned).pack(())  # raises the error
    if not runs:
        return
    pack = allocation_of(planned, runs)
    limit = human_duration(pack.limit_s)
    if budget is not None and pack.gpu_hours > budget:
        hours = f"{pack.gpu_hours:g} GPU-hours ({pack.nodes} x {pack.reserved_per_node} GPUs for {limit})"
        what = f"a pack of {count(len(runs), 'run')} could use {hours}, more than the budget of {budget:g}"
        remedy = "raise --budget, lower cluster.time_limit, choose runs with --only, or omit --pack"
        raise BenchError(what, remedy=remedy)
    if budget is not None:
        _say_if_inexact(planned, pack.gpu_hours)
    cost = f"{pack.gpu_hours:g} GPU-hours" if pack.gpu_hours else f"{pack.node_hours:g} node-hours"
    size = f"{count(pack.nodes, 'node')} for at most {limit}"
    say(f"pack: {count(len(runs), 'run')} in one job of {size}, {cost} at most")


def _show(planned: PlannedStudy, runs: Sequence[Run], *, pack: bool, as_json: bool) -> None:
    """Print what would be started."""
    if pack:
        _show_pack(planned, runs, as_json=as_json)
    else:
        _show_commands(planned, runs, as_json=as_json)


def _show_commands(planned: PlannedStudy, runs: Sequence[Run], *, as_json: bool) -> None:
    """Print the commands that would start ``runs``."""
    engine, records = Engine(planned), planned.records()
    say_if_copy(engine)
    commands = {
        run: engine.scheduler.words(engine.job(next_attempt(planned, run, records[run.run_id])))
        for run in runs
    }
    if as_json:
        shown = [
            {
                "run_id": run.run_id,
                "cell_id": run.cell_id,
                "command": command,
                "script": str(planned.script(run.cell_id)),
            }
            for run, command in commands.items()
        ]
        print_json(_dry_run_json(planned, runs=shown))
        return
    for command in commands.values():
        show(command)
    print_commands(planned.cells[cell_id] for cell_id in dict.fromkeys(run.cell_id for run in runs))
    if planned.scheduler.queues and planned.max_running is not None:
        say("max_running: `bench submit` also lets jobs wait for the end of earlier jobs")
    show(f"{len(runs)} of {len(planned.runs)} runs would be started")


def _show_pack(planned: PlannedStudy, runs: Sequence[Run], *, as_json: bool) -> None:
    """Print the command that would start ``runs`` in one job, and their order in the job."""
    records, scheduler = planned.records(), Engine(planned).scheduler
    pack = scheduler.pack([next_attempt(planned, run, records[run.run_id]) for run in runs]) if runs else None
    command = scheduler.words(pack.job) if pack else ""
    order = [(one.run.run_id, pack.nodes_of(one)) for one, _ in pack.attempts] if pack else []
    if as_json:
        shown = [{"run_id": run_id, "nodes": nodes} for run_id, nodes in order]
        print_json(_dry_run_json(planned, command=command, runs=shown))
        return
    if runs:
        show(command)
        size = allocation_of(planned, runs).nodes
        for place, (run_id, nodes) in enumerate(order, 1):
            show(f"{place:>4}  {run_id}  on nodes {','.join(map(str, nodes))} of {size}")
    show(f"{len(runs)} of {len(planned.runs)} runs would be started, in one job")


def _dry_run_json(planned: PlannedStudy, **content: Any) -> dict[str, Any]:
    return {"study": planned.folder.name, "planned": len(planned.runs), **content}


def start(
    planned: PlannedStudy,
    runs: Sequence[Run],
    *,
    seen: Mapping[str, Record],
    max_queued: int | None = None,
    patience: Patience | None = None,
    pack: bool = False,
    adopt: bool = False,
    halt: HaltWatch | None = None,
) -> int:
    """Start ``runs``, print the state of the study, and return the exit code.

    ``seen`` are the records by which ``runs`` were chosen. With ``pack``, one job executes all ``runs``. With
    ``patience``, and without a queue, wait until all runs have ended. ``halt`` (by default created now)
    detects a `bench cancel` that is called after its creation. The exit code is 1 if a run has failed or the
    study was cancelled.
    """
    halt, engine = halt or HaltWatch(planned), Engine(planned)
    is_found = planned.folder.path.parent.resolve() == results_folder(None).resolve()
    name = planned.folder.name if is_found else shlex.quote(str(planned.folder.path))
    waits = patience is not None or (engine.scheduler.slots is not None and bool(runs))
    if adopt:
        engine.adopt()
    if not runs:
        say("nothing to start")
    with show_progress(len(runs)) as callbacks:
        remaining = list(runs)
        if runs and engine.scheduler.slots is None:
            remaining = _start_now(
                engine, runs, seen, halt, callbacks, patience=patience, max_queued=max_queued, pack=pack
            )
        if waits:
            records = Waiting(
                engine,
                remaining,
                before=seen,
                halt=halt,
                patience=patience or Patience(),
                callbacks=callbacks,
                max_queued=max_queued,
                pack=pack,
            ).until_over()
    if not waits:
        _say_stuck_now(engine, runs, name=name, pack=pack)
        records = planned.records() if runs else dict(seen)
    return _conclude(planned.folder.name, name, records, waited=waits, halted=halt.halted())


def _say_stuck_now(engine: Engine, runs: Sequence[Run], *, name: str, pack: bool) -> None:
    """Print which of the submitted ``runs`` Slurm will not start, and how to remove them from the queue."""
    if stuck := engine.stuck(runs):
        say_stuck(set(), stuck)
        fewer = ", or pack fewer runs (--only), or submit without --pack" if pack else ""
        say(f"`bench cancel {name}` removes them from the queue; then correct the matrix{fewer}")


def _start_now(
    engine: Engine,
    runs: Sequence[Run],
    seen: Mapping[str, Record],
    halt: HaltWatch,
    callbacks: Callbacks,
    *,
    patience: Patience | None,
    max_queued: int | None,
    pack: bool,
) -> list[Run]:
    """Start the runs that can be started now; return the others."""
    try:
        remaining = start_runs(
            engine, runs, seen=seen, halt=halt, callbacks=callbacks, max_queued=max_queued, pack=pack
        )
    except HaltedError:
        return []
    except QueueFullError as full:
        if patience is None:
            raise
        say(f"{full.message}: waiting until the queue accepts jobs")
        remaining = full.left
    except UnavailableError as absent:
        if patience is None:
            raise
        patience.wait(absent)
        return list(runs)  # the wait that follows finds out which runs were submitted
    if remaining:
        until = "until other runs end" if patience else "until the next `bench submit` (or use --wait)"
        say(f"{count(len(remaining), 'run')} held back {until}")
    return remaining


def _conclude(study: str, name: str, records: Mapping[str, Record], *, waited: bool, halted: bool) -> int:
    """Print the state of the study and the next command; return the exit code."""
    counts = Counter(str(record.state) for record in records.values())
    stopped = halted and counts[RunState.COMPLETED] < len(records)
    if stopped:
        say(str(HaltedError()))
    if disturbed := sum(record.is_disturbed for record in records.values()):
        retry = f"`bench submit {name} --retry-disturbed` starts them again"
        verb = "run was" if disturbed == 1 else "runs were"
        say(f"{disturbed:,} completed {verb} disturbed: `bench status {name}` shows why; {retry}")
    say(f"study {study}: {counts_line(counts)}")
    failed, unknown = counts[RunState.FAILED], counts[RunState.UNKNOWN]
    if failed:
        retry = f"`bench submit {name} --retry-failed` starts them again"
        say(f"{failed} failed: `bench status {name}` shows why; {retry}")
    if unknown:
        cancel = f"`bench cancel {name}` marks them as cancelled"
        say(f"{unknown} unknown: `bench status {name}` shows why; {cancel}")
    return 1 if failed or stopped or (waited and unknown) else 0


def counts_line(counts: Counter[str]) -> str:
    """Format the number of runs in each state: ``16 completed, 2 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in map(str, RunState) if counts[state]) or "no runs"
