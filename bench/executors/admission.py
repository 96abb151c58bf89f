"""Whether Slurm would ever take a job, or only not now: what sbatch --test-only leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.slurm.client import Slurm, SlurmRefusedError, SlurmUnavailableError
from bench.slurm.parsing import NodeGroup

#: sbatch --test-only says this of what can never run, and of what cannot now because a node is down
#: or drained; sbatch itself takes both (unless a site has it refuse the former), and the job waits.
_NOT_NOW = re.compile(r"node configuration is not available|[Rr]equired node not available")
#: Nodes that nothing keeps from running jobs, but others.
_AT_WORK = {"idle", "mixed", "allocated", "completing", "planned"}
_PARTITION = re.compile(r"^#SBATCH --partition=(\S+)", re.M)


def partitions_of(slurm: Slurm, script: Path) -> dict[str, list[NodeGroup]]:
    """Return the nodes of the partitions that a script asks for, by partition.

    Empty where that cannot be known: Slurm does not say, or there is no such partition.
    """
    try:
        groups = slurm.nodes()
    except SlurmUnavailableError:
        return {}
    named = _PARTITION.search(script.read_text(encoding="utf-8"))
    names = named[1].split(",") if named else [group.partition for group in groups if group.default]
    found = {name: [group for group in groups if group.partition == name] for name in names}
    return found if all(found.values()) else {}


def longest_limit_s(partitions: Mapping[str, Sequence[NodeGroup]]) -> int | None:
    """Return the longest time limit of partitions, seconds; None for no limit, or where it is not known."""
    limits = {group.time_limit_s for groups in partitions.values() for group in groups}
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def refused_for_good(slurm: Slurm, refusal: SlurmRefusedError, *, script: Path, nodes: int) -> str:
    """Return why Slurm would never take a job on so many ``nodes``; empty where it may later.

    Slurm has the same words for a job that fits no node and for nodes that are down or drained.
    """
    if not _NOT_NOW.search(refusal.output):
        return refusal.output
    partitions = partitions_of(slurm, script)
    there = {name: sum(group.nodes for group in groups) for name, groups in partitions.items()}
    if there and max(there.values()) < nodes:
        has = " and ".join(f"partition {name} has {count} nodes" for name, count in there.items())
        return f"{refusal.output} ({has}, and it takes {nodes})"
    groups = [group for groups in partitions.values() for group in groups]
    all_at_work = bool(groups) and all(group.state in _AT_WORK for group in groups)
    return refusal.output if all_at_work else ""
