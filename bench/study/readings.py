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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from ddp_scaling_bench.files import read_bytes
from ddp_scaling_bench.finding import Recorded
from ddp_scaling_bench.records import EpochRow
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell
from ..matrix.workload import UNITS
from .findings import AverageOfRun, RepeatedMatches, ValuesLeftOut

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LINE_END = re.compile(r"[\r\n]+")  # progress bars print carriage returns
#: Further digits after a decimal point are only a matter of precision.
_REST_OF_DECIMAL = re.compile(r"[0-9]*[eE][-+]?[0-9]+")
_REST_OF_INTEGER = re.compile(
    r"(?=[0-9]|\.[0-9]|,[0-9]{3}(?![0-9])|[eE][-+]?[0-9])(?:[0-9]|[.,](?=[0-9]))*(?:[eE][-+]?[0-9]+)?"
)
#: Ranks of one training end together, and start together but for the time of their imports. Averages of
#: different ranks can differ by this fraction.
OWN_CLOCKS = 0.1


@dataclass(frozen=True)
class Readings:
    """The values of a run: its rows and findings about them, or the ``problem`` with the values.

    If a loss is not finite, this is a problem, but there are rows, too.
    """

    rows: Sequence[EpochRow] = ()
    findings: Sequence[Recorded] = ()
    problem: str = ""


class _UnreadableError(Exception):
    """The command's metrics are missing or invalid; the message names the file and the problem."""


class _Value(NamedTuple):
    """A reported value, the unit of its last digit, and the line that contains it."""

    value: float
    last_digit: float
    line: int


class _Found(NamedTuple):
    """Readings of a run (values by quantity), the name of their file, and findings about them."""

    readings: list[dict[str, float]]
    source: str
    findings: Sequence[Recorded] = ()


def readings_of(folder: RunFolder, cell: Cell) -> Readings:
    """Return the values that a command of ``cell`` left in the run's folder, which is not changed."""
    try:
        found = _from_output(folder, cell) if "output" in cell.metrics else _from_file(folder, cell)
        kept = found.readings[(skip := int(cell.metrics.get("skip", 0))) :]
        if not kept:
            what = f"{found.source} contains {len(found.readings)} values"
            raise _UnreadableError(f"{what}, and workload.metrics.skip {skip} drops all of them")
        rows = [_row(number, reading, cell, found.source) for number, reading in enumerate(kept, start=1)]
    except _UnreadableError as error:
        return Readings(problem=str(error))
    losses = ((number, reading.get("loss", 0.0)) for number, reading in enumerate(kept, start=1))
    wrong = (
        f"the loss became {loss} in reading {number} of {found.source}"
        for number, loss in losses
        if not math.isfinite(loss)
    )
    return Readings(rows, found.findings, next(wrong, ""))


# -- from the output ------------------------------------------------------------------


def _from_output(folder: RunFolder, cell: Cell) -> _Found:
    patterns: dict[str, str] = cell.metrics["output"]
    for path in (folder.out, folder.err):
        lines = _LINE_END.split(_text(path))
        found = {name: _matches(pattern, lines, path) for name, pattern in patterns.items()}
        rates = {name: values for name, values in found.items() if name != "loss" and values}
        if rates:
            break
    where = path.name if rates else f"{folder.out.name} or {folder.err.name}"
    for name, pattern in patterns.items():
        if name != "loss" and name not in rates:
            raise _UnreadableError(f"no line of {where} matches workload.metrics.output.{name} {pattern!r}")
    if cell.is_average:
        return _average(found, cell, where)
    counts = {name: len(values) for name, values in rates.items()}
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{name} {count} times" for name, count in counts.items())
        raise _UnreadableError(f"{where} contains {listed}, so the values cannot be paired")
    (name, count), *_ = counts.items()
    paired = {name: values for name, values in found.items() if len(values) == count}
    readings = [{name: values[i].value for name, values in paired.items()} for i in range(count)]
    return _Found(readings, where, [*_surprises(found, name, where)])


