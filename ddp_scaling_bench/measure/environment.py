"""The devices of a run, and the version of NCCL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .nvml import pci_address


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


def nccl_version() -> str | None:
    """Return the version of NCCL that torch uses, or None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
