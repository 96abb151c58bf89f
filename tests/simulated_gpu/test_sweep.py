"""The all-reduce sweep on simulated devices: the time of the device is measured, and not that of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.measure.step_parts import CudaClock
from bench.workload import probes
from bench.workload.probes import CollectiveSweep, Size, Sweep
from tests.simulated_gpu.device import Collectives, Costs, Link, Rank, World, install

SIZES = [Size(4096 * 64**power) for power in range(3)]
LINK = Link(latency_s=12e-6, s_per_byte=1 / 150e9)
#: Keyword arguments of a sweep with NCCL.
QUEUES: dict[str, Any] = {"queues": True}


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    install(monkeypatch, probes)


def sweep(rank: Rank) -> Sweep:
    """Sweep after the host has arrived late by up to 5 ms."""
    rank.spend(rank.rng.random() * 5e-3)
    timed = CollectiveSweep(
        collectives=Collectives(rank),
        clock=CudaClock(torch.device("cuda", 0)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        **QUEUES,
    )
    return timed.run(SIZES, budget_s=0.05, room_bytes=1e12, seed=3)  # five repeats of each size


@pytest.mark.parametrize(("ranks", "launch_us"), [(4, 0), (4, 40), (16, 100)])
def test_the_swept_time_is_the_time_of_the_device(ranks, launch_us):
    costs = Costs(launch_s=launch_us * 1e-6, jitter=1.0, pause_s=1e-3)
    found = World(ranks, link=LINK, costs=costs, seed=launch_us).run(sweep)
    assert all(one.times_s == found[0].times_s for one in found)
    for index, size in enumerate(SIZES):
        assert found[0].time_s(index) == pytest.approx(LINK.all_reduce_s(size.bytes), rel=0.05)
    largest = SIZES[-1].bytes
    assert found[0].standalone_s([largest] * 3) == pytest.approx(3 * LINK.all_reduce_s(largest), rel=0.05)


def test_a_clock_that_rises_during_the_sweep_does_not_change_the_times():
    def program(rank: Rank) -> Sweep:
        launch = rank.launch

        def faster(seconds: float) -> int:  # from an idle clock to six times its rate in 50 ms
            return launch(seconds / min(6.0, 1 + rank.now * 100))

        rank.launch = faster  # type: ignore[method-assign]
        return sweep(rank)

    found = World(2, link=LINK, costs=Costs(launch_s=30e-6, jitter=1.0)).run(program)[0]
    for index, size in enumerate(SIZES):
        assert found.time_s(index) == pytest.approx(LINK.all_reduce_s(size.bytes), rel=0.05)
