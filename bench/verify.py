"""The checks that people script by hand: did this run really do what it was asked for?

Each check compares what was found with what the plan expected. A run passes when all do.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.layout import METRICS_COLUMNS, RunFolder, read_json

#: Without these a run measured nothing; the other files are extra evidence.
_FILES = ("run.json", "metrics.csv", "ranks.csv", "steps.csv", "env.json")


@dataclass(frozen=True)
class Check:
    """One comparison of what was found with what was expected."""

    name: str
    passed: bool
    found: str
    expected: str

    def as_json(self) -> dict[str, Any]:
        """Return the check for `--json`."""
        return {"check": self.name, "passed": self.passed, "found": self.found, "expected": self.expected}

    def __str__(self) -> str:
        if self.passed:
            return f"ok    {self.name}: {self.found}"
        return f"FAIL  {self.name}: {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Verdict:
    """All checks of one attempt of one run."""

    run_id: str
    folder: Path
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def verify_run(path: Path) -> Verdict:
    """Return the checks of the attempt in ``path``.

    Raises:
        BenchError: no run.json that says what the run was meant to be.
    """
    folder = RunFolder(path)
    run = read_json(folder.run_json)
    if not isinstance(run, dict) or not isinstance(run.get("cell"), dict):
        what = "is not whole" if folder.run_json.exists() else "does not exist"
        raise BenchError(
            f"{folder.run_json}: {what}", remedy="give a run's folder: results/STUDY/runs/RUN/attempt-N"
        )
    return Verdict(str(run.get("run_id", path.name)), path, list(_checks(folder, run)))


def _checks(folder: RunFolder, run: dict[str, Any]) -> Iterator[Check]:
    cell = run["cell"]
    state = str(run.get("state"))
    reason = f" ({run['reason']})" if run.get("reason") else ""
    if isinstance(run.get("cause"), dict):
        reason += f"; cause: {run['cause'].get('cause')}; {run['cause'].get('remedy')}"
    yield Check("state", state == "completed", f"{state}{reason}", "completed")
    missing = [name for name in _FILES if not (folder.path / name).is_file()]
    yield Check(
        "files", not missing, f"missing {', '.join(missing)}" if missing else "all there", ", ".join(_FILES)
    )
    yield from _environment_checks(read_json(folder.env), cell)
    yield from _metrics_checks(folder, cell)


def _environment_checks(env: Any, cell: dict[str, Any]) -> Iterator[Check]:
    env = env if isinstance(env, dict) else {}
    expected = cell["world_size"]
    joined = (env.get("joined") or {}).get("ranks")
    hosts = ", ".join(str(host.get("host")) for host in env.get("hosts") or [])
    found = f"{joined} of {expected}" if joined is not None else f"unknown of {expected}"
    yield Check(
        "ranks joined",
        joined == expected,
        f"{found}{f' on {hosts}' if hosts else ''}",
        f"{expected} of {expected}",
    )
    yield _same("world size", env.get("world_size"), expected)
    yield _same("backend", env.get("backend"), cell["backend"])
    yield _same("nodes", len(env["hosts"]) if env.get("hosts") else None, cell["nodes"])
    yield _same("global batch", env.get("global_batch"), cell["global_batch"])


def _same(name: str, found: Any, expected: Any) -> Check:
    return Check(name, found == expected, "unknown" if found is None else str(found), str(expected))


def _metrics_checks(folder: RunFolder, cell: dict[str, Any]) -> Iterator[Check]:
    columns, rows = _read_metrics(folder.metrics)
    expected = int(cell["workload"]["epochs"])
    yield Check("epochs", len(rows) == expected, str(len(rows)), str(expected))
    if not columns:
        return
    lacking = [name for name in METRICS_COLUMNS if name not in columns]
    yield Check(
        "columns",
        not lacking,
        f"missing {', '.join(lacking)}" if lacking else "all there",
        "the promised ones",
    )
    if rows:
        bad = [
            row.get("epoch", "?") for row in rows if not _is_positive(row.get("throughput_samples_per_sec"))
        ]
        found = f"not a positive number in epoch {', '.join(bad)}" if bad else "positive in every epoch"
        yield Check("throughput", not bad, found, "a positive number in every epoch")
        bad = [row.get("epoch", "?") for row in rows if not _is_finite(row.get("train_loss"))]
        found = f"not finite in epoch {', '.join(bad)}" if bad else "finite in every epoch"
        yield Check("loss", not bad, found, "a finite number in every epoch")
        samples = cell["global_batch"] * int(cell["workload"]["steps_per_epoch"])
        counted = {row.get("samples") for row in rows}
        yield Check(
            "samples",
            counted == {str(samples)},
            " and ".join(sorted(map(str, counted))),
            f"{samples} an epoch",
        )


def _read_metrics(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row and None not in row.values()]
            return list(reader.fieldnames or []), rows
    except OSError:
        return [], []


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _is_finite(text: Any) -> bool:
    return math.isfinite(_number(text))


def _is_positive(text: Any) -> bool:
    return _is_finite(text) and _number(text) > 0
