"""NVML's answers as GPUs of different kinds give them, with the types of nvidia-ml-py."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_scaling_bench.measure import nvml
from ddp_scaling_bench.measure.conditions import Meters

H100 = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"
A100 = "11111111-2222-3333-4444-555555555555"
SLICE = "99999999-8888-7777-6666-555555555555"


class NVMLError(Exception):
    """The base class of nvidia-ml-py's errors."""


@dataclass(frozen=True)
class Handle:
    """An opaque handle of a device."""

    answers: dict[str, Any]


def field(number: int, status: int = 0) -> SimpleNamespace:
    return SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(ullVal=number))


def sample(time_us: int, percent: int) -> SimpleNamespace:
    return SimpleNamespace(timeStamp=time_us, sampleValue=SimpleNamespace(uiVal=percent))


#: An H100 SXM under load, with driver 570. Its power cap is active, and one row of its memory was replaced.
H100_ANSWERS: dict[str, Any] = {
    "ClockInfo": {1: 1755}.__getitem__,
    "PowerUsage": 699_312,
    "Temperature": {0: 64}.__getitem__,
    "CurrentClocksEventReasons": 0x4,
    "CurrentClocksThrottleReasons": 0x4,
    "FieldValues": lambda ids: [{75: field(2_500_000_000)}[number] for number in ids],
    "TotalEccErrors": lambda kind, counter: {(1, 0): 0}[kind, counter],
    "MigMode": [0, 0],
    "DeviceHandleFromMigDeviceHandle": NVMLError,
    "TotalEnergyConsumption": 5_000,
    "Samples": lambda kind, since: (1, [sample(since - 1, 100), sample(since, 40), sample(since + 9, 60)]),
}
#: An A100 PCIe with driver 470, which knows "throttle reasons" only. It is too hot.
A100_ANSWERS = H100_ANSWERS | {
    "ClockInfo": {1: 705}.__getitem__,
    "CurrentClocksEventReasons": NVMLError,
    "CurrentClocksThrottleReasons": 0x8 | 0x40 | 0x800,
    "FieldValues": lambda ids: [field(3_000_000_000)],
}
#: A GeForce card: no ECC, no MIG, and no counters.
GEFORCE_ANSWERS = H100_ANSWERS | {
    "CurrentClocksEventReasons": 0x1,
    "FieldValues": lambda ids: [field(0, status=3)],
    "TotalEccErrors": NVMLError,
    "MigMode": NVMLError,
    "TotalEnergyConsumption": NVMLError,
    "Samples": NVMLError,
}
#: A MIG device answers little about itself, but knows its GPU.
SLICE_ANSWERS = dict.fromkeys(H100_ANSWERS, NVMLError) | {
    "DeviceHandleFromMigDeviceHandle": Handle(H100_ANSWERS | {"MigMode": [1, 1]})
}


