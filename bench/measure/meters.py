"""Measure the resources used during a window: processor time, memory, energy and GPU utilisation."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bench.measure.nvml import Gpu, open_gpu

#: Linux's energy counters in microjoules, one per processor package. Often only root can read them.
_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Usage:
    """The resources that one rank measured in one window; a value that was not measured is None.

    One rank per host measures ``cpu_percent`` and the energy of the host's processors. One rank per GPU
    measures ``gpu_percent`` and the energy of the GPU.
    """

    cpu_percent: float | None = None
    gpu_percent: float | None = None
    energy_joules: float | None = None


class Meters:
    """Counters that are read before and after a window, and never during it."""

    def __init__(self, device: torch.device, *, reads_host: bool, reads_device: bool) -> None:
        self._reads_host = reads_host
        self._gpu = _GpuCounters.open(device) if device.type == "cuda" and reads_device else None
        packages = _Powercap.open() if reads_host and device.type == "cpu" else None
        self._energy: _GpuCounters | _Powercap | None = self._gpu or packages

    def start(self) -> None:
        """Begin a window."""
        if self._energy is not None:
            self._energy.reset()
        if self._reads_host:
            psutil.cpu_percent(interval=None)

    def stop(self) -> Usage:
        """End the window and return its usage."""
        return Usage(
            cpu_percent=psutil.cpu_percent(interval=None) if self._reads_host else None,
            gpu_percent=self._gpu.busy_percent() if self._gpu else None,
            energy_joules=self._energy.joules() if self._energy else None,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the memory allocated on its GPU, or on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Powercap:
    """The energy of a host's processor packages, from Intel's and AMD's RAPL counters."""

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._ranges = [_microjoules(zone / "max_energy_range_uj") for zone in zones]
        self._before: list[int | None] = []

    @classmethod
    def open(cls) -> _Powercap | None:
        """Return the counters of all packages; None if this process may not read all of them."""
        zones = sorted(_POWERCAP.glob("intel-rapl:[0-9]*"))
        # A zone below a package is part of that package. The zone psys covers the whole machine.
        packages = [zone for zone in zones if zone.name.count(":") == 1 and _is_package(zone)]
        readable = [zone for zone in packages if _microjoules(zone / "energy_uj") is not None]
        return cls(packages) if packages and len(readable) == len(packages) else None

    def reset(self) -> None:
        self._before = [_microjoules(zone / "energy_uj") for zone in self._zones]

    def joules(self) -> float | None:
        """Return the energy in joules since :meth:`reset`; each counter may have wrapped around once."""
        total = 0
        for zone, span, before in zip(self._zones, self._ranges, self._before, strict=True):
            now = _microjoules(zone / "energy_uj")
            if now is None or before is None or (now < before and span is None):
                return None
            total += now - before if now >= before else now - before + (span or 0)
        return total / 1e6


def _is_package(zone: Path) -> bool:
    try:
        return (zone / "name").read_text(encoding="ascii").startswith("package")
    except (OSError, ValueError):
        return False


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class _GpuCounters:
    """One GPU's energy counter, and the utilisation samples that the driver collects."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._joules: float | None = None
        self._began_us = 0

    @classmethod
    def open(cls, device: torch.device) -> _GpuCounters | None:
        """Return the device's counters; None if nvidia-ml-py or the driver's library is missing."""
        gpu = open_gpu(torch.cuda.current_device() if device.index is None else device.index)
        return None if gpu is None else cls(gpu)

    def reset(self) -> None:
        self._joules = self._gpu.energy_joules()
        self._began_us = time.time_ns() // 1000

    def joules(self) -> float | None:
        """Return the energy in joules since :meth:`reset`."""
        now = self._gpu.energy_joules()
        return None if now is None or self._joules is None else now - self._joules

    def busy_percent(self) -> float | None:
        """Return the mean utilisation since :meth:`reset`; None if the driver took no sample in that time."""
        return self._gpu.busy_percent(self._began_us)
