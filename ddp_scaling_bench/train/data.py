"""Training data of a rank: synthetic batches or a user's files, as endless streams of batches.

Synthetic batches contain a pattern, so that the model can learn and the loss falls. A user's folder contains
tensors as written by ``torch.save``, which are memory-mapped.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from ..measure.failures import DataTooSmall
from ..measure.torch_internals import end_loader_workers
from .failures import SetupError
from .models import DataShape, Kind, ModelSpec, memory_format_of, spec_of
from .options import TrainOptions

Batch = tuple[Tensor, Tensor]

#: The types of elements that a file may contain; torch has too few operations for the others.
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
#: Without validation files, 1 / _HELD_OUT of the samples is held out for validation.
_HELD_OUT = 10


@dataclass
class TensorSamples(Dataset[Batch]):
    """The samples of a tensor of inputs and one of targets, read one batch at a time."""

    inputs: Tensor
    targets: Tensor
    kind: Kind

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch with one read per tensor, which is much faster than one read per sample."""
        rows = torch.tensor(indices)
        inputs, targets = self.inputs[rows], self.targets[rows]
        if self.kind == "tokens":
            return inputs.long(), targets.long()
        values = inputs.float()
        if inputs.dtype == torch.uint8:
            values /= 255
        return values, targets.float() if self.kind == "values" else targets.long()


def load_samples(
    folder: Path, *, model: str, seq_len: int, hold_out: bool
) -> tuple[TensorSamples, TensorSamples, DataShape]:
    """Return a folder's samples for training and for validation, and the shape of a sample.

    The folder contains ``inputs.pt`` and ``targets.pt``, and for validation ``val_inputs.pt`` and
    ``val_targets.pt``; without these, samples are held out if ``hold_out`` is true. For tokens, targets are
    optional if the inputs are rows [samples, time + 1] or a stream [tokens], which is cut into samples of
    ``seq_len`` tokens.

    Raises:
        SetupError: files are missing, or the tensors do not match each other or the model.
    """
    spec = spec_of(model)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SetupError(f"data folder {folder} {what} on this host")
    training, validation = (_read(folder, prefix, spec, seq_len) for prefix in ("", "val_"))
    if training is None:
        raise SetupError(f"data folder {folder} has no inputs.pt and targets.pt")
    shape, size = _shape(*training, spec.kind), len(training[0])
    if validation is None:
        kept = size - (math.ceil(size / _HELD_OUT) if hold_out and size > 1 else 0)
        (inputs, targets), whole = training, slice(kept, None)
        training, validation = (inputs[:kept], targets[:kept]), (inputs[whole], targets[whole])
    else:
        held = _shape(*validation, spec.kind)
        if (shape.inputs, shape.targets) != (held.inputs, held.targets):
            raise SetupError(f"validation samples have shape {held.inputs}, training samples {shape.inputs}")
        if shape.classes is not None and held.classes is not None:
            shape = replace(shape, classes=max(shape.classes, held.classes))
    return TensorSamples(*training, spec.kind), TensorSamples(*validation, spec.kind), shape


def _read(folder: Path, prefix: str, spec: ModelSpec, seq_len: int) -> Batch | None:
    """Return inputs and targets in the shapes that a model expects, or None if there are no inputs."""
    path, of_targets = folder / f"{prefix}inputs.pt", folder / f"{prefix}targets.pt"
    if not path.is_file():
        return None
    kind, model = spec.kind, f"model {spec.name}"
    if of_targets.is_file():
        inputs, targets = _open(path), _open(of_targets)
    elif kind == "tokens":
        inputs, targets = _next_tokens(_open(path), seq_len, path)
    else:
        raise SetupError(f"{path} exists, but {of_targets.name} does not")
    a, b, wanted = inputs.dtype, targets.dtype, "must be integers, not"
    problems = [
        (len(inputs) != len(targets), f"the data has {len(inputs)} inputs but {len(targets)} targets"),
        (not len(inputs), "the data has no samples"),
        (
            kind != "values" and b.is_floating_point,
            f"{model} learns {kind}: its targets {wanted} {b}",
        ),
        (
            kind == "tokens" and a.is_floating_point,
            f"{model} reads tokens: its inputs {wanted} {a}",
        ),
        (
            kind == "classes" and targets.ndim != 1,
            f"{model} learns one class per sample; the targets have shape {list(targets.shape)}",
        ),
    ]
    for is_found, problem in problems:
        if is_found:
            raise SetupError(problem)
    return inputs[:, None] if spec.takes_images and inputs.ndim == 3 else inputs, targets


def _open(path: Path) -> Tensor:
    try:
        tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise SetupError(f"{path} cannot be read as a tensor: {str(error).splitlines()[0]}") from None
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or not tensor.dim():
        what = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise SetupError(f"{path} contains {what}, not a tensor of numbers, one row per sample")
    return tensor


