"""FSDP2 (``fully_shard``), in a user's training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from ...measure.torch_internals import fsdp_version, parameter_groups
from .spec import Messages, Parts, Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the first module of FSDP2, which only a user's training imports."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next((one for one in modules if isinstance(one, kind) or fsdp_version(one) == 2), None)


class ShardedParts(Parts):
    """Measure the parts of a step of a sharded model."""

    def messages(self, buckets: Sequence[int]) -> list[Messages]:
        """Return what a step sends, after the first step.

        Each micro-batch gathers the weights for its forward pass, and again for backward unless they are
        kept. The last one of a step reduces and scatters the gradients. With replicas, the shards of the
        gradients are then all-reduced; without them, the all-reduce has no messages.
        """
        groups = parameter_groups(self.model)
        shards, replicas = (groups[0].shards, groups[0].replicas) if groups else (None, None)
        gathered = [one.gathered_bytes for one in groups for _ in range(1 if one.is_kept else 2)]
        reduced = [one.reduced_bytes for one in groups if one.reduced_bytes]
        of_shards = [one.reduced_bytes // one.shards.size() for one in groups if one.replicas is not None]
        return [
            Messages("all_reduce", of_shards, replicas),
            Messages("all_gather", gathered, shards, in_each_micro_batch=True),
            Messages("reduce_scatter", reduced, shards),
        ]


SPEC = Strategy("fsdp2", title="FSDP2", find=find, times_parts=False, recognised=True)
