"""What a strategy of parallel training tells the rest of the program.

To add a strategy, add a file here with its ``SPEC``. ``bench plan`` and the report read the literals of that
call from the text of the file, because they must not import torch. The recorder imports every strategy
into the user's process, so a file must not import optional packages at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...known_strategies import StrategyFacts
from ...measure.findings import PartsNotTimed
from ...measure.step_parts import BackwardReading, StepTimer
from ...measure.wire import Messages
from ..options import TrainOptions

#: The types of gradients between ranks, by the name in a matrix.
WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_COMMUNICATION = BackwardReading(0.0, 0.0, 0)


#: The momentum of SGD, with the value that is usual for ResNet-50.
_MOMENTUM = 0.9


class Parts:
    """Measure the parts of a step of ``model``, which the strategy wrapped.

    This class is for a model that never exchanges gradients. Its timers measure all parts.
    """

    #: True if :meth:`read` contains all communication of a step of several ranks.
    sees_communication = False
    #: False if the step also waits in forward, where nothing sees it.
    sees_forward = True
    #: True if the strategy exchanges gradients in buckets, which :meth:`hook_buckets` can time.
    has_buckets = False
    #: The optimizer of the model, if it is known.
    optimizer: Optimizer | None = None
    #: The number of backward passes that synchronised gradients since :meth:`start`, if the strategy counts.
    sync_passes: int | None = None
    _stop_observing: Callable[[], None] | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def module(self) -> nn.Module:
        """The model within the wrapper."""
        return self.model

    def start(self, timer: StepTimer) -> PartsNotTimed | None:
        """Begin to measure every step; ``timer`` times its parts.

        Returns:
            The reason why the parts of this model's steps cannot be measured, or None.
        """
        return None

    def stop(self) -> None:
        """Stop measuring, so that steps are as fast as without bench."""
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None

    def _observe(self, found: Callable[[], None] | PartsNotTimed) -> PartsNotTimed | None:
        """Return the reason why nothing is observed, or keep the function that ends the observation."""
        if isinstance(found, PartsNotTimed):
            return found
        self._stop_observing = found
        return None

    def times_backward(self) -> bool:
        """Return whether :meth:`read` has the times of the next backward pass, because it synchronises."""
        return False

    def read(self) -> BackwardReading | None:
        """Return the times of the backward pass that just synchronised, or None if they are unknown."""
        return NO_COMMUNICATION

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for micro-batches that accumulate gradients without exchanging them."""
        return nullcontext()

    def bucket_bytes(self) -> list[int]:
        """Return the sizes in bytes of the buckets of gradients as they are sent, in their order."""
        return []

    def messages(self) -> list[Messages] | None:
        """Return what a step sends, one entry for each collective, or None if that is unknown."""
        return None

    def hook_buckets(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange the gradients of each bucket."""

    def validated(self) -> None:
        """Release what the model keeps after forward passes without backward."""

    def facts(self) -> dict[str, Any]:
        """Return what env.json contains about the wrapped model after it has trained."""
        return {}


def optimizer_kind(options: TrainOptions, *, fused: bool) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and its arguments; with ``fused``, a kernel updates many weights.

    Without it, torch chooses between a loop and ``foreach``, but not if ``fused`` is given as False.
    """
    common = {"lr": options.learning_rate} | ({"fused": True} if fused else {})
    if options.optimizer == "sgd":
        return SGD, {**common, "momentum": _MOMENTUM}
    return Adam if options.optimizer == "adam" else AdamW, common


def build_optimizer(model: nn.Module, options: TrainOptions) -> Optimizer:
    """Return torch's optimizer of all parameters, which is fused except for SGD of sharded tensors."""
    weights = list(model.parameters())
    is_sharded = any(hasattr(one, "full_tensor") for one in weights)
    kind, arguments = optimizer_kind(options, fused=options.optimizer != "sgd" or not is_sharded)
    optimizer: Optimizer = kind(weights, **arguments)
    return optimizer


def state_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the weights and the optimizer's states, for a checkpoint."""
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


@dataclass(frozen=True)
class Strategy(StrategyFacts):
    """One way to train in parallel.

    Attributes:
        wrap: returns the wrapped model, or raises a SetupError.
        parts: measures the parts of a step of the wrapped model.
        optimizer: returns the optimizer of the wrapped model.
        state: returns the whole state of the unwrapped model and of its optimizer. Only rank 0 uses it, but
            every rank must call this function.
        find: returns the wrapped module of a user's model, if any of ``modules`` shows the strategy.
        made: whether an optimizer is one of this strategy, which extends another strategy's model.
    """

    wrap: Callable[[nn.Module, TrainOptions], nn.Module] = lambda model, options: model
    parts: type[Parts] = Parts
    optimizer: Callable[[nn.Module, TrainOptions], Optimizer] = build_optimizer
    state: Callable[[nn.Module, Optimizer], dict[str, Any]] = state_of
    find: Callable[[Sequence[nn.Module]], nn.Module | None] = lambda modules: None
    made: Callable[[Optimizer], bool] = lambda optimizer: False
