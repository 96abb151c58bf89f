"""DDP with ``static_graph=True``: the first step records which gradients each later step has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from . import ddp
from .spec import Strategy


class StaticParts(ddp.DdpParts):
    """DDP's parts; the first backward pass synchronises."""

    _is_recorded = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``, except the first time.

        torch fails if the pass in which DDP records the graph does not synchronise. Results do not change:
        gradients that are the average over all ranks stay the same when they are averaged again.
        """
        is_recorded, self._is_recorded = self._is_recorded, True
        return super().no_sync() if is_recorded else nullcontext()


SPEC = Strategy(
    "ddp-static",
    title="DDP with a static graph",
    options=("bucket_cap_mb", "comm_dtype", "comm_hook"),
    wrap=partial(ddp.wrap, static_graph=True),
    parts=StaticParts,
)
