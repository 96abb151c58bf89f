"""Read the metrics of a user's command (without the recorder) from its output or from a file.

A reading is a set of values that the command reports together. It becomes one row of the run's table. The row
counts as one training step with the configured global batch, because bench does not know over how many steps
the command averages. All other columns stay empty.

With ``kind: average``, the command reports one average of the whole run. The run then has one row with
throughput and loss, and neither steps nor samples. Several ranks can print the same average. As their clocks
start and end at slightly different times, the slowest rank determines the throughput.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ddp_scaling_bench.files import read_bytes
from ddp_scaling_bench.finding import Recorded
from ddp_scaling_bench.records import EpochRow
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell
from ..matrix.workload import UNITS, says_tokens
from .findings import AverageOfRun, RepeatedMatches, ValuesLeftOut
from .log_lines import (
    UnreadableError,
    Value,
    find_values,
    lines_left_out,
    lines_that_count,
    read_number,
    split_log,
)

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "sec": 1.0, "seconds": 1.0, "min": 60.0}
#: A unit of time or a rate of steps, directly behind a value.
_PRINTED_TIME = re.compile(r"\s?(ms|us|µs|sec|seconds|min|s)(?![A-Za-z])")
_PRINTED_STEPS = re.compile(r"\s?(?:it|iters?|steps?|batch(?:es)?)/s", re.IGNORECASE)
#: What is beside a value: a unit behind it, which is not the name of the next value, or else its name.
_UNIT_BEHIND = re.compile(r"\s?[A-Za-z_]+ ?(?:/|per)[\w/ ]{1,20}(?!\s*[\w/]*[:=])")
_NAME_BEFORE = re.compile(r"[A-Za-z][\w/ -]{0,30}[\"']?\s*[:=]?\s*[\"'(]?$")
#: Ranks of one training end together, and start together but for the time of their imports. Averages of
#: different ranks can differ by this fraction.
OWN_CLOCKS = 0.1
#: The largest share of values that can be 0 after the first value that is not, as after a meter is reset.
_FEW_ZEROS = 0.05


@dataclass(frozen=True)
class Readings:
    """The values of a run: its rows and findings about them, or the ``problem`` with the values.

    If a loss is not finite, this is a problem, but there are rows, too.
    """

    rows: Sequence[EpochRow] = ()
    findings: Sequence[Recorded] = ()
    problem: str = ""


class _Found(NamedTuple):
    """Readings of a run (values by quantity), the name of their file, and findings about them."""

    readings: Sequence[Mapping[str, Value]]
    source: str
    findings: Sequence[Recorded] = ()


def readings_of(folder: RunFolder, cell: Cell) -> Readings:
    """Return the values that a command of ``cell`` left in the run's folder, which is not changed."""
    if "output" in cell.metrics:
        return readings_in({path.name: path for path in (folder.out, folder.err)}, cell)
    return _readings(lambda: _from_file(folder, cell), cell)


def readings_in(logs: Mapping[str, Path], cell: Cell) -> Readings:
    """Return the values in the first of some logs (paths by name) that contains any."""
    return _readings(lambda: _from_output(logs, cell), cell)


def _readings(find: Callable[[], _Found], cell: Cell) -> Readings:
    findings: Sequence[Recorded] = ()
    try:
        found = find()
        kept, zeros = _without_zeros(found, int(cell.metrics.get("skip", 0)))
        findings = (*found.findings, *zeros)
        rows = [_row(number, reading, cell, found.source) for number, reading in enumerate(kept, start=1)]
    except UnreadableError as error:
        return Readings(findings=findings, problem=str(error))
    losses = ((number, reading.get("loss")) for number, reading in enumerate(kept, start=1))
    wrong = (
        f"the loss became {loss.value} in reading {number} of {found.source}, line {loss.line}"
        for number, loss in losses
        if loss and not math.isfinite(loss.value)
    )
    return Readings(rows, findings, next(wrong, ""))


