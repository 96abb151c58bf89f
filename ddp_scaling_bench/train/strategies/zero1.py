"""DDP with ``ZeroRedundancyOptimizer``: each rank updates a part of the weights, then broadcasts it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...measure.findings import PartsNotTimed
from ...measure.step_parts import StepTimer
from ...measure.torch_internals import broadcast_bytes, observe_parameter_sync
from ...measure.wire import Messages
from ..options import TrainOptions
from . import ddp
from .spec import Strategy, optimizer_kind, state_of


class Zero1Parts(ddp.DdpParts):
    """Add the broadcast of the updated parameters, within the optimizer's step, to the times of DDP."""

    def start(self, timer: StepTimer) -> PartsNotTimed | None:
        """Time the broadcast of every step, and make DDP's logger record times."""
        return self._observe(observe_parameter_sync(self.optimizer, timer.time_wait)) or super().start(timer)

    def messages(self) -> list[Messages] | None:
        """Return DDP's messages, and the broadcasts of the weights."""
        found, weights = super().messages(), self.model.parameters()
        alone = [one.numel() * one.element_size() for one in weights]
        return found and [*found, Messages("broadcast", broadcast_bytes(self.optimizer) or alone)]


def build_optimizer(model: nn.Module, options: TrainOptions) -> Optimizer:
    """Return torch's optimizer, of whose states each rank has a part.

    A rank broadcasts all weights that it has updated at once. Weights in channels_last, which would lose
    their format, are broadcast one by one. With fp16, GradScaler waits for the device, because it does not
    see that the inner optimizer is fused.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    (kind, arguments), weights = optimizer_kind(options, fused=True), list(model.parameters())
    at_once = all(one.is_contiguous() for one in weights)
    return ZeroRedundancyOptimizer(weights, kind, parameters_as_bucket_view=at_once, **arguments)


def made(optimizer: Optimizer) -> bool:
    """Return whether it is torch's ``ZeroRedundancyOptimizer``, which only some trainings import."""
    module = sys.modules.get("torch.distributed.optim")
    return isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ()))


def whole_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state; the ranks send their parts of the optimizer's states to rank 0."""
    optimizer.consolidate_state_dict(to=0)
    return state_of(module, optimizer) if optimizer.rank == 0 else {}


SPEC = Strategy(
    "zero1",
    title="DDP with ZeRO-1",
    options=("bucket_cap_mb", "comm_dtype", "comm_hook"),
    sharded=("states",),
    wrap=ddp.wrap,
    parts=Zero1Parts,
    optimizer=build_optimizer,
    state=whole_state,
    made=made,
)
