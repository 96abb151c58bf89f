"""FSDP2 that keeps gathered weights from forward to backward: one all-gather per step, and more memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from . import fsdp

SPEC = replace(
    fsdp.SPEC,
    name="fsdp-keep",
    title="FSDP2 with kept weights",
    wrap=partial(fsdp.shard, reshard=False),
)
