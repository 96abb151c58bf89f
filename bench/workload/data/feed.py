"""Where a rank's batches come from: always ``per_gpu_batch`` samples, to the sample, without end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from bench.matrix.workload import WorkloadOptions
from bench.workload.data.arrays import ArrayDataset, load_arrays, whole_batch
from bench.workload.data.synthetic import (
    TRAINING,
    VALIDATION,
    Batch,
    Signal,
    SyntheticBatches,
    generator_on,
    signal_for,
    synthetic_shape,
)
from bench.workload.failures import SetupError
from bench.workload.task import KINDS, DataShape


@dataclass(frozen=True)
class Place:
    """One rank among all, and its device."""

    rank: int
    world_size: int
    device: torch.device


class Feed(Protocol):
    """Gives a rank its batches, on its device."""

    shape: DataShape

    def next(self) -> Batch:
        """Return the next training batch; there is always one."""

    def validation(self) -> Iterator[Batch]:
        """Yield this rank's validation batches, the same ones at each call."""

    def close(self) -> None:
        """End worker processes."""


def open_feed(options: WorkloadOptions, per_gpu_batch: int, place: Place) -> Feed:
    """Return the feed that the options ask for.

    Raises:
        SetupError: data that is missing, malformed, or too small for one batch per rank.
    """
    if options.data != "synthetic":
        return FolderFeed(options, per_gpu_batch, place)
    return SyntheticFeed(options, per_gpu_batch, place)


class SyntheticFeed:
    """Fresh random batches, drawn on the device, or by a DataLoader's workers where there are any."""

    def __init__(self, options: WorkloadOptions, per_gpu_batch: int, place: Place) -> None:
        self.shape = synthetic_shape(options)
        self._options = options
        self._batch = per_gpu_batch
        self._place = place
        self._generator = generator_on(place.device, options.seed, TRAINING, place.rank)
        self._signal = signal_for(options, self.shape, place.device)
        self._loaded: Iterator[Batch] | None = None
        if options.num_workers:
            host_signal = signal_for(options, self.shape, torch.device("cpu"))
            self._loaded = iter(_stream_loader(options, host_signal, per_gpu_batch, place))

    def next(self) -> Batch:
        """Return a batch that nobody has seen."""
        if self._loaded is None:
            return self._signal.draw(self._batch, self._generator)
        return _moved(next(self._loaded), self._place.device, pinned=self._options.pin_memory)

    def validation(self) -> Iterator[Batch]:
        """Yield ``val_steps`` batches, the same ones at each call."""
        generator = generator_on(self._place.device, self._options.seed, VALIDATION, self._place.rank)
        for _ in range(self._options.val_steps):
            yield self._signal.draw(self._batch, generator)

    def close(self) -> None:
        """End the loader's workers."""
        _end_workers(self._loaded)
        self._loaded = None


class FolderFeed:
    """A user's arrays, through DataLoader and DistributedSampler; restarted when they are used up."""

    def __init__(self, options: WorkloadOptions, per_gpu_batch: int, place: Place) -> None:
        arrays = load_arrays(
            Path(options.data),
            model=options.model,
            kind=KINDS[options.model],
            seq_len=options.seq_len,
            holds_out=options.val_steps > 0,
        )
        needed = place.world_size * per_gpu_batch
        if len(arrays.training) < needed:
            raise SetupError(
                f"data set smaller than one step: {len(arrays.training)} training samples for"
                f" {place.world_size} ranks x {per_gpu_batch} = {needed}",
                remedy="use fewer ranks, a smaller batch or more data",
            )
        self.shape = arrays.shape
        self._options = options
        self._place = place
        self._sampler: DistributedSampler[Batch] = DistributedSampler(
            arrays.training, place.world_size, place.rank, shuffle=True, seed=options.seed, drop_last=True
        )
        self._loader = DataLoader(
            arrays.training, per_gpu_batch, sampler=self._sampler, drop_last=True, **_loader_settings(options)
        )
        self._validation = _validation_loader(arrays.validation, per_gpu_batch, place)
        self._pass = 0
        self._batches = iter(self._loader)

    def next(self) -> Batch:
        """Return the next batch of this pass over the data, or the first of the next pass."""
        try:
            batch = next(self._batches)
        except StopIteration:
            self._pass += 1
            self._sampler.set_epoch(self._pass)
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return _moved(batch, self._place.device, pinned=self._options.pin_memory)

    def validation(self) -> Iterator[Batch]:
        """Yield up to ``val_steps`` batches of this rank's share of the validation samples."""
        if self._validation is None:
            return
        batches = iter(self._validation)
        for _ in range(self._options.val_steps):
            batch = next(batches, None)
            if batch is None:
                return
            yield _moved(batch, self._place.device, pinned=False)

    def close(self) -> None:
        """End the loader's workers."""
        _end_workers(self._batches)


def _loader_settings(options: WorkloadOptions) -> dict[str, Any]:
    return {
        "num_workers": options.num_workers,
        "pin_memory": options.pin_memory,
        "persistent_workers": options.num_workers > 0,
        "collate_fn": whole_batch,
    }


def _stream_loader(
    options: WorkloadOptions, signal: Signal, per_gpu_batch: int, place: Place
) -> DataLoader[Batch]:
    stream = SyntheticBatches(signal, batch=per_gpu_batch, seed=options.seed, rank=place.rank)
    return DataLoader(stream, batch_size=None, **_loader_settings(options))


def _validation_loader(
    dataset: ArrayDataset, per_gpu_batch: int, place: Place
) -> DataLoader[tuple[Tensor, Tensor]] | None:
    """Return a loader of every ``world_size``-th sample; no sample is given twice to fill up."""
    share = range(place.rank, len(dataset), place.world_size)
    if not share:
        return None
    return DataLoader(dataset, per_gpu_batch, sampler=share, collate_fn=whole_batch)


def _moved(batch: Batch, device: torch.device, *, pinned: bool) -> Batch:
    if device.type == "cpu":
        return batch
    inputs, targets = batch
    return inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned)


def _end_workers(batches: Iterator[Any] | None) -> None:
    """Stop persistent workers now: left to the garbage collector they delay the process's end."""
    shutdown = getattr(batches, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
