"""Measure your own training loop: see :class:`Recorder`."""

from __future__ import annotations

from bench.record.recorder import Recorder
from bench.record.session import RecorderError

__all__ = ["Recorder", "RecorderError"]
