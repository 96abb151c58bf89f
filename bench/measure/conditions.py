"""The conditions of a rank and its node, sampled before and after a throughput window, never in a step.

Each rank counts its own samples, collectives and clocks. One rank per node also samples the node. The values
travel to rank 0 as part of :class:`bench.measure.windows.Window`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.measure import nvml
from bench.measure.node import Node, utc_now
from bench.measure.torch_internals import compilations, count_collectives


class Conditions:
    """Samples the conditions of one rank; ``reads_node`` is true on one rank per node.

    The first sample is taken at once, because it takes longest. ``gradient_bytes`` is the size of the model's
    gradients; None if it is unknown.
    """

    def __init__(
        self,
        device: torch.device,
        env: Mapping[str, str],
        *,
        reads_node: bool,
        gradient_bytes: int | None = None,
    ) -> None:
        self._device = device
        self._gradient_bytes = gradient_bytes
        self._node = Node(env) if reads_node else None
        self.sample()

    def sample(self) -> None:
        """Take the sample before a window. It delays this rank, so call it outside of measured steps."""
        self._clocks = self._read_clocks()
        self._before = None if self._node is None else self._node.sample()
        self._began = utc_now()

    def start(self) -> None:
        """Note torch's counters, immediately before the first step of a window."""
        self._counters = self._read_counters()

    def stop(self, *, samples: float | None, sync_passes: int | None) -> dict[str, Any]:
        """End the window, take the sample after it, and return this rank's part of conditions.json.

        ``start`` and ``end`` are the times of the samples, which enclose the window. ``samples`` and
        ``sync_passes`` are the samples that the rank trained on and its backward passes that
        synchronised gradients; None if unknown.
        """
        counters, ended = self._read_counters(), utc_now()
        clocks = self._read_clocks()
        node = None
        if self._node is not None and self._before is not None:
            node = self._node.conditions(self._before, self._node.sample())
        return {
            "start": self._began,
            "end": ended,
            "node": node,
            "rank": {
                "cores": len(os.sched_getaffinity(0)),
                "threads": torch.get_num_threads(),
                "samples": None if samples is None else round(samples),
                **{name: _difference(value, self._counters[name]) for name, value in counters.items()},
                **self.synchronised(sync_passes),
                "clocks": None if clocks is None else {"before": self._clocks, "after": clocks},
            },
        }

    def synchronised(self, passes: int | None) -> dict[str, int | None]:
        """Return the values of ``passes`` backward passes that synchronised gradients (None if unknown)."""
        known = passes is not None and self._gradient_bytes is not None
        return {
            "sync_passes": passes,
            "bytes": (passes or 0) * (self._gradient_bytes or 0) if known else None,
        }

    def _read_counters(self) -> dict[str, float | None]:
        """Return the rank's counters of collectives, compilations and retries so far; None if unknown."""
        compiled = compilations()
        retries = None
        if self._device.type == "cuda":
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries")
        return {
            "collectives": count_collectives(),
            "recompilations": None if compiled is None else compiled[0],
            "compile_s": None if compiled is None else compiled[1],
            "allocator_retries": retries,
        }

    def _read_clocks(self) -> dict[str, Any] | None:
        """Return the clocks of the rank's GPU; None on a CPU."""
        return nvml.clocks(self._device.index) if self._device.type == "cuda" else None


def _difference(after: float | None, before: float | None) -> float | None:
    """Return the change of a counter; None if it is unknown, or was reset in between."""
    if after is None or before is None or after < before:
        return None
    return round(after - before, 6)


def window_conditions(epoch: int, of_ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Combine all ranks' parts into an entry of ``windows`` in conditions.json; None if one is missing."""
    parts = [part for part in of_ranks if part is not None]
    if len(parts) < len(of_ranks):
        return None
    nodes = {part["node"]["node"]: part["node"] for part in parts if part["node"] is not None}
    return {
        "epoch": epoch,
        "start": min(part["start"] for part in parts),
        "end": max(part["end"] for part in parts),
        "nodes": list(nodes.values()),
        "ranks": [{"rank": rank, **part["rank"]} for rank, part in enumerate(parts)],
    }
