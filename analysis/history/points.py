"""What a study contributes to the history."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cell of a study that at least three runs measured.

    Attributes:
        key, settings: those of equal cells (:mod:`analysis.history.key`).
        date: the end of the last run, in ISO 8601 and UTC.
        runs: digests that identify the measurements.
        log_mean: mean of the logarithms of the runs' throughputs.
        rate, low, high: throughput in ``unit``, with its 95 % interval.
        exposed: the share of exposed communication in a step.
        facts: versions, nodes and settings that can change from study to study.
    """

    key: str
    settings: dict[str, str]
    study: str
    cell: str
    date: str
    runs: list[str]
    log_mean: float
    rate: float
    low: float | None
    high: float | None
    unit: str
    efficiency: float | None
    efficiency_low: float | None
    efficiency_high: float | None
    exposed: float | None
    memory_bytes: float | None
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of a study; ``left_out`` has reasons by cell, or by ``""`` for the whole study."""

    stamp: list[int]
    points: list[Point] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