def _without_zeros(found: _Found, skip: int) -> tuple[list[Mapping[str, Value]], Sequence[Recorded]]:
    """Return the readings from ``skip`` on without first zeros and a few later ones, and findings.

    Raises:
        UnreadableError: nothing is left, or too many values are 0.
    """
    readings, source = found.readings, found.source
    zeros = [
        (place, name, one)
        for place, reading in enumerate(readings)
        for name, one in reading.items()
        if name != "loss" and one.value == 0
    ]
    kept = sorted({*range(skip, len(readings))} - {place for place, *_ in zeros})
    if not kept:
        what = f"skip {skip} drops all of them; lower it"
        if zeros and skip < len(readings):
            what = f"all are 0 from {source}:{zeros[0][2].line} on"
        raise UnreadableError(f"{source} contains {len(readings)} values, and {what}")
    later = [(name, one) for place, name, one in zeros if place > kept[0]]
    if len(later) > _FEW_ZEROS * len(readings):
        (name, one), of = later[0], len(readings)
        raise UnreadableError(f"{source}:{one.line}: {name} is 0, in {len(later)} of {of} values")
    by_name = {name: [one for _, own, one in zeros if own == name] for _, name, _ in zeros}
    left_out = [lines_left_out(own, "zero", quantity=name, source=source) for name, own in by_name.items()]
    return [readings[place] for place in kept], left_out


# -- from the output ------------------------------------------------------------------


def _from_output(logs: Mapping[str, Path], cell: Cell) -> _Found:
    patterns: dict[str, str] = cell.metrics["output"]
    for source, path in logs.items():
        texts, findings = split_log(_text(path)), list[Recorded]()
        found: dict[str, Sequence[Value]] = {}
        for name, pattern in patterns.items():
            values = list(find_values(name, pattern, texts, source))
            found[name], about_lines = lines_that_count(values, name, texts, cell, source)
            findings += about_lines
        rates = {name: values for name, values in found.items() if name != "loss" and values}
        if rates:
            break
    where = source if rates else " or ".join(logs)
    for name, pattern in patterns.items():
        if name != "loss" and name not in rates:
            what = f"no line of {where} matches the pattern of {name}, {pattern!r}"
            raise UnreadableError(f"{what}; correct it: workload.metrics.output, or --pattern for logs")
    if cell.is_average:
        return _average(found, cell, where, findings)
    counts = {name: len(values) for name, values in rates.items()}
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{name} {count} times" for name, count in counts.items())
        every = [one for values in rates.values() for one in values]
        places = Counter(one.place for one in every)
        odd = min((one.line for one in every if places[one.place] % len(rates)), default=every[0].line)
        raise UnreadableError(f"{where} contains {listed}, so the values cannot be paired (as in line {odd})")
    (name, count), *_ = counts.items()
    losses = {one.place: one for one in found.get("loss", ())}
    if all(one.place in losses for one in found[name]):  # a bar is first drawn without a rate
        found["loss"] = [losses[one.place] for one in found[name]]
    paired = {name: values for name, values in found.items() if len(values) == count}
    readings = [{name: values[i] for name, values in paired.items()} for i in range(count)]
    return _Found(readings, where, [*findings, *_surprises(found, name, where)])


def _surprises(found: Mapping[str, Sequence[Value]], rate: str, source: str) -> Iterator[Recorded]:
    """Yield a finding for each quantity that cannot be paired with ``rate``, or matches twice in a line."""
    for name, values in found.items():
        lines = {value.place for value in values}
        fewer = len(lines) if len(lines) < len(values) else None
        matched, rows = len(values), len(found[rate])
        if rows != matched:
            others = {"other": rate, "other_matched": rows, "rows": rows, "rows_without": rows}
            yield _left_out(name, values, source, lines=fewer, **others)
        elif fewer:
            yield RepeatedMatches(subject=(name,), quantity=name, source=source, matched=matched, lines=fewer)


def _left_out(name: str, values: Sequence[Value], source: str, **more: Any) -> ValuesLeftOut:
    return ValuesLeftOut(subject=(name,), quantity=name, source=source, matched=len(values), **more)


