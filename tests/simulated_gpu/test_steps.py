"""Windows, parts of a step, probe steps and the sweep on simulated devices."""

from dataclasses import asdict, replace
from statistics import fmean, median

import pytest
import torch

from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.measure.environment import device_for
from ddp_scaling_bench.measure.findings import PartsNotTimed
from ddp_scaling_bench.measure.results import Window
from ddp_scaling_bench.measure.step_parts import CudaClock
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.probes import CollectiveSweep, Size, Sweep, time_buckets
from ddp_scaling_bench.train.strategies import ddp
from ddp_scaling_bench.train.training import Trainer
from tests.common import read_rows
from tests.simulated_gpu.device import Collectives, Costs, Link, Rank, World
from tests.simulated_gpu.training import LENGTHS, Ddp, Feed, Model, Optimizer, loop, record, train

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


def measured(folder, model: Model, costs: Costs, link: Link, ranks: int = 4, **options) -> list[Window]:
    """Return the window of each rank; rank 0 computes 20 % longer."""

    def program(rank: Rank, recorder: Recorder) -> None:
        slow = replace(model, forward_s=1.2 * model.forward_s)
        train(recorder, Ddp(rank, model if rank.number else slow), **options)

    return record(World(ranks, link=link, costs=costs), folder, program)


#: The costs of a launch in microseconds, if the host is the bottleneck.
SLOW_HOST = {us: (SMALL, Costs(us * 1e-6, jitter=0.5), Link(10e-6, 0.0)) for us in (10, 100)}


@pytest.mark.parametrize(
    ("work", "grad_accum"),
    [((MODEL, FAST, HIDDEN), 1), ((MODEL, FAST, EXPOSED), 2), (SLOW_HOST[10], 2), (SLOW_HOST[100], 1)],
    ids=["hidden", "exposed", "slow host", "very slow host"],
)
def test_the_parts_add_up_to_the_step(tmp_path, work, grad_accum):
    """The device or the host is the bottleneck."""
    for window in measured(tmp_path, *work, ranks=2, grad_accum=grad_accum):
        assert [abs(parts.other_s) < 0.01 * parts.step_s for parts in window.parts] == [True] * 10


class HookedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step calls torch's hooks; the constructor of torch would import its compiler."""

    def __init__(self) -> None:
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @torch.optim.Optimizer.profile_hook_step
    def step(self) -> None:
        """Update the weights on the device."""
        Optimizer(MODEL).step()


@pytest.mark.parametrize("device", ["cuda", None])
def test_a_loop_of_a_user_has_the_times_of_the_device(tmp_path, device):
    """The host is far ahead of the device. Without a model, the recorder finds the device by itself."""

    def program(rank: Rank) -> None:
        model = Ddp(rank, MODEL)
        lengths = {**LENGTHS, "epochs": 2}
        with Recorder(model if device else None, run_dir=tmp_path, device=device, **lengths) as recorder:
            loop(recorder, model, HookedOptimizer().step)

    World(1, link=HIDDEN, costs=Costs(launch_s=2e-6)).run(program)
    expected = {"step_time_sec_median": MODEL.step_s + 2e-3, "epoch_time_sec": 10 * (MODEL.step_s + 2e-3)}
    if device:
        expected |= {"forward_time_sec": MODEL.forward_s, "backward_time_sec": MODEL.backward_s}
        expected |= {"comm_exposed_time_sec": 2e-3, "optimizer_time_sec": MODEL.optimizer_s}
    rows = read_rows(RunFolder(tmp_path).metrics_csv)
    assert len(rows) == 2
    for row in rows:
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=0.02)
        assert bool(row["other_time_sec"]) == bool(device)
        assert abs(float(row["other_time_sec"] or 0)) < 0.01 * MODEL.step_s


def test_a_process_without_cuda_is_timed_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_for(None, None) == torch.device("cpu")


def exposed_s(model: Model, link: Link, forwards_s: list[float]) -> list[float]:
    """Return the exposed communication of each rank by the schedule of the buckets, if no host is slow."""
    end = 0.0
    for place, size in enumerate(model.buckets, start=1):
        ready = max(forwards_s) + place * model.backward_s / len(model.buckets)
        end = max(end, ready) + link.all_reduce_s(size)
    return [end - (forward + model.backward_s) for forward in forwards_s]


@pytest.mark.parametrize(("link", "ranks"), [(HIDDEN, 3), (EXPOSED, 4)])
def test_planted_exposed_communication_is_found(tmp_path, link, ranks):
    forwards = [(1.0 if rank else 1.2) * MODEL.forward_s for rank in range(ranks)]
    expected = exposed_s(MODEL, link, forwards)
    windows = measured(tmp_path, MODEL, FAST, link, ranks)
    found = [fmean(parts.exposed_s for parts in window.parts) for window in windows]
    assert found == pytest.approx(expected, rel=0.02)


