"""The model alone: what one rank does without any wrapper."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ...matrix.workload import WorkloadOptions
from ..failures import SetupError
from .spec import Strategy


def wrap(model: nn.Module, options: WorkloadOptions) -> nn.Module:
    """Return the model itself.

    Raises:
        SetupError: there are several ranks, which would train different models.
    """
    if dist.get_world_size() > 1:
        raise SetupError(f"--strategy {SPEC.name} does not exchange gradients", remedy="start one rank")
    return model


SPEC = Strategy("none", title="no wrapper", wrap=wrap, one_rank=True)
