"""The sampled step: the slowest calls of the user's code, with their lines and parts."""

import inspect
import io
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.study.run_json import read_sampled_step
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.record import step_sample
from ddp_scaling_bench.record.recorder import Batches
from ddp_scaling_bench.record.step_sample import StepSampler, is_users
from ddp_scaling_bench.records import SampledStep, SlowCall
from ddp_scaling_bench.run_folder import RunFolder
from tests.record.loops import PlantedClock

NAP_S = 0.02


class SlowNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return self.layer(x)


class Timers:
    """Stands for the recorder of a loop over batches."""

    def data_begins(self) -> None: ...

    def first_batch(self, wait_s: float, loader: object) -> None: ...

    def data_ended(self, batch: object) -> None: ...

    def rest(self) -> None: ...


def naps() -> Iterator[torch.Tensor]:
    while True:
        time.sleep(NAP_S)
        yield torch.ones(2, 4)


def write_checkpoint(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())
    time.sleep(NAP_S)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


def one_step() -> SampledStep | None:
    """Sample a step that sleeps in every part, and reduces a metric."""
    model = SlowNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(Batches(Timers(), naps()))  # type: ignore[arg-type]
    metric = torch.zeros(3)
    sampler = StepSampler(model)
    sampler.start()
    loss = model(next(batches)).sum()
    time.sleep(NAP_S)
    loss.backward()
    optimizer.step()
    for _ in range(2):
        dist.all_reduce(metric)
    write_checkpoint(model)
    return sampler.stop(3)


@pytest.fixture
def sampled(group) -> SampledStep:
    found = one_step()
    assert found is not None
    return found


def line_of(function: object, text: str) -> int:
    """Return the line of a function that contains ``text``."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (place,) = [place for place, line in enumerate(lines) if text in line]
    return first + place


def test_slow_calls_are_found_at_their_lines_and_in_their_parts(sampled):
    assert sampled.rank == 3
    naps_by_line = {call.line: call for call in sampled.slow_calls if call.function == "time.sleep"}
    expected = {
        line_of(naps, "time.sleep"): "data_load",
        line_of(SlowNetwork, "time.sleep"): "forward",
        line_of(one_step, "time.sleep"): "backward",  # the timers count it as backward
        line_of(write_checkpoint, "time.sleep"): None,
    }
    assert {line: call.part for line, call in naps_by_line.items()} == expected
    for call in naps_by_line.values():
        assert (Path(call.path).name, call.calls) == ("test_step_sample.py", 1)
        assert call.seconds >= NAP_S
    assert sampled.step_s >= sum(call.seconds for call in sampled.slow_calls) >= 4 * NAP_S
    names = {call.function for call in sampled.slow_calls}
    assert {"torch.save", "Tensor.backward", "SlowNetwork.__call__"} <= names


def test_the_collectives_are_counted(sampled):
    (call,) = [call for call in sampled.slow_calls if call.function == "torch.distributed.all_reduce"]
    assert (call.calls, call.part) == (2, None)
    assert sampled.collectives == 2


def test_a_profiler_of_the_user_is_left_alone(monkeypatch):
    sampler = StepSampler(None)
    mine = lambda *_: None  # noqa: E731
    sys.setprofile(mine)
    try:
        sampler.start()
        assert sys.getprofile() is mine
        assert sampler.stop(0) is None
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)


def test_the_sampler_does_not_measure_itself(monkeypatch):
    own, clock = step_sample.is_users, PlantedClock()

    def slowly(path: str) -> bool:
        clock.sleep(NAP_S)
        return own(path)

    monkeypatch.setattr(step_sample, "time", clock)
    monkeypatch.setattr(step_sample, "is_users", slowly)
    sampler = StepSampler(None)
    sampler.start()
    inspect.getmodulename("a.py")  # calls several functions of Python's library
    step = sampler.stop(0)
    assert clock.now > 3 * NAP_S
    assert step is not None
    (call,) = [call for call in step.slow_calls if call.function.endswith("getmodulename")]
    assert (call.seconds, step.step_s) == (0, 0)


def test_forked_workers_are_not_sampled():
    sampler = StepSampler(None)
    sampler.start()
    child = os.fork()
    if not child:
        os._exit(0 if sys.getprofile() is None else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert sampler.stop(0) is not None


def test_compiled_functions_are_not_compiled_again_in_the_sample():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    compiled(torch.ones(3))
    sampler = StepSampler(None)
    sampler.start()
    result = compiled(torch.ones(3))
    sampler.stop(0)
    assert result.tolist() == [2.0] * 3
    compiled(torch.ones(3))
    assert len(compilations) == 1


def test_files_of_python_packages_and_bench_are_not_the_users():
    for module in (torch, os, psutil, Batches):
        assert not is_users(inspect.getsourcefile(module) or "")
    assert not is_users("<string>")
    assert is_users(__file__)


def test_the_file_is_read_back_and_malformed_entries_are_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_sampled_step(folder) == []
    call = {"path": "/a/train.py", "line": 7, "function": "torch.save", "calls": 1, "seconds": 0.5}
    rank = {"rank": 1, "step_s": 0.9, "collectives": 4, "slow_calls": [{**call, "part": None}]}
    write_json(folder.sampled_step, {"schema": 1, "ranks": [rank, {"rank": 2}]})
    assert read_sampled_step(folder) == [
        SampledStep(1, 0.9, 4, [SlowCall("/a/train.py", 7, "torch.save", 1, 0.5)])
    ]