# -- from a file ----------------------------------------------------------------------


def _from_file(folder: RunFolder, cell: Cell) -> _Found:
    name = cell.metrics["csv"]
    path = folder.path / name
    if not path.exists():
        what = f"the command did not create {name} in the run's folder"
        raise UnreadableError(f"{what}; let it write to {{run_dir}}/{name}, or correct workload.metrics.csv")
    columns: dict[str, str] = cell.metrics["columns"]
    records = list(_csv_records(path))
    readings: list[dict[str, Value]] = []
    for line, record in records:
        given = {name: record[key] for name, key in columns.items() if record.get(key) not in (None, "")}
        if any(columns[own] == text for own, text in given.items()):
            what = f"{cell.metrics['csv']}:{line} repeats the names of its columns, so several ranks wrote it"
            raise UnreadableError(f"{what}; let only one write it")
        if given.keys() - {"loss"}:
            where = f"{name}:{line}: contains"
            readings.append(
                {name: Value(*read_number(text, where), line, line) for name, text in given.items()}
            )
    if not readings:
        keys = dict.fromkeys(str(key) for _, record in records for key in record)
        wanted = ", ".join(column for column in columns.values() if column not in keys) or "values"
        contained = ", ".join(keys) or "nothing"
        what = f"{name} has no {wanted}; it contains {contained}"
        raise UnreadableError(f"{what}; correct workload.metrics.columns")
    found = {name: [reading[name] for reading in readings if name in reading] for name in columns}
    if cell.is_average:
        return _average(found, cell, name)
    findings = []
    if missing := len(readings) - len(found.get("loss", readings)):
        rate = next(name for name in columns if name != "loss")
        others = {
            "other": rate,
            "other_matched": len(found[rate]),
            "rows": len(readings),
            "rows_without": missing,
        }
        findings.append(_left_out("loss", found["loss"], path.name, **others))
    return _Found(readings, name, findings)


