"""The state of NVIDIA GPUs, read through NVML: clocks, power, temperature and errors.

Source: NVIDIA's NVML API Reference, and nvidia-ml-py's pynvml.py. A value that cannot be read is None: many
values are not supported by consumer cards or MIG devices, need permissions, or are unknown to an older
driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

#: Reasons for lower clocks: the bit in NVML's mask, the cause that it belongs to, and NVML's name. NVML sets
#: ``hw_slowdown`` with ``hw_thermal_slowdown`` and ``hw_power_brake``. Alone, ``hw_slowdown`` can also mean
#: that the clocks are just changing.
_REASONS = {
    0x001: ("other", "gpu_idle"),
    0x002: ("other", "applications_clocks_setting"),
    0x004: ("power_cap", "sw_power_cap"),
    0x008: ("hardware", "hw_slowdown"),
    0x010: ("other", "sync_boost"),
    0x020: ("thermal", "sw_thermal_slowdown"),
    0x040: ("thermal", "hw_thermal_slowdown"),
    0x080: ("hardware", "hw_power_brake"),
    0x100: ("other", "display_clock_setting"),
    0x200: ("power_cap", "board_limit"),
    0x400: ("other", "reliability"),
}
_CAUSES = ("hardware", "thermal", "power_cap", "other")
#: A field of nvmlDeviceGetFieldValues: nanoseconds below the requested clocks, since the driver was loaded.
#: The counters of hardware slowdowns are not read: their numbers differ between releases of NVML.
_PERF_POLICY_THERMAL = 75
_CLOCK_SM = 1
_UNCORRECTED, _VOLATILE = 1, 0
_TEMPERATURE_GPU = 0
_GPU_UTILIZATION_SAMPLES = 1


@dataclass(frozen=True)
class Gpu:
    """One GPU in NVML.

    ``mig`` is true if torch uses a part of the GPU. ``handle`` is then the handle of the whole GPU, because
    clocks, power, errors and the link belong to the whole GPU.
    """

    library: Any
    handle: Any
    mig: bool = False

    def read(self, names: str, *arguments: Any) -> Any | None:
        """Return the result of the first of NVML's functions that exists and does not fail, or None."""
        for name in names.split():
            with suppress(AttributeError, getattr(self.library, "NVMLError", AttributeError)):
                return getattr(self.library, name)(self.handle, *arguments)
        return None

    def energy_joules(self) -> float | None:
        """Return the energy used since the driver was loaded (J), or None for a part of a GPU."""
        millijoules = None if self.mig else self.read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def busy_percent(self, since_us: int) -> float | None:
        """Return the mean utilisation since a time in µs since 1970, or None if the driver took no sample."""
        found = self.read("nvmlDeviceGetSamples", _GPU_UTILIZATION_SAMPLES, since_us)
        if self.mig or found is None:
            return None
        values = [sample.sampleValue.uiVal for sample in found[1] if sample.timeStamp >= since_us]
        return sum(values) / len(values) if values else None


#: Every value of it is None.
NO_GPU = Gpu(None, None)


def clocks(device: int) -> dict[str, Any]:
    """Return the clocks of torch's CUDA device ``device`` at this moment, and what limits them.

    ``reasons`` lists NVML's reasons for lower clocks by their cause: ``hardware``, ``thermal``, ``power_cap``
    and ``other``. ``thermal_s`` is the time since the driver was loaded in which the temperature lowered the
    clocks, and ``ecc_uncorrected`` the number of uncorrected memory errors since then.
    """
    read = (open_gpu(device) or NO_GPU).read
    power_mw = read("nvmlDeviceGetPowerUsage")
    fields = read("nvmlDeviceGetFieldValues", [_PERF_POLICY_THERMAL])
    thermal = fields[0] if fields and fields[0].nvmlReturn == 0 else None
    return {
        "sm_mhz": read("nvmlDeviceGetClockInfo", _CLOCK_SM),
        "power_w": None if power_mw is None else power_mw / 1000,
        # CUDA 14 removes the older name of the temperature; drivers before 2024 lack the newer name.
        "temperature_c": read("nvmlDeviceGetTemperature nvmlDeviceGetTemperatureV", _TEMPERATURE_GPU),
        "reasons": _reasons(read),
        "thermal_s": None if thermal is None else int(thermal.value.ullVal) / 1e9,
        "ecc_uncorrected": read("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
    }


def _reasons(read: Callable[[str], Any]) -> dict[str, list[str]] | None:
    # Driver 535 renamed "throttle" to "event". nvidia-ml-py or the driver can lack one of these names.
    mask = read("nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:
        return None
    found: dict[str, list[str]] = {cause: [] for cause in _CAUSES}
    for bit in (1 << place for place in range(64) if mask & 1 << place):
        cause, name = _REASONS.get(bit, ("other", hex(bit)))
        found[cause].append(name)
    return found


@cache
def open_gpu(device: int) -> Gpu | None:
    """Return the GPU behind torch's CUDA device ``device``, or None if NVML or the GPU is not available.

    CUDA_VISIBLE_DEVICES can reorder and hide devices, so torch's index differs from NVML's. The UUID (on MIG
    that of the GPU or of the MIG device) and the PCI address are the same in torch and NVML.
    """
    if (library := _library()) is None:
        return None
    try:
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    except (AssertionError, RuntimeError):  # no such device, or no usable CUDA
        return None
    ways = [("ByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG") if uuid is not None]
    for way, name in [*ways, ("ByPciBusId", pci_address(device))]:
        with suppress(library.NVMLError, AttributeError):
            if name is not None:
                return _whole_gpu(library, getattr(library, f"nvmlDeviceGetHandle{way}")(name))
    return None


def pci_address(device: int) -> str | None:
    """Return the PCI address of torch's CUDA device ``device``, or None without a CUDA driver.

    torch has a GPU's UUID since 2.5, and its PCI address since 2.10.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, text = ctypes.c_int(), ctypes.create_string_buffer(64)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), device)
    failed = failed or driver.cuDeviceGetPCIBusId(text, len(text), number)
    return None if failed else text.value.decode("ascii")


def _whole_gpu(library: Any, handle: Any) -> Gpu:
    with suppress(library.NVMLError, AttributeError):
        return Gpu(library, library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), mig=True)
    # The handle belongs to the whole GPU, not to a MIG device. If the GPU is divided, torch uses one of its
    # parts.
    mode = Gpu(library, handle).read("nvmlDeviceGetMigMode")
    return Gpu(library, handle, mig=bool(mode and mode[0]))


@cache
def _library() -> Any | None:
    """Return nvidia-ml-py's module, ready for use, or None if the package or the driver is missing."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    return None
