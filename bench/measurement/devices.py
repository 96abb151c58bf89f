"""A rank's device, and which one it is: ranks can share a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Device:
    """How a rank calls its device, which one it is, and its model's name (None for a CPU)."""

    name: str
    identity: str
    model: str | None


def device_of(device: torch.device, host: str) -> Device:
    """Return what ``device`` of ``host`` is; of a CPU there is one per host."""
    if device.type == "cpu":
        return Device("cpu", host, None)
    properties = torch.cuda.get_device_properties(device)
    name = str(device)
    return Device(name, str(getattr(properties, "uuid", f"{host} {name}")), properties.name)


def device_for(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    """Return the device that was given, with its number, else that of the model's weights."""
    if given is not None:
        device = torch.device(given)
    else:
        weight = next(model.parameters(), None) if model is not None else None
        device = torch.device("cpu") if weight is None else weight.device
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
