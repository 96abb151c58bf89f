"""Trainings in which several ranks share a replica of the model, and what they count themselves."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_scaling_bench.record import Recorder
from tests.train.ranks import folder_of_test

#: Samples of a replica per step, and features.
BATCH, WIDTH, STEPS = 8, 16, 10


def _note(steps: int, replicas: int) -> None:
    if dist.get_rank() == 0:
        own = {"samples_per_step": BATCH * replicas, "steps": steps, "world_size": dist.get_world_size()}
        (folder_of_test() / "own.json").write_text(json.dumps(own))


def tensor_parallel() -> int:
    """Two replicas with two ranks each; both ranks of a replica read the same batch."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(10 + mesh["dp"].get_local_rank())
    data = [torch.randn(BATCH, WIDTH) for _ in range(STEPS)]
    with Recorder(model=model, optimizer=optimizer, run_dir=folder_of_test()) as recorder:
        for inputs in recorder.batches(data):
            with recorder.step():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                for one in model.parameters():
                    own = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
                    dist.all_reduce(own, group=mesh["dp"].get_group())
                optimizer.step()
    _note(STEPS, 2)
    return 0


def pipeline() -> int:
    """Two replicas with two stages each, whose parameters start alike; only the first stages read data."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    part = PipelineStage(module, stage, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(
        part, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean()
    )
    torch.manual_seed(10 + mesh["dp"].get_local_rank())
    data = [torch.randn(BATCH, WIDTH) for _ in range(STEPS)]
    with Recorder(model=module, optimizer=optimizer, run_dir=folder_of_test()) as recorder:
        for inputs in recorder.batches(data) if stage == 0 else data:
            with recorder.step():
                optimizer.zero_grad()
                schedule.step(inputs) if stage == 0 else schedule.step(target=inputs)
                for one in module.parameters():
                    dist.all_reduce(one.grad, group=mesh["dp"].get_group())
                optimizer.step()
    _note(STEPS, 2)
    return 0


def pairs() -> int:
    """Four ranks, of which two each read the same batches."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() // 2)
    data = [torch.randn(BATCH, WIDTH) for _ in range(STEPS)]
    model = nn.Linear(WIDTH, 4)
    with Recorder(model=model, run_dir=folder_of_test()) as recorder:
        for inputs in recorder.batches(data):
            with recorder.step():
                model(inputs).sum().backward()
    return 0


def unclear() -> int:
    """Three of four ranks count samples, which fits no layout of two ranks per replica."""
    dist.init_process_group("gloo")
    model = nn.Linear(WIDTH, 4)
    with Recorder(model=model, run_dir=folder_of_test()) as recorder:
        for _ in range(STEPS):
            with recorder.step(samples=BATCH if dist.get_rank() else None):
                model(torch.randn(BATCH, WIDTH)).sum().backward()
    return 0
