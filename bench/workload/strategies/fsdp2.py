"""FSDP2 (``fully_shard``), in a user's training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from ...measure.torch_internals import fsdp_version
from .spec import Parts, Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the first module of FSDP2, which only a user's training imports."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next((one for one in modules if isinstance(one, kind) or fsdp_version(one) == 2), None)


class ShardedParts(Parts):
    """Measure the parts of a step of a sharded model."""


SPEC = Strategy("fsdp2", title="FSDP2", find=find, times_parts=False, recognised=True)
