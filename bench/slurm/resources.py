"""What a cluster has, read from sinfo: partitions, nodes, GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.slurm.parsing import UnreadableOutputError, parse_limit_s

#: sinfo -h -o: partition (* marks the default), availability, limit, nodes, state, CPUs, MB, GRES,
#: features, hosts. One row per group of equal nodes in one state.
NODES_FORMAT = "%P|%a|%l|%D|%T|%c|%m|%G|%f|%N"

#: Suffixes of sinfo's states: * not responding, ~ # ! % powered down or changing, $ maintenance,
#: @ ^ reboot, - planned for a larger job, + more (a mixed group).
_STATE_MARKS = "*~#!%$@^-+"
_IN_SERVICE = {
    *("idle", "mixed", "allocated", "completing", "planned", "reserved", "maint"),
    # Shut down to save power, and started for a job (21.08 and later write words for the marks).
    *("powered_down", "powering_down", "powering_up", "power_up"),
    "blocked",  # another job's exclusive topology block, 23.11 and later
}


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node: ``gpu:l40s:4`` is name gpu, kind l40s, count 4."""

    name: str
    kind: str | None
    count: int


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition in one state. ``time_limit_s`` is None for no limit."""

    partition: str
    default: bool
    available: bool
    time_limit_s: int | None
    nodes: int
    state: str
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...]
    features: tuple[str, ...]
    hosts: str

    @property
    def in_service(self) -> bool:
        """Whether jobs run on these nodes, now or when others have ended (not down, not drained)."""
        return self.state.rstrip(_STATE_MARKS) in _IN_SERVICE and not self.state.endswith("*")

    @property
    def gpus(self) -> tuple[Gres, ...]:
        """The nodes' GPUs."""
        return tuple(gres for gres in self.gres if gres.name == "gpu" and gres.count)


def parse_nodes(text: str) -> list[NodeGroup]:
    """Read ``sinfo -h -o`` :data:`NODES_FORMAT`.

    Raises:
        UnreadableOutputError: a line with other columns.
    """
    return [_node_group(line) for line in text.splitlines() if line and not line.startswith("CLUSTER: ")]


def _node_group(line: str) -> NodeGroup:
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != 10:
        raise UnreadableOutputError(f"expected 10 columns, got {line!r}")
    partition, available, limit, nodes, state, cpus, memory, gres, features, hosts = cells
    return NodeGroup(
        partition=partition.removesuffix("*"),
        default=partition.endswith("*"),
        available=available == "up",
        time_limit_s=parse_limit_s(limit),
        nodes=_number(nodes),
        state=state.lower(),
        cpus=_number(cpus),
        memory_mb=_number(memory),
        gres=parse_gres(gres),
        features=() if features == "(null)" else tuple(re.split(r"[,&|]", features)),
        hosts=hosts,
    )


def _number(cell: str) -> int:
    """Read a count; ``+`` marks the least of a mixed group, ``K`` a thousand."""
    match = re.fullmatch(r"(\d+)([KkMm]?)\+?", cell)
    if not match:
        raise UnreadableOutputError(f"{cell!r} is not a number of sinfo")
    return int(match.group(1)) * {"": 1, "k": 1000, "m": 10**6}[match.group(2).lower()]


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Read ``gpu:l40s:4(S:0-1),shard:8``, ``gpu:4``, ``gpu:a100_1g.5gb:7(IDX:0-6)``, ``(null)``."""
    found = []
    bare = re.sub(r"\([^)]*\)", "", text)  # sockets and indices, and (null)
    for item in filter(None, bare.split(",")):
        name, *rest = [part for part in item.split(":") if part != "no_consume"]
        count = rest.pop() if rest and re.fullmatch(r"\d+[KMGkmg]?", rest[-1]) else "1"
        found.append(Gres(name, rest[0] if rest else None, _gres_count(count)))
    return tuple(found)


def _gres_count(text: str) -> int:
    factor = {"k": 2**10, "m": 2**20, "g": 2**30}.get(text[-1].lower(), 1)
    return int(text.rstrip("KMGkmg")) * factor
