"""Trainings in which several ranks share a replica of the model, one after another in the same ranks."""

import os

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


def batches(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(BATCH, WIDTH) for _ in range(STEPS)]


def tensor_parallel() -> None:
    """Two replicas with two ranks each; both ranks of a replica read the same batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(model=model, optimizer=optimizer) as recorder:
        for inputs in recorder.batches(batches(10 + mesh["dp"].get_local_rank())):
            with recorder.step():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                for one in model.parameters():
                    own = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
                    dist.all_reduce(own, group=mesh["dp"].get_group())
                optimizer.step()


def pipeline() -> None:
    """Two replicas with two stages each, whose parameters start alike; only the first stages read data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    part = PipelineStage(module, stage, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(
        part, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean()
    )
    data = batches(10 + mesh["dp"].get_local_rank())
    with Recorder(model=module, optimizer=optimizer) as recorder:
        for inputs in recorder.batches(data) if stage == 0 else data:
            with recorder.step():
                optimizer.zero_grad()
                schedule.step(inputs) if stage == 0 else schedule.step(target=inputs)
                for one in module.parameters():
                    dist.all_reduce(one.grad, group=mesh["dp"].get_group())
                optimizer.step()


def pairs() -> None:
    """Four ranks, of which two each read the same batches."""
    model, data = nn.Linear(WIDTH, 4), batches(dist.get_rank() // 2)
    with Recorder(model=model) as recorder:
        for inputs in recorder.batches(data):
            with recorder.step():
                model(inputs).sum().backward()


def unclear() -> None:
    """Three of four ranks count samples, which fits no layout of two ranks per replica."""
    model = nn.Linear(WIDTH, 4)
    with Recorder(model=model) as recorder:
        for inputs in batches(0):
            with recorder.step(samples=BATCH if dist.get_rank() else None):
                model(inputs).sum().backward()


TRAININGS = {
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    **{f"pairs, {model_parallel}": pairs for model_parallel in (1, 2, 4)},
    "unclear": unclear,
}


def layouts() -> int:
    dist.init_process_group("gloo")
    for name, train in TRAININGS.items():
        os.environ["BENCH_RUN_DIR"] = str(folder_of_test() / name)
        train()
    return 0
