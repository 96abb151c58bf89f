"""Train a small classifier with Hugging Face Accelerate; the lines marked `bench` measure it."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train_ddp import network, samples

from ddp_scaling_bench import Recorder  # bench


def main() -> None:
    """Train with gradient accumulation, as Accelerate does it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank and micro-batch")
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch, over all ranks")
    given = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=given.grad_accum, cpu=not torch.cuda.is_available())
    model = network(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(samples(given.samples, seed=1), batch_size=given.batch_size, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    recorder = Recorder(model)  # bench
    for _ in range(given.epochs):
        for points, labels in recorder.batches(loader):  # bench: it was `in loader`
            with (
                accelerator.accumulate(model),
                recorder.step(update=accelerator.sync_gradients),  # bench
            ):
                accelerator.backward(cross_entropy(model(points), labels))
                optimizer.step()
                optimizer.zero_grad()
    recorder.close()  # bench
    accelerator.end_training()


if __name__ == "__main__":
    main()