def _matches(pattern: str, lines: list[str], path: Path) -> list[_Value]:
    where = f"{path.name}: workload.metrics.output found"
    values = []
    for number, line in enumerate(lines, start=1):
        for match in re.finditer(pattern, line):
            if cut := _rest_of_number(match):
                raise _UnreadableError(
                    f"{where} {match[1]!r}, which is only a part of {match[1]}{cut}; let the pattern match "
                    "the whole number, for example with ([0-9.,e+-]+)"
                )
            values.append(_value(match[1], where, line=number))
    return values


def _rest_of_number(match: re.Match[str]) -> str:
    """Return the rest of a number of which a pattern matches only the beginning, such as 1.2 of 1.2e+04."""
    if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]*", match[1] or "") is None:
        return ""
    rest = _REST_OF_DECIMAL if "." in match[1] else _REST_OF_INTEGER
    cut = rest.match(match.string, match.end(1))
    return cut[0] if cut else ""


def _surprises(found: Mapping[str, Sequence[_Value]], rate: str, source: str) -> Iterator[Recorded]:
    """Yield a finding for each quantity that cannot be paired with ``rate``, or matches twice in a line."""
    for name, values in found.items():
        lines = {value.line for value in values}
        fewer = len(lines) if len(lines) < len(values) else None
        matched, rows = len(values), len(found[rate])
        if rows != matched:
            yield ValuesLeftOut(
                subject=(name,),
                quantity=name,
                source=source,
                matched=matched,
                lines=fewer,
                other=rate,
                other_matched=rows,
                rows=rows,
                rows_without=rows,
            )
        elif fewer:
            yield RepeatedMatches(subject=(name,), quantity=name, source=source, matched=matched, lines=fewer)


# -- from a file ----------------------------------------------------------------------


def _from_file(folder: RunFolder, cell: Cell) -> _Found:
    path = folder.path / cell.metrics["csv"]
    if not path.exists():
        raise _UnreadableError(f"the command did not create {path}, the file named in workload.metrics.csv")
    columns: dict[str, str] = cell.metrics["columns"]
    records = list(_csv_records(path))
    readings: list[dict[str, _Value]] = []
    for line, record in enumerate(records, start=1):
        given = {name: record[key] for name, key in columns.items() if record.get(key) not in (None, "")}
        if given.keys() - {"loss"}:
            where = f"{path}: contains"
            readings.append({name: _value(value, where, line=line) for name, value in given.items()})
    if not readings:
        keys = dict.fromkeys(str(key) for record in records for key in record)
        wanted = ", ".join(column for column in columns.values() if column not in keys) or "values"
        contained = ", ".join(keys) or "nothing"
        raise _UnreadableError(f"{path} has no {wanted} (workload.metrics.columns); it contains {contained}")
    found = {name: [reading[name] for reading in readings if name in reading] for name in columns}
    if cell.is_average:
        return _average(found, cell, str(path))
    findings = []
    if missing := len(readings) - len(found.get("loss", readings)):
        rate = next(name for name in columns if name != "loss")
        left_out = ValuesLeftOut(
            subject=("loss",),
            quantity="loss",
            source=path.name,
            matched=len(found["loss"]),
            other=rate,
            other_matched=len(found[rate]),
            rows=len(readings),
            rows_without=missing,
        )
        findings.append(left_out)
    values = [{name: value.value for name, value in reading.items()} for reading in readings]
    return _Found(values, str(path), findings)


def _csv_records(path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path).removeprefix("\ufeff")), skipinitialspace=True)
    for row in reader:
        yield {str(key).strip(): value for key, value in row.items() if isinstance(value, str)}


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _UnreadableError(f"{path}: cannot be read: {error.strerror}") from None


def _value(value: Any, where: str, *, line: int) -> _Value:
    text = value.replace(",", "") if isinstance(value, str) else value
    try:
        return _Value(float(text), _last_digit(str(text).strip()), line)
    except (TypeError, ValueError):
        raise _UnreadableError(f"{where} {value!r}, which is not a number") from None


