"""What env.json says of software, hosts and transport, whatever is trained.

What could not be determined is null. Variables are taken by name and prefix, never all of
them: an environment holds secrets.
"""

from __future__ import annotations

import ipaddress
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from bench import __version__
from bench.measure.hosts import RankFacts, crowded_machines, hosts_of
from bench.measure.transport import address_of

_KEPT = re.compile(
    r"(NCCL|GLOO|OMP|KMP|MKL|TORCH|PYTORCH|UCX|FI)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES|BENCH_[A-Z_]+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_SLURM_IDS = (
    "SLURM_CLUSTER_NAME",
    "SLURM_CPUS_PER_TASK",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_TASKS_PER_NODE",
)


def surroundings(
    facts: Sequence[RankFacts],
    env: Mapping[str, str],
    *,
    backend: str,
    world_size: int,
    launcher: str,
    seconds: float | None,
    device: torch.device,
    threads: int,
) -> dict[str, Any]:
    """Return what env.json says of software, hosts and transport, whatever is trained.

    Args:
        facts: the ranks that came.
        env: the environment variables of rank 0.
        backend: who communicates.
        world_size: how many ranks there were to be.
        launcher: who started them.
        seconds: how long they took to find each other; None where nobody timed that.
        device: rank 0's device.
        threads: the threads that rank 0 computes with.
    """
    return {
        "schema": 1,
        "bench_version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "device_name": _device_name(device, facts),
        "device": device.type,
        "backend": backend,
        "world_size": world_size,
        "launcher": launcher,
        "joined": {
            "ranks": len(facts),
            "expected": world_size,
            "seconds": None if seconds is None else round(seconds, 6),
        },
        "hosts": [host.as_json() for host in hosts_of(facts)],
        "ranks_outnumber_cores": bool(crowded_machines(facts)),
        "transport": transport(backend, env),
        "threads_per_rank": threads,
        "env": {
            name: env[name] for name in sorted(env) if _KEPT.fullmatch(name) and not _SECRET.search(name)
        },
        "slurm": {name: env[name] for name in _SLURM_IDS if name in env},
    }


def transport(backend: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the configuration says of the way gradients travel, before anything was sent.

    What is found in use later (:mod:`bench.measure.transport`) takes its place.
    """
    found: dict[str, str | None] = dict.fromkeys(
        ("backend", "interface", "network", "algorithm", "version", "gpudirect")
    )
    found |= {"backend": backend, "source": "configuration"}
    if backend == "gloo":
        found["interface"] = env.get("GLOO_SOCKET_IFNAME") or _gloo_interface()
        found["network"] = "tcp"
        return found
    found["interface"] = env.get("NCCL_SOCKET_IFNAME")
    found["network"] = env.get("NCCL_NET") or ("Socket" if env.get("NCCL_IB_DISABLE") == "1" else None)
    found["algorithm"] = env.get("NCCL_ALGO")
    found["version"] = _nccl_version()
    return found


def _gloo_interface() -> str | None:
    """Return the interface that gloo binds to by itself: that of the host name's address, else loopback."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    wanted = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
    for address in [*wanted, ipaddress.ip_address("127.0.0.1")]:
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if address_of(entry.address) == address:
                    return name
    # All of 127.0.0.0/8 is loopback; Debian gives the host name 127.0.1.1.
    return "lo" if any(address.is_loopback for address in wanted) else None


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None


def _device_name(device: torch.device, facts: Sequence[RankFacts]) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else facts[0].cpu_model
