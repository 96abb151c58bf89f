"""FSDP2 (``fully_shard``): each rank has a part of the weights, gradients and optimizer states.

The weights of a block are all-gathered before its forward and again before its backward pass, and freed after
each of them. Its gradients are reduce-scattered. As with torch's defaults, the weights outside of the blocks
(those of the root) are kept from forward to backward, which needs them first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..failures import SetupError, known_failure
from ..models.spec import Blocks
from ..options import TrainOptions
from .fsdp2 import ShardedParts
from .spec import WIRE_TYPES, Strategy, state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    model: nn.Module, options: TrainOptions, *, reshard: bool = True, mesh: DeviceMesh | None = None
) -> nn.Module:
    """Shard the network of a task, in place, and move it to the device of the options.

    The root is the network, not the task, so that validation gathers its weights, too.

    ``reshard`` tells whether gathered weights are freed after forward. A ``mesh`` of two dimensions has
    replicas and shards; by default, all ranks are shards.

    Raises:
        SetupError: torch or the backend lacks something.
    """
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        what = f"strategy {options.strategy} needs torch 2.6 or newer; this is {torch.__version__}"
        raise SetupError(what, remedy="use a newer torch, or strategy ddp") from None
    # The loss reads the output of the traffic model, a view, and never changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    everyone: Any = dist.group.WORLD
    types = (WIRE_TYPES[options.gathered_dtype], WIRE_TYPES[options.wire_dtype])
    plain = {*types} == {torch.float32}
    arguments: dict[str, Any] = {
        "mesh": mesh or DeviceMesh.from_group(everyone, options.device),
        "mp_policy": MixedPrecisionPolicy(*(() if plain else types)),
    }
    _check_average(options, partial(fully_shard, **arguments))
    if options.fsdp_wrap == "block":
        for blocks in [one for one in model.modules() if isinstance(one, Blocks)]:
            for block in blocks:
                fully_shard(block, reshard_after_forward=reshard, **arguments)
    fully_shard(model.get_submodule("network"), reshard_after_forward=False, **arguments)
    return model


def _check_average(options: TrainOptions, fully_shard: Callable[[nn.Module], Any]) -> None:
    """Average a gradient of known value.

    The backend of a release can lack a collective for a type. With torch 2.7 and gloo, FSDP adds up
    gradients in fp32 without dividing them. Only rank 0's gradient is not 0, so that no sum is rounded.
    """
    ranks, trial = dist.get_world_size(), nn.Linear(dist.get_world_size(), 1, bias=False)
    nn.init.ones_(trial.weight)
    fully_shard(trial)
    own, found, reason = 0.0 if dist.get_rank() else float(ranks), math.nan, ""
    try:
        trial(torch.full((1, ranks), own, device=options.device)).sum().backward()
        gradient: Any = trial.weight.grad
        found = float(gradient.full_tensor().mean())
    except (RuntimeError, ValueError) as error:
        if known_failure(error, timeout_s=options.join_timeout):  # out of memory, or another rank has ended
            raise
        reason = f": {error}"
    if not math.isclose(found, 1, rel_tol=0.05):
        where = f"backend {dist.get_backend()} of torch {torch.__version__}"
        what = f"strategy {options.strategy} cannot average gradients in {options.wire_dtype} with {where}"
        reason = reason or f": {found:g} instead of 1"
        raise SetupError(what + reason, remedy="use a newer torch, another reduce_dtype, or strategy ddp")


class FsdpParts(ShardedParts):
    """The parts of a step of :func:`shard`'s model."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on each rank, without reduce-scatters; weights are still gathered."""
        root: Any = self.model.get_submodule("network")
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def validated(self) -> None:
        """Free the gathered weights that wait for a backward pass."""
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()


def whole_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state with whole tensors, which rank 0 keeps in the host's memory."""
    found: dict[str, Any] = _whole(state_of(module, optimizer), keeps=dist.get_rank() == 0)
    return found


def _whole(value: Any, *, keeps: bool) -> Any:
    if isinstance(value, dict):
        return {key: _whole(one, keeps=keeps) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(one, keeps=keeps) for one in value]
    if not hasattr(value, "full_tensor"):
        return value
    whole = value.full_tensor()
    return whole.cpu() if keeps else None


SPEC = Strategy(
    "fsdp",
    title="FSDP2",
    options=("param_dtype", "reduce_dtype", "fsdp_wrap"),
    sharded=("weights", "gradients", "states"),
    wrap=shard,
    parts=FsdpParts,
    state=whole_state,
)
