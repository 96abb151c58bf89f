"""What a run's folder says about how it ended, whoever ran it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bench.executors.base import Outcome
from bench.layout import METRICS_COLUMNS, RunFolder, read_json
from bench.ledger import RunState
from bench.matrix.cell import Cell

_TAIL_BYTES = 20_000

#: srun's words for the signals that end a task from outside, or by a fault of its own.
_SIGNALS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
_SRUN_TASK = re.compile(rf"srun: error: (\S+): tasks? (\S+): ({'|'.join(_SIGNALS)})")
#: From here on it is Slurm that ends tasks, because one had ended badly.
_SRUN_ENDS_ALL = re.compile(r"srun: .*Terminating StepId|srun: Job step aborted|srun: Force Terminated")
_TORCHRUN_RANK = re.compile(r"host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: -(\d+) ")


@dataclass(frozen=True)
class ProvisionalEnd:
    """What the job itself could still note in end.json: its exit code, and when (None: nothing)."""

    exit_code: int | None = None
    written: str | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> ProvisionalEnd:
        """Read end.json; a file that is absent, torn or of another shape says nothing."""
        end = read_json(folder.end)
        if not isinstance(end, dict):
            return cls()
        code, written = end.get("exit_code"), end.get("time")
        known = isinstance(code, int) and not isinstance(code, bool)
        return cls(code if known else None, written if isinstance(written, str) else None)

    @property
    def time(self) -> datetime | None:
        """When it was written."""
        try:
            moment = datetime.fromisoformat(self.written or "")
        except ValueError:
            return None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


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


def killed_rank(folder: RunFolder, launcher: str) -> str:
    """Return who was killed by a signal, as the launcher's words in job.err tell it; empty for nobody.

    To Slurm's accounting a killed and an aborted rank look alike. A killed rank says nothing
    itself, and the others only say that they lost it.
    """
    text = "\n".join(_tail(folder.err))
    before = _SRUN_ENDS_ALL.split(text, maxsplit=1)[0]
    lost = "lost the connection to another rank" in text
    if found := _SRUN_TASK.search(before) or (_SRUN_TASK.search(text) if lost else None):
        host, tasks, word = found.groups()
        many = "s" if re.search(r"[-,]", tasks) else ""
        was = "were" if many else "was"
        who = f"rank{many} {tasks} on {host}" if launcher == "srun" else f"the torchrun agent on {host}"
        return f"{who} {was if launcher == 'srun' else 'was'} killed by {_SIGNALS[word]}"
    for host, rank, number in _TORCHRUN_RANK.findall(text):
        if int(number) != signal.SIGTERM:  # that is how torchrun ends the others
            return f"rank {rank} on {host} was killed by {_signal_name(int(number))}"
    return ""


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
    return f"rank {failure['rank']} was killed by {_signal_name(-int(failure['exit_code']))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
