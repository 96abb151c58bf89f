"""The training task: a module that contains the network and its loss, with a validation function."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.matrix.workload import WorkloadOptions
from bench.measure.results import Validation
from bench.workload.models import BUILDERS, KINDS, DataShape, Kind

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Task(nn.Module):
    """A module that runs a network and returns the loss.

    The loss and autocast are inside the module, because DDP's logger starts backward when the module returns.
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
        """Return the loss, accuracy and error sums of one validation batch."""
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
        if self._dtype is None:  # even a disabled autocast takes ten microseconds
            predicted = self.network(inputs)
            return predicted
        with torch.autocast(self._device_type, dtype=self._dtype):
            predicted = self.network(inputs)
        return predicted

    def _loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, or for real values (traffic forecasts) the mean absolute error."""
        predicted = predicted.float()
        if self.kind == "values":
            return functional.l1_loss(predicted, targets)
        if self.kind == "tokens":
            return functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        return functional.cross_entropy(predicted, targets)


def build_task(options: WorkloadOptions, shape: DataShape) -> Task:
    """Create the task with initial weights that depend only on the seed.

    Raises:
        SetupError: the model does not support data of this shape.
    """
    torch.manual_seed(options.seed)
    network = BUILDERS[options.model](options, shape)
    return Task(network, KINDS[options.model], options.precision, options.device)


def parameters_of(task: nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters, and the size of their gradients in bytes."""
    trained = [p for p in task.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)
