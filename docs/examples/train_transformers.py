"""Train a small classifier with HuggingFace's Trainer; the callback is the only addition for measuring it."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from train_ddp import network, samples
from transformers import Trainer, TrainingArguments

from ddp_scaling_bench import TransformersCallback  # bench


class Classifier(nn.Module):
    """The network of train_ddp.py as a model for the Trainer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = network(width)

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits of a batch."""
        logits = self.network(points)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Points(Dataset[dict[str, Tensor]]):
    """The samples of train_ddp.py as a dataset for the Trainer."""

    def __init__(self, count: int, seed: int) -> None:
        self._samples = samples(count, seed=seed)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one point and its label."""
        point, label = self._samples[index]
        return {"points": point, "labels": label}


def main() -> None:
    """Train; the Trainer takes ranks and devices from the launcher."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank and micro-batch")
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch, over all ranks")
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        gradient_accumulation_steps=given.grad_accum,
        use_cpu=not on_gpu,
        ddp_backend="nccl" if on_gpu else "gloo",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        Classifier(given.width),
        arguments,
        train_dataset=Points(given.samples, seed=1),
        callbacks=[TransformersCallback()],  # bench
    )
    trainer.train()


if __name__ == "__main__":
    main()
