"""The recorder on a simulated device, with and without a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.measure import environment, nvml, step_parts
from bench.record import Recorder
from tests.common import read_rows
from tests.simulated_gpu.device import Costs, Link, Rank, World, install
from tests.simulated_gpu.training import Ddp, Feed, Model, Optimizer

#: Only the last bucket is exposed.
MODEL, LINK = Model(), Link(latency_s=2e-3, s_per_byte=0.0)
STEP_S = MODEL.step_s + LINK.latency_s
LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 6, "attribution_steps": 3, "epochs": 2}
#: With windows of both kinds, and two steps between them, after the steps that the logger always samples.
STEPS = 13 + 2 * (6 + 4 + 2)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    install(monkeypatch, step_parts)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")
    properties = SimpleNamespace(uuid="GPU-1", name="simulated", total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(nvml, "clocks", lambda index: None)
    for name in ("RANK", "WORLD_SIZE", "BENCH_RUN_DIR", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


class HookedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step calls torch's hooks; the constructor of torch would import its compiler."""

    def __init__(self) -> None:
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @torch.optim.Optimizer.profile_hook_step
    def step(self) -> None:
        """Update the weights on the device."""
        Optimizer(MODEL).step()


def recorded(folder: Path, *, with_model: bool) -> list[dict[str, str]]:
    """Return metrics.csv of a loop on a single rank, in which the host is far ahead of the device."""

    def program(rank: Rank) -> None:
        model, feed, optimizer = Ddp(rank, MODEL), Feed(MODEL), HookedOptimizer()
        given = {"model": model, "device": "cuda"} if with_model else {}
        with Recorder(run_dir=folder, **given, **LENGTHS) as recorder:
            for _ in recorder.batches(feed.next() for _ in range(STEPS)):
                with recorder.step(samples=8):
                    model().backward()
                    optimizer.step()

    World(1, link=LINK, costs=Costs(launch_s=2e-6)).run(program)
    return read_rows(folder / "metrics.csv")


@pytest.mark.parametrize("with_model", [False, True])
def test_the_windows_have_the_times_of_the_device(tmp_path, with_model):
    rows = recorded(tmp_path, with_model=with_model)
    assert len(rows) == 2
    for row in rows:
        assert float(row["step_time_sec_median"]) == pytest.approx(STEP_S, rel=0.02)
        assert float(row["epoch_time_sec"]) == pytest.approx(6 * STEP_S, rel=0.02)


def test_the_parts_of_a_step_are_those_of_the_device(tmp_path):
    for row in recorded(tmp_path, with_model=True):
        found = {name: float(row[f"{name}_time_sec"]) for name in ("forward", "backward", "comm_exposed")}
        expected = {"forward": MODEL.forward_s, "backward": MODEL.backward_s, "comm_exposed": LINK.latency_s}
        assert found == pytest.approx(expected, rel=0.02)
        assert float(row["optimizer_time_sec"]) == pytest.approx(MODEL.optimizer_s, rel=0.02)
        assert abs(float(row["other_time_sec"])) < 0.01 * STEP_S


def test_a_process_without_cuda_is_timed_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert environment.device_for(None, None) == torch.device("cpu")
