"""The windows of one rank and epoch, and their combination over all ranks.

The built-in workload and the recorder both produce one :class:`Window` per rank and epoch. They differ only
in how ranks exchange the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from bench.measure.conditions import window_conditions
from bench.measure.meters import Usage
from bench.measure.results import EpochRecord, RankPlace, RankRecord
from bench.measure.step_parts import DDP_ALWAYS_SAMPLED, StepParts, mean_parts

#: The first steps are never measured: allocators grow in step 1, and DDP rebuilds its buckets in step 2.
_UNREPRESENTATIVE_STEPS = 2
#: Largest relative difference between the medians of both halves of the steps for a stable step time.
_STABLE_WITHIN = 0.10


def is_stable(step_s: Sequence[float]) -> bool:
    """Return whether the step time is stable: without steps 1 and 2, the medians of both halves agree."""
    kept = step_s[_UNREPRESENTATIVE_STEPS:]
    half = len(kept) // 2
    if half < 1:
        return False
    earlier, later = median(kept[-2 * half : -half]), median(kept[-half:])
    return abs(later / earlier - 1) <= _STABLE_WITHIN


def fewest_warmup_steps(steps: int, device: torch.device) -> int:
    """Return ``steps``, or on CUDA at least the number of iterations that DDP's logger always samples."""
    return max(steps, DDP_ALWAYS_SAMPLED + 1) if device.type == "cuda" else steps


@dataclass(frozen=True)
class Window:
    """One rank's throughput window and the attribution window after it.

    ``step_s`` and ``samples`` have one entry per step of the throughput window. ``parts`` has one entry per
    step of the attribution window; None for a step that does not count. ``loss`` is the mean of the known
    losses. ``stable`` is true if the step time was stable after the warm-up. ``clock_jumps`` is the number of
    steps of the attribution window during which the wall clock was set. ``window_s`` is the duration of the
    throughput window; None means the sum of its steps. ``conditions`` is the result of
    :meth:`bench.measure.conditions.Conditions.stop`.
    """

    step_s: list[float]
    samples: list[float | None]
    parts: list[StepParts | None]
    loss: float | None
    peak_mem_bytes: int
    usage: Usage
    stable: bool = True
    clock_jumps: int = 0
    window_s: float | None = None
    conditions: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the window as values for JSON, including NaN, which Python's ``json`` accepts."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Window:
        """Create a window from the result of :meth:`as_json`."""
        parts = [None if part is None else StepParts(**part) for part in content["parts"]]
        return cls(**{**content, "parts": parts, "usage": Usage(**content["usage"])})


def merge_windows(
    epoch: int, windows: Sequence[Window], places: Sequence[RankPlace], *, on_gpus: bool
) -> EpochRecord:
    """Combine all ranks' windows of one epoch, keeping only steps that every rank took.

    Values of a whole host or device, such as energy, are taken from the first rank on that host or device.
    """
    steps = min(len(window.step_s) for window in windows)
    columns = list(zip(*(window.step_s[:steps] for window in windows), strict=True))
    attributed = _attributed(windows)
    least = [min(parts.exposed_s for parts in ranks) for ranks in zip(*attributed, strict=True)]
    counters = {(place.host, place.device_id if on_gpus else "") for place in places}
    first_on_host: dict[str, int] = {}
    first_on_device: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        first_on_host.setdefault(place.host, rank)
        first_on_device.setdefault((place.host, place.device_id), rank)
    ranks = []
    for rank, (window, parts, place) in enumerate(zip(windows, attributed, places, strict=True)):
        usage = _usage(
            window.usage,
            is_first_on_host=first_on_host[place.host] == rank,
            is_first_on_device=first_on_device[place.host, place.device_id] == rank,
            on_gpus=on_gpus,
        )
        ranks.append(_rank_record(replace(window, usage=usage), steps, parts, least))
    samples = [rank.samples for rank in ranks if rank.samples is not None]
    return EpochRecord(
        epoch=epoch,
        samples=sum(samples) if len(samples) == len(ranks) else None,
        step_s=[max(column) for column in columns],
        slowest_rank=[column.index(max(column)) for column in columns],
        attribution_steps=len(least),
        ranks=ranks,
        energy_counters=len(counters),
        conditions=window_conditions(epoch, [window.conditions for window in windows]),
    )


def count_dropped_steps(windows: Sequence[Window]) -> int:
    """Return the number of attribution steps that are left out because a rank has no parts for them."""
    by_step = zip(*(window.parts for window in windows if window.parts), strict=False)
    return sum(any(parts is None for parts in step) for step in by_step)


def _attributed(windows: Sequence[Window]) -> list[list[StepParts]]:
    """Return the parts of each rank's attribution steps, without steps that any rank left out."""
    fewest = min(len(window.parts) for window in windows)
    counted = [step for step in range(fewest) if all(window.parts[step] is not None for window in windows)]
    return [[parts for step in counted if (parts := window.parts[step])] for window in windows]


def _rank_record(window: Window, steps: int, parts: list[StepParts], least: Sequence[float]) -> RankRecord:
    samples = [count for count in window.samples[:steps] if count is not None]
    # The wait is computed for each step before averaging: the rank that waits least can change at each step.
    waits = [own.exposed_s - low for own, low in zip(parts, least, strict=True)]
    return RankRecord(
        window_s=sum(window.step_s[:steps]) if window.window_s is None else window.window_s,
        loss=window.loss,
        peak_mem_bytes=window.peak_mem_bytes,
        usage=window.usage,
        parts=mean_parts(parts) if parts else None,
        wait_s=sum(waits) / len(waits) if waits else None,
        samples=round(sum(samples)) if len(samples) == steps else None,
    )


def _usage(usage: Usage, *, is_first_on_host: bool, is_first_on_device: bool, on_gpus: bool) -> Usage:
    """Return a rank's usage without the values that an earlier rank of its host or device reports."""
    return Usage(
        cpu_percent=usage.cpu_percent if is_first_on_host else None,
        gpu_percent=usage.gpu_percent if is_first_on_device else None,
        energy_joules=usage.energy_joules if (is_first_on_device if on_gpus else is_first_on_host) else None,
    )
