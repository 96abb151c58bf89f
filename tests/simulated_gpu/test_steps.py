"""Windows, parts of a step, probe steps and the sweep on simulated devices."""

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from bench.measure import step_parts
from bench.measure.conditions import Meters
from bench.measure.findings import PartsNotTimed
from bench.measure.results import Window
from bench.measure.step_parts import CudaClock, StepParts
from bench.train import probes, training
from bench.train.options import TrainOptions
from bench.train.probes import CollectiveSweep, Size, Sweep
from bench.train.step_probes import StepReadings, time_buckets
from bench.train.strategies import ddp
from bench.train.training import Trainer, Windows
from tests.simulated_gpu.device import Collectives, Costs, Link, Rank, World, install
from tests.simulated_gpu.training import Ddp, Feed, Model, Optimizer

DEVICE = torch.device("cuda", 0)
#: The host launches a step in about half a millisecond.
FAST = Costs(launch_s=5e-6, jitter=0.5)
KIB = 2**10
#: A bucket is ready every 4 ms. Its all-reduce takes 2 ms, so all but the last are hidden, or 6 ms.
HIDDEN = Link(latency_s=0.0, s_per_byte=2e-3 / (64 * KIB))
EXPOSED = Link(latency_s=0.0, s_per_byte=6e-3 / (64 * KIB))
MODEL = Model(buckets=(64 * KIB,) * 4)
#: A network for which the host is the bottleneck: the device needs 0.6 ms for a step.
SMALL = replace(MODEL, forward_s=0.2e-3, backward_s=0.3e-3, optimizer_s=0.1e-3, copy_s=5e-6)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    install(monkeypatch, step_parts, training, probes)
    strategy = replace(ddp.SPEC, optimizer=lambda model, options: Optimizer(model.work))
    monkeypatch.setattr(training, "strategy_of", lambda name: strategy)


def trainer_of(rank: Rank, model: Model, **options) -> Trainer:
    """Return the trainer of the workload with a simulated model."""
    return Trainer(Ddp(rank, model), Feed(model), TrainOptions(**options))


def windows_of(rank: Rank, model: Model, **options) -> Windows:
    meters = Meters(DEVICE, reads_host=False, reads_device=False)
    trainer = trainer_of(rank, model, **options)
    return Windows(trainer, Collectives(rank), meters, DEVICE, samples_per_step=1)


def measured(model: Model, costs: Costs, link: Link, ranks: int = 4, **options) -> list[Window]:
    """Return the window of each rank, after a warm-up; rank 0 computes 20 % longer."""

    def program(rank: Rank) -> Window:
        slow = replace(model, forward_s=1.2 * model.forward_s)
        windows = windows_of(rank, model if rank.number else slow, **options)
        windows.warm_up(10)
        return windows.attribution(windows.throughput(10), 10)

    return World(ranks, link=link, costs=costs).run(program)


def mean_of(window: Window, part: str) -> float:
    return fmean(getattr(parts, part) for parts in window.parts if parts is not None)


def total(parts: StepParts) -> float:
    return parts.step_s - parts.other_s


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("link", [HIDDEN, EXPOSED], ids=["hidden", "exposed"])
def test_the_parts_add_up_to_the_step_if_the_device_is_the_bottleneck(link, grad_accum):
    for window in measured(MODEL, FAST, link, grad_accum=grad_accum):
        for parts in window.parts:
            assert total(parts) == pytest.approx(parts.step_s, rel=0.01)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("launch_us", [10, 40, 100])
def test_the_parts_add_up_to_the_step_if_the_host_is_the_bottleneck(launch_us, grad_accum):
    costs = Costs(launch_s=launch_us * 1e-6, jitter=0.5)
    for window in measured(SMALL, costs, Link(10e-6, 0.0), grad_accum=grad_accum):
        for parts in window.parts:
            assert total(parts) == pytest.approx(parts.step_s, rel=0.01)


def exposed_s(model: Model, link: Link, forwards_s: list[float]) -> list[float]:
    """Return the exposed communication of each rank by the schedule of the buckets, if no host is slow."""
    end = 0.0
    for place, size in enumerate(model.buckets, start=1):
        ready = max(forwards_s) + place * model.backward_s / len(model.buckets)
        end = max(end, ready) + link.all_reduce_s(size)
    return [end - (forward + model.backward_s) for forward in forwards_s]


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("link", [HIDDEN, EXPOSED], ids=["hidden", "exposed"])
def test_planted_exposed_communication_is_found(link, ranks):
    forwards = [(1.0 if rank else 1.2) * MODEL.forward_s for rank in range(ranks)]
    expected = exposed_s(MODEL, link, forwards)
    found = [mean_of(window, "exposed_s") for window in measured(MODEL, FAST, link, ranks)]
    assert found == pytest.approx(expected, rel=0.02)


