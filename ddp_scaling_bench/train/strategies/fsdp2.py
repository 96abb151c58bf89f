"""FSDP2 (``fully_shard``), in a user's training, and what measures the steps of a sharded model.

FSDP2 gathers the parameters of a group of modules before the group computes, in forward and (unless it kept
them) in backward, and reduces and scatters its gradients after it. A step is exposed to communication

- on a CPU while a collective runs, because gloo's collectives are synchronous here;
- on CUDA while the stream of the computation waits for the stream of a collective.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from ...measure.findings import PartsNotTimed
from ...measure.step_parts import ShardingTimer, StepTimer
from ...measure.torch_internals import fsdp_version, observe_sharding, parameter_groups
from ...measure.wire import Messages
from .spec import Parts, Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the whole model if it contains a module of FSDP2, which only a user's training imports."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return modules[0] if any(isinstance(one, kind) or fsdp_version(one) == 2 for one in modules) else None


class ShardedParts(Parts):
    """Time the waits for the collectives of ``fully_shard``."""

    sees_communication = True
    _sharding: ShardingTimer | None = None

    def start(self, timer: StepTimer) -> PartsNotTimed | None:
        """Observe all groups of the model."""
        self._sharding = ShardingTimer(timer)
        return self._observe(observe_sharding(self.model, self._sharding))

    @property
    def sync_passes(self) -> int | None:  # type: ignore[override]
        """The number of backward passes that reduced gradients."""
        return None if self._sharding is None else self._sharding.passes

    def messages(self) -> list[Messages] | None:
        """Return what a step sends, after the first step.

        Each micro-batch gathers the weights for its forward pass, and again for backward unless they are
        kept. The last one of a step reduces and scatters the gradients. With replicas, the shards of the
        gradients are then all-reduced; without them, the all-reduce has no messages.
        """
        groups = parameter_groups(self.model)
        if len({(one.shards, one.replicas) for one in groups}) != 1:
            return None
        shards, replicas = groups[0].shards, groups[0].replicas
        reduced = [one.reduced_bytes for one in groups if one.reduced_bytes]
        gathered = [one.gathered_bytes for one in groups for _ in range(1 if one.is_kept else 2)]
        of_shards = [] if replicas is None else [size // shards.size() for size in reduced]
        return [
            Messages("all_reduce", of_shards, replicas),
            Messages("all_gather", gathered, shards, in_each_micro_batch=True),
            Messages("reduce_scatter", reduced, shards),
        ]


SPEC = Strategy("fsdp2", parts=ShardedParts, find=find, recognised=True)
