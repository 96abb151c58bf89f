"""Wait until all ranks have joined, and name the missing ranks if a time limit is exceeded.

torch's own rendezvous would only report the number of ranks that joined. Here every rank writes its rank and
host to the store. Rank 0 waits for all of them and publishes the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from bench.measure.ranks import Host, RankFacts, hosts_of
from bench.units import number_ranges
from bench.workload.failures import WorkloadError
from bench.workload.launch import Launch

#: Additional time that other ranks wait to read the result of rank 0.
_GRACE_S = 5.0
#: Maximum time that rank 0 keeps the store open for others to read that joining failed.
_ACKNOWLEDGE_S = 2.0


@dataclass(frozen=True)
class Joined:
    """All ranks of a run, and the store in which they met."""

    store: Store
    facts: list[RankFacts]
    seconds: float

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the run, in the order of their first ranks."""
        return hosts_of(self.facts)


class JoinError(WorkloadError):
    """Ranks are missing; the message contains their number and names."""


class OtherRankError(WorkloadError):
    """Ranks are missing, and another rank prints the message."""


def join(launch: Launch, me: RankFacts, *, timeout_s: float) -> Joined:
    """Wait until all ranks have joined.

    Raises:
        JoinError: ranks are missing, and this rank prints the message.
        OtherRankError: ranks are missing, and another rank prints the message.
        WorkloadError: the store did not answer.
    """
    began = time.monotonic()
    if launch.world_size == 1:
        return Joined(HashStore(), [me], 0.0)
    store = _open_store(launch, timeout_s)
    store.set(f"rank/{me.rank}", json.dumps(asdict(me)))
    left_s = max(0.1, timeout_s - (time.monotonic() - began))
    if launch.rank == 0:
        facts = _collect_facts(store, launch, left_s, timeout_s)
        store.set("result", json.dumps({"facts": [asdict(rank) for rank in facts]}))
    else:
        facts = _read_result(store, launch, left_s + _GRACE_S, timeout_s)
    return Joined(store, facts, time.monotonic() - began)


def joined_message(joined: Joined, launch: Launch, backend: str) -> str:
    """Return the line that rank 0 prints after all ranks have joined."""
    hosts = joined.hosts
    ranks_by_host = ", ".join(f"{host.host}: {number_ranges(host.ranks)}" for host in hosts)
    count = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = f"{launch.world_size}/{launch.world_size} ranks"
    return f"bench: {ranks} joined on {count} ({ranks_by_host}) in {joined.seconds:.2f} s, backend {backend}"


def _open_store(launch: Launch, timeout_s: float) -> Store:
    serves = launch.rank == 0 and not launch.agent_store
    try:
        store = TCPStore(
            launch.address,
            launch.port,
            launch.world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if serves:
            raise WorkloadError(
                f"rank 0 cannot serve the store at {launch.endpoint}: {first}",
                remedy="check that MASTER_ADDR is the host of rank 0 and that MASTER_PORT is free there",
            ) from None
        server = "torchrun's agent" if launch.agent_store else "rank 0"
        raise WorkloadError(
            f"rank {launch.rank}: the store at {launch.endpoint} ({server})"
            f" did not answer in {timeout_s:g} s: {first}",
            remedy="check that rank 0 was started, and that this host can reach MASTER_ADDR",
        ) from None
    return PrefixStore(launch.prefix, store)


def _collect_facts(store: Store, launch: Launch, left_s: float, timeout_s: float) -> list[RankFacts]:
    """Wait for the facts of all ranks; if some are missing, publish the failure and raise a JoinError."""
    keys = [f"rank/{rank}" for rank in range(launch.world_size)]
    try:
        store.wait(keys, timedelta(seconds=left_s))
    except (dist.DistError, RuntimeError):
        facts = _facts_so_far(store, launch)
        message = missing_ranks_message(facts, launch, timeout_s)
        store.set("result", json.dumps({"missing": message}))
        _await_acknowledgements(store, len(facts) - 1)
        raise JoinError(message) from None
    return [RankFacts(**json.loads(value)) for value in store.multi_get(keys)]


def _facts_so_far(store: Store, launch: Launch) -> list[RankFacts]:
    keys = [f"rank/{rank}" for rank in range(launch.world_size)]
    return [RankFacts(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _await_acknowledgements(store: Store, others: int) -> None:
    until = time.monotonic() + _ACKNOWLEDGE_S
    while store.add("acknowledged", 0) < others and time.monotonic() < until:
        time.sleep(0.02)


def _read_result(store: Store, launch: Launch, left_s: float, timeout_s: float) -> list[RankFacts]:
    """Wait for rank 0's result and return the facts of all ranks."""
    try:
        store.wait(["result"], timedelta(seconds=left_s))
        result = json.loads(store.get("result"))
    except (dist.DistError, RuntimeError):
        raise _no_result(store, launch, timeout_s) from None
    if "missing" in result:
        store.add("acknowledged", 1)
        raise OtherRankError(result["missing"])
    return [RankFacts(**facts) for facts in result["facts"]]


def _no_result(store: Store, launch: Launch, timeout_s: float) -> WorkloadError:
    """Return the error for a missing result: rank 0 has ended, or never joined the store of the agent."""
    try:
        facts = _facts_so_far(store, launch)
    except (dist.DistError, RuntimeError):
        return WorkloadError(
            f"rank {launch.rank}: the store at {launch.endpoint} stopped answering while ranks joined",
            remedy="rank 0 or its launcher ended; see their messages",
        )
    message = missing_ranks_message(facts, launch, timeout_s)
    first = min((rank.rank for rank in facts), default=launch.rank)
    return JoinError(message) if launch.rank == first else OtherRankError(message)


def missing_ranks_message(facts: Sequence[RankFacts], launch: Launch, timeout_s: float) -> str:
    """Return a message such as ``3/4 ranks joined in 60 s; missing: rank 2 on n2; joined: rank 0 on n1``."""
    present = {rank.rank for rank in facts}
    absent = [rank for rank in range(launch.world_size) if rank not in present]
    expected = launch.expected_hosts
    missing = _ranks_on_hosts([(rank, expected[rank] if expected else "") for rank in absent])
    joined = _ranks_on_hosts([(rank.rank, rank.host) for rank in facts])
    count = f"{len(present)}/{launch.world_size} ranks joined in {timeout_s:g} s"
    text = f"{count}; missing: {missing}; joined: {joined}"
    known = {rank.host for rank in facts}
    # If the host of each rank is known, the hosts of missing ranks are already in the text.
    silent = [] if expected else [host for host in launch.job_hosts if host not in known]
    return f"{text}; no rank joined from {', '.join(silent)}" if silent else text


def _ranks_on_hosts(ranks: Sequence[tuple[int, str]]) -> str:
    """Format ranks with their hosts, such as ``rank 0 on n1, ranks 1-3 on n2``."""
    groups: dict[str, list[int]] = {}
    for rank, host in ranks:
        groups.setdefault(host, []).append(rank)
    return (
        ", ".join(
            f"rank{'s' if len(group) > 1 else ''} {number_ranges(group)}" + (f" on {host}" if host else "")
            for host, group in groups.items()
        )
        or "none"
    )