def _next_tokens(tokens: Tensor, seq_len: int, path: Path) -> Batch:
    """Return inputs and targets as views of one tensor of tokens; targets are shifted by one token."""
    if tokens.ndim == 2 and tokens.shape[1] > 1:
        return tokens[:, :-1], tokens[:, 1:]
    rows = (len(tokens) - 1) // seq_len if tokens.ndim == 1 else 0
    if rows < 1:
        wanted = f"at least {seq_len + 1} tokens in a row, or samples [samples, time + 1]"
        raise SetupError(f"{path} has shape {list(tokens.shape)}; without targets it must have {wanted}")
    end = rows * seq_len
    return tokens[:end].view(rows, seq_len), tokens[1 : end + 1].view(rows, seq_len)


def _shape(inputs: Tensor, targets: Tensor, kind: Kind) -> DataShape:
    classes = None
    if kind != "values":
        labels = (inputs, targets) if kind == "tokens" else (targets,)
        least, most = min(int(one.min()) for one in labels), max(int(one.max()) for one in labels)
        if least < 0:
            raise SetupError(f"classes and tokens are numbered from 0; the data contains {least}")
        classes = most + 1
    return DataShape(tuple(inputs.shape[1:]), tuple(targets.shape[1:]), classes)


#: Seeds of three independent streams of random numbers: for the pattern, training and validation.
_SIGNAL, _TRAINING, _VALIDATION = 0, 1, 2

#: The period of synthetic traffic: a day of readings, five minutes apart.
_SAMPLES_PER_DAY = 288
_NOISE = 0.1
#: Amplitude of a class's pattern in noise of [-1, 1], chosen so that learning takes an epoch or two.
_PATTERN_SCALE_IMAGE, _PATTERN_SCALE = 0.1, 0.3
#: The share of random tokens in synthetic text.
_RANDOM_TOKENS = 0.1


def generator_on(device: torch.device | str, *numbers: int) -> torch.Generator:
    """Return a generator of random numbers on ``device``; different ``numbers`` give unrelated ones."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


#: Draws a number of samples of a synthetic signal. All ranks share its pattern, but not the generator.
Signal = Callable[[int, torch.Generator], Batch]


def signal_for(options: TrainOptions, shape: DataShape, device: torch.device) -> Signal:
    """Return the signal for ``options.model``; its samples are drawn on ``device``."""
    kind, classes = spec_of(options.model).kind, shape.classes or 0
    generator = generator_on("cpu", options.seed, _SIGNAL)
    if kind == "tokens":
        return partial(_draw_tokens, classes, torch.arange(shape.inputs[0] + 1, device=device))
    if kind == "values":
        sensors, history = shape.inputs
        phases = (torch.rand((sensors, 1), generator=generator) * 2 * math.pi).to(device)
        return partial(_draw_waves, phases, history, torch.arange(history + shape.targets[1], device=device))
    is_image = len(shape.inputs) == 3
    size = (*shape.inputs[:-1], 1) if is_image else shape.inputs
    drawn = torch.randn((classes, *size), generator=generator)
    patterns = ((_PATTERN_SCALE_IMAGE if is_image else _PATTERN_SCALE) * drawn).to(device)
    return partial(_draw_classes, patterns, shape.inputs, memory_format_of(options))


def _draw_classes(
    patterns: Tensor,
    shape: tuple[int, ...],
    memory_format: torch.memory_format,
    samples: int,
    generator: torch.Generator,
) -> Batch:
    """Return noise in [-1, 1] plus a pattern per class: a value per channel and image row, or per feature."""
    device = generator.device
    labels = torch.randint(len(patterns), (samples,), generator=generator, device=device)
    inputs = torch.empty((samples, *shape), device=device, memory_format=memory_format)
    return inputs.uniform_(-1, 1, generator=generator).add_(patterns[labels]), labels


def _draw_tokens(vocabulary: int, time: Tensor, samples: int, generator: torch.Generator) -> Batch:
    """Return tokens that count up from a random start, of which a tenth is random, and their successors."""
    device, size = generator.device, (samples, len(time))
    start = torch.randint(vocabulary, (samples, 1), generator=generator, device=device)
    random_tokens = torch.randint(vocabulary, size, generator=generator, device=device)
    is_random = torch.empty(size, device=device).uniform_(generator=generator) < _RANDOM_TOKENS
    tokens = torch.where(is_random, random_tokens, (start + time) % vocabulary)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _draw_waves(phases: Tensor, past: int, time: Tensor, samples: int, generator: torch.Generator) -> Batch:
    """Return past and future readings of a noisy daily wave, whose phase differs between sensors."""
    device = generator.device
    begin = torch.rand((samples, 1, 1), generator=generator, device=device) * _SAMPLES_PER_DAY
    angle = (begin + time) * (2 * math.pi / _SAMPLES_PER_DAY) + phases
    noise = torch.empty(angle.shape, device=device).uniform_(-_NOISE, _NOISE, generator=generator)
    readings = torch.sin(angle) + noise
    return readings[..., :past].contiguous(), readings[..., past:].contiguous()


@dataclass
class SyntheticBatches(IterableDataset[Batch]):
    """An endless stream of batches; each worker of a DataLoader draws its own random numbers."""

    signal: Signal
    batch: int
    device: torch.device
    seeds: tuple[int, ...]

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end."""
        info = get_worker_info()
        generator = generator_on(self.device, *self.seeds, info.id if info else 0)
        while True:
            yield self.signal(self.batch, generator)