def test_the_steps_of_both_throughput_windows_take_as_long_as_on_the_device(tmp_path):
    def program(rank: Rank, recorder: Recorder) -> None:
        model = Ddp(rank, MODEL)
        model.reducer.sample_rate = 1  # as a program may set it; the recorder stops the logger
        trainer = train(recorder, model)
        began_s = trainer.feed.began_s[20:29]  # of the first window, after nineteen steps
        assert began_s[-1] - began_s[0] < 0.2 * 8 * MODEL.step_s, "the host waits for the device"

    world = World(2, link=HIDDEN, costs=FAST)
    for rank, window in enumerate(record(world, tmp_path, program, epochs=2)):
        # All ranks wait for the last bucket.
        assert window.step_s[1:] == pytest.approx([MODEL.step_s + 2e-3] * 9, rel=0.01)
        assert window.samples == [8] * 10
        assert window.micro_batches == 1
        assert window.peak_mem_bytes == 2**20 * (1 + rank)


def test_the_clocks_are_read_while_the_device_is_busy(tmp_path):
    for window in measured(tmp_path, MODEL, FAST, HIDDEN, ranks=2):
        clocks = window.conditions["rank"]["clocks"]
        assert (clocks["after"], clocks["loaded"]) == ({"is_busy": False}, {"is_busy": True})


def test_a_strategy_whose_parts_cannot_be_timed_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp.DdpParts, "start", lambda self, timer: PartsNotTimed())
    for window in measured(tmp_path, MODEL, FAST, HIDDEN):
        [known] = {tuple(name for name, s in asdict(parts).items() if s == s) for parts in window.parts}
        assert known == ("step_s", "data_load_s", "launch_s", "host_s")
    assert PartsNotTimed().as_json() in read_json(RunFolder(tmp_path).env)["facts"]


def test_the_probe_steps_find_the_time_of_each_bucket():
    def program(rank: Rank) -> tuple[list, list]:
        trainer = Trainer(Ddp(rank, MODEL), Feed(MODEL), TrainOptions())
        clock = CudaClock(DEVICE)
        return time_buckets(trainer, 6, collectives=Collectives(rank), clock=clock, dtype=torch.float32)

    (unions, spans), (others, _), *_ = World(4, link=EXPOSED, costs=FAST).run(program)
    assert [median(rank) for rank in unions] == pytest.approx([4 * 6e-3] * 4, rel=0.02)
    assert others == unions
    for step in spans:
        assert [span.bytes for span in step] == [64 * KIB] * 4


#: The host needs longest for forward, and the device for backward. If the host waits for the device in each
#: step, steps are a quarter longer than otherwise.
UNEQUAL, BALANCED = replace(MODEL, forward_s=1e-3, optimizer_s=0.1e-3), Costs(launch_s=0.3e-3)
#: Steps of a recording after its warm-up.
MEASURED = 10 + 11


def test_the_warm_up_judges_only_steps_that_do_not_wait_for_the_logger(tmp_path):
    def program(rank: Rank, recorder: Recorder) -> None:
        model = Ddp(rank, UNEQUAL)
        train(recorder, model)
        assert model.reducer.iterations == 29 + MEASURED

    world = World(2, link=HIDDEN, costs=BALANCED)
    for window in record(world, tmp_path, program, warmup_steps=20):
        assert window.stable
        assert max(window.step_s[1:]) == pytest.approx(min(window.step_s[1:]), rel=0.05)


def test_a_drift_after_the_first_steps_is_noticed(tmp_path):
    class Drifting(Ddp):
        """Steps get faster from the twelfth on, for example because the clock rises."""

        def run_backward(self) -> None:
            if 11 < self.reducer.iterations <= 15 and self.rank.number:
                self.rank.launch(5e-3 * (16 - self.reducer.iterations))
            super().run_backward()

    def program(rank: Rank, recorder: Recorder) -> None:
        model = Drifting(rank, MODEL)
        train(recorder, model)
        assert model.reducer.iterations == 34 + MEASURED

    windows = record(World(2, costs=FAST), tmp_path, program, warmup_steps=8)
    assert [window.stable for window in windows] == [True, True]


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


@pytest.mark.parametrize(("ranks", "launch_us"), [(4, 0), (2, 40), (8, 100)])
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

        def faster(seconds: float) -> None:  # from an idle clock to six times its rate in 50 ms
            launch(seconds / min(6.0, 1 + rank.now * 100))

        rank.launch = faster  # type: ignore[method-assign]
        return sweep(rank)

    found = World(2, link=LINK, costs=Costs(launch_s=30e-6, jitter=1.0)).run(program)[0]
    for index, size in enumerate(SIZES):
        assert found.time_s(index) == pytest.approx(LINK.all_reduce_s(size.bytes), rel=0.05)
