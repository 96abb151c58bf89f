"""Recognise how a model is trained in parallel, and count the parameters of the whole model."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..measure.torch_internals import fsdp_version, is_flattened, whole_flat_parameters

#: Strategies for which the parts of a step cannot be measured yet. In forward and in backward, these wait for
#: collectives that gather and reduce shards, and nothing reports the time of these waits.
SHARDED = frozenset({"fsdp1", "fsdp2", "deepspeed"})


def find_strategy(model: nn.Module | None) -> str | None:
    """Return ``fsdp1``, ``fsdp2``, ``deepspeed`` or ``ddp``, or None if the model shows none of them.

    Wrappers within ``model`` count, such as those within a compiled model. A module within a sharded model is
    recognised, too. FSDP and DeepSpeed are not imported here: without them in ``sys.modules``, no model
    uses them, and an import takes seconds.
    """
    if model is None:
        return None
    parts = list(model.modules())
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    if any(isinstance(part, engine) for part in parts):
        return "deepspeed"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if any(isinstance(part, getattr(fsdp, "FullyShardedDataParallel", ())) for part in parts):
        return "fsdp1"
    if any(isinstance(part, getattr(fsdp, "FSDPModule", ())) for part in parts):
        return "fsdp2"
    versions = {version for part in parts if (version := fsdp_version(part))}
    if versions:
        return f"fsdp{min(versions)}"
    return None if find_ddp(model) is None else "ddp"


def find_ddp(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return the first DDP module in ``model``, which can be ``model`` itself, or None if there is none."""
    if model is None:
        return None
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def model_sizes(model: nn.Module | None) -> tuple[int | None, int | None]:
    """Return the number of parameters and the size of their gradients in bytes, over all shards.

    Both are None without a model, and for a module within an FSDP1 model: FSDP1 keeps the sizes of whole
    parameters in its own modules.
    """
    if model is None:
        return None, None
    parameters = list(model.parameters())
    flat = whole_flat_parameters(model)
    if flat is None:
        return None, None
    # A DTensor of FSDP2 has the size of the whole parameter. With ZeRO-3, `ds_numel` has it.
    own = [(int(getattr(p, "ds_numel", p.numel())), p) for p in parameters if not is_flattened(p)]
    found = [*flat, *own]
    trained = (count * p.element_size() for count, p in found if p.requires_grad)
    return sum(count for count, _ in found), sum(trained)
