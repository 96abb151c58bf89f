"""The networks of the workload, one file each.

Per computation, mlp communicates most and convnet least.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

from ...known_models import MODELS
from ..options import TrainOptions
from .spec import DataShape, Kind, ModelSpec

__all__ = ["DataShape", "Kind", "ModelSpec", "memory_format_of", "spec_of"]


@cache
def spec_of(model: str) -> ModelSpec:
    """Return the description of a model, by its name in a matrix."""
    spec: ModelSpec = import_module(f"{__name__}.{MODELS[model].module}").SPEC
    return spec


def memory_format_of(options: TrainOptions) -> torch.memory_format:
    """Return the memory format of the weights and of the inputs, which are images in some models only."""
    is_last = options.memory_format == "channels_last" and spec_of(options.model).takes_images
    return torch.channels_last if is_last else torch.contiguous_format