def test_the_steps_of_the_throughput_window_take_as_long_as_on_the_device():
    for window in measured(MODEL, FAST, HIDDEN):
        # All ranks wait for the slow one, and for the last bucket.
        expected = MODEL.step_s + 0.2 * MODEL.forward_s + 2e-3
        assert window.step_s[1:] == pytest.approx([expected] * 9, rel=0.01)
        assert window.window_s == pytest.approx(sum(window.step_s), rel=0.01)


def test_the_clocks_are_read_while_the_device_is_busy():
    def program(rank: Rank) -> list[bool]:
        def add_loaded(found: object) -> None:
            last = len(rank.compute.operations) - 1
            with rank.world.changed:
                busy.append(rank.compute.end_of(last) > rank.now)

        busy: list[bool] = []
        windows = windows_of(rank, MODEL)
        windows.warm_up(10)
        window = replace(windows.throughput(10), conditions={})
        windows._conditions = SimpleNamespace(add_loaded=add_loaded)
        windows.sample_loaded(window)
        return busy

    assert World(2, link=HIDDEN, costs=FAST).run(program) == [[True], [True]]


def test_a_strategy_whose_parts_cannot_be_timed_has_none(monkeypatch):
    monkeypatch.setattr(ddp.DdpParts, "start", lambda self, timer: PartsNotTimed())
    assert [window.parts for window in measured(MODEL, FAST, HIDDEN)] == [[]] * 4


def test_the_probe_steps_find_the_time_of_each_bucket():
    def program(rank: Rank) -> StepReadings:
        trainer = trainer_of(rank, MODEL)
        clock = CudaClock(DEVICE)
        return time_buckets(trainer, 6, collectives=Collectives(rank), clock=clock, dtype=torch.float32)

    found = World(4, link=EXPOSED, costs=FAST).run(program)
    assert found[0].comm_time_s == pytest.approx([4 * 6e-3] * 4, rel=0.02)
    assert found[1].union_s == found[0].union_s
    for step in found[0].spans:
        assert [span.bytes for span in step] == [64 * KIB] * 4


#: The host needs longest for forward, and the device for backward. If the host waits for the device in each
#: step, steps are a quarter longer than otherwise.
UNEQUAL, BALANCED = replace(MODEL, forward_s=1e-3, optimizer_s=0.1e-3), Costs(launch_s=0.3e-3)


def test_the_warm_up_judges_only_steps_that_do_not_wait_for_the_logger():
    def program(rank: Rank) -> tuple[int, bool, list[float]]:
        windows = windows_of(rank, UNEQUAL)
        return *windows.warm_up(20), windows.throughput(10).step_s

    for steps, is_stable, step_s in World(2, link=HIDDEN, costs=BALANCED).run(program):
        assert (steps, is_stable) == (29, True)
        assert max(step_s[1:]) == pytest.approx(min(step_s[1:]), rel=0.05)


def test_a_drift_after_the_first_steps_is_noticed():
    class Drifting(Ddp):
        """Steps get faster from the twelfth on, for example because the clock rises."""

        def run_backward(self) -> None:
            if 11 < self.reducer.iterations <= 15:
                self.rank.launch(5e-3 * (16 - self.reducer.iterations))
            super().run_backward()

    def program(rank: Rank) -> tuple[int, bool]:
        windows = windows_of(rank, MODEL)
        windows._trainer.model = Drifting(rank, MODEL)
        return windows.warm_up(8)

    assert World(1, costs=FAST).run(program) == [(34, True)]


SIZES = [Size(4096 * 64**power) for power in range(3)]
LINK = Link(latency_s=12e-6, s_per_byte=1 / 150e9)


def sweep(rank: Rank) -> Sweep:
    """Sweep after the host has arrived late by up to 5 ms."""
    rank.spend(rank.rng.random() * 5e-3)
    timed = CollectiveSweep(
        collectives=Collectives(rank),
        clock=CudaClock(DEVICE),
        device=torch.device("cpu"),
        dtype=torch.float32,
        queues=True,  # as with NCCL
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
