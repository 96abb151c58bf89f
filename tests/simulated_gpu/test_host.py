"""Whether the host or the device is the limit of a step, and what else a busy device can hide from the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.checks.slow_ranks import host_bound
from analysis.data.load import RankOfRun
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.measure import conditions
from ddp_scaling_bench.measure.findings import OtherDdp, SideStreams, WaitsForDevice
from ddp_scaling_bench.measure.results import Window
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.records import RankRow, text_columns
from ddp_scaling_bench.run_folder import RunFolder
from tests.common import read_rows
from tests.simulated_gpu.device import CUDA, WARNINGS, Costs, Link, Rank, Stream, World, here
from tests.simulated_gpu.test_steps import HookedOptimizer
from tests.simulated_gpu.training import Ddp, Feed, Model, Optimizer, loop, record, train

KIB = 2**10
#: Each bucket is hidden by the computation of the next one, or takes longer than that.
HIDDEN, EXPOSED = Link(10e-6, 0.0), Link(3e-3, 0.0)
BUSY = Model(buckets=(64 * KIB,) * 4)
#: Launches of a step: forward, backward and optimizer, a copy, and the buckets.
LAUNCHES = 3 * BUSY.kernels + 1 + len(BUSY.buckets)


def model_of(device_s: float, optimizer: float = 0.04) -> Model:
    """Return a model whose step takes ``device_s``, of which the optimizer has a share."""
    rest_s = device_s * (1 - optimizer) / 3
    times = {"forward_s": rest_s, "backward_s": 2 * rest_s, "optimizer_s": device_s * optimizer}
    return replace(BUSY, **times, copy_s=1e-6, load_host_s=device_s * 0.02)


def ranks_of(folder: Path) -> Iterator[RankOfRun]:
    """Yield the rows of ranks.csv, as the analysis reads them."""
    texts = text_columns(RankRow)
    for row in read_rows(RunFolder(folder).ranks_csv):
        values = {
            name: text if name in texts else float(text) if text else math.nan for name, text in row.items()
        }
        yield RankOfRun(**values | {"rank": int(values["rank"]), "run_id": "r"})


def slow_hosts(
    folder: Path, model: Model, costs: Costs, link: Link, ranks: int, steps: int = 10, **options: Any
) -> list[int]:
    """Train, and return the ranks whose host is the limit; the times of all hosts are known."""

    def program(rank: Rank, recorder: Recorder) -> None:
        train(recorder, Ddp(rank, model), **options)

    folder.mkdir(exist_ok=True)
    record(World(ranks, link=link, costs=costs, seed=ranks), folder, program, steps_per_epoch=steps)
    rows = list(ranks_of(folder))
    assert [math.isfinite(row.host_time_sec + row.launch_lead_time_sec) for row in rows] == [True] * ranks
    return [one.rank for one in host_bound(rows)]


def has_host_times(folder: Path) -> bool:
    """Return whether the time of a host is known on any rank."""
    return any(math.isfinite(row.host_time_sec) for row in ranks_of(folder))


#: Launch costs in microseconds, ranks, steps, micro-batches.
CASES = [(20, 2, 10, 1), (100, 1, 30, 2), (200, 3, 10, 1)]


@pytest.mark.parametrize(("launch_us", "ranks", "steps", "grad_accum"), CASES)
def test_a_busy_device_is_never_the_hosts_fault(tmp_path, launch_us, ranks, steps, grad_accum):
    """A host needs up to 2.25 times its launches: each rank and each launch can take 50 % longer."""
    costs = Costs(launch_us * 1e-6, jitter=0.5, queue=40 if ranks == 3 else 1000)
    model = model_of(2.5 * LAUNCHES * costs.launch_s)
    for link in (HIDDEN, EXPOSED):
        assert not slow_hosts(tmp_path / str(link), model, costs, link, ranks, steps, grad_accum=grad_accum)


@pytest.mark.parametrize(("launch_us", "ranks", "steps", "grad_accum"), CASES)
def test_a_slow_host_is_always_found(tmp_path, launch_us, ranks, steps, grad_accum):
    """The device needs half the time of the launches; its last kernel is short or long."""
    costs = Costs(launch_us * 1e-6, jitter=0.5)
    for link, optimizer in ((HIDDEN, 0.04), (Link(0.5e-3, 0.0), 0.4)):
        model = replace(model_of(0.5 * LAUNCHES * costs.launch_s, optimizer), kernels=20 * grad_accum)
        assert slow_hosts(tmp_path / str(link), model, costs, link, ranks, steps, grad_accum=grad_accum)


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_a_full_queue_of_launches_is_not_a_slow_host(tmp_path, grad_accum):
    model = replace(BUSY, kernels=60, forward_s=8e-3, backward_s=16e-3)  # 120 launches of 85 us
    assert not slow_hosts(tmp_path, model, Costs(85e-6, queue=200), HIDDEN, 1, grad_accum=grad_accum)


@pytest.mark.parametrize("waits", [lambda: here().item(), lambda: CUDA.synchronize()])
def test_a_loop_that_waits_is_not_a_slow_host(tmp_path, waits):
    def program(rank: Rank, recorder: Recorder) -> None:
        model, optimizer = Ddp(rank, BUSY), HookedOptimizer()

        def update() -> None:
            optimizer.step()
            WARNINGS.warn("of the user")
            waits()

        recorder.watch(model)
        loop(recorder, model, update)
        assert {*WARNINGS.shown} == {"of the user"}
        assert CUDA.mode == 0
        CUDA.synchronize()

    windows = record(World(1, costs=Costs(20e-6)), tmp_path, program)
    assert windows[0].host_waits == 1
    assert not has_host_times(tmp_path)
    assert WaitsForDevice(waits=1).as_json() in read_json(RunFolder(tmp_path).env)["facts"]


def test_launches_that_block_have_no_launch_time(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    record(World(1, costs=Costs(20e-6)), tmp_path, lambda rank, recorder: train(recorder, Ddp(rank, BUSY)))
    assert not has_host_times(tmp_path)


def test_a_slow_meter_does_not_change_the_throughput(tmp_path, monkeypatch):
    def window_s(folder: str, seconds: float) -> float:
        def ticks() -> tuple[int, int]:
            here().spend(seconds * here().number)
            return 0, 1

        monkeypatch.setattr(conditions, "_cpu_ticks", ticks)
        (tmp_path / folder).mkdir()

        def program(rank: Rank, recorder: Recorder) -> None:
            train(recorder, Ddp(rank, BUSY))

        windows = record(World(2, link=HIDDEN, costs=Costs(20e-6)), tmp_path / folder, program)
        return max(sum(window.step_s) for window in windows)

    assert window_s("late", 20e-3) == pytest.approx(window_s("usual", 0.0), rel=1e-3)


def test_clocks_of_an_idle_device_are_not_those_under_load(tmp_path):
    def program(rank: Rank, recorder: Recorder) -> None:
        train(recorder, Ddp(rank, replace(BUSY, forward_s=1e-5, backward_s=1e-5, optimizer_s=1e-5)))

    [window] = record(World(1, costs=Costs(100e-6, event_s=50e-6)), tmp_path, program, attribution_steps=0)
    assert window.conditions["rank"]["clocks"].keys() == {"before", "after"}


def own_loop(
    folder: Path, update: Callable[[Rank, Recorder, int], None], ranks: int = 1, **lengths: int
) -> list[Window]:
    """Record a loop that calls ``update`` with the number of the step."""

    def program(rank: Rank, recorder: Recorder) -> None:
        model, numbers = Ddp(rank, BUSY), iter(range(1000))
        recorder.watch(model)
        loop(recorder, model, lambda: update(rank, recorder, next(numbers)))

    return record(World(ranks, link=HIDDEN, costs=Costs(5e-6)), folder, program, **lengths)


def test_work_on_side_streams_is_part_of_the_step(tmp_path):
    def update(rank: Rank, recorder: Recorder, number: int) -> None:
        sides.setdefault(rank.number, Stream(rank))
        HookedOptimizer().step()
        with rank.on(sides[rank.number]):
            rank.launch(0.2)

    sides: dict[int, Stream] = {}
    [window] = own_loop(tmp_path, update)
    assert sum(window.step_s) == pytest.approx(10 * 0.2, rel=0.02)
    assert {round(parts.step_s, 2) for parts in window.parts} == {0.2}
    [fact] = [one for one in read_json(RunFolder(tmp_path).env)["facts"] if one["kind"] == SideStreams.kind]
    assert fact["values"]["step_s"] == pytest.approx(0.2 - BUSY.step_s, rel=0.02)


#: The first step of the attribution window that is measured, counted from 0.
MEASURED = 19 + 10 + 1


def test_a_step_that_gradscaler_skips_is_left_out(tmp_path):
    def update(rank: Rank, recorder: Recorder, number: int) -> None:
        if number != MEASURED + 3:
            HookedOptimizer().step()

    own_loop(tmp_path, update)
    [row] = read_rows(RunFolder(tmp_path).ranks_csv)
    assert float(row["optimizer_time_sec"]) == pytest.approx(BUSY.optimizer_s, rel=0.05)


def test_a_step_that_captures_a_graph_has_no_parts(tmp_path):
    """In warm-up, throughput and attribution; some captures contain the end of a step."""
    captured, captured_alone = (13, 19 + 4, MEASURED + 3), (15, 19 + 6, MEASURED + 5)

    def program(rank: Rank, recorder: Recorder) -> None:
        model, optimizer = Ddp(rank, BUSY), HookedOptimizer()
        recorder.watch(model)
        for number, _ in enumerate(recorder.batches(iter(Feed(BUSY).next, None))):
            with recorder.step():
                rank.is_capturing = number in captured
                model().backward()
                optimizer.step()
                rank.is_capturing = False
            if number in captured_alone:
                rank.is_capturing = True
                with recorder.step():
                    model().backward()
                rank.is_capturing = False
            if recorder.done:
                break

    [window] = record(World(1, costs=Costs(5e-6)), tmp_path, program)
    assert len(window.step_s) == 10
    assert [parts is None for parts in window.parts].count(True) == 1
    assert window.parts[3] is None
    assert all(math.isfinite(one) for one in window.step_s)


@pytest.mark.parametrize("trains", [True, False])
def test_a_second_model_with_ddp_empties_the_communication(tmp_path, trains):
    def program(rank: Rank, recorder: Recorder) -> None:
        model, second, optimizer = Ddp(rank, BUSY), Ddp(rank, BUSY), Optimizer(BUSY)
        recorder.watch(model)

        def update() -> None:
            with recorder.optimizer():
                optimizer.step()
            with torch.set_grad_enabled(trains):
                output = second()
            if trains:
                output.backward()

        loop(recorder, model, update)

    windows = record(World(2, costs=Costs(5e-6)), tmp_path, program)
    assert {math.isnan(parts.exposed_s) for window in windows for parts in window.parts} == {trains}
    facts = read_json(RunFolder(tmp_path).env)["facts"]
    assert (OtherDdp().as_json() in facts) == trains