def _last_digit(text: str) -> float:
    """Return the unit of a number's last digit, 0.01 for ``3.14``; 0 if the number is not finite."""
    try:
        exponent = Decimal(text).as_tuple().exponent
    except InvalidOperation:
        return 0.0
    return 10.0**exponent if isinstance(exponent, int) else 0.0


# -- one average of the whole run -----------------------------------------------------


def _average(found: Mapping[str, Sequence[_Value]], cell: Cell, source: str) -> _Found:
    """Reduce the averages that the ranks report to one reading, that of the slowest rank.

    Raises:
        _UnreadableError: the values cannot be the same average.
    """
    rate = next(name for name, values in found.items() if name != "loss" and values)
    values = [value.value for value in found[rate]]
    if wrong := [value for value in values if not (math.isfinite(value) and value > 0)]:
        return _Found([{rate: wrong[0]}], source)  # _row rejects it
    low, high = min(values), max(values)
    of_ranks = len(values) <= cell.world_size and high - low <= OWN_CLOCKS * high
    if not (of_ranks or _are_equal(found[rate])):
        raise _UnreadableError(
            f"{source} contains {len(values)} different values of {rate} ({low:.6g} to {high:.6g}), but "
            "kind average reads one value of the whole run; let workload.metrics match only the summary, or "
            "remove kind"
        )
    reading = {rate: high if rate == "step_time" else low}
    findings: list[Recorded] = [
        AverageOfRun(
            subject=(rate,), quantity=rate, source=source, reported=len(values), lowest=low, highest=high
        )
    ]
    if "loss" in found:
        losses = [value.value for value in found["loss"]]
        if losses and (_are_equal(found["loss"]) or not all(map(math.isfinite, losses))):
            reading["loss"] = next((loss for loss in losses if not math.isfinite(loss)), losses[0])
        else:
            left_out = ValuesLeftOut(
                subject=("loss",),
                quantity="loss",
                source=source,
                matched=len(losses),
                lowest=min(losses, default=None),
                highest=max(losses, default=None),
            )
            findings.append(left_out)
    return _Found([reading], source, findings)


def _are_equal(values: Sequence[_Value]) -> bool:
    """Return whether values differ at most by rounding: by one unit of the last digit of the finest value."""
    numbers = [one.value for one in values]
    largest = max(map(abs, numbers))
    rounding = 1.001 * min(one.last_digit for one in values)
    return max(numbers) - min(numbers) <= min(rounding, OWN_CLOCKS * largest)


# -- rows -----------------------------------------------------------------------------


def _row(number: int, reading: Mapping[str, float], cell: Cell, source: str) -> EpochRow:
    throughput = _throughput(reading, cell)
    step_s = reading["step_time"] * _SECONDS[_unit(cell, "step_time")] if "step_time" in reading else None
    rate = cell.global_batch / step_s if throughput is None and step_s else throughput
    if rate is None or not (math.isfinite(rate) and rate > 0):
        values = {name: value for name, value in reading.items() if name != "loss"}
        raise _UnreadableError(f"reading {number} of {source} is not a positive number: {values}")
    loss = reading.get("loss", math.nan)
    row = EpochRow(
        epoch=number, throughput_samples_per_sec=rate, train_loss=loss if math.isfinite(loss) else math.nan
    )
    if cell.is_average:
        return row
    samples, seconds = cell.global_batch, cell.global_batch / rate
    step_s = seconds if step_s is None else step_s
    return replace(row, steps=1, samples=samples, epoch_time_sec=seconds, step_time_sec_median=step_s)


def _throughput(reading: Mapping[str, float], cell: Cell) -> float | None:
    """Return a reading's throughput in samples per second over all ranks, or None if the reading has none."""
    if "throughput" not in reading:
        return None
    if _unit(cell, "throughput") == "it/s":
        return reading["throughput"] * cell.global_batch
    per_gpu = cell.metrics.get("scope") == "per_gpu"
    return reading["throughput"] * (cell.world_size if per_gpu else 1)


def _unit(cell: Cell, quantity: str) -> str:
    return str((cell.metrics.get("units") or {}).get(quantity, UNITS[quantity][0]))
