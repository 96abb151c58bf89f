"""Wait until all ranks have joined.

torch's own rendezvous would only report the number of ranks that joined. Here every rank writes its rank and
host to the store. Rank 0 waits for all of them and publishes the result. If a time limit is exceeded, the
error names the missing ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..measure.exchange import Met
from ..measure.failures import HostRank, OtherSize, RanksMissing
from ..measure.launch import Launch
from ..measure.ranks import RankFacts
from ..units import number_ranges
from .failures import WorkloadError

#: Additional time that other ranks wait to read the result of rank 0.
_GRACE_S = 5.0
#: Maximum time that rank 0 keeps the store open for others to read that joining failed.
_ACKNOWLEDGE_S = 2.0
#: The name of the facts of all ranks in the store.
_FACTS = "facts"


class JoinError(WorkloadError):
    """Ranks are missing; the failure names them."""


class OtherRankError(WorkloadError):
    """Ranks are missing, and another rank prints the message."""


def check_size(launch: Launch, planned: int, launcher: str) -> None:
    """Raise WorkloadError if another number of processes was started than ``planned`` for ``launcher``."""
    if launch.world_size != planned:
        raise WorkloadError(OtherSize(started=launch.world_size, planned=planned, launcher=launcher))


def join(launch: Launch, me: RankFacts, *, timeout_s: float) -> Met:
    """Wait until all ranks have joined.

    Raises:
        WorkloadError: ranks are missing (a JoinError or an OtherRankError), or the store did not answer.
    """
    began = time.monotonic()
    store = open_store(launch, timeout_s)
    if launch.world_size == 1:
        return Met(launch, store, [me], 0.0)
    left_s = max(0.1, timeout_s - (time.monotonic() - began))
    try:
        found = _share(store, launch, _FACTS, asdict(me), left_s)
    except (dist.DistError, RuntimeError):
        raise _not_joined(store, launch, timeout_s) from None
    if found is None:
        store.add(f"{_FACTS}/read", 1)
        raise OtherRankError("ranks are missing")
    return Met(launch, store, [RankFacts(**one) for one in found], time.monotonic() - began)


def _share(store: Store, launch: Launch, name: str, value: Any, timeout_s: float) -> Any:
    """Write this rank's value, and return the values of all ranks; rank 0 collects them.

    Each rank would otherwise read the values of all ranks one by one. After an error, rank 0 can write None
    as the values, which the other ranks then return.
    """
    keys = [f"{name}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(value))
    if launch.rank == 0:
        store.wait(keys, timedelta(seconds=timeout_s))
        store.set(name, json.dumps([json.loads(one) for one in store.multi_get(keys)]))
    else:
        store.wait([name], timedelta(seconds=timeout_s + _GRACE_S))
    return json.loads(store.get(name))


def meeting_place(launch: Launch) -> tuple[str, int]:
    """Return the address and the port at which the ranks meet.

    Raises:
        WorkloadError: they are not set, or the port is not a number.
    """
    values = {"MASTER_ADDR": launch.address, "MASTER_PORT": launch.port}
    if missing := [name for name, value in values.items() if not value]:
        raise WorkloadError(
            f"{' and '.join(missing)} not set for {launch.world_size} processes",
            remedy="export MASTER_ADDR (the job's first host) and MASTER_PORT before the launch line",
        )
    if not launch.port.isdecimal():
        raise WorkloadError(f"MASTER_PORT is {launch.port!r}, not a number")
    return launch.address, int(launch.port)


def gather(joined: Met, name: str, value: Any, *, timeout_s: float) -> list[Any]:
    """Return the values of all ranks in the order of the ranks, through the store in which they met.

    Raises:
        WorkloadError: a rank ended, or did not write its value in time.
    """
    if joined.launch.world_size == 1:
        return [value]
    try:
        values: list[Any] = _share(joined.store, joined.launch, name, value, timeout_s)
    except (dist.DistError, RuntimeError):
        raise WorkloadError(
            f"rank {joined.launch.rank}: a rank ended or did not choose its device in {timeout_s:g} s",
            remedy="see the other ranks' messages",
        ) from None
    return values


def await_readers(joined: Met, name: str) -> None:
    """Before a rank ends after :func:`gather`: let rank 0, which can serve the store, wait for the others."""
    if joined.launch.rank == 0:
        _await_acknowledgements(joined.store, f"{name}/read", joined.launch.world_size - 1)
    else:
        joined.store.add(f"{name}/read", 1)


def joined_message(joined: Met, backend: str) -> str:
    """Return the line that rank 0 prints after all ranks have joined."""
    hosts = joined.hosts
    ranks_by_host = ", ".join(f"{host.host}: {number_ranges(host.ranks)}" for host in hosts)
    count = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = f"{joined.launch.world_size}/{joined.launch.world_size} ranks"
    return f"bench: {ranks} joined on {count} ({ranks_by_host}) in {joined.seconds:.2f} s, backend {backend}"


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Connect to the store of the ranks, which rank 0 or torchrun's agent serves.

    Raises:
        WorkloadError: the store did not answer in time, or cannot be served.
    """
    if launch.world_size == 1:
        return HashStore()
    serves = launch.rank == 0 and not launch.agent_store
    try:
        store = TCPStore(
            *meeting_place(launch),
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


def _not_joined(store: Store, launch: Launch, timeout_s: float) -> WorkloadError:
    """Return the error of a rank that has no result: ranks are missing, or the store's server has ended."""
    keys = [f"{_FACTS}/{rank}" for rank in range(launch.world_size)]
    try:
        facts = [RankFacts(**json.loads(store.get(key))) for key in keys if store.check([key])]
        if launch.rank == 0:
            store.set(_FACTS, json.dumps(None))
            _await_acknowledgements(store, f"{_FACTS}/read", len(facts) - 1)
    except (dist.DistError, RuntimeError):
        return WorkloadError(
            f"rank {launch.rank}: the store at {launch.endpoint} stopped answering while ranks joined",
            remedy="rank 0 or its launcher ended; see their messages",
        )
    first = min((rank.rank for rank in facts), default=launch.rank)
    error = JoinError if launch.rank == first else OtherRankError
    return error(missing_ranks(facts, launch, timeout_s))


def _await_acknowledgements(store: Store, key: str, others: int) -> None:
    until = time.monotonic() + _ACKNOWLEDGE_S
    while store.add(key, 0) < others and time.monotonic() < until:
        time.sleep(0.02)


def missing_ranks(facts: Sequence[RankFacts], launch: Launch, timeout_s: float) -> RanksMissing:
    """Return which ranks are missing, from the facts of those that have joined."""
    present, hosts = {rank.rank for rank in facts}, {rank.host for rank in facts}
    absent = [rank for rank in range(launch.world_size) if rank not in present]
    expected = launch.expected_hosts
    return RanksMissing(
        missing=tuple(HostRank(rank, expected[rank] if expected else "") for rank in absent),
        joined=tuple(HostRank(rank.rank, rank.host) for rank in facts),
        timeout_s=timeout_s,
        # If the host of each rank is known, the missing ranks name them already.
        silent=() if expected else tuple(host for host in launch.job_hosts if host not in hosts),
    )
