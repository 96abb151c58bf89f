"""The environment of a run: devices, hosts and ranks, and their description in env.json."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from bench import __version__
from bench.measure.nvml import pci_address
from bench.units import number_ranges

_KEPT = re.compile(
    r"(NCCL|GLOO|OMP|KMP|MKL|TORCH|PYTORCH|UCX|FI)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES|BENCH_[A-Z_]+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_SLURM = re.compile(
    r"SLURM_(CLUSTER_NAME|CPUS_PER_TASK|JOB_(ID|NAME|NODELIST|PARTITION)|NNODES|NTASKS|RESTART_COUNT|STEP_ID"
    r"|TASKS_PER_NODE)"
)


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    ``name`` is torch's name, such as ``cuda:0``. ``identity`` is unique per physical device, which several
    ranks can share. ``model`` is the product name; None for a CPU.
    """

    name: str
    identity: str
    model: str | None


def device_of(device: torch.device, host: str) -> Device:
    """Describe torch's ``device`` (with its index) on ``host``; all CPUs of a host count as one device."""
    if device.type == "cpu":
        return Device("cpu", host, None)
    properties = torch.cuda.get_device_properties(device)
    name = str(device)
    # Every task can see its own GPU as cuda:0, so the name alone does not identify the GPU.
    identity = getattr(properties, "uuid", None) or f"{host} {pci_address(device.index) or name}"
    return Device(name, str(identity), properties.name)


def device_for(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    """Return the ``given`` device, or by default the device of the model's weights, with its CUDA index."""
    if given is None:
        weight = next(model.parameters(), None) if model is not None else None
        given = "cpu" if weight is None else weight.device
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@dataclass(frozen=True)
class RankFacts:
    """One rank, its host, and the cores that it may run on.

    ``machine`` identifies the running kernel. Several hosts of a test cluster can share one machine, and its
    cores must not be counted twice. ``infiniband`` lists the InfiniBand devices with an active port.
    """

    rank: int
    local_rank: int
    host: str
    machine: str
    core_ids: list[int] = field(repr=False)
    memory_bytes: int
    cpu_model: str | None
    infiniband: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Host:
    """One host and its ranks in ascending order.

    ``cores`` is the number of cores that the ranks may use, and ``affinity`` contains the cores of each rank,
    in the order of ``ranks`` and in Linux's notation (``0-6,64-70``).
    """

    host: str
    ranks: list[int]
    cores: int
    affinity: list[str]
    cpu_model: str | None
    memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the host's entry in env.json."""
        return {**asdict(self), "ranks_here": len(self.ranks)}


def own_facts(rank: int, local_rank: int, env: Mapping[str, str]) -> RankFacts:
    """Collect the rank, host, cores and memory of this process."""
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=host_name(env),
        machine=_machine(),
        core_ids=sorted(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        cpu_model=_cpu_model(),
        infiniband=infiniband_devices(),
    )


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this host if Slurm started the process, else the host's own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def hosts_of(facts: Sequence[RankFacts]) -> list[Host]:
    """Group ranks by their host, in the order of the hosts' first ranks."""
    groups: dict[str, list[RankFacts]] = {}
    for one in sorted(facts, key=lambda f: f.rank):
        groups.setdefault(one.host, []).append(one)
    return [
        Host(
            name,
            [one.rank for one in group],
            _cores(group),
            [number_ranges(one.core_ids) for one in group],
            group[0].cpu_model,
            group[0].memory_bytes,
        )
        for name, group in groups.items()
    ]


def _cores(facts: Sequence[RankFacts]) -> int:
    return len(set().union(*(one.core_ids for one in facts)))


def oversubscribed_machines(facts: Sequence[RankFacts]) -> list[tuple[int, int]]:
    """Return the number of ranks and of cores for every machine that has fewer cores than ranks."""
    groups: dict[str, list[RankFacts]] = {}
    for one in facts:
        groups.setdefault(one.machine, []).append(one)
    sizes = [(len(group), _cores(group)) for group in groups.values()]
    return [(ranks, cores) for ranks, cores in sizes if ranks > cores]


def oversubscription_warnings(facts: Sequence[RankFacts]) -> list[str]:
    """Return one warning per machine that has fewer cores than ranks."""
    return [
        f"{ranks} ranks share {cores} cores: adding ranks measures how cores are shared, not the network"
        for ranks, cores in oversubscribed_machines(facts)
    ]


def threads_per_rank(me: RankFacts, facts: Sequence[RankFacts], env: Mapping[str, str]) -> int:
    """Return the number of compute threads per rank, the same under every launcher.

    The number is ``BENCH_THREADS_PER_RANK`` if set, else ``OMP_NUM_THREADS``, else an equal share of the
    cores that this host's ranks may use. torchrun sets ``OMP_NUM_THREADS=1`` for two or more processes, but
    srun sets nothing. A plan that compares launchers therefore sets ``BENCH_THREADS_PER_RANK``.
    """
    for name in ("BENCH_THREADS_PER_RANK", "OMP_NUM_THREADS"):
        first = env.get(name, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    here = [one for one in facts if one.host == me.host]
    return max(1, _cores(here) // len(here))


def infiniband_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand and RoCE devices that have a port in state ACTIVE.

    Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
    """
    found = []
    for state in sorted(root.glob("*/ports/*/state")):
        name = state.parts[-4]
        try:
            active = "ACTIVE" in state.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        if active and name not in found:
            found.append(name)
    return found


@cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@cache
def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def shared_environment(
    facts: Sequence[RankFacts],
    env: Mapping[str, str],
    *,
    backend: str,
    world_size: int,
    launcher: str,
    join_s: float | None,
    device: torch.device,
    threads: int,
    transport: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the part of env.json that is the same for the built-in workload and the recorder.

    Unknown values are null. ``env``, ``device`` and ``threads`` belong to rank 0. Only environment variables
    with known names or prefixes are included, and no secrets. ``join_s`` is the time in seconds that the
    ranks took to join; None if it was not measured.
    """
    return {
        "schema": 1,
        "bench_version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else facts[0].cpu_model,
        "device": device.type,
        "backend": backend,
        "world_size": world_size,
        "launcher": launcher,
        "joined": {
            "ranks": len(facts),
            "expected": world_size,
            "seconds": None if join_s is None else round(join_s, 6),
        },
        "hosts": [host.as_json() for host in hosts_of(facts)],
        "ranks_outnumber_cores": bool(oversubscribed_machines(facts)),
        "transport": dict(transport),
        "threads_per_rank": threads,
        "env": {
            name: env[name] for name in sorted(env) if _KEPT.fullmatch(name) and not _SECRET.search(name)
        },
        "slurm": {name: env[name] for name in sorted(env) if _SLURM.fullmatch(name)},
    }


def nccl_version() -> str | None:
    """Return the version of NCCL that torch uses, or None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
