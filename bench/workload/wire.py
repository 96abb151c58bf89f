"""The messages of a step of the strategies that divide weights or optimizer states among ranks."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ..measure.wire import Message, Passes


def sharded_messages(
    model: nn.Module, passes: Passes, *, gathers: int, ranks: Literal["all", "within"] = "all"
) -> list[Message]:
    """Return the messages of FSDP2 (``fully_shard``), whose shards are all ranks, or those within a node.

    Every micro-batch gathers the weights of a block ``gathers`` times, and those of the root, the first
    sharded module of ``model``, once. The root keeps them from forward to backward, which needs them first.
    """
    _, *blocks = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    whole, of_blocks = _count(model) * passes.element_bytes, sum(map(_count, blocks)) * passes.element_bytes
    gathered = (whole + (gathers - 1) * of_blocks) * passes.micro_batches
    reduced = whole * passes.syncs
    found = [Message("all_gather", gathered, ranks), Message("reduce_scatter", reduced, ranks)]
    return found if ranks == "all" else [*found, Message("all_reduce", reduced, "across")]


def _count(module: nn.Module) -> int:
    """Return the number of weights; a DTensor counts the weights of all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())
