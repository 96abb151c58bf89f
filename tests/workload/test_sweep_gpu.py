"""The all-reduce sweep on a CUDA device, with all-reduces whose time on the device and on the host is known."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from bench.measure.step_parts import CudaClock
from bench.workload.probes import CollectiveSweep, Size
from tests.workload.test_probes import OneRank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

CUDA = torch.device("cuda", 0)
#: Cycles of the device in an all-reduce of each size: from about 20 to 600 µs.
CYCLES = {4096: 40_000, 65536: 200_000, 2**20: 1_200_000}


def device_s(cycles: int) -> float:
    """Return the device's time of a spin, of which many are queued."""
    clock = CudaClock(CUDA)
    torch.cuda._sleep(300_000_000)  # the clock rises to its usual rate
    begin = clock.stamp()
    for _ in range(100):
        torch.cuda._sleep(cycles)
    end = clock.stamp()
    clock.synchronize()
    return clock.seconds(begin, end) / 100


@pytest.mark.parametrize("launch_us", [0, 40, 100])
def test_the_swept_time_is_the_time_of_the_device(monkeypatch, launch_us):
    def all_reduce(payload: torch.Tensor, group: None) -> None:
        until = time.perf_counter() + launch_us * 1e-6
        while time.perf_counter() < until:
            pass
        torch.cuda._sleep(CYCLES.get(payload.numel() * 4, 1000))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    sweep = CollectiveSweep(
        collectives=OneRank(), clock=CudaClock(CUDA), device=CUDA, dtype=torch.float32, queues=True
    )
    found = sweep.run([Size(size) for size in CYCLES], budget_s=10.0, room_bytes=1e9, seed=1)
    for index, cycles in enumerate(CYCLES.values()):
        assert found.time_s(index) == pytest.approx(device_s(cycles), rel=0.05)
