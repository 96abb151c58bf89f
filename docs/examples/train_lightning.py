"""Train a small classifier with Lightning; the callback is the only addition for measuring it."""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train_ddp import network, samples

from ddp_scaling_bench import LightningCallback  # bench


class Classifier(pl.LightningModule):
    """The network of train_ddp.py as a Lightning module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network: nn.Module = network(width)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        points, labels = batch
        return cross_entropy(self.network(points), labels)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of train_ddp.py."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train on the nodes and devices of the command line, which must be those of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch, over all ranks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="per node")
    given = parser.parse_args()
    loader = DataLoader(
        samples(given.samples, seed=1), batch_size=given.batch_size, drop_last=True, shuffle=True
    )
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        num_nodes=given.nodes,
        devices=given.devices,
        strategy="ddp",
        max_epochs=given.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningCallback()],  # bench
    )
    trainer.fit(Classifier(given.width), loader)


if __name__ == "__main__":
    main()
