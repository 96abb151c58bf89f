"""What a strategy of parallel training tells the rest of the program.

To add a strategy, add a file here with its ``SPEC``. ``bench plan`` and the report read the literals of that
call from the text of the file, because they must not import torch. The recorder imports every strategy
into the user's process, so a file must not import optional packages at its top: ``deepspeed.py`` and
``fsdp1.py`` look in ``sys.modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...matrix.workload import WorkloadOptions
from ...measure.step_parts import BackwardReading
from ...measure.wire import Message, Passes

NO_COMMUNICATION = BackwardReading(0.0, 0.0, 0)
#: The momentum of SGD, with the value that is usual for ResNet-50.
_MOMENTUM = 0.9


class Parts:
    """Measure the parts of a step of ``model``, which the strategy wrapped.

    This class is for a model that never exchanges gradients. Its timers measure all parts.
    """

    #: True if :meth:`read` contains all communication of a step of several ranks.
    sees_communication = False
    #: True if the strategy exchanges gradients in buckets, which :meth:`hook_buckets` can time.
    has_buckets = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def module(self) -> nn.Module:
        """The model within the wrapper."""
        return self.model

    def start(self) -> None:
        """Begin to measure every step."""

    def stop(self) -> None:
        """Stop measuring, so that steps are as fast as without bench."""

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
        """Return the sizes in bytes of the buckets of gradients, in their order."""
        return []

    def hook_buckets(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange the gradients of each bucket."""

    def facts(self) -> dict[str, Any]:
        """Return what env.json contains about the wrapped model after it has trained."""
        return {}


def build_optimizer(model: nn.Module, options: WorkloadOptions) -> Optimizer:
    """Return torch's optimizer of all parameters."""
    if options.optimizer == "sgd":
        return SGD(model.parameters(), lr=options.learning_rate, momentum=_MOMENTUM)
    kind = Adam if options.optimizer == "adam" else AdamW
    return kind(model.parameters(), lr=options.learning_rate)


@dataclass(frozen=True)
class Strategy:
    """One way to train in parallel.

    Attributes:
        name: the name in a matrix and in env.json.
        title: the name in sentences.
        wrap: returns the wrapped model, or raises a SetupError.
        parts: measures the parts of a step of the wrapped model.
        optimizer: returns the optimizer of the wrapped model.
        messages: returns the messages of a step of the wrapped model, or None if they are unknown.
        find: returns the wrapped module of a user's model, if any of ``modules`` shows the strategy.
        recognised: True if the strategy is recognised in a user's training only, and cannot be in a matrix.
        times_parts: False if nothing can tell communication from computation yet.
        one_rank: True if the strategy does not communicate.
    """

    name: str
    title: str
    wrap: Callable[[nn.Module, WorkloadOptions], nn.Module] = lambda model, options: model
    parts: type[Parts] = Parts
    optimizer: Callable[[nn.Module, WorkloadOptions], Optimizer] = build_optimizer
    messages: Callable[[nn.Module, Passes], list[Message] | None] = lambda model, passes: None
    find: Callable[[Sequence[nn.Module]], nn.Module | None] = lambda modules: None
    times_parts: bool = True
    one_rank: bool = False
    recognised: bool = False
