"""Which process of which launch this is, from the environment that a launcher sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.workload.failures import WorkloadError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Launch:
    """One process of a launch.

    ``agent_store`` says that the launcher itself serves the store at ``address``:``port``;
    else rank 0 does. ``expected_hosts`` has one host name per rank where the launcher fixed
    that beforehand, else it is empty. ``job_hosts`` are the hosts of the job, if known.
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
    job_hosts: tuple[str, ...] = field(default=())

    @property
    def endpoint(self) -> str:
        """Where the store is."""
        return f"{self.address}:{self.port}"


def launch_from(env: Mapping[str, str]) -> Launch:
    """Return what a launcher's variables say; torchrun's win over Slurm's, neither is one process.

    Raises:
        WorkloadError: variables that contradict each other, or a number of processes other
            than ``BENCH_EXPECTED_WORLD_SIZE``.
    """
    if all(name in env for name in _TORCHRUN):
        launch = _from_torchrun(env)
    elif "SLURM_PROCID" in env and not _in_batch_shell(env):
        launch = _from_srun(env)
    else:
        launch = Launch("single", 0, 0, 1, job_hosts=_job_hosts(env))
    if not 0 <= launch.rank < launch.world_size:
        raise WorkloadError(
            f"rank {launch.rank} does not fit {launch.world_size} processes; see the launcher's line"
        )
    _check_size(launch, env)
    return launch


def _in_batch_shell(env: Mapping[str, str]) -> bool:
    """Tell a job's script from its steps: both have SLURM_PROCID, only a step has an id."""
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
        # An agent's store outlives a restart of its workers: keys must not.
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
        raise WorkloadError(f"{name} is not set, though the launcher's other variables are") from None
    except ValueError:
        raise WorkloadError(f"{name} is {env[name]!r}, not a number") from None


def _job_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(host for host in env.get("BENCH_HOSTS", "").split(",") if host)


def _hosts_of_ranks(env: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    """Return each rank's host: srun fills the job's hosts one after the other."""
    hosts = _job_hosts(env)
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
    processes = f"{launch.world_size} of {expected} processes"
    if launch.world_size == 1:
        raise WorkloadError(f"{processes}: the launch line has no srun?")
    raise WorkloadError(f"{processes}: the launcher started another number than was planned")
