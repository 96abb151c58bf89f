"""What is trained: a network with its loss inside, and what validation counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.matrix.workload import WorkloadOptions
from bench.measure.results import Validation
from bench.workload.failures import SetupError
from bench.workload.models.convnet import Convnet
from bench.workload.models.mlp import Mlp, width_for
from bench.workload.models.resnet import ResNet50
from bench.workload.models.traffic import Traffic
from bench.workload.models.transformer import Transformer, shape_for

Kind = Literal["classes", "tokens", "values"]

#: What each model learns: one of some classes, the next token, or values.
KINDS: dict[str, Kind] = {
    "mlp": "classes",
    "convnet": "classes",
    "resnet50": "classes",
    "transformer": "tokens",
    "traffic": "values",
}
#: Sizes of transformer and mlp where nothing was asked.
DEFAULT_PARAMETERS = {"transformer": 10_000_000, "mlp": 8_000_000}

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DataShape:
    """The shape of one sample; ``classes`` counts classes or tokens (None where values are learned)."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    classes: int | None


class Task(nn.Module):
    """A network that returns its loss, so that DDP's logger begins backward where forward ends.

    Autocast is inside as well: what runs between the module and ``backward()`` would count
    as backward.
    """

    def __init__(self, network: nn.Module, kind: Kind, precision: str, device_type: str) -> None:
        super().__init__()
        self.network = network
        self.kind = kind
        self._device_type = device_type
        self._dtype = _AUTOCAST[precision]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the batch's mean loss, a scalar."""
        return self._loss(self._predict(inputs), targets)

    @torch.no_grad()
    def validate(self, inputs: Tensor, targets: Tensor) -> Validation:
        """Return the sums of one batch."""
        predicted = self._predict(inputs).float()
        samples = float(len(targets))
        loss = samples * float(self._loss(predicted, targets))
        if self.kind == "classes":
            correct = float((predicted.argmax(dim=1) == targets).sum())
            return Validation(samples, loss, labels=samples, correct=correct)
        if self.kind == "values":
            error = (predicted - targets).double()
            return Validation(
                samples,
                loss,
                values=float(error.numel()),
                absolute_error=float(error.abs().sum()),
                squared_error=float(error.square().sum()),
            )
        return Validation(samples, loss)

    def _predict(self, inputs: Tensor) -> Tensor:
        predicted: Tensor
        if self._dtype is None:  # a disabled autocast still costs ten microseconds
            predicted = self.network(inputs)
            return predicted
        with torch.autocast(self._device_type, dtype=self._dtype):
            predicted = self.network(inputs)
        return predicted

    def _loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return cross entropy, or for values the mean absolute error, as forecasters of traffic train."""
        predicted = predicted.float()
        if self.kind == "values":
            return functional.l1_loss(predicted, targets)
        if self.kind == "tokens":
            return functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        return functional.cross_entropy(predicted, targets)


def build_task(options: WorkloadOptions, shape: DataShape) -> Task:
    """Return the task with freshly initialised weights (the same on every rank of one seed).

    Raises:
        SetupError: data of a shape that the model cannot take.
    """
    torch.manual_seed(options.seed)
    network = _NETWORKS[options.model](options, shape)
    return Task(network, KINDS[options.model], options.precision, options.device)


def parameters_of(task: nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters, and the bytes of their gradients."""
    trained = [p for p in task.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)


def _mlp(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    features, classes = _product(shape.inputs), _classes(shape)
    wanted = options.parameters or DEFAULT_PARAMETERS["mlp"]
    width = width_for(wanted, features=features, classes=classes)
    return Mlp(features=features, classes=classes, width=width, recompute=options.activation_checkpointing)


def _convnet(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    channels, height, width = _image(shape, "convnet", least=6)
    return Convnet(
        channels=channels,
        height=height,
        width=width,
        classes=_classes(shape),
        recompute=options.activation_checkpointing,
    )


def _resnet50(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    channels, _, _ = _image(shape, "resnet50", least=32)
    return ResNet50(channels=channels, classes=_classes(shape), recompute=options.activation_checkpointing)


def _transformer(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    if len(shape.inputs) != 1 or shape.targets != shape.inputs:
        raise _unfit("transformer", shape, "tokens [samples, time] and as many targets")
    dimensions = shape_for(
        options.parameters or DEFAULT_PARAMETERS["transformer"], vocabulary=_classes(shape)
    )
    return Transformer(dimensions, seq_len=shape.inputs[0], recompute=options.activation_checkpointing)


def _traffic(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    if len(shape.inputs) != 2 or len(shape.targets) != 2 or shape.inputs[0] != shape.targets[0]:
        raise _unfit(
            "traffic", shape, "inputs [samples, sensors, history] and targets [samples, sensors, horizon]"
        )
    (sensors, history), horizon = shape.inputs, shape.targets[1]
    return Traffic(
        sensors=sensors, history=history, horizon=horizon, recompute=options.activation_checkpointing
    )


_NETWORKS: dict[str, Callable[[WorkloadOptions, DataShape], nn.Module]] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "resnet50": _resnet50,
    "transformer": _transformer,
    "traffic": _traffic,
}


def _image(shape: DataShape, model: str, *, least: int) -> tuple[int, int, int]:
    if len(shape.inputs) != 3 or min(shape.inputs[1:]) < least:
        raise _unfit(
            model, shape, f"images [samples, channels, height, width] of at least {least} x {least} pixels"
        )
    channels, height, width = shape.inputs
    return channels, height, width


def _classes(shape: DataShape) -> int:
    assert shape.classes is not None, "the data's kind follows from the model"
    return shape.classes


def _unfit(model: str, shape: DataShape, wanted: str) -> SetupError:
    have = f"inputs {list(shape.inputs)} and targets {list(shape.targets)} per sample"
    return SetupError(f"model {model} takes {wanted}; the data has {have}")


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