class Nvml(ModuleType):
    """The module pynvml with recorded answers, by the name of the GPU in NVML (UUID or PCI address).

    An answer is a value, a function of the arguments, or an error.
    """

    NVMLError = NVMLError

    def __init__(self, gpus: dict[str, dict[str, Any]], *, lacks: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self._gpus = {name: Handle(answers) for name, answers in gpus.items()}
        self._lacks = lacks

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, name: str) -> Handle:
        if name not in self._gpus:
            raise NVMLError
        return self._gpus[name]

    def nvmlDeviceGetHandleByPciBusId(self, name: str) -> Handle:
        return self.nvmlDeviceGetHandleByUUID(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet") or name in self._lacks:
            raise AttributeError(name)

        def function(handle: Handle, *arguments: Any) -> Any:
            answer = handle.answers.get(name.removeprefix("nvmlDeviceGet"), NVMLError)
            if isinstance(answer, type):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return function


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes torch see the GPUs with these properties, and NVML answer for them."""

    def install(library: ModuleType | None, *uuids: str | None) -> None:
        devices = [SimpleNamespace(uuid=uuid) for uuid in uuids]

        def properties_of(index: int) -> SimpleNamespace:
            if index >= len(devices):
                raise AssertionError("Invalid device id")
            return devices[index]

        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)

    forget()
    yield install
    forget()


def forget() -> None:
    """Forget the library and the handles of another test."""
    nvml._library.cache_clear()
    nvml.open_gpu.cache_clear()


NEWER = A100_ANSWERS | {"CurrentClocksEventReasons": 0x20, "TemperatureV": {0: 91}.__getitem__}
NO_REASONS: dict[str, list[str]] = {"hardware": [], "thermal": [], "power_cap": [], "other": []}


H100_VALUES = {
    "sm_mhz": 1755,
    "power_w": 699.312,
    "temperature_c": 64,
    "thermal_s": 2.5,
    "ecc_uncorrected": 0,
}


@pytest.mark.parametrize(
    ("answers", "lacks", "expected", "reasons"),
    [
        (H100_ANSWERS, (), H100_VALUES, {"power_cap": ["sw_power_cap"]}),
        # An older driver knows throttling; an unknown reason keeps its bit.
        (
            *(A100_ANSWERS, (), {"thermal_s": 3.0}),
            {"hardware": ["hw_slowdown"], "thermal": ["hw_thermal_slowdown"], "other": ["0x800"]},
        ),
        # A newer library has only the newer names.
        (
            *(NEWER, ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTemperature")),
            *({"temperature_c": 91}, {"thermal": ["sw_thermal_slowdown"]}),
        ),
        # A consumer card leaves empty what it does not support.
        (
            *(GEFORCE_ANSWERS, (), {"sm_mhz": 1755, "thermal_s": None, "ecc_uncorrected": None}),
            {"other": ["gpu_idle"]},
        ),
    ],
)
def test_the_clocks_are_what_the_gpu_answers(cuda, answers, lacks, expected, reasons):
    cuda(Nvml({f"GPU-{H100}": answers}, lacks=lacks), H100)
    found = nvml.clocks(0)
    assert found.pop("reasons") == NO_REASONS | reasons
    assert {name: found[name] for name in expected} == expected
    assert not nvml.open_gpu(0).mig


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({f"MIG-{SLICE}": SLICE_ANSWERS}, id="torch names the MIG device"),
        pytest.param({f"GPU-{SLICE}": H100_ANSWERS | {"MigMode": [1, 1]}}, id="torch names the GPU"),
    ],
)
def test_a_mig_device_has_the_clocks_of_its_gpu_but_not_its_energy(cuda, answers):
    cuda(Nvml(answers), SLICE)
    assert nvml.clocks(0)["power_w"] == 699.312
    assert nvml.open_gpu(0).mig is True
    assert used() == (None, None)


def test_hidden_and_reordered_devices_are_found_by_their_uuid(cuda):
    # CUDA_VISIBLE_DEVICES=1: torch's device 0 is NVML's device 1.
    cuda(Nvml({f"GPU-{H100}": H100_ANSWERS, f"GPU-{A100}": A100_ANSWERS}), A100)
    assert nvml.clocks(0)["sm_mhz"] == 705


class CudaDriver:
    """CUDA's driver library, whose only device is at 0001:C1:00.0."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        return 0 if device == 0 else 101

    def cuDeviceGetPCIBusId(self, text: Any, size: int, number: Any) -> int:
        assert size >= 13
        text.value = b"0001:C1:00.0"
        return 0


@pytest.mark.parametrize("uuids", [(), ("00000000-0000-0000-0000-000000000000",)])
def test_a_gpu_that_nvml_does_not_know_by_its_uuid_is_found_by_its_pci_address(cuda, monkeypatch, uuids):
    monkeypatch.setattr(nvml.ctypes, "CDLL", CudaDriver)
    cuda(Nvml({"0001:C1:00.0": A100_ANSWERS}), *uuids or (None,))
    assert nvml.clocks(0)["sm_mhz"] == 705


def used(window_s: float = 2.0) -> tuple[float | None, float | None]:
    """Return the utilisation (%) and the energy (J) of GPU 0 in a window."""
    meters = Meters(torch.device("cuda", 0))
    meters.read()
    meters.start()
    found = meters.stop(window_s)
    return found.gpu_percent, found.energy_joules


@pytest.mark.parametrize(
    ("window_s", "samples", "expected"),
    [
        (2.0, H100_ANSWERS["Samples"], (50, 5.0)),  # the mean of later samples, and the mean power of 2.5 W
        (0.9, H100_ANSWERS["Samples"], (50, None)),  # the window is shorter than a second
        (2.0, lambda kind, since: (1, [sample(since - 5, 100)]), (None, 5.0)),  # too short for a sample
    ],
)
def test_a_gpus_energy_and_utilisation_are_those_of_the_window(
    cuda, monkeypatch, window_s, samples, expected
):
    clock = SimpleNamespace(time_ns=time.time_ns, perf_counter_ns=iter((0, 3_000_000_000)).__next__)
    monkeypatch.setattr("ddp_scaling_bench.measure.conditions.time", clock)
    millijoules = iter((5_000, 12_500))
    answers = H100_ANSWERS | {"TotalEnergyConsumption": lambda: next(millijoules), "Samples": samples}
    cuda(Nvml({f"GPU-{H100}": answers}), H100)
    assert used(window_s) == pytest.approx(expected)


class NoDriver(Nvml):
    def nvmlInit(self) -> None:
        raise NVMLError


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(None, id="nvidia-ml-py is missing"),
        pytest.param(NoDriver({}), id="the driver's library is missing"),
        pytest.param(Nvml({}), id="NVML does not know the GPU"),
        pytest.param(Nvml({f"GPU-{H100}": dict.fromkeys(H100_ANSWERS, NVMLError)}), id="GPU is lost"),
    ],
)
def test_without_an_answer_every_value_is_empty(cuda, library):
    cuda(library, H100)
    assert {*nvml.clocks(0).values()} == {None}
    assert used() == (None, None)


def test_the_answers_have_the_names_of_nvidia_ml_py():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = {f"nvmlDeviceGet{name}" for name in (*H100_ANSWERS, "HandleByUUID", "HandleByPciBusId")}
    assert not {name for name in names if not hasattr(pynvml, name)}
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    assert pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL == 75
    assert pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80
