"""FSDP1 (``FullyShardedDataParallel``), in a user's training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from ...measure.torch_internals import fsdp_version
from .spec import Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the first module of FSDP1, which only a user's training imports."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return next((one for one in modules if isinstance(one, kind) or fsdp_version(one) == 1), None)


SPEC = Strategy("fsdp1", find=find, untimed="FSDP1", recognised=True)
