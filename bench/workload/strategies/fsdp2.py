"""FSDP2 (``fully_shard``), in a user's training, and what measures the steps of a sharded model.

FSDP2 gathers the parameters of a group of modules before the group computes, in forward and (unless it kept
them) in backward, and reduces and scatters its gradients after it. A step is exposed to communication

- on a CPU while a collective runs, because gloo's collectives are synchronous here;
- on CUDA while the stream of the computation waits for the stream of a collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ...facts import Fact
from ...measure.step_parts import StepTimer
from ...measure.torch_internals import fsdp_version, observe_sharding, parameter_groups
from ...measure.wire import Messages
from .spec import Parts, Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the whole model if it contains a module of FSDP2, which only a user's training imports."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return modules[0] if any(isinstance(one, kind) or fsdp_version(one) == 2 for one in modules) else None


class ShardedParts(Parts):
    """Time the waits for the collectives of ``fully_shard``, within the parts that a timer measures.

    On CUDA, a wait lasts from an event on the stream of the computation to one after the collective.
    """

    sees_communication = True

    def start(self, timer: StepTimer) -> Fact | None:
        """Observe all groups of the model."""
        self._timer, self._clock = timer, timer.clock
        #: Ends of the latest collectives: each group's all-gather, the reduce-scatter, and the all-reduce
        #: that follows it if there are replicas.
        self._gathered: dict[Any, Any] = {}
        self._scattered: Any = None
        self._reduced: Any = None
        self._reduction_began: Any = None
        self._post_backward_began: Any = None
        self._is_end = False
        return self._observe(observe_sharding(self.model, self))

    # -- called by what observes the groups --------------------------------------------------

    @property
    def is_on_host(self) -> bool:
        """True if collectives are complete when they return."""
        return self._clock.is_host

    def gathers(self, group: object, call: Callable[[], Any]) -> Any:
        """Make the call of an all-gather; the stream of the computation waits for it later."""
        work, end = self._communicate(call)
        if work is not None:  # the user asked for an asynchronous one
            return _TimedWork(work, self._timer)
        self._gathered[group] = end
        return None

    def scatters(self, call: Callable[[], Any]) -> Any:
        """Make the call of a reduce-scatter."""
        work, end = self._communicate(call)
        self._scattered = self._reduced = self._reduction_began = end
        return work

    def allocates(self) -> None:
        """Record that memory is allocated for a reduction: the group has waited for the previous one."""
        self._reduction_began = now = self._clock.stamp()
        if self._post_backward_began is not None and self._scattered is not None:
            self._timer.waited(self._post_backward_began, now, self._scattered, at_end=self._is_end)
        self._post_backward_began = None

    def all_reduced(self) -> None:
        """Record the end of the all-reduce over the replicas."""
        self._reduced = self._clock.stamp()
        if self._clock.is_host:
            self._timer.waited(self._reduction_began, self._reduced, at_end=self._is_end)

    def waits_for_gather(self, group: object, call: Callable[[], Any]) -> Any:
        """Let the group wait for its all-gather."""
        if (end := self._gathered.pop(group, None)) is not None:
            self._timer.waited(self._clock.stamp(), end)
        return call()

    def post_backward(self, call: Callable[[], Any]) -> Any:
        """Let a group wait for an earlier reduce-scatter, and reduce its gradients."""
        self._post_backward_began = self._clock.stamp()
        result = call()
        if self._post_backward_began is not None:  # without gradients, the group has only waited
            self.allocates()
        return result

    def finalizes(self, call: Callable[[], Any]) -> Any:
        """Let a group wait for the last reductions."""
        began = self._clock.stamp()
        result = call()
        if self._reduced is not None:
            self._timer.waited(began, self._clock.stamp(), self._reduced, at_end=True)
        return result

    def ends(self, call: Callable[[], Any]) -> Any:
        """Make the call that follows the last computation of backward."""
        self._is_end = True
        try:
            return call()
        finally:
            self._is_end = False

    def _communicate(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """Make the call of a collective; return its work if it is asynchronous, and the stamp after it."""
        if not self._clock.is_host:
            return call(), self._clock.stamp()
        begin = self._clock.stamp()
        work, end = call(), self._clock.stamp()
        if work is None:
            self._timer.waited(begin, end, at_end=self._is_end)
        return work, end

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


class _TimedWork(dist.Work):
    """A collective that runs, with a timer on the wait for it."""

    def __init__(self, work: Any, timer: StepTimer) -> None:
        super().__init__()
        self._work, self._timer = work, timer

    def wait(self, *timeout: Any) -> Any:
        """Wait for the collective."""
        begin = self._timer.clock.stamp()
        result = self._work.wait(*timeout)
        self._timer.waited(begin, self._timer.clock.stamp())
        return result


SPEC = Strategy("fsdp2", title="FSDP2", parts=ShardedParts, find=find, recognised=True)
