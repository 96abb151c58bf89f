"""Measure your own training loop: see :class:`Recorder`."""

from __future__ import annotations

from .recorder import Recorder
from .settings import RecorderError

__all__ = ["Recorder", "RecorderError"]
