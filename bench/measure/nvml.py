"""The state of NVIDIA GPUs, read through NVML: clocks, power, temperature and errors.

Source: NVIDIA's NVML API Reference, and nvidia-ml-py's pynvml.py. A value that cannot be read is None: many
values are not supported by consumer cards or MIG devices, need permissions, or are unknown to an older
driver.
"""

from __future__ import annotations

import ctypes
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

    def read(self, name: str, *arguments: Any) -> Any | None:
        """Return the result of NVML's function ``name``, or None if it does not exist or fails."""
        function = getattr(self.library, name, None)
        if function is None:
            return None
        with suppress(self.library.NVMLError):
            return function(self.handle, *arguments)
        return None

    def energy_joules(self) -> float | None:
        """Return the energy used since the driver was loaded (J), or None for a part of a GPU."""
        return None if self.mig else _thousandth(self.read("nvmlDeviceGetTotalEnergyConsumption"))

    def busy_percent(self, since_us: int) -> float | None:
        """Return the mean utilisation since a time in µs since 1970, or None if the driver took no sample."""
        found = self.read("nvmlDeviceGetSamples", _GPU_UTILIZATION_SAMPLES, since_us)
        if self.mig or found is None:
            return None
        values = [sample.sampleValue.uiVal for sample in found[1] if sample.timeStamp >= since_us]
        return sum(values) / len(values) if values else None


def clocks(device: int) -> dict[str, Any]:
    """Return the clocks of torch's CUDA device ``device`` at this moment, and what limits them.

    ``sm_mhz`` is in MHz, ``power_w`` in watts and ``temperature_c`` in °C. ``reasons`` lists NVML's reasons
    for lower clocks by their cause: ``hardware``, ``thermal``, ``power_cap`` and ``other``. ``thermal_s`` is
    the time in seconds since the driver was loaded in which the temperature lowered the clocks, and
    ``ecc_uncorrected`` the number of uncorrected memory errors since then. The difference of two samples thus
    includes all changes between them.
    """
    gpu = open_gpu(device)
    return {
        "sm_mhz": _read(gpu, "nvmlDeviceGetClockInfo", _CLOCK_SM),
        "power_w": _thousandth(_read(gpu, "nvmlDeviceGetPowerUsage")),
        "temperature_c": _temperature(gpu),
        "reasons": _reasons(gpu),
        "thermal_s": _thermal_s(gpu),
        "ecc_uncorrected": _read(gpu, "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
    }


@cache
def open_gpu(device: int) -> Gpu | None:
    """Return the GPU behind torch's CUDA device ``device``, or None if NVML or the GPU is not available.

    CUDA_VISIBLE_DEVICES can reorder and hide devices, so torch's index differs from NVML's. The UUID is the
    same in torch and NVML, and so is the PCI address. On a MIG device torch returns the UUID of the GPU or of
    the MIG device.
    """
    library = _library()
    if library is None:
        return None
    try:
        properties = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError):  # no such device, or no usable CUDA
        return None
    for find, name in _names(properties, device):
        with suppress(library.NVMLError, AttributeError):
            return _whole_gpu(library, getattr(library, find)(name))
    return None


def _names(properties: Any, device: int) -> list[tuple[str, str]]:
    """Return the possible ways to find a GPU in NVML, as pairs of a function's name and its argument."""
    uuid = getattr(properties, "uuid", None)
    found = [("nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG") if uuid is not None]
    address = pci_address(device)
    return found if address is None else [*found, ("nvmlDeviceGetHandleByPciBusId", address)]


def pci_address(device: int) -> str | None:
    """Return the PCI address of torch's CUDA device ``device``, or None without a CUDA driver.

    torch has a GPU's UUID since 2.5, and its PCI address since 2.10.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, text = ctypes.c_int(), ctypes.create_string_buffer(64)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), device):
        return None
    if driver.cuDeviceGetPCIBusId(text, len(text), number):
        return None
    return text.value.decode("ascii")


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
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _read(gpu: Gpu | None, name: str, *arguments: Any) -> Any | None:
    return None if gpu is None else gpu.read(name, *arguments)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _temperature(gpu: Gpu | None) -> int | None:
    # CUDA 14 removes the older name; drivers before 2024 lack the newer name.
    old = _read(gpu, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
    return old if old is not None else _read(gpu, "nvmlDeviceGetTemperatureV", _TEMPERATURE_GPU)


def _reasons(gpu: Gpu | None) -> dict[str, list[str]] | None:
    # Driver 535 renamed "throttle" to "event". nvidia-ml-py or the driver can lack one of these names.
    mask = _read(gpu, "nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:
        mask = _read(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:
        return None
    found: dict[str, list[str]] = {cause: [] for cause in _CAUSES}
    for bit in (1 << place for place in range(64)):
        if mask & bit:
            cause, name = _REASONS.get(bit, ("other", hex(bit)))
            found[cause].append(name)
    return found


def _thermal_s(gpu: Gpu | None) -> float | None:
    fields = _read(gpu, "nvmlDeviceGetFieldValues", [_PERF_POLICY_THERMAL])
    if fields is None or fields[0].nvmlReturn != 0:
        return None
    return int(fields[0].value.ullVal) / 1e9
