"""The training task and its steps.

The steps are the same whether the recorder times their parts or not: it finds forward, backward and the
optimizer by hooks, as in any program.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..measure.exchange import Collectives
from .data import Feed
from .models import DataShape, ModelSpec, memory_format_of, spec_of
from .models.spec import compute_type
from .options import TrainOptions
from .strategies import strategy_of


class Validation(NamedTuple):
    """Sums over validation samples, which can be added over batches and ranks.

    ``labels`` is the number of predictions of a class, and ``values`` the number of predicted real values.
    """

    samples: float = 0.0
    loss: float = 0.0
    labels: float = 0.0
    correct: float = 0.0
    values: float = 0.0
    absolute_error: float = 0.0
    squared_error: float = 0.0

    @property
    def columns(self) -> dict[str, float]:
        """The columns of metrics.csv."""
        row = {"val_loss": self.loss / self.samples} if self.samples else {}
        if self.labels:
            row["val_accuracy"] = self.correct / self.labels
        if self.values:
            row["val_mae"] = self.absolute_error / self.values
            row["val_rmse"] = sqrt(self.squared_error / self.values)
        return row


class Task(nn.Module):
    """A module that runs a network and returns the loss.

    The loss and autocast are inside the module: for DDP's logger, backward begins when the module returns.
    """

    def __init__(self, network: nn.Module, spec: ModelSpec, options: TrainOptions) -> None:
        super().__init__()
        self.network = network
        self.kind = spec.kind
        self._device_type = options.device
        # With weights that are gathered in the type of the computation, nothing is left to convert.
        converts = not spec.converts and options.gathered_dtype == "fp32"
        self._dtype = compute_type(options) if converts else torch.float32

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
            size, absolute, squared = float(error.numel()), error.abs().sum(), error.square().sum()
            return Validation(samples, loss, 0.0, 0.0, size, float(absolute), float(squared))
        return Validation(samples, loss)

    def _predict(self, inputs: Tensor) -> Tensor:
        predicted: Tensor
        if self._dtype == torch.float32:  # even a disabled autocast takes ten microseconds
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


def build_task(options: TrainOptions, shape: DataShape) -> Task:
    """Create the task with initial weights that depend only on the seed.

    Raises:
        SetupError: the model does not support data of this shape.
    """
    torch.manual_seed(options.seed)
    spec = spec_of(options.model)
    task = Task(spec.build(options, shape), spec, options)
    # torch converts the weights of convolutions, which have four dimensions; other weights stay as they are.
    task.to(memory_format=memory_format_of(options))  # type: ignore[call-overload]
    return task


def use_precision(precision: str) -> None:
    """Let matrix products and convolutions use TF32 if ``precision`` is tf32; else keep torch's settings.

    torch allows TF32 in cuDNN's convolutions by default, but not in matrix products. Shapes do not change, so
    that cuDNN tries its algorithms once and uses the fastest.
    """
    torch.backends.cudnn.benchmark = True
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def parameters_of(task: nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters, and the size of their gradients in bytes."""
    trained = [p for p in task.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)


#: Number of optimizer states per weight, by optimizer.
STATES_PER_WEIGHT = {"sgd": 1, "adam": 2, "adamw": 2}


def wrap(task: nn.Module, options: TrainOptions) -> nn.Module:
    """Wrap the task with the strategy of the options.

    Raises:
        SetupError: the strategy does not support this training.
    """
    if options.compile:
        task.compile()
    return strategy_of(options.strategy).wrap(task, options)


def zero_batch(task: Task, shape: DataShape, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of zeros, [samples, ...]."""
    inputs = torch.zeros((samples, *shape.inputs), device=device)
    targets = torch.zeros((samples, *shape.targets), device=device)
    return (
        inputs.long() if task.kind == "tokens" else inputs,
        targets if task.kind == "values" else targets.long(),
    )


class Trainer:
    """The training steps of one rank."""

    def __init__(self, model: nn.Module, feed: Feed, options: TrainOptions) -> None:
        strategy = strategy_of(options.strategy)
        self.model = model
        self.parts = strategy.parts(model)
        self.optimizer = self.parts.optimizer = strategy.optimizer(model, options)
        self.feed = feed
        self.micro_batches = options.grad_accum
        self._state = strategy.state
        # The initial scale is often too high. If gradients overflow, a step is skipped and the scale halved.
        self._scaler = torch.amp.GradScaler(options.device) if options.precision == "fp16" else None

    def backward(self, batch: tuple[Tensor, Tensor], *, syncs: bool) -> Tensor:
        """Compute the gradients of a micro-batch, and exchange them if it ``syncs``; return its mean loss."""
        with nullcontext() if syncs else self.parts.no_sync():
            loss: Tensor = self.model(*batch)
            scaled = loss * (1.0 / self.micro_batches) if self.micro_batches > 1 else loss
            if self._scaler is not None:
                scaled = self._scaler.scale(scaled)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> Tensor:
        """Train on one global batch, which nothing measures; return this rank's mean loss."""
        last = self.micro_batches - 1
        losses = [self.backward(self.feed.next(), syncs=micro == last) for micro in range(self.micro_batches)]
        self.update()
        return torch.stack(losses).mean()

    def validate(self, collectives: Collectives) -> Validation:
        """Validate the model and return the validation sums over all ranks.

        All ranks take equally many batches, because all ranks gather sharded weights. Their sizes can differ,
        so that cuDNN tries no algorithms here.
        """
        cudnn = torch.backends.cudnn
        tries, cudnn.benchmark = cudnn.benchmark, False
        try:
            return self._validate(collectives)
        finally:
            cudnn.benchmark = tries

    def _validate(self, collectives: Collectives) -> Validation:
        task = self.parts.module
        assert isinstance(task, Task)
        task.eval()
        own, batches = [0.0] * len(Validation()), self.feed.validation()
        padding = zero_batch(task, self.feed.shape, 1, next(self.model.parameters()).device)
        while True:
            batch = next(batches, None)
            if not any(collectives.maxima([float(batch is not None)])):
                break
            found = task.validate(*(batch or padding))
            if batch is not None:
                own = [total + more for total, more in zip(own, found, strict=True)]
        task.train()
        self.parts.validated()
        return Validation(*collectives.sums(own))

    def state(self) -> dict[str, Any]:
        """Return the whole weights and optimizer states for rank 0; every rank must call this."""
        return self._state(self.parts.module, self.optimizer)

    def update(self) -> None:
        """Update the weights, and clear the gradients."""
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
