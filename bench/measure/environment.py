"""The environment of a run: devices, hosts and ranks, and their description in env.json."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import __version__
from .nvml import pci_address
from .ranks import RankFacts, cores_of_nodes, hosts_of, kept_variables


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    ``name`` is torch's name, such as ``cuda:0``. ``identity`` is unique per physical device, which several
    ranks can share. ``model`` is the product name, or None for a CPU.
    """

    name: str
    identity: str
    model: str | None


def device_of(device: torch.device, host: str) -> Device:
    """Describe torch's ``device`` (its index is set) on ``host``; all CPUs of a host count as one device."""
    if device.type == "cpu":
        return Device("cpu", host, None)
    properties = torch.cuda.get_device_properties(device)
    name = str(device)
    # Every task can see its own GPU as cuda:0, so the name alone does not identify the GPU.
    identity = getattr(properties, "uuid", None) or f"{host} {pci_address(device.index) or name}"
    return Device(name, str(identity), properties.name)


def device_for(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    """Return the ``given`` device, or by default the device of the model's weights, with its CUDA index.

    Without weights, it is CUDA if this process uses CUDA: its clock is then right for the host's work, too.
    """
    if given is None:
        weight = next(model.parameters(), None) if model is not None else None
        default = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
        given = default if weight is None else weight.device
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


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

    Unknown values are null. ``env``, ``device`` and ``threads`` describe rank 0. Only environment
    variables that are shown (:mod:`bench.variables`) are included. ``join_s`` is the time in seconds
    that the ranks took to join, or None if it was not measured.
    """
    return {
        "schema": 1,
        "bench_version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else facts[0].cpu_model,
        "device_memory_bytes": (
            int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
        ),
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
        "cores": cores_of_nodes(facts),
        "transport": dict(transport),
        "threads_per_rank": threads,
        **kept_variables(env),
    }


def nccl_version() -> str | None:
    """Return the version of NCCL that torch uses, or None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
