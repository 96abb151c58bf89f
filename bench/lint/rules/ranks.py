"""Rules about the ranks that the processes are told."""

from __future__ import annotations

from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.engine import Remark, rule
from bench.lint.environment import Unknown, Value
from bench.lint.geometry import Geometry
from bench.lint.rendezvous import (
    RANK_OPTIONS,
    meets_by_itself,
)
from bench.lint.script import Script
from bench.lint.walk import Step

_RANK_VARIABLES = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_GTIDS"})
_RANK_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "GLOBAL_RANK",
        "MACHINE_RANK",
        "NODE_ID",
        "NODEID",
        "PET_NODE_RANK",
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
    }
)
_LET_EXPAND = "let the task expand it: srun bash -c '... $SLURM_NODEID ...', or write \\$ in double quotes"


@rule(Severity.ERROR)
def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The rank of a node or a task is expanded by the batch shell, where it is always 0.

    The batch script runs on the first node only. What stands unescaped on the srun line, or in
    double quotes, is expanded there, so that every task gets 0; what is escaped needs a shell in
    the task to expand it. (A rendezvous over c10d gives out the ranks itself: there it does no harm.)

    Bad:
        srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...

    Good:
        srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    for step in script.sruns:
        if meets_by_itself(step.launch) or step.launch.opaque:
            continue
        for name, value in _ranks_given(script, step):
            if value.text.lstrip("\\").startswith("$SLURM_"):
                message = f"srun starts no shell, so {name} stays the text {value.text}: nothing expands it"
                yield Remark(value.line, message, _LET_EXPAND)
            for unknown in script.walk.unknowns.within(value.text):
                severity = _harm(script.geometry(step), unknown)
                if severity is None:
                    continue
                message = f"the batch shell expands {unknown.source}, so every task is told {name} 0"
                yield Remark(unknown.line, message, _LET_EXPAND, severity)
                if value.line != unknown.line:
                    yield Remark(
                        value.line, f"{message} (see line {unknown.line})", _LET_EXPAND, Severity.INFO
                    )
    yield from _exported_early(script)


def _ranks_given(script: Script, step: Step) -> Iterator[tuple[str, Value]]:
    launch = step.launch
    yield from ((name, value) for name, value in launch.options.items() if name in RANK_OPTIONS)
    for name, value in script.options_of_program(launch):
        if name in RANK_OPTIONS:
            yield name, value
    yield from ((name, value) for name, value in step.prefix.items() if name in _RANK_NAMES)


def _harm(geometry: Geometry, unknown: Unknown) -> Severity | None:
    """Return how sure it is that a rank expanded early is wrong; None where it is not."""
    if unknown.in_task or unknown.name not in _RANK_VARIABLES:
        return None
    if unknown.name == "SLURM_NODEID":
        count = geometry.nodes
    elif unknown.name == "SLURM_LOCALID":
        count = geometry.tasks_per_node
    else:
        count = geometry.ntasks
    if count == 1:
        return None
    return Severity.WARNING if count is None else Severity.ERROR


def _exported_early(script: Script) -> Iterator[Remark]:
    """Find ranks that the batch shell exports to all tasks."""
    direct = [step for step in script.sruns if not meets_by_itself(step.launch) and not step.launch.opaque]
    if not direct:
        return
    for assigned in script.walk.assigned:
        if assigned.name not in _RANK_NAMES or not assigned.value:
            continue
        sees = assigned.exported or assigned.name in script.walk.exported
        for unknown in script.walk.unknowns.within(assigned.value.text):
            severity = next(filter(None, (_harm(script.geometry(step), unknown) for step in direct)), None)
            if severity is None or not sees:
                continue
            if not assigned.in_task and not assigned.name.endswith("VISIBLE_DEVICES"):
                severity = Severity.WARNING  # a program that asks Slurm itself is not misled
            message = f"the batch shell expands {unknown.source}, so every task sees {assigned.name}=0"
            yield Remark(unknown.line, message, _LET_EXPAND, severity)
