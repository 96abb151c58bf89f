"""Every test here has simulated devices, and an optimizer whose kernels run there."""

import gc
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_scaling_bench.measure import exchange, host_waits, nvml, step_parts
from ddp_scaling_bench.record import attribution
from ddp_scaling_bench.train import probes, training
from ddp_scaling_bench.train.strategies import ddp
from tests.simulated_gpu.device import CUDA, TIME, WARNINGS, Event, all_reduce, here
from tests.simulated_gpu.training import Ddp, Optimizer


def own_referrers(*kinds):
    """Return the models of the rank: all ranks are in one process."""
    return [one for one in gc.get_referrers(*kinds) if type(one) is Ddp and one.rank is here()]


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    functions = {
        "Event": Event,
        "current_stream": lambda device=None: here().current,
        "synchronize": lambda device=None: here().synchronize(),
        "_sleep": lambda cycles: here().launch(cycles / here().world.clock_hz),
        "is_current_stream_capturing": lambda: here().is_capturing,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "memory_stats": lambda device: {},
        "max_memory_allocated": lambda device=None: 2**20 * (1 + here().number),
        "get_device_name": lambda device: "simulated",
        "get_device_properties": lambda device: SimpleNamespace(
            uuid=f"GPU-{here().number}", name="simulated", total_memory=2**30
        ),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(nvml, "clocks", lambda device: {"is_busy": here().end() > here().now})
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(here().world.ranks))
    monkeypatch.setattr(exchange, "_exchanges", repeat(0))  # one store for the recorders of all threads
    monkeypatch.setenv("NCCL_DEBUG", "WARN")  # else the recorder would request NCCL's log
    for name in ("RANK", "WORLD_SIZE", "BENCH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_waits, "torch", SimpleNamespace(cuda=CUDA, distributed=CUDA))
    monkeypatch.setattr(host_waits, "warnings", WARNINGS)
    monkeypatch.setattr(attribution, "gc", SimpleNamespace(get_referrers=own_referrers))
    for module in (step_parts, probes):
        monkeypatch.setattr(module, "time", TIME)
    strategy = replace(ddp.SPEC, optimizer=lambda model, options: Optimizer(model.work))
    monkeypatch.setattr(training, "strategy_of", lambda name: strategy)
