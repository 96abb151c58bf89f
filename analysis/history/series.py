"""Series of equal cells over time, with their changes and what else changed at about these times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.history.change import LEAST, deviation_of_last, find_changes, ratio_of
from analysis.history.key import labels_of


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


@dataclass(frozen=True)
class Difference:
    """A version, a setting or the nodes, which changed at about the time of a change."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the throughput.

    Attributes:
        at, reported: places of the first study after it, and of the study with which it was first reported.
        ratio, low, high: the throughput after it relative to that before, with the 95 % interval.
        differences: what else changed then, which need not be its cause.
        is_new: it was first reported with the newest of all studies, or since a given date.
    """

    at: int
    reported: int
    ratio: float
    low: float
    high: float
    differences: list[Difference]
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Series:
    """Equal cells of several studies, in the order of time.

    Attributes:
        lacking: the number of studies that are missing for a verdict, after the last change if there is one.
        deviation: the ratio of the last study to those before it, if this study alone is too far off.
    """

    label: str
    points: list[Point]
    changes: list[Change]
    lacking: int
    deviation: float | None

    @staticmethod
    def of(label: str, points: list[Point], *, searched: int, newest: str, new_since: str | None) -> Series:
        """Search the changes of a series; see :func:`history_of`."""
        logs = [point.log_mean for point in points]
        found = find_changes(logs, searched=searched)
        starts = [0, *(at for at, _ in found), len(points)]
        changes = []
        for (at, reported), start, end in zip(found, starts, starts[2:], strict=False):
            ratio, low, high = ratio_of(logs[start:at], logs[at:end])
            is_new = reported == len(points) - 1 and points[reported].study == newest
            is_new |= bool(new_since and points[reported].date >= new_since)
            interval = {"ratio": ratio, "low": low, "high": high}
            differences = [*_differences(points, at)]
            changes.append(
                Change(at=at, reported=reported, **interval, differences=differences, is_new=is_new)
            )
        last = logs[starts[-2] :]
        deviation = deviation_of_last(last, searched=searched)
        lacking = max(0, LEAST - len(last))
        return Series(label=label, points=points, changes=changes, lacking=lacking, deviation=deviation)

    @property
    def regression(self) -> bool:
        """True if the series became slower, and this is new."""
        return any(change.is_new and change.ratio < 1 for change in self.changes)


@dataclass(frozen=True)
class History:
    """The series, those with new slowdowns and changes first, and (study or study/cell, reason) left out.

    ``searched`` is the number of series that have enough studies to be searched for changes.
    """

    series: list[Series]
    left_out: list[tuple[str, str]]
    searched: int


def history_of(
    entries: Mapping[str, Entry], *, archives: Sequence[str] = (), new_since: str | None = None
) -> History:
    """Return the series of studies.

    A measurement counts once: one in a folder before one in the ``archives``, then that of the study with
    more runs. Changes that were first reported since the date ``new_since`` are new.
    """
    series: dict[str, list[Point]] = {}
    left_out: list[tuple[str, str]] = []
    study_of_run: dict[str, str] = {}
    for name in sorted(entries, key=lambda name: (name in archives, -_runs(entries[name]), name)):
        left_out += [
            (f"{name}/{cell}".rstrip("/"), reason) for cell, reason in entries[name].left_out.items()
        ]
        for point in entries[name].points:
            if other := next(filter(None, map(study_of_run.get, point.runs)), None):
                left_out.append((f"{name}/{point.cell}", f"the same runs are in {other}"))
            else:
                study_of_run |= dict.fromkeys(point.runs, name)
                series.setdefault(point.key, []).append(point)
    for points in series.values():
        points.sort(key=lambda point: (point.date, point.study))
    searched = sum(len(points) >= LEAST for points in series.values())
    every = (point for points in series.values() for point in points)
    newest = max(every, key=lambda point: (point.date, point.study)).study if series else ""
    labels = labels_of({key: points[-1].settings for key, points in series.items()})
    found = [
        Series.of(labels[key], points, searched=searched, newest=newest, new_since=new_since)
        for key, points in series.items()
    ]
    found.sort(
        key=lambda one: (
            not one.regression,
            not one.changes,
            int(one.points[-1].settings["world_size"]),
            one.label,
        )
    )
    return History(found, sorted(left_out), searched)


def _runs(entry: Entry) -> int:
    return sum(len(point.runs) for point in entry.points)


def _differences(points: Sequence[Point], at: int) -> Iterable[Difference]:
    """Yield what changed for good between the studies around a change.

    One study before or after it, and for nodes, which often differ, the values must last for two studies.
    """
    for name in dict.fromkeys(name for point in points for name in point.facts):
        texts = [point.facts.get(name, "") for point in points]
        for place in (at, at - 1, at + 1):
            if not 0 < place < len(texts):
                continue
            before, after = texts[place - 1], texts[place]
            lasts = texts[max(0, place - 2)] == before and texts[min(place + 1, len(texts) - 1)] == after
            is_known = before and after and before not in texts[place:] and after not in texts[:place]
            if is_known and (lasts or (place == at and name != "nodes")):
                yield Difference(name, before, after)
                break
