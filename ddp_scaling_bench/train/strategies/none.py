"""The model alone: what one rank does without any wrapper."""

from __future__ import annotations

from .spec import Strategy

SPEC = Strategy("none", title="no wrapper", one_rank=True)
