"""Feeds: endless streams of a rank's batches, each with exactly ``per_gpu_batch`` samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from bench.matrix.workload import WorkloadOptions
from bench.measure.torch_internals import end_loader_workers
from bench.workload.data.arrays import ArrayDataset, batch_as_is, load_arrays
from bench.workload.data.synthetic import (
    TRAINING,
    VALIDATION,
    Batch,
    SyntheticBatches,
    generator_on,
    signal_for,
    synthetic_shape,
)
from bench.workload.failures import SetupError


@dataclass(frozen=True)
class DataShard:
    """The rank and world size that select a share of the data, and the device for its batches."""

    rank: int
    world_size: int
    device: torch.device


class SyntheticFeed:
    """Random batches, drawn anew each time on the device, or by a DataLoader if ``num_workers`` is not 0."""

    def __init__(self, options: WorkloadOptions, per_gpu_batch: int, shard: DataShard) -> None:
        self.shape = synthetic_shape(options)
        self._options = options
        self._batch = per_gpu_batch
        self._shard = shard
        self._generator = generator_on(shard.device, options.seed, TRAINING, shard.rank)
        self._signal = signal_for(options, self.shape, shard.device)
        self._loaded: Iterator[Batch] | None = None
        if options.num_workers:
            host_signal = signal_for(options, self.shape, torch.device("cpu"))
            stream = SyntheticBatches(host_signal, batch=per_gpu_batch, seed=options.seed, rank=shard.rank)
            self._loaded = iter(DataLoader(stream, batch_size=None, **_loader_settings(options)))

    def next(self) -> Batch:
        """Return a new batch."""
        if self._loaded is None:
            return self._signal.draw(self._batch, self._generator)
        return _to_device(next(self._loaded), self._shard.device, pinned=self._options.pin_memory)

    def validation(self) -> Iterator[Batch]:
        """Yield ``val_steps`` batches, which are the same in each call."""
        generator = generator_on(self._shard.device, self._options.seed, VALIDATION, self._shard.rank)
        for _ in range(self._options.val_steps):
            yield self._signal.draw(self._batch, generator)

    def close(self) -> None:
        """End the loader's workers."""
        end_loader_workers(self._loaded)
        self._loaded = None


class FolderFeed:
    """Batches of a user's arrays from a DataLoader with DistributedSampler, repeating the data as needed."""

    def __init__(self, options: WorkloadOptions, per_gpu_batch: int, shard: DataShard) -> None:
        folder, hold_out = Path(options.data), options.val_steps > 0
        arrays = load_arrays(folder, model=options.model, seq_len=options.seq_len, hold_out=hold_out)
        needed = shard.world_size * per_gpu_batch
        if len(arrays.training) < needed:
            raise SetupError(
                f"data set smaller than one step: {len(arrays.training)} training samples for"
                f" {shard.world_size} ranks x {per_gpu_batch} = {needed}",
                remedy="use fewer ranks, a smaller batch or more data",
            )
        self.shape = arrays.shape
        self._options = options
        self._shard = shard
        self._sampler: DistributedSampler[Batch] = DistributedSampler(
            arrays.training, shard.world_size, shard.rank, shuffle=True, seed=options.seed, drop_last=True
        )
        self._loader = DataLoader(
            arrays.training, per_gpu_batch, sampler=self._sampler, drop_last=True, **_loader_settings(options)
        )
        self._validation = _validation_loader(arrays.validation, per_gpu_batch, shard)
        self._pass = 0
        self._batches = iter(self._loader)

    def next(self) -> Batch:
        """Return the next batch; after the last one, start another pass over reshuffled data."""
        try:
            batch = next(self._batches)
        except StopIteration:
            self._pass += 1
            self._sampler.set_epoch(self._pass)
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return _to_device(batch, self._shard.device, pinned=self._options.pin_memory)

    def validation(self) -> Iterator[Batch]:
        """Yield up to ``val_steps`` batches of this rank's validation samples."""
        for batch in islice(self._validation or (), self._options.val_steps):
            yield _to_device(batch, self._shard.device, pinned=False)

    def close(self) -> None:
        """End the loader's workers."""
        end_loader_workers(self._batches)


Feed = SyntheticFeed | FolderFeed


def open_feed(options: WorkloadOptions, per_gpu_batch: int, shard: DataShard) -> Feed:
    """Return the feed for ``options.data``.

    Raises:
        SetupError: the data is missing, malformed, or too small for one batch per rank.
    """
    if options.data != "synthetic":
        return FolderFeed(options, per_gpu_batch, shard)
    return SyntheticFeed(options, per_gpu_batch, shard)


def _loader_settings(options: WorkloadOptions) -> dict[str, Any]:
    return {
        "num_workers": options.num_workers,
        "pin_memory": options.pin_memory,
        "persistent_workers": options.num_workers > 0,
        "collate_fn": batch_as_is,
    }


def _validation_loader(
    dataset: ArrayDataset, per_gpu_batch: int, shard: DataShard
) -> DataLoader[tuple[Tensor, Tensor]] | None:
    """Return a loader for this rank's share of the validation samples, without repeating any sample."""
    samples = range(shard.rank, len(dataset), shard.world_size)
    if not samples:
        return None
    return DataLoader(dataset, per_gpu_batch, sampler=samples, collate_fn=batch_as_is)


def _to_device(batch: Batch, device: torch.device, *, pinned: bool) -> Batch:
    if device.type == "cpu":
        return batch
    inputs, targets = batch
    return inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned)
