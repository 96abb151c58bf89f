"""Random batches that contain a pattern, so that the model can learn and the loss falls."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from bench.matrix.workload import WorkloadOptions
from bench.workload.models import DEFAULT_PARAMETERS, KINDS, DataShape, decoder_shape

Batch = tuple[Tensor, Tensor]

#: Seeds of three independent streams of random numbers: for the pattern, training and validation.
SIGNAL, TRAINING, VALIDATION = 0, 1, 2

#: The shape of a synthetic sample for each model.
_IMAGE_MNIST, _CLASSES_MNIST = (1, 28, 28), 10
_CLASSES_IMAGENET = 1_000
_FEATURES, _FEATURES_TINY, _TINY_PARAMETERS = 784, 16, 200_000
_SENSORS, _HISTORY, _HORIZON, _SAMPLES_PER_DAY = 207, 12, 12, 288
_NOISE = 0.1
#: Amplitude of a class's pattern in noise of [-1, 1], such that learning takes an epoch or two.
_PATTERN_SCALE_IMAGE, _PATTERN_SCALE = 0.1, 0.3
#: The share of random tokens.
_RANDOM_TOKENS = 0.1


def seed_of(*numbers: int) -> int:
    """Derive a seed of 63 bits from ``numbers``; different numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def generator_on(device: torch.device | str, *numbers: int) -> torch.Generator:
    """Return a generator of random numbers on ``device``, seeded with :func:`seed_of` ``numbers``."""
    return torch.Generator(device).manual_seed(seed_of(*numbers))


def synthetic_shape(options: WorkloadOptions) -> DataShape:
    """Return the shape of one synthetic sample."""
    if options.model == "transformer":
        tokens = decoder_shape(options.parameters or DEFAULT_PARAMETERS["transformer"]).vocabulary
        return DataShape((options.seq_len,), (options.seq_len,), tokens)
    if options.model == "traffic":
        return DataShape((_SENSORS, _HISTORY), (_SENSORS, _HORIZON), None)
    if options.model == "resnet50":
        return DataShape((3, options.image_size, options.image_size), (), _CLASSES_IMAGENET)
    if options.model == "convnet":
        return DataShape(_IMAGE_MNIST, (), _CLASSES_MNIST)
    tiny = (options.parameters or DEFAULT_PARAMETERS["mlp"]) < _TINY_PARAMETERS
    return DataShape((_FEATURES_TINY if tiny else _FEATURES,), (), _CLASSES_MNIST)


class ClassSignal:
    """Noise in [-1, 1] plus a pattern per class (one value per channel and image row, or per feature)."""

    def __init__(self, shape: DataShape, *, seed: int, device: torch.device) -> None:
        self._shape = shape.inputs
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
        inputs = torch.empty((samples, *self._shape), device=device).uniform_(-1, 1, generator=generator)
        return inputs.add_(self._patterns[labels]), labels


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
        """Return past readings [samples, sensors, history] and future ones [samples, sensors, horizon]."""
        device = generator.device
        begin = torch.rand((samples, 1, 1), generator=generator, device=device) * _SAMPLES_PER_DAY
        angle = (begin + self._time) * (2 * math.pi / _SAMPLES_PER_DAY) + self._phases
        noise = torch.empty(angle.shape, device=device).uniform_(-_NOISE, _NOISE, generator=generator)
        readings = torch.sin(angle) + noise
        return readings[..., : self._history].contiguous(), readings[..., self._history :].contiguous()


#: A synthetic signal. All ranks share its pattern, and each rank draws its own samples.
Signal = ClassSignal | TokenSignal | TrafficSignal


def signal_for(options: WorkloadOptions, shape: DataShape, device: torch.device) -> Signal:
    """Return the signal for ``options.model``; its samples are drawn on ``device``."""
    kind = KINDS[options.model]
    if kind == "tokens":
        return TokenSignal(shape, device=device)
    if kind == "values":
        return TrafficSignal(shape, seed=options.seed, device=device)
    return ClassSignal(shape, seed=options.seed, device=device)


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