@dataclass(frozen=True)
class Feed:
    """The batches of a rank: ``batches`` without end for training, and those of each call of ``held_out``.

    ``is_loaded`` is true if a DataLoader returns the batches, in the host's memory.
    """

    options: TrainOptions
    device: torch.device
    shape: DataShape
    batches: Iterator[Batch]
    held_out: Callable[[], Iterator[Batch]]
    is_loaded: bool = False

    def next(self) -> Batch:
        """Return the next batch on the device."""
        return next(self._ready)

    @cached_property
    def _ready(self) -> Iterator[Batch]:
        copies = self.is_loaded and self.device.type == "cuda"
        return self._copied_ahead() if copies else map(self._on_device, self.batches)

    def _copied_ahead(self) -> Iterator[Batch]:
        """Yield batches; each is copied to the device on another stream, during the step before it."""
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        ahead = deque[tuple[Batch, torch.cuda.Event]]()
        for batch in self.batches:
            with torch.cuda.stream(stream):
                ahead.append((self._on_device(batch), stream.record_event()))
            if len(ahead) > 1:
                ready, copied = ahead.popleft()
                current = torch.cuda.current_stream(self.device)
                current.wait_event(copied)
                for tensor in ready:
                    tensor.record_stream(current)
                yield ready

    def validation(self) -> Iterator[Batch]:
        """Yield up to ``val_steps`` batches for validation, which are the same in each call."""
        return map(self._on_device, islice(self.held_out(), self.options.val_steps))

    def close(self) -> None:
        """End the loader's workers."""
        end_loader_workers(self.batches)

    def _on_device(self, batch: Batch) -> Batch:
        """Return the batch on the device, with the inputs in the model's memory format."""
        (inputs, targets), pinned = batch, self.options.pin_memory
        inputs = inputs.to(self.device, non_blocking=pinned, memory_format=memory_format_of(self.options))
        return inputs, targets.to(self.device, non_blocking=pinned)


def open_feed(options: TrainOptions, per_gpu_batch: int, rank: int, ranks: int, device: torch.device) -> Feed:
    """Return the feed for ``options.data``: new random batches for each step, or samples of a folder.

    Random batches are drawn on the device, or by the workers of a DataLoader if ``num_workers`` > 0.

    Raises:
        SetupError: the data is missing, malformed, or too small for one batch per rank.
    """
    if options.data != "synthetic":
        return _folder_feed(options, per_gpu_batch, rank, ranks, device)
    shape = spec_of(options.model).sample(options)

    def stream(device: torch.device, use: int) -> SyntheticBatches:
        seeds = (options.seed, use, rank)
        return SyntheticBatches(signal_for(options, shape, device), per_gpu_batch, device, seeds)

    trained = stream(torch.device("cpu") if options.num_workers else device, _TRAINING)
    is_loaded = options.num_workers > 0
    batches = iter(_loader(trained, options, batch_size=None) if is_loaded else trained)
    return Feed(options, device, shape, batches, stream(device, _VALIDATION).__iter__, is_loaded)


def _folder_feed(
    options: TrainOptions, per_gpu_batch: int, rank: int, ranks: int, device: torch.device
) -> Feed:
    """Return the feed of a user's tensors, which are shuffled anew in each pass and repeat as needed."""
    folder, hold_out = Path(options.data), options.val_steps > 0
    training, validation, shape = load_samples(
        folder, model=options.model, seq_len=options.seq_len or 0, hold_out=hold_out
    )
    if len(training) < ranks * per_gpu_batch:
        raise SetupError(DataTooSmall(samples=len(training), ranks=ranks, batch=per_gpu_batch))
    sampler: DistributedSampler[int] = DistributedSampler(
        training, ranks, rank, shuffle=True, seed=options.seed, drop_last=True
    )

    def passes() -> Iterator[list[int]]:
        for number in count():
            sampler.set_epoch(number)
            yield from BatchSampler(sampler, per_gpu_batch, drop_last=True)

    def held_out() -> Iterator[Batch]:
        own = range(rank, len(validation), ranks)  # no sample is repeated
        for start in range(0, len(own), per_gpu_batch):
            yield validation.__getitems__(own[start : start + per_gpu_batch])

    batches = iter(_loader(training, options, batch_sampler=passes()))
    return Feed(options, device, shape, batches, held_out, is_loaded=True)


def batch_as_is(batch: Any) -> Any:
    """Return the batch unchanged, because the samples are read as batches."""
    return batch


def _loader(dataset: Dataset[Batch], options: TrainOptions, **settings: Any) -> DataLoader[Batch]:
    return DataLoader(
        dataset,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory and options.device == "cuda",
        persistent_workers=options.num_workers > 0,
        collate_fn=batch_as_is,
        **settings,
    )
