"""A model in a wrapper that this program does not know, such as FSDP1 or DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...measure.torch_internals import fsdp_version
from .spec import Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the wrapper. Several ranks may communicate in its forward, which looks like computation."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    versions = {fsdp_version(module) for module in modules}
    if 1 in versions:
        return modules[0]
    if 2 in versions or any(isinstance(module, DistributedDataParallel) for module in modules):
        return None
    # DDP, FSDP1 and DeepSpeed all have the model as `module`.
    return next((one for one in modules if isinstance(getattr(one, "module", None), nn.Module)), None)


SPEC = Strategy("wrapped", find=find, untimed="a wrapper other than DDP and FSDP2", recognised=True)
