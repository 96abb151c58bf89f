"""DeepSpeed's engine, in a user's training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from .spec import Strategy


def find(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the engine; DeepSpeed is not imported, because its import takes seconds."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    return next((module for module in modules if isinstance(module, engine)), None)


SPEC = Strategy("deepspeed", find=find, untimed="DeepSpeed", recognised=True)
