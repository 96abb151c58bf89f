"""Read a user's data from a folder of .npy arrays (memory-mapped) or of MNIST's IDX files."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bench.workload.failures import SetupError
from bench.workload.models import KINDS, DataShape, Kind

Array = NDArray[Any]

_PAIRS = (("inputs.npy", "targets.npy"), ("x.npy", "y.npy"))
_VALIDATION_PAIRS = (("val_inputs.npy", "val_targets.npy"), ("x_val.npy", "y_val.npy"))
_IDX_FOLDERS = ("", "raw", "MNIST/raw")
#: The (big-endian) element type of an IDX file by its third byte (http://yann.lecun.com/exdb/mnist).
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
#: Without validation arrays, 1 / _HELD_OUT of the samples is held out for validation.
_HELD_OUT = 10


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples ``start`` to ``stop`` of an inputs array and a targets array, read one batch at a time."""

    def __init__(
        self, inputs: Array, targets: Array, *, kind: Kind, start: int = 0, stop: int | None = None
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
        """Return a batch with one read per array, which is much faster than one read per sample."""
        rows = np.asarray(indices) + self._start
        inputs, targets = np.asarray(self._inputs[rows]), np.asarray(self._targets[rows])
        if self._kind == "tokens":
            return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
        values = torch.from_numpy(inputs.astype(np.float32))
        if inputs.dtype == np.uint8:
            values /= 255
        kind = np.float32 if self._kind == "values" else np.int64
        return values, torch.from_numpy(targets.astype(kind))


def batch_as_is(batch: Any) -> Any:
    """Return the batch unchanged: :meth:`ArrayDataset.__getitems__` has already collated it."""
    return batch


@dataclass(frozen=True)
class Arrays:
    """The training and validation samples of a folder, and the shape of one sample."""

    training: ArrayDataset
    validation: ArrayDataset
    shape: DataShape


def load_arrays(folder: Path, *, model: str, seq_len: int, hold_out: bool) -> Arrays:
    """Open the arrays of ``folder`` for a model.

    Args:
        folder: contains ``inputs.npy`` and ``targets.npy`` (or ``x.npy`` and ``y.npy``), and for
            validation ``val_inputs.npy`` and ``val_targets.npy`` (or ``x_val.npy`` and
            ``y_val.npy``); or MNIST's four IDX files, plain or gzipped. For tokens, targets are optional if
            the inputs are a stream [tokens] or rows [samples, time + 1].
        model: the model that is trained on the samples.
        seq_len: the number of tokens per sample; a stream of tokens is cut into samples of this length.
        hold_out: whether to hold out samples for validation if the folder has no validation arrays.

    Raises:
        SetupError: files are missing, or the arrays do not match each other or the model.
    """
    kind = KINDS[model]
    if not folder.is_dir():
        raise SetupError(
            f"data folder {folder} {'is a file' if folder.exists() else 'does not exist'} on this host"
        )
    training = _find_pair(folder, _PAIRS, kind, seq_len) or _find_idx(folder, "train")
    if training is None:
        raise SetupError(
            f"data folder {folder} has neither inputs.npy and targets.npy (or x.npy and y.npy)"
            " nor MNIST's train-images-idx3-ubyte and train-labels-idx1-ubyte"
        )
    validation = _find_pair(folder, _VALIDATION_PAIRS, kind, seq_len) or _find_idx(folder, "t10k")
    inputs, targets = _check_arrays(*training, model=model, kind=kind)
    size = len(inputs)
    if validation is not None:
        held = _check_arrays(*validation, model=model, kind=kind)
        shape, held_shape = _shape(inputs, targets, kind), _shape(*held, kind)
        if (shape.inputs, shape.targets) != (held_shape.inputs, held_shape.targets):
            raise SetupError(
                f"validation samples have shape {held_shape.inputs}, training samples {shape.inputs}"
            )
        if shape.classes is not None and held_shape.classes is not None:
            shape = replace(shape, classes=max(shape.classes, held_shape.classes))
        return Arrays(ArrayDataset(inputs, targets, kind=kind), ArrayDataset(*held, kind=kind), shape)
    kept = size - (math.ceil(size / _HELD_OUT) if hold_out and size > 1 else 0)
    return Arrays(
        ArrayDataset(inputs, targets, kind=kind, stop=kept),
        ArrayDataset(inputs, targets, kind=kind, start=kept),
        _shape(inputs, targets, kind),
    )


def _find_pair(
    folder: Path, names: Sequence[tuple[str, str]], kind: Kind, seq_len: int
) -> tuple[Array, Array] | None:
    for inputs_name, targets_name in names:
        if not (folder / inputs_name).is_file():
            continue
        inputs = _open_npy(folder / inputs_name)
        if (folder / targets_name).is_file():
            return inputs, _open_npy(folder / targets_name)
        if kind == "tokens":
            return _next_tokens(inputs, seq_len, folder / inputs_name)
        raise SetupError(f"{folder / inputs_name} exists, but {targets_name} does not")
    return None


def _open_npy(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SetupError(f"{path} cannot be read as an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise SetupError(f"{path} contains elements of type {array.dtype}, not numbers")
    return array


def _next_tokens(tokens: Array, seq_len: int, path: Path) -> tuple[Array, Array]:
    """Return inputs and targets as views of one array of tokens; targets are shifted by one token."""
    if tokens.ndim == 2 and tokens.shape[1] > 1:
        return tokens[:, :-1], tokens[:, 1:]
    rows = (len(tokens) - 1) // seq_len if tokens.ndim == 1 else 0
    if rows < 1:
        wanted = f"at least {seq_len + 1} tokens in a row, or samples [samples, time + 1]"
        raise SetupError(f"{path} has shape {list(tokens.shape)}; without targets it must have {wanted}")
    end = rows * seq_len
    return tokens[:end].reshape(rows, seq_len), tokens[1 : end + 1].reshape(rows, seq_len)


def _find_idx(folder: Path, part: str) -> tuple[Array, Array] | None:
    images, labels = _idx_file(folder, f"{part}-images", 3), _idx_file(folder, f"{part}-labels", 1)
    if images is None or labels is None:
        return None
    return _open_idx(images), _open_idx(labels)


def _idx_file(folder: Path, stem: str, dimensions: int) -> Path | None:
    for below in _IDX_FOLDERS:
        for dot in "-.":
            for ending in ("", ".gz"):
                path = folder / below / f"{stem}{dot}idx{dimensions}-ubyte{ending}"
                if path.is_file():
                    return path
    return None


def _open_idx(path: Path) -> Array:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
                raise SetupError(f"{path} is not an IDX file: it begins with {head.hex(' ')}")
            sizes = np.frombuffer(file.read(4 * head[3]), dtype=">u4").astype(np.int64)
            elements = np.frombuffer(file.read(), dtype=_IDX_TYPES[head[2]])
    except (OSError, EOFError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    if len(sizes) != head[3] or elements.size != sizes.prod():
        stated = " x ".join(str(size) for size in sizes)
        raise SetupError(f"{path} is truncated: it has {elements.size} of {stated} elements")
    return elements.astype(elements.dtype.newbyteorder("=")).reshape(sizes)


def _check_arrays(inputs: Array, targets: Array, *, model: str, kind: Kind) -> tuple[Array, Array]:
    """Arrange the axes of the arrays as the model expects, or raise a SetupError."""
    if len(inputs) != len(targets):
        raise SetupError(f"the data has {len(inputs)} inputs but {len(targets)} targets")
    if len(inputs) == 0:
        raise SetupError("the data has no samples")
    if kind == "values":
        return _sensors_first(inputs, targets)
    if targets.dtype.kind == "f":
        raise SetupError(f"model {model} learns {kind}: its targets must be integers, not {targets.dtype}")
    if kind == "tokens" and inputs.dtype.kind == "f":
        raise SetupError(f"model {model} reads tokens: its inputs must be integers, not {inputs.dtype}")
    if kind == "classes" and targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if kind == "classes" and targets.ndim != 1:
        raise SetupError(
            f"model {model} learns one class per sample; the targets have shape {list(targets.shape)}"
        )
    if model in ("convnet", "resnet50") and inputs.ndim == 3:
        inputs = inputs[:, None]
    return inputs, targets


def _sensors_first(inputs: Array, targets: Array) -> tuple[Array, Array]:
    """Arrange traffic data as [samples, sensors, time].

    Accepts that layout, [samples, time, sensors], or [samples, time, sensors, features] as in the files of
    METR-LA and PEMS-BAY. In the last layout, the first feature is forecast.
    """
    if inputs.ndim == targets.ndim == 4:
        return inputs[..., 0].swapaxes(1, 2), targets[..., 0].swapaxes(1, 2)
    shapes = inputs.shape, targets.shape
    time_first = (
        inputs.ndim == targets.ndim == 3 and shapes[0][1] != shapes[1][1] and shapes[0][2] == shapes[1][2]
    )
    return (inputs.swapaxes(1, 2), targets.swapaxes(1, 2)) if time_first else (inputs, targets)


def _shape(inputs: Array, targets: Array, kind: Kind) -> DataShape:
    if kind == "values":
        return DataShape(inputs.shape[1:], targets.shape[1:], None)
    labels = (inputs, targets) if kind == "tokens" else (targets,)
    least, most = min(int(a.min()) for a in labels), max(int(a.max()) for a in labels)
    if least < 0:
        raise SetupError(f"classes and tokens are numbered from 0; the data contains {least}")
    return DataShape(inputs.shape[1:], targets.shape[1:], most + 1)
