"""Detect how this rank was launched, and wait until all ranks have joined.

torch's own rendezvous would only report the number of ranks that joined. Here every rank writes its rank and
host to the store. Rank 0 waits for all of them and publishes the result. If a time limit is exceeded, the
error names the missing ranks.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..measure.failures import HostRank, OtherSize, RanksMissing
from ..measure.ranks import Host, RankFacts, hosts_of
from ..units import number_ranges
from .failures import WorkloadError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and the address at which all ranks meet.

    The store is at ``address``:``port``. torchrun's agent serves the store if ``agent_store`` is true;
    otherwise rank 0 serves it. ``expected_hosts`` contains the host of each rank if the launcher assigns
    hosts in advance. ``job_hosts`` contains the hosts of the job if these hosts are known.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    address: str = ""
    port: int = 0
    agent_store: bool = False
    prefix: str = "bench"
    expected_hosts: tuple[str, ...] = ()
    job_hosts: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """The address of the store as ``host:port``."""
        return f"{self.address}:{self.port}"


def launch_from(env: Mapping[str, str]) -> Launch:
    """Read the variables of srun or torchrun; if neither are set, return a launch of a single process.

    Raises:
        WorkloadError: the variables contradict each other.
    """
    # In a job's script, SLURM_PROCID is set but no step id. A script of bench sets RANK and the like in each
    # task of srun, too, but not those of torchrun's agent.
    in_step = "SLURM_JOB_ID" not in env or {"SLURM_STEP_ID", "SLURM_STEPID"} & {*env}
    if "SLURM_PROCID" in env and in_step and "TORCHELASTIC_RUN_ID" not in env:
        launch = _from_srun(env)
    elif all(name in env for name in _TORCHRUN):
        launch = _from_torchrun(env)
    else:
        launch = Launch("single", 0, 0, 1, job_hosts=_job_hosts(env))
    if not 0 <= launch.rank < launch.world_size:
        raise WorkloadError(
            f"rank {launch.rank} is too high for {launch.world_size} processes",
            remedy="check the launch line",
        )
    return launch


def _from_torchrun(env: Mapping[str, str]) -> Launch:
    run = env.get("TORCHELASTIC_RUN_ID", "")
    return Launch(
        "torchrun",
        _number(env, "RANK"),
        _number(env, "LOCAL_RANK"),
        _number(env, "WORLD_SIZE"),
        *_master(env, _number(env, "WORLD_SIZE")),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true"),
        # The store of torchrun's agent outlives a restart of the workers, so each restart needs its own keys.
        prefix=f"bench/{run}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        job_hosts=_job_hosts(env),
    )


def _from_srun(env: Mapping[str, str]) -> Launch:
    size = _number(env, "SLURM_NTASKS")
    return Launch(
        "srun",
        _number(env, "SLURM_PROCID"),
        _number(env, "SLURM_LOCALID"),
        size,
        *_master(env, size),
        expected_hosts=_hosts_of_ranks(env, size),
        job_hosts=_job_hosts(env),
    )


def _master(env: Mapping[str, str], world_size: int) -> tuple[str, int]:
    if world_size == 1:
        return "", 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise WorkloadError(
            f"{' and '.join(missing)} not set for {world_size} processes",
            remedy="export MASTER_ADDR (the job's first host) and MASTER_PORT before the launch line",
        )
    return env["MASTER_ADDR"], _number(env, "MASTER_PORT")


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise WorkloadError(f"{name} is not set, although other variables of the launcher are") from None
    except ValueError:
        raise WorkloadError(f"{name} is {env[name]!r}, not a number") from None


def _job_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(host for host in env.get("BENCH_HOSTS", "").split(",") if host)


def _hosts_of_ranks(env: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    """Return the host of each rank if srun fills the hosts in order (block distribution), else ``()``."""
    hosts = _job_hosts(env)
    if env.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane")):
        return ()
    written = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for tasks, nodes in _TASKS.findall(written):
        counts += [int(tasks)] * int(nodes or 1)
    if len(counts) != len(hosts) or sum(counts) != world_size:
        return ()
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def check_size(launch: Launch, planned: int, launcher: str) -> None:
    """Raise WorkloadError if another number of processes was started than ``planned`` for ``launcher``."""
    if launch.world_size != planned:
        raise WorkloadError(OtherSize(started=launch.world_size, planned=planned, launcher=launcher))


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
    """Ranks are missing; the failure names them."""


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


def gather(joined: Joined, launch: Launch, name: str, value: Any, *, timeout_s: float) -> list[Any]:
    """Return the values of all ranks in the order of the ranks, through the store in which they met.

    Rank 0 collects the values, because each rank would otherwise read the values of all ranks one by one.

    Raises:
        WorkloadError: a rank ended, or did not write its value in time.
    """
    if launch.world_size == 1:
        return [value]
    store, keys = joined.store, [f"{name}/{rank}" for rank in range(launch.world_size)]
    try:
        store.set(keys[launch.rank], json.dumps(value))
        if launch.rank == 0:
            store.wait(keys, timedelta(seconds=timeout_s))
            store.set(name, json.dumps([json.loads(one) for one in store.multi_get(keys)]))
        else:
            store.wait([name], timedelta(seconds=timeout_s + _GRACE_S))
        values: list[Any] = json.loads(store.get(name))
    except (dist.DistError, RuntimeError):
        raise WorkloadError(
            f"rank {launch.rank}: a rank ended or did not choose its device in {timeout_s:g} s",
            remedy="see the other ranks' messages",
        ) from None
    return values


def await_readers(joined: Joined, launch: Launch, name: str) -> None:
    """Before a rank ends after :func:`gather`: let rank 0, which can serve the store, wait for the others."""
    if launch.rank == 0:
        _await_acknowledgements(joined.store, f"{name}/read", launch.world_size - 1)
    else:
        joined.store.add(f"{name}/read", 1)


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
        store.set("result", json.dumps({"facts": None}))
        _await_acknowledgements(store, "acknowledged", len(facts) - 1)
        raise JoinError(missing_ranks(facts, launch, timeout_s)) from None
    return [RankFacts(**json.loads(value)) for value in store.multi_get(keys)]


def _facts_so_far(store: Store, launch: Launch) -> list[RankFacts]:
    keys = [f"rank/{rank}" for rank in range(launch.world_size)]
    return [RankFacts(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _await_acknowledgements(store: Store, key: str, others: int) -> None:
    until = time.monotonic() + _ACKNOWLEDGE_S
    while store.add(key, 0) < others and time.monotonic() < until:
        time.sleep(0.02)


def _read_result(store: Store, launch: Launch, left_s: float, timeout_s: float) -> list[RankFacts]:
    """Wait for rank 0's result and return the facts of all ranks."""
    try:
        store.wait(["result"], timedelta(seconds=left_s))
        result = json.loads(store.get("result"))
    except (dist.DistError, RuntimeError):
        raise _no_result(store, launch, timeout_s) from None
    if result["facts"] is None:
        store.add("acknowledged", 1)
        raise OtherRankError("ranks are missing")
    return [RankFacts(**facts) for facts in result["facts"]]


def _no_result(store: Store, launch: Launch, timeout_s: float) -> WorkloadError:
    """Return the error for a missing result: rank 0 has ended, or never joined the agent's store."""
    try:
        facts = _facts_so_far(store, launch)
    except (dist.DistError, RuntimeError):
        return WorkloadError(
            f"rank {launch.rank}: the store at {launch.endpoint} stopped answering while ranks joined",
            remedy="rank 0 or its launcher ended; see their messages",
        )
    first = min((rank.rank for rank in facts), default=launch.rank)
    error = JoinError if launch.rank == first else OtherRankError
    return error(missing_ranks(facts, launch, timeout_s))


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
