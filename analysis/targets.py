"""Judge the targets of a study: met, missed or cannot tell.

A target is met if the whole 95 % interval of its value meets the limit, and missed if the whole interval
misses it. Intervals need three runs; an efficiency also needs three runs of its baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from analysis.checks.assessment import CheckedStudy
from analysis.checks.scaling_table import Invalid, error_of
from analysis.compare.matching import match_studies
from analysis.data.columns import ScalingRow, grouped
from analysis.data.load import Study, load_study
from analysis.data.settings import spelled
from analysis.stats.estimate import MIN_RUNS, log_moments, ratio_interval
from analysis.stats.measured import Measured
from analysis.stats.rates import RateUnit, rate_unit
from analysis.text import clean, heading, one_line, plain
from bench.archive import is_archive, open_archive
from bench.study.plan_json import first_error, invalid_plan
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, interval, known, listed, names, number

#: Values are equal if they differ by less than this share.
_EQUAL = 1e-9
_GIB = 2**30
#: Names and units of values.
_NAMES = {"step_time_sec": ("step time", " s"), "memory_gib": ("memory", " GiB")}
#: Settings by which a target selects rows, besides their sizes and the settings of the plan.
_OF_ROW = ("nodes", "mode", "launcher", "backend", "global_batch", "per_gpu_batch")


class TargetVerdict(StrEnum):
    """Whether a target is met."""

    MET = "met"
    MISSED = "missed"
    UNKNOWN = "cannot tell"


class Value(NamedTuple):
    """A measured value with its 95 % interval; NaN if unknown. ``reason`` is why it cannot be judged."""

    measured: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""


class TargetRow(NamedTuple):
    """The verdict on a target for one cell in one series; on a target without cells, these are empty.

    ``target`` is the target in words. ``measured``, ``low``, ``high`` and ``limit`` have the target's unit.
    """

    target: str
    series: str
    cell_id: str
    measured: float
    low: float
    high: float
    limit: float
    verdict: TargetVerdict
    reason: str

    @property
    def value(self) -> str:
        """The measured value with its interval, as text."""
        ends = interval(self.low, self.high) if self.low < self.high else ""
        return f"{number(self.measured)} {ends}".strip()

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs; unknown ones are None."""
        return {name: plain(own) for name, own in self._asdict().items()}


def planned_targets(study: Study) -> list[Any]:
    """Return the targets in the plan of a study; raise BenchError if they are not valid."""
    if not (planned := study.plan.get("targets")):
        return []
    from bench.matrix.schema import Target  # building the models takes longer than most analyses

    try:
        return [Target.model_validate(one) for one in planned]
    except ValidationError as error:
        raise invalid_plan(study.folder, f"has a target that is not valid ({first_error(error)})") from None


def judge_targets(
    targets: Sequence[Any], study: Study, frames: Measured, rows: Sequence[ScalingRow], *, invalid: Invalid
) -> list[TargetRow]:
    """Judge each target for the rows of the scaling table that it is for.

    Targets of an efficiency are not for baselines. The study of a share is looked up beside ``study``.

    Raises:
        BenchError: a target gives another unit of the throughput than the study has.
    """
    if not targets:
        return []
    unit, values = rate_unit(rows), _Values(study, frames, invalid)
    planned = {clean(cell.cell_id): cell.settings for cell in study.planned}
    settings: Mapping[str, Mapping[str, Any]] = study.table.settings if study.table else planned
    found = []
    for target in targets:
        if target.unit not in (None, unit.name):
            what = f"a target is in {target.unit}, but the throughput of {study.name} in {unit.name}"
            raise BenchError(what, remedy=f"give throughput_per_gpu in {unit.name}")
        about = _text(target, unit.name)
        own = [row for row in rows if target.is_for({**_settings(row), **settings.get(row.cell_id, {})})]
        own = [row for row in own if target.limited != "efficiency" or not row.is_base]
        for row in own:
            value = values.of(row, target, unit)
            verdict = TargetVerdict.UNKNOWN if value.reason else _verdict(value, target)
            cell = row.series, row.cell_id
            found.append(TargetRow(about, *cell, *value[:3], target.limit, verdict, value.reason))
        if not own:
            unknown = target.limit, TargetVerdict.UNKNOWN, "it matches no cell"
            found.append(TargetRow(about, "", "", *Value()[:3], *unknown))
    return found


def target_lines(rows: Sequence[TargetRow]) -> Iterator[str]:
    """Yield the number of each verdict, and a line for each target and reason why it is not met."""
    if rows:
        counts = Counter(row.verdict for row in rows)
        yield f"targets: {', '.join(f'{counts[one]:,} {one}' for one in TargetVerdict if counts[one])}"
    unmet = [row for row in rows if row.verdict != TargetVerdict.MET]
    for about, own in grouped(unmet, lambda row: (row.verdict, row.target, row.reason)).items():
        times = Counter(row.cell_id for row in own)
        cells = [
            f"{row.value if known(row.measured) else ''} {row.cell_id}".strip()
            + f" ({row.series})" * (times[row.cell_id] > 1)
            for row in own
        ]
        shown = names(dict.fromkeys(filter(None, cells)), limit=2)
        verdict = about[0] if own[0].cell_id else "warning"
        yield f"{verdict}: {': '.join(filter(None, (about[1], shown, one_line(about[2], limit=120))))}"


