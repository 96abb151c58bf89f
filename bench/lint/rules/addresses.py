"""Rules about the address that the processes meet at."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.engine import Remark, rule
from bench.lint.environment import MARK, Assigned, Unknown, Value
from bench.lint.launch import Launch
from bench.lint.rendezvous import (
    ADDRESS_VARIABLE,
    LOOPBACK,
    MEETING,
    addresses,
    prefixed,
    spans_nodes,
)
from bench.lint.script import Script, spawns_workers
from bench.lint.walk import Step

_HOST = re.compile(
    r"(?:tcp://)?((?:\d{1,3}\.){3}\d{1,3}|(?=[A-Za-z0-9.-]*[0-9.-])[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*)(?::(?:\d+|[^:]*))?\Z"
)


@rule(Severity.ERROR)
def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address is, or can become, the local host, in a job of several nodes.

    Each node then waits at its own door: the processes of the other nodes never meet the first
    one. torchrun takes 127.0.0.1 where it is given no address (it does not read MASTER_ADDR),
    and c10d meets at localhost where it is given no --rdzv_endpoint.

    Bad:
        #SBATCH --nodes=2
        export MASTER_ADDR=localhost

    Good:
        #SBATCH --nodes=2
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    spanning = [step for step in script.training if spans_nodes(script, step)]
    if not _several(script) or (script.training and not spanning):
        return
    for assigned in script.walk.assigned:
        if ADDRESS_VARIABLE.match(assigned.name) and assigned.value and _holds(script, assigned):
            for remark in _at_home(script, assigned.value, in_task=assigned.in_task):
                yield remark if _matters(script, assigned.name, spanning) else _doubtful(remark)
    for step in spanning:
        for value in [*addresses(script, step.launch), *prefixed(step)]:
            yield from _at_home(script, value, in_task=step.place.task is not None)
        if step.launch.launcher in ("torchrun", "launch") and not _has_address(script, step.launch):
            yield Remark(
                _launcher_line(step),
                _no_address(step.launch),
                "pass --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, HOST the first of the job",
            )


def _several(script: Script) -> bool:
    job = script.job
    if job.heterogeneous:
        return False
    return job.several_nodes or any((script.geometry(step).nodes or 1) > 1 for step in script.sruns)


def _holds(script: Script, assigned: Assigned) -> bool:
    """Return whether an assignment is the last word: no later one replaces it, no other branch differs."""
    others = script.assigned_to.get(assigned.name, [])
    if any(other.line > assigned.line and not other.branches for other in others):
        return False
    if not assigned.branches or len({other.line for other in others}) == 1:
        return True
    depth = len(assigned.branches)
    return any(
        step.place.branches[:depth] == assigned.branches and spans_nodes(script, step)
        for step in script.training
    )


def _matters(script: Script, name: str, spanning: list[Step]) -> bool:
    """Return whether anything reads the variable: launchers with a rendezvous of their own do not."""
    used = any(use.name == name for use in script.walk.uses)
    return used or not spanning or any(not spawns_workers(step.launch) for step in spanning)


def _doubtful(remark: Remark) -> Remark:
    return remark._replace(severity=Severity.WARNING)


def _at_home(script: Script, value: Value, *, in_task: bool) -> Iterator[Remark]:
    remedy = 'use the first host of the job: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if LOOPBACK.match(value.text):
        message = f"{script.shown(value.text)[:60]} is each node itself: the nodes never meet"
        yield Remark(value.line, f"{message}, and the job ends after the store's time-out", remedy)
        return
    for unknown in script.unknowns(value.text)[:1]:
        if in_task and unknown.in_task and _own_name(unknown):
            message = f"each task computes {unknown.source[:40]} on its own node, so the nodes never meet"
            yield Remark(unknown.line, message, remedy)
        elif LOOPBACK.match(unknown.default or "") and not _set_elsewhere(script, unknown):
            message = f"where {unknown.name} is not set, each node takes {unknown.default} for the master"
            yield Remark(unknown.line, message, remedy, Severity.WARNING)


def _own_name(unknown: Unknown) -> bool:
    """Return whether an expansion is the name of the node that expands it."""
    if unknown.kind == "command":
        return bool(re.match(r"\s*(?:/bin/|/usr/bin/)?hostname\b[^|;&]*\Z", unknown.source[2:-1]))
    return unknown.name in ("HOSTNAME", "SLURMD_NODENAME")


def _set_elsewhere(script: Script, unknown: Unknown) -> bool:
    others = script.assigned_to.get(unknown.name, [])
    return unknown.name.startswith("SLURM") or any(other.line != unknown.line for other in others)


def _has_address(script: Script, launch: Launch) -> bool:
    """Return whether torchrun is told where to meet, or may be by what is not known here."""
    options = launch.options
    if launch.opaque or any(MARK.fullmatch(word.text) for word in _before_program(launch)):
        return True
    if script.walk.opaque or any(name.startswith("PET_") for name in script.walk.exported):
        return True
    if "standalone" in options:
        return False
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
    if backend == "static":
        return bool({"master_addr", "rdzv_endpoint"} & set(options))
    return "rdzv_endpoint" in options or not (backend in MEETING or MARK.search(backend))


def _before_program(launch: Launch) -> list[Value]:
    words = list(launch.words)
    behind = len(launch.arguments)
    return words[: len(words) - behind] if behind else words


def _no_address(launch: Launch) -> str:
    if "standalone" in launch.options:
        return "--standalone meets at localhost: on several nodes, each waits for the others on its own"
    if "rdzv_backend" in launch.options:
        return "c10d without --rdzv_endpoint meets at localhost: each node waits for the others on its own"
    return (
        f"{_name(launch)} is given no address and takes 127.0.0.1: each node waits for the others on its own"
    )


def _name(launch: Launch) -> str:
    return "torch.distributed.launch" if launch.launcher == "launch" else launch.launcher


def _launcher_line(step: Step) -> int:
    """Return the line of the launcher's own word."""
    for word in step.launch.words:
        name = word.text.rpartition("/")[2]
        if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
            return word.line
    return step.line


@rule(Severity.WARNING)
def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master is a fixed host, while Slurm decides where the job runs.

    On other nodes nobody listens there, and all processes wait until their time-out.

    Bad:
        export MASTER_ADDR=node001

    Good:
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    if script.job.value("nodelist") or any(_on_fixed_hosts(step) for step in script.sruns):
        return
    for value in _master_values(script):
        match = _HOST.match(value.text)
        if not match or LOOPBACK.match(value.text) or match.group(1) in ("0.0.0.0", "255.255.255.255"):  # noqa: S104
            continue
        yield Remark(
            value.line,
            f"the master is always {match.group(1)}, wherever Slurm puts the job",
            'use its first host: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )


def _on_fixed_hosts(step: Step) -> bool:
    """Return whether srun is told the hosts by name."""
    return any(
        option.name == "nodelist" and not MARK.search(option.value or "") for option in step.launch.srun
    )


def _master_values(script: Script) -> Iterator[Value]:
    for assigned in script.walk.assigned:
        if assigned.value and ADDRESS_VARIABLE.match(assigned.name):
            yield assigned.value
    for step in script.training:
        yield from addresses(script, step.launch)
        yield from prefixed(step)
