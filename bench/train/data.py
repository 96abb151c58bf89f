"""Training data of a rank: synthetic batches or a user's files, as endless streams of batches.

Synthetic batches contain a pattern, so that the model can learn and the loss falls. A user's folder contains
tensors as written by ``torch.save``, which are memory-mapped.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from ..measure.failures import DataTooSmall
from ..measure.torch_internals import end_loader_workers
from .failures import SetupError
from .models import DataShape, Kind, memory_format_of, spec_of
from .options import TrainOptions

#: The types of elements that a file may contain; torch has too few operations for the others.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
#: Without validation files, 1 / _HELD_OUT of the samples is held out for validation.
_HELD_OUT = 10


class TensorSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples ``start`` to ``stop`` of a tensor of inputs and one of targets, read one batch at a time."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, *, kind: Kind, start: int = 0, stop: int | None = None
    ) -> None:
        self._inputs, self._targets = inputs, targets
        self._kind = kind
        self._start = start
        self._stop = len(inputs) if stop is None else stop

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._stop - self._start

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample."""
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch with one read per tensor, which is much faster than one read per sample."""
        rows = torch.tensor(indices) + self._start
        inputs, targets = self._inputs[rows], self._targets[rows]
        if self._kind == "tokens":
            return inputs.long(), targets.long()
        values = inputs.float()
        if inputs.dtype == torch.uint8:
            values /= 255
        return values, targets.float() if self._kind == "values" else targets.long()


def batch_as_is(batch: Any) -> Any:
    """Return the batch unchanged: :meth:`TensorSamples.__getitems__` has already collated it."""
    return batch


@dataclass(frozen=True)
class FolderSamples:
    """The training and validation samples of a folder, and the shape of one sample."""

    training: TensorSamples
    validation: TensorSamples
    shape: DataShape


def load_samples(folder: Path, *, model: str, seq_len: int, hold_out: bool) -> FolderSamples:
    """Open the tensors of ``folder`` for a model.

    Args:
        folder: contains ``inputs.pt`` and ``targets.pt``, and for validation ``val_inputs.pt`` and
            ``val_targets.pt``. For tokens, targets are optional if the inputs are a stream [tokens] or rows
            [samples, time + 1].
        model: the model that is trained on the samples.
        seq_len: the number of tokens per sample; a stream of tokens is cut into samples of this length.
        hold_out: whether to hold out samples for validation if the folder has none.

    Raises:
        SetupError: files are missing, or the tensors do not match each other or the model.
    """
    kind = spec_of(model).kind
    if not folder.is_dir():
        raise SetupError(
            f"data folder {folder} {'is a file' if folder.exists() else 'does not exist'} on this host"
        )
    training = _find_pair(folder, "", kind, seq_len)
    if training is None:
        raise SetupError(f"data folder {folder} has no inputs.pt and targets.pt")
    validation = _find_pair(folder, "val_", kind, seq_len)
    inputs, targets = _check(*training, model=model, kind=kind)
    size, shape = len(inputs), _shape(inputs, targets, kind)
    if validation is not None:
        held = _check(*validation, model=model, kind=kind)
        held_shape = _shape(*held, kind)
        if (shape.inputs, shape.targets) != (held_shape.inputs, held_shape.targets):
            raise SetupError(
                f"validation samples have shape {held_shape.inputs}, training samples {shape.inputs}"
            )
        if shape.classes is not None and held_shape.classes is not None:
            shape = replace(shape, classes=max(shape.classes, held_shape.classes))
        return FolderSamples(
            TensorSamples(inputs, targets, kind=kind), TensorSamples(*held, kind=kind), shape
        )
    kept = size - (math.ceil(size / _HELD_OUT) if hold_out and size > 1 else 0)
    return FolderSamples(
        TensorSamples(inputs, targets, kind=kind, stop=kept),
        TensorSamples(inputs, targets, kind=kind, start=kept),
        shape,
    )


def _find_pair(folder: Path, prefix: str, kind: Kind, seq_len: int) -> tuple[Tensor, Tensor] | None:
    path, targets = folder / f"{prefix}inputs.pt", folder / f"{prefix}targets.pt"
    if not path.is_file():
        return None
    if targets.is_file():
        return _open(path), _open(targets)
    if kind == "tokens":
        return _next_tokens(_open(path), seq_len, path)
    raise SetupError(f"{path} exists, but {targets.name} does not")


def _open(path: Path) -> Tensor:
    try:
        tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise SetupError(f"{path} cannot be read as a tensor: {str(error).splitlines()[0]}") from None
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or not tensor.dim():
        what = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise SetupError(f"{path} contains {what}, not a tensor of numbers, one row per sample")
    return tensor


def _next_tokens(tokens: Tensor, seq_len: int, path: Path) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as views of one tensor of tokens; targets are shifted by one token."""
    if tokens.ndim == 2 and tokens.shape[1] > 1:
        return tokens[:, :-1], tokens[:, 1:]
    rows = (len(tokens) - 1) // seq_len if tokens.ndim == 1 else 0
    if rows < 1:
        wanted = f"at least {seq_len + 1} tokens in a row, or samples [samples, time + 1]"
        raise SetupError(f"{path} has shape {list(tokens.shape)}; without targets it must have {wanted}")
    end = rows * seq_len
    return tokens[:end].view(rows, seq_len), tokens[1 : end + 1].view(rows, seq_len)