def _text(target: Any, unit: str) -> str:
    """Return a target in words: ``efficiency at least 0.8 (nodes 2 or 4)``."""
    name, units = {**_NAMES, "throughput_per_gpu": ("throughput per rank", f" {unit}")}.get(
        target.limited, (target.limited, "")
    )
    cells = [f"{key} {' or '.join(map(spelled, values))}" for key, values in target.matched.items()]
    of = f" of {one_line(target.of, limit=80)}" if target.of else ""
    bound = "at least" if target.is_least else "at most"
    return f"{name} {bound} {target.limit:.6g}{units}{of}{f' ({listed(cells)})' if cells else ''}"


def _settings(row: ScalingRow) -> dict[str, Any]:
    """Return the settings that a row knows, by which targets select the sizes of a table, too."""
    sizes = {"world_size": row.gpus, "tasks_per_node": row.gpus_per_node}
    return sizes | {name: getattr(row, name) for name in _OF_ROW}


def _verdict(value: Value, target: Any) -> TargetVerdict:
    sign = 1 if target.is_least else -1  # with -1, the larger value is the worse one
    worst, best = sorted((sign * value.low, sign * value.high))
    least = sign * target.limit - _EQUAL * target.limit
    unmet = TargetVerdict.MISSED if best < least else TargetVerdict.UNKNOWN
    return TargetVerdict.MET if worst >= least else unmet


@dataclass(frozen=True)
class _Values:
    """The values of a study's cells that targets limit.

    ``others`` contains the measured throughputs of the equal cells of other studies, or why there are none.
    """

    study: Study
    frames: Measured
    invalid: Invalid
    others: dict[str, dict[str, list[float]] | str] = field(default_factory=dict)

    def of(self, row: ScalingRow, target: Any, unit: RateUnit) -> Value:
        """Return the value of a row."""
        name, base = target.limited, row.base if target.limited == "efficiency" else None
        if error := error_of(row, base, self.invalid):
            return Value(reason=f"not valid: {heading(error)}")
        rates = row.throughput_samples_per_sec, row.throughput_low, row.throughput_high
        runs = self.frames.measured_in(row.cell_id)
        counts = {"it": row.n}
        if name == "efficiency":
            value = Value(row.efficiency, row.efficiency_low, row.efficiency_high)
            counts["its baseline"] = base.n if base else MIN_RUNS
        elif name == "throughput_per_gpu":
            measured, low, high = (unit.of(rate, row) / row.gpus for rate in rates)
            value = Value(measured, low, high)
        elif name == "step_time_sec":
            value = Value(row.step_time_sec, row.global_batch / rates[2], row.global_batch / rates[1])
        elif name == "memory_gib":  # a maximum has no interval: one run can miss the limit
            used = [run.peak_mem_bytes / _GIB for run in runs if known(run.peak_mem_bytes)]
            most, counts["it"] = max(used, default=math.nan), len(used)
            value = Value(most, most, most) if len(used) >= MIN_RUNS or most > target.limit else Value(most)
        else:
            equal = self._equal(target.of)
            if isinstance(equal, str):
                return Value(reason=equal)
            others, other = equal.get(row.cell_id, []), one_line(target.of, limit=80)
            counts[f"an equal, valid cell of {other}"] = len(others)
            value = _ratio([run.rate for run in runs], others)
        if known(value.measured) and known(value.low) and known(value.high):
            return value
        few = [f"{one} has {count(n, 'measured run')}" for one, n in counts.items() if n < MIN_RUNS]
        return value._replace(reason=f"{listed(few)}; {MIN_RUNS} are needed" if few else "not measured")

    def _equal(self, name: str) -> dict[str, list[float]] | str:
        """Return the throughputs of the equal, valid cells of another study, by the cell of this one."""
        if name not in self.others:
            try:
                path = self.study.folder.source.parent / name
                other = load_study(open_archive(path).path if is_archive(path) else path)
                pairs, about = match_studies(other, self.study).pairs, CheckedStudy.of(other)
                valid = [(theirs, ours) for theirs, ours in pairs if theirs not in about.invalid]
                runs = {ours: about.frames.measured_in(theirs) for theirs, ours in valid}
                self.others[name] = {cell: [run.rate for run in own] for cell, own in runs.items()}
            except BenchError as error:
                self.others[name] = one_line(error.message)
        return self.others[name]


def _ratio(rates: Sequence[float], others: Sequence[float]) -> Value:
    """Return the ratio of the geometric means of throughputs."""
    moments = log_moments([rates, others])
    top, bottom = (moments.take(np.array([place])) for place in (0, 1))
    low, high = (float(end[0]) for end in ratio_interval(top, bottom))
    return Value(math.exp(float(moments.mean[0] - moments.mean[1])), low, high)
