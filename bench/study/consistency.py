"""Find records of a run that contradict each other: run.json, end.json, the ledger, and the CSV files.

A job writes most values twice, and the values of a row depend on each other. A value that contradicts another
place cannot be trusted, and neither can the other value, so that both are left empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..facts import Fact
from ..matrix.workload import with_defaults
from .conditions import parse_moment
from .files import file_sha256
from .layout import RunFolder
from .ledger import RunRecord, RunState
from .records import MEAN_COLUMNS, METRICS_COLUMNS, PARTS_COLUMNS, RATE_COLUMNS, EpochRow, RankRow

#: Largest relative difference between two values that are written with twelve digits.
ROUNDING = 1e-6
#: Largest difference in seconds between times of different clocks or of successive events.
CLOCKS_S = 120.0
#: Values of a cell in run.json that are compared with the plan.
CELL_NAMES = (
    "cell_id",
    "launcher",
    "backend",
    "nodes",
    "tasks_per_node",
    "world_size",
    "global_batch",
    "per_gpu_batch",
)
#: Rates outside of this range overflow in later computations.
_LEAST_RATE, _LARGEST_RATE = 1e-12, 1e18


def _contradiction(
    place: str, value: Any, other: str, other_value: Any, unusable: Sequence[str] = ()
) -> Fact:
    """Return a fact about two places that contradict each other.

    Its values are named as the arguments. ``place`` is the first file, with the name of the value, such as
    ``run.json: ended_at``. ``unusable`` are columns of metrics.csv, or ``started_at``, ``ended_at`` and
    ``state``: they cannot be trusted, and are left empty.
    """
    values = {"place": place, "value": value, "other": other, "other_value": other_value}
    return Fact("contradiction", values={**values, "unusable": list(unusable)}, severity="error")


# -- run.json, end.json and the ledger --------------------------------------------------------


def record_contradictions(
    run: Mapping[str, Any],
    end: Mapping[str, Any],
    record: RunRecord | None,
    *,
    attempt: int | None,
    cell: Mapping[str, Any],
    folder: RunFolder,
) -> Iterator[Fact]:
    """Yield the contradictions between run.json, end.json and the ledger of an attempt that has ended.

    If a command has reported the values of metrics.csv, run.json contains the digest of this file.

    Args:
        run: the content of run.json.
        end: the content of end.json; empty if it is missing.
        record: the run's record in the ledger; None if it is unknown.
        attempt: the number of the attempt.
        cell: the run's cell in the plan.
        folder: the folder of the attempt.
    """
    if run.get("state") not in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED):
        return
    yield from _invalid_times(run)
    yield from _against_end(run, end, is_known=record is not None and record.state.ended)
    yield from _against_plan(run, cell)
    if (digest := run.get("metrics_sha256")) is not None:
        found = file_sha256(folder.metrics_csv)
        if found is not None and found != digest:
            place = "run.json: metrics_sha256"
            yield _contradiction(place, digest, "the SHA-256 of metrics.csv", found, METRICS_COLUMNS[1:])
    if record is None or not record.state.ended:
        return
    if record.attempt != attempt:
        other = "ledger.jsonl: attempt"
        yield _contradiction("run.json: attempt", attempt, other, record.attempt, ("state",))
    else:
        yield from _against_ledger(run, record)


def metrics_digest(folder: RunFolder) -> dict[str, str | None]:
    """Return the digest of the values of a command for run.json; ranks.csv contains those of other runs."""
    return {} if folder.ranks_csv.exists() else {"metrics_sha256": file_sha256(folder.metrics_csv)}


def _against_plan(run: Mapping[str, Any], cell: Mapping[str, Any]) -> Iterator[Fact]:
    own = run.get("cell")
    if not isinstance(own, dict):
        yield _contradiction("run.json: cell", own, "the format of", "a cell")
        return
    workloads: list[dict[str, Any]] = [
        found if isinstance(found := one.get("workload"), dict) else {} for one in (own, cell)
    ]
    pairs = [(name, own.get(name), cell.get(name)) for name in CELL_NAMES]
    names = [name for name in workloads[1] if name not in ("command", "metrics")]
    known = with_defaults(workloads[0]) if workloads[0] else {}
    pairs += [(f"workload.{name}", known.get(name), workloads[1][name]) for name in names]
    for name, value, planned in pairs:
        if value != planned or isinstance(value, bool) != isinstance(planned, bool):
            yield _contradiction(f"run.json: {name}", value, f"plan.json: {name}", planned)


def _invalid_times(run: Mapping[str, Any]) -> Iterator[Fact]:
    times = {name: run.get(name) for name in ("submitted_at", "started_at", "ended_at")}
    for name, value in times.items():
        if value is not None and not (isinstance(value, str) and parse_moment(value)):
            yield _contradiction(f"run.json: {name}", value, "the format of", "a time", (name,))
    start, end = parse_moment(times["started_at"]), parse_moment(times["ended_at"])
    submitted = parse_moment(times["submitted_at"])
    if start and end and start > end:
        both = ("started_at", "ended_at")
        yield _contradiction(
            "run.json: started_at", times["started_at"], "run.json: ended_at", times["ended_at"], both
        )
    if start and submitted and (submitted - start).total_seconds() > CLOCKS_S:
        yield _contradiction(
            "run.json: started_at",
            times["started_at"],
            "run.json: submitted_at",
            times["submitted_at"],
            ("started_at",),
        )


def _against_end(run: Mapping[str, Any], end: Mapping[str, Any], *, is_known: bool) -> Iterator[Fact]:
    ended_at, written = run.get("ended_at"), end.get("time")
    if written is not None and not (isinstance(written, str) and parse_moment(written)):
        yield _contradiction("end.json: time", written, "the format of", "a time")
    elif _differ(ended_at, written, CLOCKS_S):
        yield _contradiction("run.json: ended_at", ended_at, "end.json: time", written, ("ended_at",))
    code = end.get("exit_code")
    if run.get("state") == RunState.COMPLETED and code not in (0, None):
        unusable = () if is_known else ("state",)  # the ledger has the state, too
        yield _contradiction("run.json: state", "completed", "end.json: exit_code", code, unusable)


def _against_ledger(run: Mapping[str, Any], record: RunRecord) -> Iterator[Fact]:
    details = record.details
    if run.get("state") != record.state:
        yield _contradiction(
            "run.json: state", run.get("state"), "ledger.jsonl: state", str(record.state), ("state",)
        )
    for name, known in (("exit_code", record.exit_code), ("failure_class", record.failure_class)):
        if run.get(name) != known:
            yield _contradiction(f"run.json: {name}", run.get(name), f"ledger.jsonl: {name}", known, (name,))
    for name in ("started_at", "ended_at"):
        # Earlier versions did not write the times into the ledger.
        if name in details and _differ(run.get(name), details[name], 0.0):
            yield _contradiction(
                f"run.json: {name}", run.get(name), f"ledger.jsonl: {name}", details[name], (name,)
            )
    recorded, end = parse_moment(details.get("recorded_at")), parse_moment(run.get("ended_at"))
    if recorded and end and (end - recorded).total_seconds() > CLOCKS_S:
        yield _contradiction(
            "run.json: ended_at", run["ended_at"], "ledger.jsonl: time", details["recorded_at"], ("ended_at",)
        )


def _differ(a: Any, b: Any, seconds: float) -> bool:
    first, second = parse_moment(a), parse_moment(b)
    if seconds and (first is None or second is None):
        return False
    return _is_apart(first, second, seconds)


def _is_apart(a: datetime | None, b: datetime | None, seconds: float) -> bool:
    if a is None or b is None:
        return a is not b
    return abs((a - b).total_seconds()) > seconds


# -- metrics.csv ------------------------------------------------------------------------------


def metrics_contradictions(
    rows: Sequence[EpochRow], ranks: Sequence[RankRow], *, epochs: int | None, global_batch: float
) -> Iterator[Fact]:
    """Yield the contradictions within metrics.csv, with ranks.csv and with the plan.

    Args:
        rows: the rows of metrics.csv; unknown values are NaN.
        ranks: the rows of ranks.csv; empty if the run has no such file.
        epochs: the planned number of epochs; None if the command determines it.
        global_batch: the planned samples per step.
    """
    if not rows:
        return
    if epochs is not None and len(rows) != epochs:
        # Further epochs were measured, too: only a missing one changes what the others mean.
        unusable = ("*",) if len(rows) < epochs else ()
        yield _contradiction("metrics.csv: rows", len(rows), "plan.json: epochs", epochs, unusable)
    numbers = [row.epoch for row in rows]
    steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
    if steps - {1.0} and not all(math.isnan(one) for one in steps):
        listed = ", ".join(f"{number:g}" for number in numbers[:8])
        yield _contradiction("metrics.csv: epoch", listed, "metrics.csv:", "successive epochs", ("*",))
        return
    of_ranks = {row.epoch for row in ranks}
    if ranks and of_ranks != set(numbers):
        listed, other = (
            ", ".join(f"{one:g}" for one in sorted(found)[:8]) for found in (set(numbers), of_ranks)
        )
        # metrics.csv is complete if ranks.csv has no further epoch.
        unusable = ("*",) if of_ranks - set(numbers) else ()
        yield _contradiction("metrics.csv: epoch", listed, "ranks.csv: epoch", other, unusable)
    yield from _lost_cells(rows)
    by_epoch: dict[float, list[RankRow]] = {}
    for rank in ranks:
        by_epoch.setdefault(rank.epoch, []).append(rank)
    for row in rows:
        yield from _in_row(row, global_batch)
        yield from _against_ranks(row, by_epoch.get(row.epoch, []))


def _lost_cells(rows: Sequence[EpochRow]) -> Iterator[Fact]:
    """Yield cells that are empty in some rows, although another cell of the row is computed from them."""
    for name, other in (("steps", "samples"), ("samples", "throughput_samples_per_sec")):
        lost = [row for row in rows if math.isnan(getattr(row, name)) and not math.isnan(getattr(row, other))]
        if lost and len(lost) < len(rows):
            place = f"metrics.csv: {name} in epoch {lost[0].epoch:g}"
            yield _contradiction(place, None, f"metrics.csv: {other}", getattr(lost[0], other), RATE_COLUMNS)


def _in_row(row: EpochRow, global_batch: float) -> Iterator[Fact]:
    at = f" in epoch {row.epoch:g}" if math.isfinite(row.epoch) else ""
    rate, samples, seconds = row.throughput_samples_per_sec, row.samples, row.epoch_time_sec
    place = f"metrics.csv: throughput_samples_per_sec{at}"
    if rate > 0 and not _LEAST_RATE <= rate <= _LARGEST_RATE:
        yield _contradiction(place, rate, "the range", "1e-12 to 1e18", RATE_COLUMNS)
    elif _are_apart(0.0 if math.isnan(rate) else rate * seconds, samples) and not math.isnan(seconds):
        expected = samples / seconds if seconds else math.inf
        yield _contradiction(
            place,
            None if math.isnan(rate) else rate,
            "metrics.csv: samples / epoch_time_sec",
            expected,
            RATE_COLUMNS,
        )


def _against_ranks(row: EpochRow, ranks: Sequence[RankRow]) -> Iterator[Fact]:
    """Compare a row of metrics.csv with the rows of ranks.csv of its epoch.

    Tables without window_time_sec are those of other programs, whose other columns have other definitions.
    """
    if not ranks:
        return
    at = f" in epoch {row.epoch:g}"
    samples = sum(rank.samples for rank in ranks)
    if _are_apart(row.samples, samples):
        # The throughput agrees with samples and time of its row (or is empty), so only ranks.csv is in doubt.
        yield _contradiction(f"metrics.csv: samples{at}", row.samples, "ranks.csv: their sum", samples)
    windows = [rank.window_time_sec for rank in ranks]
    if any(map(math.isnan, windows)):
        return
    if _are_apart(row.epoch_time_sec, max(windows)):
        name = f"metrics.csv: epoch_time_sec{at}"
        other = "ranks.csv: their maximum"
        yield _contradiction(name, row.epoch_time_sec, other, max(windows), RATE_COLUMNS)
    for name in ("steps", *MEAN_COLUMNS):
        value = getattr(row, name)
        mean = sum(getattr(rank, name) for rank in ranks) / len(ranks)
        if _are_apart(value, mean) or math.isnan(value) != math.isnan(mean):
            unusable = RATE_COLUMNS if name == "steps" else PARTS_COLUMNS
            yield _contradiction(f"metrics.csv: {name}{at}", value, "ranks.csv: their mean", mean, unusable)


def _are_apart(a: float, b: float) -> bool:
    """Return whether two values differ by more than rounding; a value that is not known never differs."""
    if math.isnan(a) or math.isnan(b):
        return False
    if math.isinf(a) or math.isinf(b):
        return a != b
    return abs(a - b) > ROUNDING * max(abs(a), abs(b)) + 1e-11
