"""Detect rank, world size and the address of the store from the launcher's environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.workload.failures import WorkloadError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and the address at which all ranks meet.

    The store is at ``address``:``port``. It is served by torchrun's agent if ``agent_store`` is true, and
    otherwise by rank 0. ``expected_hosts`` contains the host of each rank if the launcher assigns hosts in
    advance. ``job_hosts`` contains the hosts of the job if they are known.
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
    """Read torchrun's variables, else Slurm's; with neither, return a launch of a single process.

    Raises:
        WorkloadError: the variables contradict each other, or the number of processes differs from
            ``BENCH_EXPECTED_WORLD_SIZE``.
    """
    if all(name in env for name in _TORCHRUN):
        launch = _from_torchrun(env)
    elif "SLURM_PROCID" in env and not _in_batch_shell(env):
        launch = _from_srun(env)
    else:
        launch = Launch("single", 0, 0, 1, job_hosts=_job_hosts(env))
    if not 0 <= launch.rank < launch.world_size:
        raise WorkloadError(
            f"rank {launch.rank} is too high for {launch.world_size} processes",
            remedy="check the launch line",
        )
    _check_size(launch, env)
    return launch


def _in_batch_shell(env: Mapping[str, str]) -> bool:
    """Return whether this process runs in a job's script, where SLURM_PROCID is set but no step id."""
    return "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env


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
    """Return the host of each rank if srun fills the hosts in order (block distribution)."""
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


def _check_size(launch: Launch, env: Mapping[str, str]) -> None:
    expected = env.get("BENCH_EXPECTED_WORLD_SIZE")
    if not expected or _number(env, "BENCH_EXPECTED_WORLD_SIZE") == launch.world_size:
        return
    started = f"{launch.world_size} of {expected} planned processes started"
    remedy = "does the launch line lack srun?" if launch.world_size == 1 else "check the launch line"
    raise WorkloadError(started, remedy=remedy)
