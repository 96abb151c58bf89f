"""The measurements of a preflight on simulated GPUs: all work at once, and the device is timed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from bench.preflight import checks, pairs
from bench.preflight.checks import gpu_state
from bench.preflight.pairs import Exchange
from bench.preflight.program import Coordinator
from bench.study.layout import PreflightFolder

LAUNCHES = pytest.mark.parametrize("launch_us", [0, 15, 100])


class Host:
    """The virtual clock of the host."""

    def __init__(self, launch_us: float = 5.0) -> None:
        self.now = 0.0
        self.launch_s = launch_us * 1e-6


class Gpu:
    """A GPU with a queue of limited length, and its clock of events."""

    is_host = False

    def __init__(self, host: Host, queue: int = 1000) -> None:
        self.host = host
        self.queue = queue
        self.ends: list[float] = [0.0]

    def launch(self, seconds: float) -> None:
        self.host.now += self.host.launch_s
        if len(self.ends) > self.queue:
            self.host.now = max(self.host.now, self.ends[-self.queue])
        self.ends.append(max(self.host.now, self.ends[-1]) + seconds)

    def stamp(self) -> Stamp:
        self.launch(0.0)
        return Stamp(self.host, self.ends[-1])

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        return end.time - begin.time

    def synchronize(self) -> None:
        self.host.now = max(self.host.now, self.ends[-1])

    @property
    def is_busy(self) -> bool:
        return self.host.now < self.ends[-1]


class Stamp:
    """An event on a GPU."""

    def __init__(self, host: Host, time: float) -> None:
        self.host = host
        self.time = time

    def synchronize(self) -> None:
        self.host.now = max(self.host.now, self.time)


# -- exchange --------------------------------------------------------------------------------------


@LAUNCHES
@pytest.mark.parametrize("rate", [125e6, 50e9])
def test_the_rate_of_an_exchange_contains_no_launch(monkeypatch, launch_us, rate):
    gpu = Gpu(Host(launch_us))
    monkeypatch.setattr(pairs, "MAX_MESSAGE", 256 * 2**10)  # no memory is needed to count bytes
    scale = 2**10

    class Work:
        def wait(self) -> None:
            """The stream waits, and not the host."""

    def exchanged(operations: list[torch.Tensor]) -> list[Work]:
        gpu.launch(10e-6 + operations[0].nbytes * scale / rate)
        return [Work()]

    monkeypatch.setattr(pairs, "clock_for", lambda device: gpu)
    monkeypatch.setattr(pairs.dist, "P2POp", lambda call, tensor, partner: tensor)
    monkeypatch.setattr(pairs.dist, "batch_isend_irecv", exchanged)
    count = round(rate * 0.3 / scale)
    found = Exchange(1, torch.device("cpu"), count).rate() * scale
    assert found == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("rate", "count"), [(50e9, 15 * 10**9), (1e6, 64 * 2**20)])
def test_the_bytes_of_an_exchange_follow_the_rate_of_the_network(tmp_path, rate, count):
    class Recording(Coordinator):
        def _exchange(self, steps, count, backend, rates):
            counts.append(count)
            rates |= {(0, 1): rate, (1, 0): rate}

    counts: list[int] = []
    meeting = SimpleNamespace(names={0: "n1", 1: "n2"}, ranks=[0, 1])
    one = Recording(None, meeting, PreflightFolder(tmp_path), threshold=0.9, end=0.0)
    one.measured.passes["gpus"] = [[8, 8]]
    one._exchanges()
    assert counts[:2] == [64 * 2**20, count]


# -- all GPUs at once ------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    """Return two simulated GPUs, on which the checks run."""
    host = Host()
    gpus = [Gpu(host), Gpu(host)]
    monkeypatch.setattr(checks, "clock_for", lambda device: gpus[device.index])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpus[device.index].synchronize())
    monkeypatch.setattr(checks, "time", SimpleNamespace(perf_counter=lambda: host.now))
    return gpus


DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("once_s", [160e-6, 4e-3])
def test_all_gpus_work_in_the_same_window(two, once_s):
    """A copy takes so short that thousands of them are queued, and a queue has a limit."""
    begins: list[float] = []

    def work(gpu: Gpu) -> None:
        gpu.launch(once_s)
        begins.append(gpu.ends[-1] - once_s)

    works = [lambda gpu=gpu: work(gpu) for gpu in two]
    rates = checks._gpu_rates(works, 1e6, DEVICES)
    assert rates == pytest.approx([1e6 / once_s] * 2, rel=0.01)
    first, second = begins[1::2], begins[2::2]  # without the work that is timed alone
    overlap = min(first[-1], second[-1]) - max(first[0], second[0])
    assert overlap > 0.95 * (max(first[-1], second[-1]) - min(first[0], second[0]))


def test_a_rate_takes_as_long_with_two_gpus_as_with_one(two, monkeypatch):
    monkeypatch.setattr(
        checks, "_product", lambda device, size: (lambda: two[device.index].launch(2e-3), 1e9)
    )
    durations = []
    for devices in (DEVICES[:1], DEVICES):
        began = two[0].host.now
        assert checks.product_rate(devices, 8192, windows=3) == pytest.approx(5e11, rel=0.01)
        durations.append(two[0].host.now - began)
    assert durations[1] == pytest.approx(durations[0], rel=0.05)


def test_clocks_are_read_while_all_gpus_work(two, monkeypatch):
    monkeypatch.setattr(
        checks, "_product", lambda device, size: (lambda: two[device.index].launch(2e-3), 1.0)
    )
    monkeypatch.setattr(checks, "gpu_facts", lambda: [{"remapped_rows": None, "pcie_width": 16}] * 2)
    moments = itertools.count()

    def clocks(index: int) -> dict:
        next(moments)
        assert two[0].host.now >= 1.0, "after a second of work"
        # An idle GPU has a low clock.
        busy = all(gpu.is_busy for gpu in two)
        return {"sm_mhz": 1980 if busy else 345, "reasons": None, "ecc_uncorrected": 0}

    monkeypatch.setattr(checks, "clocks", clocks)
    found = gpu_state(DEVICES, 8192)
    assert found == {"gpu-clock": 1980e6, "gpu-slowdown": None, "gpu-errors": 0, "pcie-width": 16}
    assert next(moments) == 2
    assert not any(gpu.is_busy for gpu in two)
