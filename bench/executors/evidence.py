"""What a run's folder says about how it ended, whoever ran it."""

from __future__ import annotations

import signal
from typing import Any

from bench.executors.base import Outcome
from bench.layout import METRICS_COLUMNS, RunFolder, read_json
from bench.ledger import RunState
from bench.matrix.cell import Cell

_TAIL_BYTES = 20_000


def metrics_epochs(folder: RunFolder) -> int | None:
    """Return how many whole epochs metrics.csv holds; None where it is absent or not ours."""
    try:
        lines = folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not lines or tuple(lines[0].split(",")) != METRICS_COLUMNS:
        return None
    return sum(1 for line in lines[1:] if line.count(",") == len(METRICS_COLUMNS) - 1)


def incomplete(folder: RunFolder, cell: Cell) -> str:
    """Return what a run that ended well still lacks; empty where it lacks nothing."""
    epochs, wanted = metrics_epochs(folder), int(cell.workload["epochs"])
    if epochs is None:
        return "ended without metrics.csv" if not folder.metrics.exists() else "metrics.csv has other columns"
    if epochs < wanted:
        return f"metrics.csv holds {epochs} of {wanted} epochs"
    return ""


def said_error(folder: RunFolder) -> str:
    """Return the workload's own first error line, else the log's last telling one."""
    own, last = "", ""
    for path in (folder.err, folder.out):
        for line in _tail(path):
            words = line.strip()
            if "bench: error: " in words and not own:
                own = words.partition("bench: error: ")[2]
            if words and words[0] not in "=-[" and "Error" in words:
                last = words
    return own or last


def _tail(path: Any) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def outcome_of(folder: RunFolder, cell: Cell, exit_code: int | None) -> Outcome:
    """Return how a run ended, from its exit code, end.json, metrics and error lines."""
    if exit_code == 0:
        lack = incomplete(folder, cell)
        if lack:
            return Outcome(RunState.FAILED, lack, "bad-exit", exit_code)
        return Outcome(RunState.COMPLETED, exit_code=0)
    end = read_json(folder.end) or {}
    failures = end.get("failures") or []
    # A rank that was killed could say nothing; the others only say that they lost it.
    if failures and isinstance(failures[0].get("exit_code"), int) and failures[0]["exit_code"] < 0:
        return Outcome(RunState.FAILED, killed_words(failures[0]), "killed", exit_code)
    reason = said_error(folder)
    code = f"exit code {exit_code}" if exit_code is not None else "no exit code"
    return Outcome(RunState.FAILED, reason or code, "bad-exit", exit_code)


def killed_words(failure: dict[str, Any]) -> str:
    """Return ``rank 1 was killed by SIGKILL``."""
    number = -int(failure["exit_code"])
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"rank {failure['rank']} was killed by {name}"
