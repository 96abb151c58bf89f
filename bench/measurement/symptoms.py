"""How communication that broke looks on the ranks that were left, whoever called it."""

from __future__ import annotations

import enum
import re

import torch.distributed as dist

_PEER_LOST = re.compile(
    r"connection (closed|reset|was closed) by (remote )?peer|remote process exited|socket closed|broken pipe"
    r"|failed to recv, got 0 bytes|\[.*gloo/transport/.*\].*(read|write)(v)? error|Connection refused",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# "Application timeout caused pair closure" is gloo's too, and does not say so.
_GLOO_OR_NCCL = re.compile(r"gloo|nccl|c10d|store|pair closure", re.IGNORECASE)


class Symptom(enum.Enum):
    """How communication broke, which says little about why."""

    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def symptom_of(error: BaseException) -> Symptom | None:
    """Return how communication broke; None for an error of another kind."""
    text = str(error)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO_OR_NCCL.search(text)):
        if _PEER_LOST.search(text):
            return Symptom.LOST
        if _TIMED_OUT.search(text):
            return Symptom.TIMED_OUT
    return None