def _csv_records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the records of a CSV file, each with the number of its last line."""
    reader = csv.DictReader(io.StringIO(_text(path).removeprefix("\ufeff")), skipinitialspace=True)
    for row in reader:
        named = {str(key).strip(): value for key, value in row.items() if isinstance(value, str)}
        yield reader.line_num, named


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from None


# -- one average of the whole run -----------------------------------------------------


def _average(
    found: Mapping[str, Sequence[Value]], cell: Cell, source: str, findings: Sequence[Recorded] = ()
) -> _Found:
    """Reduce the averages that the ranks report to one reading, that of the slowest rank.

    Raises:
        UnreadableError: the values cannot be the same average.
    """
    rate = next(name for name, values in found.items() if name != "loss" and values)
    values = sorted(found[rate], key=lambda one: one.value)
    if wrong := [one for one in values if not (math.isfinite(one.value) and one.value > 0)]:
        return _Found([{rate: wrong[0]}], source)  # _row rejects it
    (low, *_, high) = (*values, values[-1])
    of_ranks = len(values) <= cell.world_size and high.value - low.value <= OWN_CLOCKS * high.value
    if not (of_ranks or _are_equal(values)):
        raise UnreadableError(
            f"{source} contains {len(values)} different values of {rate} ({low.value:.6g} in line {low.line} "
            f"to {high.value:.6g} in line {high.line}), but kind average reads one value of the whole run; "
            "let workload.metrics match only the summary, or remove kind"
        )
    reading = {rate: high if rate == "step_time" else low}
    bounds: dict[str, Any] = {"lowest": low.value, "highest": high.value}
    average = AverageOfRun(subject=(rate,), quantity=rate, source=source, reported=len(values), **bounds)
    findings = [*findings, average]
    if "loss" in found:
        losses = [one.value for one in found["loss"]]
        infinite = [one for one in found["loss"] if not math.isfinite(one.value)]
        if losses and (infinite or _are_equal(found["loss"])):
            reading["loss"] = (infinite or found["loss"])[0]
        else:
            extremes = {"lowest": min(losses, default=None), "highest": max(losses, default=None)}
            findings.append(_left_out("loss", found["loss"], source, **extremes))
    return _Found([reading], source, findings)


def _are_equal(values: Sequence[Value]) -> bool:
    """Return whether values differ at most by rounding: to the coarsest digits, or by the last digit."""
    numbers = [one.value for one in values]
    largest = max(map(abs, numbers))
    digits = [one.last_digit for one in values]
    rounding = 1.001 * max(min(digits), max(digits) / 2)
    return max(numbers) - min(numbers) <= min(rounding, OWN_CLOCKS * largest)


# -- rows -----------------------------------------------------------------------------


def _row(number: int, values: Mapping[str, Value], cell: Cell, source: str) -> EpochRow:
    reading = {name: one.value for name, one in values.items()}
    throughput = _throughput(reading, cell)
    step_s = _in_seconds(values["step_time"], cell) if "step_time" in reading else None
    one, is_stated = values.get("throughput"), "throughput" in (cell.metrics.get("units") or {})
    if one and not is_stated and _PRINTED_STEPS.match(one.text, one.end):
        what = f"{source}:{one.line}: the rate is one of steps: {one.shape!r}"
        raise UnreadableError(f"{what}; set units: {{throughput: it/s}} in workload.metrics")
    if one and not is_stated and (unit := _token_rate(one)):
        what = f"{source}:{one.line}: the rate is one of tokens ({unit}): {one.shape!r}"
        raise UnreadableError(
            f"{what}; set units: {{throughput: tokens/s}} (tokens/s/GPU if it is that of one rank) and "
            "tokens_per_sample in workload.metrics; if it counts samples, units: {throughput: samples/s}"
        )
    rate = cell.global_batch / step_s if throughput is None and step_s else throughput
    if rate is None or not (math.isfinite(rate) and rate > 0):
        shown = {name: value for name, value in reading.items() if name != "loss"}
        line = min(one.line for one in values.values())
        raise UnreadableError(f"{source}:{line}: reading {number} is not a positive number: {shown}")
    loss = reading.get("loss", math.nan)
    row = EpochRow(
        epoch=number, throughput_samples_per_sec=rate, train_loss=loss if math.isfinite(loss) else math.nan
    )
    if cell.is_average:
        return row
    samples, seconds = cell.global_batch, cell.global_batch / rate
    step_s = seconds if step_s is None else step_s
    return replace(row, steps=1, samples=samples, epoch_time_sec=seconds, step_time_sec_median=step_s)


def _token_rate(one: Value) -> str:
    """Return the unit beside a value in a log if it is a rate of tokens, else ``""``."""
    found = _UNIT_BEHIND.match(one.text, one.end) or _NAME_BEFORE.search(one.text, 0, one.start)
    return found[0].strip(" :=(\"'") if found and says_tokens(found[0]) else ""


def _in_seconds(one: Value, cell: Cell) -> float:
    """Return a time in seconds: in the unit that follows it in the log, or else in that of the matrix."""
    printed = _PRINTED_TIME.match(one.text, one.end) if one.text else None
    return one.value * _SECONDS[printed[1] if printed else _unit(cell, "step_time")]


def _throughput(reading: Mapping[str, float], cell: Cell) -> float | None:
    """Return a reading's throughput in samples per second over all ranks, or None if the reading has none."""
    if "throughput" not in reading:
        return None
    if _unit(cell, "throughput") == "it/s":
        return reading["throughput"] * cell.global_batch
    parts = {"per_gpu": cell.world_size, "per_replica": cell.replicas}.get(cell.metrics.get("scope", ""), 1)
    return reading["throughput"] * parts / int(cell.metrics.get("tokens_per_sample", 1))


def _unit(cell: Cell, quantity: str) -> str:
    return str((cell.metrics.get("units") or {}).get(quantity, UNITS[quantity][0]))
