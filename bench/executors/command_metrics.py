"""Read the metrics that a user's command (without ``bench.record``) prints or writes to a file.

Each reading becomes one row of metrics.csv. It counts as one training step with the configured global
batch, because bench does not know over how many steps the command averages. All other columns stay empty.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.matrix.cell import Cell
from bench.matrix.workload import UNITS
from bench.study.files import write_atomically
from bench.study.layout import METRICS_COLUMNS, RunFolder
from bench.study.run_json import read_run

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LINE_END = re.compile(r"[\r\n]+")  # progress bars print carriage returns
Reading = dict[str, float]


class UnreadableError(Exception):
    """The command's metrics are missing or invalid; the message names the file and the problem."""


@dataclass(frozen=True)
class _Found:
    """Readings of a run and the name of the file that contains them."""

    readings: list[Reading]
    source: str


def collect_metrics(folder: RunFolder, cell: Cell) -> str:
    """Write metrics.csv from the readings of a command; return an error message, or an empty string."""
    metrics = cell.metrics
    try:
        found = _from_output(folder, metrics) if "output" in metrics else _from_file(folder, metrics)
        rows = _rows(found, cell)
    except UnreadableError as error:
        return str(error)
    text = io.StringIO()
    writer = csv.DictWriter(text, METRICS_COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder.metrics_csv, text.getvalue())
    for row, reading in zip(rows, found.readings[-len(rows) :], strict=True):
        if not math.isfinite(reading.get("loss", 0.0)):
            return f"the loss became {reading['loss']} in reading {row['epoch']} of {found.source}"
    return ""


def _from_output(folder: RunFolder, metrics: Mapping[str, Any]) -> _Found:
    patterns: dict[str, str] = metrics["output"]
    for path in (folder.out, folder.err):
        lines = _LINE_END.split(_text(path))
        found = {name: _matches(pattern, lines, path) for name, pattern in patterns.items()}
        rates = {name: values for name, values in found.items() if name != "loss" and values}
        if rates:
            break
    else:
        name = next(name for name in patterns if name != "loss")
        raise UnreadableError(
            f"no line of job.out or job.err matches workload.metrics.output.{name} {patterns[name]!r}"
        )
    for name in patterns.keys() - rates.keys() - {"loss"}:
        raise UnreadableError(
            f"no line of {path.name} matches workload.metrics.output.{name} {patterns[name]!r}"
        )
    counts = {name: len(values) for name, values in rates.items()}
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{name} {count} times" for name, count in counts.items())
        raise UnreadableError(f"{path.name} contains {listed}, so the values cannot be paired")
    (count, *_) = counts.values()
    paired = {name: values for name, values in found.items() if len(values) == count}
    return _Found([{name: values[i] for name, values in paired.items()} for i in range(count)], path.name)


def _matches(pattern: str, lines: list[str], path: Path) -> list[float]:
    compiled = re.compile(pattern)
    return [
        _number(match[1], f"{path.name}: workload.metrics.output found")
        for line in lines
        for match in compiled.finditer(line)
    ]


def _from_file(folder: RunFolder, metrics: Mapping[str, Any]) -> _Found:
    kind = "csv" if "csv" in metrics else "jsonl"
    path = folder.path / metrics[kind]
    if not path.is_file():
        raise UnreadableError(f"the command did not create {path}, the file named in workload.metrics.{kind}")
    if not path.is_relative_to(folder.path) and _is_older(path, folder):
        raise UnreadableError(f"{path} is older than this run, so another run wrote it")
    columns: dict[str, str] = metrics["columns"]
    records = list(_csv_records(path) if kind == "csv" else _json_records(path))
    readings = []
    for record in records:
        given = {name: record[key] for name, key in columns.items() if record.get(key) not in (None, "")}
        if given.keys() - {"loss"}:
            readings.append({name: _number(value, f"{path}: contains") for name, value in given.items()})
    if not readings:
        keys = ", ".join(dict.fromkeys(str(key) for record in records for key in record)) or "nothing"
        wanted = ", ".join(columns.values())
        raise UnreadableError(f"{path} has no {wanted} (workload.metrics.columns); it contains {keys}")
    return _Found(readings, str(path))


def _is_older(path: Path, folder: RunFolder) -> bool:
    run, _ = read_run(folder.path)
    try:
        submitted = datetime.fromisoformat(str(run["submitted_at"])) if run else None
        return submitted is not None and path.stat().st_mtime < submitted.timestamp()
    except (KeyError, ValueError, OSError):
        return False


def _csv_records(path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path).removeprefix("\ufeff")), skipinitialspace=True)
    for row in reader:
        yield {str(key).strip(): value for key, value in row.items() if isinstance(value, str)}


def _json_records(path: Path) -> Iterator[dict[str, Any]]:
    for line in _text(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # an incomplete last line, or other text
            continue
        if isinstance(record, dict):
            yield record


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from None


def _number(value: Any, where: str) -> float:
    try:
        return float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise UnreadableError(f"{where} {value!r}, which is not a number") from None


def _rows(found: _Found, cell: Cell) -> list[dict[str, Any]]:
    skip = int(cell.metrics.get("skip", 0))
    kept = found.readings[skip:]
    if not kept:
        what = f"{found.source} contains {len(found.readings)} values"
        raise UnreadableError(f"{what}, and workload.metrics.skip {skip} drops all of them")
    return [_row(number, reading, cell, found.source) for number, reading in enumerate(kept, start=1)]


def _row(number: int, reading: Reading, cell: Cell, source: str) -> dict[str, Any]:
    throughput, step_s = _throughput(reading, cell), _step_s(reading, cell)
    rate = cell.global_batch / step_s if throughput is None and step_s else throughput
    if rate is None or not (math.isfinite(rate) and rate > 0):
        values = {name: value for name, value in reading.items() if name != "loss"}
        raise UnreadableError(f"reading {number} of {source} is not a positive number: {values}")
    seconds = cell.global_batch / rate
    row = {
        "epoch": number,
        "steps": 1,
        "samples": cell.global_batch,
        "epoch_time_sec": format(seconds, ".12g"),
        "throughput_samples_per_sec": format(rate, ".12g"),
        "step_time_sec_median": format(seconds if step_s is None else step_s, ".12g"),
    }
    loss = reading.get("loss")
    return row if loss is None or not math.isfinite(loss) else row | {"train_loss": format(loss, ".12g")}


def _throughput(reading: Reading, cell: Cell) -> float | None:
    """Return a reading's throughput in samples per second over all ranks; None if the reading has none."""
    if "throughput" not in reading:
        return None
    if _unit(cell, "throughput") == "it/s":
        return reading["throughput"] * cell.global_batch
    per_gpu = cell.metrics.get("scope") == "per_gpu"
    return reading["throughput"] * (cell.world_size if per_gpu else 1)


def _step_s(reading: Reading, cell: Cell) -> float | None:
    return reading["step_time"] * _SECONDS[_unit(cell, "step_time")] if "step_time" in reading else None


def _unit(cell: Cell, quantity: str) -> str:
    return str((cell.metrics.get("units") or {}).get(quantity, UNITS[quantity][0]))
