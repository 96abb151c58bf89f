"""The messages of a step of the strategies that divide weights or optimizer states among ranks."""

from __future__ import annotations

from torch import nn

from ..measure.wire import Message, Passes


def sharded_messages(
    model: nn.Module, passes: Passes, *, gathers: int, within: bool = False
) -> list[Message]:
    """Return the messages of FSDP2 (``fully_shard``).

    Every micro-batch gathers all weights, those of the blocks before forward and before backward. The root
    keeps its weights from forward to backward, which needs them first. Without ``within``, all ranks are
    shards.

    Args:
        model: contains the root, the first sharded module, and its blocks, the other sharded modules.
        passes: the passes of a step.
        gathers: how often a micro-batch gathers the weights of a block.
        within: True if the ranks of a node are shards, and nodes are replicas.
    """
    _, *blocks = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    whole, of_blocks = _count(model) * passes.element_bytes, sum(map(_count, blocks)) * passes.element_bytes
    gathered = (whole + (gathers - 1) * of_blocks) * passes.micro_batches
    reduced = whole * passes.syncs
    if not within:
        return [Message("all_gather", gathered), Message("reduce_scatter", reduced)]
    return [
        Message("all_gather", gathered, "within"),
        Message("reduce_scatter", reduced, "within"),
        Message("all_reduce", reduced, "across"),
    ]


def _count(module: nn.Module) -> int:
    """Return the number of weights; a DTensor counts the weights of all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())
