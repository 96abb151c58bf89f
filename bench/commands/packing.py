"""What `bench submit --pack` says before it submits: the allocation, what it costs, the order."""

from __future__ import annotations

from collections.abc import Sequence

from bench.commands.common import print_json, say
from bench.errors import BenchError
from bench.executors import pack_executor
from bench.executors.pack import allocation_of
from bench.matrix.cell import Run
from bench.study.plan_json import PlannedStudy
from bench.units import count, human_duration


def check_pack(planned: PlannedStudy, runs: Sequence[Run], budget: float | None) -> None:
    """Say what one allocation for ``runs`` costs at most; refuse more GPU-hours than ``budget``.

    Raises:
        BenchError: with the sum; or packs are not for this executor.
    """
    pack_executor(planned)
    if not runs:
        return
    asked = allocation_of(planned, runs)
    size = f"{asked.nodes} node{'s' * (asked.nodes > 1)} for at most {human_duration(asked.limit_s)}"
    if budget is not None and asked.gpu_hours > budget:
        gpus = f"{asked.nodes} x {asked.gpus_per_node} GPUs for {human_duration(asked.limit_s)}"
        hours = f"{asked.gpu_hours:g} GPU-hours ({gpus})"
        what = f"a pack of {count(len(runs), 'run')} could use {hours}, more than the budget of {budget:g}"
        remedy = "raise --budget, lower cluster.time_limit, choose runs with --only, or leave --pack away"
        raise BenchError(what, remedy=remedy)
    cost = f"{asked.gpu_hours:g} GPU-hours" if asked.gpus_per_node else f"{asked.node_hours:g} node-hours"
    say(f"pack: {count(len(runs), 'run')} in one job of {size}, {cost} at most")


def show_pack(planned: PlannedStudy, runs: Sequence[Run], *, as_json: bool) -> None:
    """Print the command that would start ``runs`` in one job, and their order in it."""
    executor = pack_executor(planned)
    command, order = executor.describe(runs) if runs else ("", [])
    if as_json:
        print_json(
            {
                "study": planned.folder.name,
                "planned": len(planned.runs),
                "command": command,
                "runs": [{"run_id": run_id, "nodes": nodes} for run_id, nodes in order],
            }
        )
        return
    if runs:
        print(command)
    size = allocation_of(planned, runs).nodes if runs else 0
    for place, (run_id, nodes) in enumerate(order, 1):
        print(f"{place:>4}  {run_id}  on nodes {','.join(map(str, nodes))} of {size}")
    print(f"{len(runs)} of {len(planned.runs)} runs would be started, in one job")
