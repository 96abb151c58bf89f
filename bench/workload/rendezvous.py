"""Ranks find each other: counted, in a bounded time, with names for those that are missing.

torch would wait for all workers inside the store and then say only how many came. Here every
rank writes who it is; rank 0 waits for all, and tells the others its verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from bench.measure.environment import Host, RankFacts, hosts_of
from bench.workload.failures import WorkloadError
from bench.workload.launch import Launch

#: How much longer than rank 0 the others wait, so that they hear its verdict.
_GRACE_S = 5.0
#: How long rank 0 keeps the store open for the others to read that the join failed.
_FAREWELL_S = 2.0


@dataclass(frozen=True)
class Joined:
    """All ranks of a run, and the store through which they met."""

    store: Store
    facts: list[RankFacts]
    seconds: float

    @property
    def hosts(self) -> list[Host]:
        """The hosts, in the order of their first ranks."""
        return hosts_of(self.facts)


class JoinError(WorkloadError):
    """Not all ranks came; the message counts and names them."""


class OtherRankError(WorkloadError):
    """Not all ranks came, and another rank says so."""


def join(launch: Launch, me: RankFacts, *, timeout_s: float) -> Joined:
    """Wait until all ranks are there.

    Raises:
        JoinError: not all ranks came, and this one reports it.
        OtherRankError: not all ranks came, and another rank reports it.
        WorkloadError: the store did not answer.
    """
    began = time.monotonic()
    if launch.world_size == 1:
        return Joined(HashStore(), [me], 0.0)
    store = _open_store(launch, timeout_s)
    store.set(f"rank/{me.rank}", json.dumps(me.as_json()))
    left = max(0.1, timeout_s - (time.monotonic() - began))
    if launch.rank == 0:
        facts = _await_all(store, launch, left, timeout_s)
        verdict = {"facts": [one.as_json() for one in facts]}
        store.set("verdict", json.dumps(verdict))
    else:
        facts = _await_verdict(store, launch, left + _GRACE_S, timeout_s)
    return Joined(store, facts, time.monotonic() - began)


def start_line(joined: Joined, launch: Launch, backend: str) -> str:
    """Return rank 0's line once all are there."""
    hosts = joined.hosts
    places = ", ".join(f"{host.host}: {_ranges(host.ranks)}" for host in hosts)
    count = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = f"{launch.world_size}/{launch.world_size} ranks"
    return f"bench: {ranks} joined on {count} ({places}) in {joined.seconds:.2f} s, backend {backend}"


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
                remedy="is MASTER_ADDR the host of rank 0, and MASTER_PORT free there?",
            ) from None
        who = "torchrun's agent" if launch.agent_store else "rank 0"
        silence = f"the store at {launch.endpoint} ({who}) did not answer in {timeout_s:g} s"
        raise WorkloadError(
            f"rank {launch.rank}: {silence}: {first}",
            remedy="was rank 0 started, and does MASTER_ADDR name its host on a network reached from here?",
        ) from None
    return PrefixStore(launch.prefix, store)


def _await_all(store: Store, launch: Launch, left_s: float, timeout_s: float) -> list[RankFacts]:
    keys = [f"rank/{rank}" for rank in range(launch.world_size)]
    try:
        store.wait(keys, timedelta(seconds=left_s))
    except (dist.DistError, RuntimeError):
        facts = _present(store, keys)
        message = missing_line(facts, launch, timeout_s)
        store.set("verdict", json.dumps({"missing": message}))
        _await_farewells(store, len(facts) - 1)
        raise JoinError(message) from None
    return [RankFacts(**json.loads(value)) for value in store.multi_get(keys)]


def _present(store: Store, keys: Sequence[str]) -> list[RankFacts]:
    return [RankFacts(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _await_farewells(store: Store, others: int) -> None:
    until = time.monotonic() + _FAREWELL_S
    while store.add("farewells", 0) < others and time.monotonic() < until:
        time.sleep(0.02)


def _await_verdict(store: Store, launch: Launch, left_s: float, timeout_s: float) -> list[RankFacts]:
    try:
        store.wait(["verdict"], timedelta(seconds=left_s))
        verdict = json.loads(store.get("verdict"))
    except (dist.DistError, RuntimeError):
        raise _no_verdict(store, launch, timeout_s) from None
    if "missing" in verdict:
        store.add("farewells", 1)
        raise OtherRankError(verdict["missing"])
    return [RankFacts(**one) for one in verdict["facts"]]


def _no_verdict(store: Store, launch: Launch, timeout_s: float) -> WorkloadError:
    """Rank 0 never spoke: either its store went away with it, or an agent's store has no rank 0."""
    try:
        facts = _present(store, [f"rank/{rank}" for rank in range(launch.world_size)])
    except (dist.DistError, RuntimeError):
        return WorkloadError(
            f"rank {launch.rank}: the store at {launch.endpoint} stopped answering while ranks joined",
            remedy="rank 0 or its launcher ended; see their messages",
        )
    message = missing_line(facts, launch, timeout_s)
    first = min((one.rank for one in facts), default=launch.rank)
    return JoinError(message) if launch.rank == first else OtherRankError(message)


def missing_line(facts: Sequence[RankFacts], launch: Launch, timeout_s: float) -> str:
    """Return ``3/4 ranks joined in 60 s; missing: rank 2 on n2; joined: rank 0 on n1, ...``."""
    present = {one.rank for one in facts}
    absent = [rank for rank in range(launch.world_size) if rank not in present]
    expected = launch.expected_hosts
    missing = _placed([(rank, expected[rank] if expected else "") for rank in absent])
    joined = _placed([(one.rank, one.host) for one in facts])
    count = f"{len(present)}/{launch.world_size} ranks joined in {timeout_s:g} s"
    text = f"{count}; missing: {missing}; joined: {joined}"
    heard = {one.host for one in facts}
    # Where each missing rank's host is known, it has been named already.
    silent = [] if expected else [host for host in launch.job_hosts if host not in heard]
    return f"{text}; no rank came from {', '.join(silent)}" if silent else text


def _placed(ranks: Sequence[tuple[int, str]]) -> str:
    """Return ``rank 0 on n1, ranks 1-3 on n2``."""
    groups: dict[str, list[int]] = {}
    for rank, host in ranks:
        groups.setdefault(host, []).append(rank)
    return (
        ", ".join(
            f"rank{'s' if len(group) > 1 else ''} {_ranges(group)}" + (f" on {host}" if host else "")
            for host, group in groups.items()
        )
        or "none"
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Return ``0-2,5`` for 0, 1, 2, 5."""
    runs = [
        [rank for _, rank in group] for _, group in groupby(enumerate(sorted(ranks)), lambda p: p[1] - p[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