def _check(inputs: Tensor, targets: Tensor, *, model: str, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the tensors in the shapes that the model expects, or raise a SetupError."""
    if len(inputs) != len(targets):
        raise SetupError(f"the data has {len(inputs)} inputs but {len(targets)} targets")
    if len(inputs) == 0:
        raise SetupError("the data has no samples")
    if kind == "values":
        return inputs, targets
    if targets.is_floating_point():
        raise SetupError(f"model {model} learns {kind}: its targets must be integers, not {targets.dtype}")
    if kind == "tokens" and inputs.is_floating_point():
        raise SetupError(f"model {model} reads tokens: its inputs must be integers, not {inputs.dtype}")
    if kind == "classes" and targets.ndim != 1:
        raise SetupError(
            f"model {model} learns one class per sample; the targets have shape {list(targets.shape)}"
        )
    if spec_of(model).takes_images and inputs.ndim == 3:
        inputs = inputs[:, None]
    return inputs, targets


def _shape(inputs: Tensor, targets: Tensor, kind: Kind) -> DataShape:
    if kind == "values":
        return DataShape(tuple(inputs.shape[1:]), tuple(targets.shape[1:]), None)
    labels = (inputs, targets) if kind == "tokens" else (targets,)
    least, most = min(int(one.min()) for one in labels), max(int(one.max()) for one in labels)
    if least < 0:
        raise SetupError(f"classes and tokens are numbered from 0; the data contains {least}")
    return DataShape(tuple(inputs.shape[1:]), tuple(targets.shape[1:]), most + 1)


Batch = tuple[Tensor, Tensor]

#: Seeds of three independent streams of random numbers: for the pattern, training and validation.
SIGNAL, TRAINING, VALIDATION = 0, 1, 2

#: The period of synthetic traffic: a day of readings, five minutes apart.
_SAMPLES_PER_DAY = 288
_NOISE = 0.1
#: Amplitude of a class's pattern in noise of [-1, 1], chosen so that learning takes an epoch or two.
_PATTERN_SCALE_IMAGE, _PATTERN_SCALE = 0.1, 0.3
#: The share of random tokens in synthetic text.
_RANDOM_TOKENS = 0.1


def generator_on(device: torch.device | str, *numbers: int) -> torch.Generator:
    """Return a generator of random numbers on ``device``; different ``numbers`` give unrelated ones."""
    seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1
    return torch.Generator(device).manual_seed(int(seed))


class ClassSignal:
    """Noise in [-1, 1] plus a pattern per class (one value per channel and image row, or per feature)."""

    def __init__(
        self, shape: DataShape, *, seed: int, device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self._shape = shape.inputs
        self._memory_format = memory_format
        self._classes = shape.classes or 0
        is_image = len(shape.inputs) == 3
        pattern = (*shape.inputs[:-1], 1) if is_image else shape.inputs
        source = generator_on("cpu", seed, SIGNAL)
        scale = _PATTERN_SCALE_IMAGE if is_image else _PATTERN_SCALE
        self._patterns = (scale * torch.randn((self._classes, *pattern), generator=source)).to(device)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Return inputs [samples, ...] and classes [samples]."""
        device = generator.device
        labels = torch.randint(self._classes, (samples,), generator=generator, device=device)
        size = (samples, *self._shape)
        inputs = torch.empty(size, device=device, memory_format=self._memory_format)
        return inputs.uniform_(-1, 1, generator=generator).add_(self._patterns[labels]), labels


class TokenSignal:
    """Tokens that count up from a random start, modulo the vocabulary size; a tenth of them is random."""

    def __init__(self, shape: DataShape, *, device: torch.device) -> None:
        self._tokens = shape.classes or 0
        self._time = torch.arange(shape.inputs[0] + 1, device=device)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Return tokens [samples, time] and the token that follows each of them, in the same shape."""
        device, size = generator.device, (samples, len(self._time))
        start = torch.randint(self._tokens, (samples, 1), generator=generator, device=device)
        random_tokens = torch.randint(self._tokens, size, generator=generator, device=device)
        is_random = torch.empty(size, device=device).uniform_(generator=generator) < _RANDOM_TOKENS
        tokens = torch.where(is_random, random_tokens, (start + self._time) % self._tokens)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TrafficSignal:
    """A noisy daily wave with a different phase for each sensor, sampled at random times of the day."""

    def __init__(self, shape: DataShape, *, seed: int, device: torch.device) -> None:
        sensors, self._history = shape.inputs
        self._time = torch.arange(self._history + shape.targets[1], device=device)
        source = generator_on("cpu", seed, SIGNAL)
        self._phases = (torch.rand((sensors, 1), generator=source) * 2 * math.pi).to(device)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        """Return past and future readings: [samples, sensors, history] and [samples, sensors, horizon]."""
        device = generator.device
        begin = torch.rand((samples, 1, 1), generator=generator, device=device) * _SAMPLES_PER_DAY
        angle = (begin + self._time) * (2 * math.pi / _SAMPLES_PER_DAY) + self._phases
        noise = torch.empty(angle.shape, device=device).uniform_(-_NOISE, _NOISE, generator=generator)
        readings = torch.sin(angle) + noise
        return readings[..., : self._history].contiguous(), readings[..., self._history :].contiguous()


#: A synthetic signal. All ranks share its pattern, and each rank draws its own samples.
Signal = ClassSignal | TokenSignal | TrafficSignal


def signal_for(options: TrainOptions, shape: DataShape, device: torch.device) -> Signal:
    """Return the signal for ``options.model``; its samples are drawn on ``device``."""
    kind = spec_of(options.model).kind
    if kind == "tokens":
        return TokenSignal(shape, device=device)
    if kind == "values":
        return TrafficSignal(shape, seed=options.seed, device=device)
    return ClassSignal(shape, seed=options.seed, device=device, memory_format=memory_format_of(options))


class SyntheticBatches(IterableDataset[Batch]):
    """An endless stream of batches for a DataLoader; each worker draws its own random numbers."""

    def __init__(self, signal: Signal, *, batch: int, seed: int, rank: int) -> None:
        self._signal = signal
        self._batch = batch
        self._seeds = (seed, TRAINING, rank)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end."""
        info = get_worker_info()
        generator = generator_on("cpu", *self._seeds, info.id if info else 0)
        while True:
            yield self._signal.draw(self._batch, generator)


@dataclass(frozen=True)
class DataShard:
    """The rank and world size that select a share of the data, and the device for its batches."""

    rank: int
    world_size: int
    device: torch.device


class SyntheticFeed:
    """New random batches for each step, from the device, or from a DataLoader if ``num_workers`` > 0."""

    def __init__(self, options: TrainOptions, per_gpu_batch: int, shard: DataShard) -> None:
        self.shape = spec_of(options.model).sample(options)
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
        return _to_device(next(self._loaded), self._shard.device, self._options)

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
    """Batches of a user's tensors from a DataLoader with DistributedSampler; the data repeats as needed."""

    def __init__(self, options: TrainOptions, per_gpu_batch: int, shard: DataShard) -> None:
        folder, hold_out = Path(options.data), options.val_steps > 0
        samples = load_samples(folder, model=options.model, seq_len=options.seq_len, hold_out=hold_out)
        needed = shard.world_size * per_gpu_batch
        if len(samples.training) < needed:
            size, ranks = len(samples.training), shard.world_size
            raise SetupError(DataTooSmall(samples=size, ranks=ranks, batch=per_gpu_batch))
        self.shape = samples.shape
        self._options = options
        self._shard = shard
        self._sampler: DistributedSampler[Batch] = DistributedSampler(
            samples.training, shard.world_size, shard.rank, shuffle=True, seed=options.seed, drop_last=True
        )
        self._loader = DataLoader(
            samples.training,
            per_gpu_batch,
            sampler=self._sampler,
            drop_last=True,
            **_loader_settings(options),
        )
        self._validation = _validation_loader(samples.validation, per_gpu_batch, shard)
        self._pass = 0
        self._batches = iter(self._loader)

    def next(self) -> Batch:
        """Return the next batch; after the last batch of the data, start again with reshuffled data."""
        try:
            batch = next(self._batches)
        except StopIteration:
            self._pass += 1
            self._sampler.set_epoch(self._pass)
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return _to_device(batch, self._shard.device, self._options)

    def validation(self) -> Iterator[Batch]:
        """Yield up to ``val_steps`` batches of this rank's validation samples."""
        for batch in islice(self._validation or (), self._options.val_steps):
            yield _to_device(batch, self._shard.device, self._options)

    def close(self) -> None:
        """End the loader's workers."""
        end_loader_workers(self._batches)


Feed = SyntheticFeed | FolderFeed


def open_feed(options: TrainOptions, per_gpu_batch: int, shard: DataShard) -> Feed:
    """Return the feed for ``options.data``.

    Raises:
        SetupError: the data is missing, malformed, or too small for one batch per rank.
    """
    if options.data != "synthetic":
        return FolderFeed(options, per_gpu_batch, shard)
    return SyntheticFeed(options, per_gpu_batch, shard)


def _loader_settings(options: TrainOptions) -> dict[str, Any]:
    return {
        "num_workers": options.num_workers,
        "pin_memory": options.pin_memory,
        "persistent_workers": options.num_workers > 0,
        "collate_fn": batch_as_is,
    }


def _validation_loader(
    dataset: TensorSamples, per_gpu_batch: int, shard: DataShard
) -> DataLoader[tuple[Tensor, Tensor]] | None:
    """Return a loader for this rank's share of the validation samples, without repeating any sample."""
    samples = range(shard.rank, len(dataset), shard.world_size)
    if not samples:
        return None
    return DataLoader(dataset, per_gpu_batch, sampler=samples, collate_fn=batch_as_is)


def _to_device(batch: Batch, device: torch.device, options: TrainOptions) -> Batch:
    """Return the batch on ``device``, with the inputs in the model's memory format."""
    inputs, targets = batch
    pinned = options.pin_memory
    inputs = inputs.to(device, non_blocking=pinned, memory_format=memory_format_of(options))
    return inputs, targets.to(device, non_blocking=pinned)
