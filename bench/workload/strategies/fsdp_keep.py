"""FSDP2 that keeps gathered weights from forward to backward: one all-gather per step, and more memory."""

from __future__ import annotations

from torch import nn

from ...matrix.workload import WorkloadOptions
from . import fsdp
from .spec import Strategy


def wrap(model: nn.Module, options: WorkloadOptions) -> nn.Module:
    """Shard the model over all ranks, with ``reshard_after_forward=False``."""
    return fsdp.shard(model, options, reshard=False)


SPEC = Strategy(
    "fsdp-keep",
    title="FSDP2 with kept weights",
    options=("comm_dtype", "fsdp_wrap"),
    sharded=("weights", "gradients", "states"),
    wrap=wrap,
    parts=fsdp.FsdpParts,
    state=fsdp.whole_state,
)
