"""`bench submit --canary`: one small multi-node run goes first, and the rest when it has passed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.commands.common import say
from bench.commands.waiting import POLL_S, begin, point_out_stuck, when_slurm_answers
from bench.executors import executor_for
from bench.executors.base import Executor
from bench.matrix.cell import Run
from bench.study.ledger import HaltWatch, RunRecord, RunState
from bench.study.plan_json import PlannedStudy
from bench.study.verify import Verdict, verify_run
from bench.units import count


def canary_passes(planned: PlannedStudy, runs: Sequence[Run], *, halt: HaltWatch, pack: bool = False) -> bool:
    """Run the smallest multi-node cell alone; say why the rest stays back where it does not pass.

    Raises:
        BenchError: Slurm would not take the rest, however the canary fares; or the study is cancelled.
    """
    records = planned.records()
    proven = [run for run in planned.runs if records[run.run_id].state is RunState.COMPLETED]
    if not runs or any(planned.cells[run.cell_id].nodes > 1 for run in proven):
        return True
    chosen = choose_canary(planned, runs)
    say(f"canary: {chosen.run_id} goes first; {count(len(runs) - 1, 'run')} held back until it has passed")
    if rest := [run for run in runs if run is not chosen]:
        when_slurm_answers(lambda: executor_for(planned, pack=pack).judge(rest))
    executor = executor_for(planned)
    begin(executor, [chosen], halt=halt)
    record = _await_end(executor, chosen)
    verdict = verify_run(planned.folder.attempt(record.run_id, record.attempt).path)
    if not verdict.passed:
        _show_failure(verdict, chosen)
    return verdict.passed


def choose_canary(planned: PlannedStudy, runs: Sequence[Run]) -> Run:
    """Return the run that shows soonest and cheapest whether nodes find each other."""

    def size(run: Run) -> tuple[bool, int, int, int]:
        cell = planned.cells[run.cell_id]
        return (cell.nodes == 1, cell.nodes, cell.world_size, run.order)

    return min(runs, key=size)


def _await_end(executor: Executor, run: Run) -> RunRecord:
    told: set[str] = set()
    while True:
        record = when_slurm_answers(executor.refresh)[run.run_id]
        if record.state not in (RunState.QUEUED, RunState.RUNNING):
            return record
        point_out_stuck(told, record)
        time.sleep(POLL_S)


def _show_failure(verdict: Verdict, canary: Run) -> None:
    for check in verdict.checks:
        if not check.passed:
            say(f"  {check}")
    say(f"the canary {canary.run_id} did not pass: nothing else was submitted")
