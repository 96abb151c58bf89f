"""DDP with ``ZeroRedundancyOptimizer``: each rank updates a part of the weights, then broadcasts it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...matrix.workload import WorkloadOptions
from ...measure.wire import Message, Passes
from . import ddp
from .spec import Strategy, optimizer_kind, state_of


class Zero1Parts(ddp.DdpParts):
    """DDP's parts, which lack the broadcast of the updated weights."""

    sees_communication = False


def build_optimizer(model: nn.Module, options: WorkloadOptions) -> Optimizer:
    """Return torch's optimizer, of whose states each rank has a part."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind, arguments = optimizer_kind(options)
    return ZeroRedundancyOptimizer(model.parameters(), kind, **arguments)


def whole_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state; the ranks send their parts of the optimizer's states to rank 0."""
    optimizer.consolidate_state_dict(to=0)
    return state_of(module, optimizer) if optimizer.rank == 0 else {}


def messages(model: nn.Module, passes: Passes) -> list[Message] | None:
    """Return DDP's messages, and the broadcast of the weights, of which each rank sends its part."""
    weight_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    found = ddp.messages(model, passes)
    return found and [*found, Message("broadcast", weight_bytes)]


SPEC = Strategy(
    "zero1",
    title="DDP with ZeRO-1",
    options=("bucket_cap_mb", "comm_dtype", "comm_hook"),
    sharded=("states",),
    wrap=ddp.wrap,
    parts=Zero1Parts,
    optimizer=build_optimizer,
    messages=messages,
    state=whole_state,
)
