"""Detect how this process was launched, from the variables of srun and torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import BenchError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class LaunchError(BenchError):
    """The launcher's variables contradict each other."""

    exit_code = 1


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and the address at which all ranks can meet (of MASTER_ADDR and MASTER_PORT).

    torchrun's agent serves a store there if ``agent_store`` is true. ``prefix`` is unique per start of the
    ranks, because that store outlives a restart. ``expected_hosts`` contains the host of each rank if the
    launcher assigns them in advance, and ``job_hosts`` the hosts of the job if they are known.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    address: str = ""
    port: str = ""
    agent_store: bool = False
    prefix: str = "bench"
    expected_hosts: tuple[str, ...] = ()
    job_hosts: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """The address of the store as ``host:port``."""
        return f"{self.address}:{self.port}"


def launch_from(env: Mapping[str, str], *, own: bool = False) -> Launch:
    """Read the variables of srun or torchrun; if neither are set, return a launch of a single process.

    With ``own``, the command has started the ranks, and Slurm's variables are not those of a rank.

    Raises:
        LaunchError: the variables contradict each other.
    """
    hosts = tuple(host for host in env.get("BENCH_HOSTS", "").split(",") if host)
    # In a job's script, SLURM_PROCID is set but no step id. A script of bench sets RANK and the like in each
    # task of srun, too, but not those of torchrun's agent.
    in_step = "SLURM_JOB_ID" not in env or {"SLURM_STEP_ID", "SLURM_STEPID"} & {*env}
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    if "SLURM_PROCID" in env and in_step and not by_torchrun and not own:
        launcher, names = "srun", _SRUN
    elif all(name in env for name in _TORCHRUN):
        launcher, names = "torchrun", _TORCHRUN
    else:
        return Launch("own" if own else "single", 0, 0, 1, job_hosts=hosts)
    rank, local_rank, size = (_number(env, name) for name in names)
    if not 0 <= rank < size:
        raise LaunchError(f"rank {rank} is too high for {size} processes", remedy="check the launch line")
    restart = ("", env.get("TORCHELASTIC_RUN_ID", ""), env.get(_RESTARTS, "0"))
    return Launch(
        launcher,
        rank,
        local_rank,
        size,
        address=env.get("MASTER_ADDR", ""),
        port=env.get("MASTER_PORT", ""),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true"),
        prefix="bench" + ("/".join(restart) if launcher == "torchrun" else ""),
        expected_hosts=_hosts_of_ranks(env, hosts, size) if launcher == "srun" else (),
        job_hosts=hosts,
    )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise LaunchError(f"{name} is not set, although other variables of the launcher are") from None
    except ValueError:
        raise LaunchError(f"{name} is {env[name]!r}, not a number") from None


def _hosts_of_ranks(env: Mapping[str, str], hosts: tuple[str, ...], world_size: int) -> tuple[str, ...]:
    """Return the host of each rank if srun fills the hosts in order (block distribution), else ``()``."""
    if env.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane")):
        return ()
    written = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(tasks) for tasks, nodes in _TASKS.findall(written) for _ in range(int(nodes or 1))]
    if len(counts) != len(hosts) or sum(counts) != world_size:
        return ()
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
