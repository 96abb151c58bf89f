"""Train a small classifier with DistributedDataParallel, started by torchrun, by srun, or alone.

An ordinary script with a sampler per rank, a snapshot to resume from, and a validation pass per
epoch. The lines marked `bench` are the only additions for measuring it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_scaling_bench import Recorder  # bench

CLASSES, FEATURES = 10, 256


def samples(count: int, seed: int) -> TensorDataset:
    """Return points around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(count, FEATURES, generator=generator), labels)


def network(width: int) -> nn.Module:
    """Return a network of three layers."""
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> Tensor:
    """Return the share of correct answers."""
    with torch.no_grad():
        points, labels = (tensor.to(device) for tensor in data.tensors)
        return (model(points).argmax(1) == labels).float().mean()


def main() -> None:
    """Train, and write a snapshot after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch, over all ranks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    given = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")

    model = DistributedDataParallel(network(given.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if given.snapshot.exists():
        state = torch.load(given.snapshot, map_location=device)
        model.module.load_state_dict(state["model"])
        first = state["epoch"] + 1
    data = samples(given.samples, seed=1)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=given.batch_size, sampler=sampler, drop_last=True)
    validation = samples(512, seed=2)

    recorder = Recorder(model)  # bench
    for epoch in range(first, given.epochs):
        sampler.set_epoch(epoch)
        for points, labels in recorder.batches(loader):  # bench: it was `in loader`
            with recorder.step():  # bench
                loss = cross_entropy(model(points.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        right = accuracy(model.module, validation, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right.item():.3f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, given.snapshot)
    recorder.close()  # bench
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
