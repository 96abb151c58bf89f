"""Whether a warm-up has warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from statistics import median
from typing import Any

from bench.measure.meters import Usage
from bench.measure.results import EpochRecord, RankRecord
from bench.measure.step_parts import StepParts, mean_parts

#: The first steps of all: DDP rebuilds its buckets in the second, allocators fill.
_UNLIKE_THE_REST = 2
#: How far the medians of the last steps and of those before them may be apart.
_STABLE_WITHIN = 0.10


def is_stable(times: Sequence[float]) -> bool:
    """Tell whether the medians of the later and the earlier half agree, without the first two steps."""
    kept = times[_UNLIKE_THE_REST:]
    half = len(kept) // 2
    if half < 1:
        return False
    earlier, later = median(kept[-2 * half : -half]), median(kept[-half:])
    return abs(later / earlier - 1) <= _STABLE_WITHIN


# What each rank saw of a window, and all ranks' windows put together.


@dataclass(frozen=True)
class Window:
    """One rank's throughput window, and the attribution window after it.

    ``samples`` and ``step_s`` have one entry per step, ``parts`` one per attributed step (None
    for a step that does not count); ``loss`` is the mean of the losses that were told; ``stable``
    says whether the step time had settled in the warm-up; ``clock_jumps`` counts attributed steps during
    which the wall clock was set.
    """

    step_s: list[float]
    samples: list[float | None]
    parts: list[list[float] | None]
    loss: float | None
    peak_mem_bytes: int
    usage: Usage
    stable: bool
    clock_jumps: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return what travels through the store (NaN and all: both ends are Python)."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Window:
        """Return the window that :meth:`as_json` described."""
        return cls(**{**content, "usage": Usage(**content["usage"])})


@dataclass(frozen=True)
class Seat:
    """What a rank's usage is of: its host, and its device (which ranks may share)."""

    host: str
    device: str


def merge(epoch: int, windows: Sequence[Window], seats: Sequence[Seat], *, on_gpus: bool) -> EpochRecord:
    """Return one epoch over all ranks; of steps that not every rank took, none counts.

    What is of a whole host or device is taken from the first rank there.
    """
    steps = min(len(window.step_s) for window in windows)
    columns = list(zip(*(window.step_s[:steps] for window in windows), strict=True))
    step_s = [max(column) for column in columns]
    attributed = _attributed(windows)
    least = [min(parts.exposed_s for parts in ranks) for ranks in zip(*attributed, strict=True)]
    counters = seats if on_gpus else [Seat(seat.host, "") for seat in seats]
    ranks = [
        _rank(window, steps, parts, least, _own_usage(window.usage, rank, seats, on_gpus=on_gpus))
        for rank, (window, parts) in enumerate(zip(windows, attributed, strict=True))
    ]
    told = [rank.samples for rank in ranks if rank.samples is not None]
    return EpochRecord(
        epoch=epoch,
        samples=sum(told) if len(told) == len(ranks) else None,
        step_s=step_s,
        slowest_rank=[column.index(max(column)) for column in columns],
        attribution_steps=len(least),
        ranks=ranks,
        validation=None,
        checkpoint_s=None,
        energy_counters=len(set(counters)),
    )


def _attributed(windows: Sequence[Window]) -> list[list[StepParts]]:
    """Return each rank's attributed steps, without those that do not count on some rank."""
    fewest = min(len(window.parts) for window in windows)
    counted = [step for step in range(fewest) if all(window.parts[step] is not None for window in windows)]
    return [[StepParts(*(window.parts[step] or ())) for step in counted] for window in windows]


def _rank(
    window: Window, steps: int, parts: list[StepParts], least: Sequence[float], usage: Usage
) -> RankRecord:
    told = [samples for samples in window.samples[:steps] if samples is not None]
    waits = [own.exposed_s - low for own, low in zip(parts, least, strict=True)]
    return RankRecord(
        window_s=sum(window.step_s[:steps]),
        loss=window.loss,
        peak_mem_bytes=window.peak_mem_bytes,
        usage=usage,
        parts=mean_parts(parts) if parts else None,
        wait_s=sum(waits) / len(waits) if waits else None,
        samples=round(sum(told)) if len(told) == steps else None,
    )


def _own_usage(usage: Usage, rank: int, seats: Sequence[Seat], *, on_gpus: bool) -> Usage:
    """Return what this rank is the first to tell of."""
    hosts = [seat.host for seat in seats]
    first_on_host = hosts.index(hosts[rank]) == rank
    first_on_device = seats.index(seats[rank]) == rank
    tells_energy = first_on_device if on_gpus else first_on_host
    return Usage(
        cpu_percent=usage.cpu_percent if first_on_host else None,
        gpu_percent=usage.gpu_percent if first_on_device else None,
        energy_joules=usage.energy_joules if tells_energy else None,
    )


def parts_row(parts: StepParts | None) -> list[float] | None:
    """Return a step's parts as they travel."""
    return None if parts is None else list(astuple(parts))


assert len(fields(StepParts)) == 6, "Window.parts travels by position"
