"""A rank's device, and which one it is: ranks can share a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
