"""What a run's folder says about how it ended, whoever ran it."""

from __future__ import annotations

import csv
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.executors.base import Outcome
from bench.executors.command_metrics import collect
from bench.matrix.cell import Cell
from bench.slurm.accounting import JobStatus
from bench.slurm.parsing import AccountingRow
from bench.slurm.states import FailureClass
from bench.study.files import read_json
from bench.study.layout import METRICS_COLUMNS, RunFolder
from bench.study.ledger import RunState

_TAIL_BYTES = 20_000
_NO_NUMBERS = ("nan", "inf", "-inf")
#: A batch script that cannot write end.json ends with this code (EX_IOERR of sysexits.h).
EXIT_UNWRITABLE = 74

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
_SRUN_EXIT = re.compile(r"srun: error: (\S+): tasks? (\S+): Exited with exit code (\d+)")
#: From here on it is Slurm that ends tasks, because one had ended badly.
_SRUN_ENDS_ALL = re.compile(r"srun: .*Terminating StepId|srun: Job step aborted|srun: Force Terminated")
_TORCHRUN_RANK = re.compile(r"host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: -(\d+) ")
_TORCHRUN_EXIT = re.compile(
    r"Root Cause .*\n.*\n.*\n *host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: (\d+) "
)
_OWN_ERROR = "bench: error: "
#: torchrun's own error, after whatever its ranks have said: that one failed.
_TORCHRUNS_OWN = "ChildFailedError"


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
        lines = folder.metrics_csv.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not lines or tuple(lines[0].split(",")) != METRICS_COLUMNS:
        return None
    return sum(1 for line in lines[1:] if line.count(",") == len(METRICS_COLUMNS) - 1)


def incomplete(folder: RunFolder, cell: Cell) -> str:
    """Return what a run that ended well still lacks; empty where it lacks nothing.

    The numbers of a command that does not record them itself are collected here.
    """
    if cell.command is not None:
        return _incomplete_command(folder, cell)
    epochs, wanted = metrics_epochs(folder), int(cell.workload["epochs"])
    if epochs is None:
        return (
            "ended without metrics.csv"
            if not folder.metrics_csv.exists()
            else "metrics.csv has other columns"
        )
    if epochs < wanted:
        return f"metrics.csv holds {epochs} of {wanted} epochs"
    return ""


def _incomplete_command(folder: RunFolder, cell: Cell) -> str:
    source = cell.metrics.get("source")
    if source == "none":
        return ""
    if source != "recorder":
        return collect(folder, cell)
    epochs = metrics_epochs(folder)
    if epochs is None and folder.metrics_csv.exists():
        return "metrics.csv has other columns"
    if epochs:
        return _no_number(folder)
    env = read_json(folder.env)
    warnings = env.get("warnings") if isinstance(env, dict) else None
    for words in warnings or []:
        if str(words).startswith("no window was recorded"):
            return str(words)
    what = "the command recorded nothing: use bench.record in it"
    return f"{what}, or say in workload.metrics where its numbers are"


def _no_number(folder: RunFolder) -> str:
    """Return in which epoch a recorder was told a loss that is no number; empty if in none."""
    rows = csv.DictReader(folder.metrics_csv.read_text(encoding="utf-8", errors="replace").splitlines())
    losses = ((row["epoch"], row["train_loss"]) for row in rows)
    return next(
        (f"the loss became {loss} in epoch {epoch}" for epoch, loss in losses if loss in _NO_NUMBERS), ""
    )


def said_error(folder: RunFolder) -> str:
    """Return the workload's own first error line, else the log's last telling one, else torchrun's."""
    last, torchruns = "", ""
    for path in (folder.err, folder.out):
        lines = tail(path)
        for line in lines:
            words = line.strip()
            if words and words[0] not in "=-[" and "Error" in words and _TORCHRUNS_OWN not in words:
                last = words
        if found := _TORCHRUN_EXIT.search("\n".join(lines)):
            host, rank, code = found.groups()
            torchruns = torchruns or f"rank {rank} on {host} ended with exit code {code}"
    return own_error(folder) or last or torchruns


def own_error(folder: RunFolder) -> str:
    """Return the first error line of the workload, or of the recorder in a user's script, if there is one."""
    lines = (line for path in (folder.err, folder.out) for line in tail(path))
    return next((line.partition(_OWN_ERROR)[2].strip() for line in lines if _OWN_ERROR in line), "")


def ended_from_outside(folder: RunFolder, reason: str) -> str:
    """Return why a run was ended, and what it told of itself then: who did not come, at a time limit."""
    return "; ".join(filter(None, (reason, own_error(folder))))


def unwritable_folder(end: ProvisionalEnd, rows: Sequence[AccountingRow]) -> str:
    """Return what it means that the job's script could not note its end; empty where it could.

    Its exit code is then all that is left of it: what went wrong was to be written to the same disk.
    """
    codes = [row.exit_code for row in rows if row.key.step is None]
    if end.exit_code is None and EXIT_UNWRITABLE in codes[-1:]:
        return "the run's folder could not be written when the job ended: the disk is full or read-only"
    return ""


def killed_rank(folder: RunFolder, launcher: str) -> str:
    """Return who was killed by a signal, as the launcher's words in job.err tell it; empty for nobody.

    To Slurm's accounting a killed and an aborted rank look alike. A killed rank says nothing
    itself, and the others only say that they lost it.
    """
    text = "\n".join(tail(folder.err))
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


def exited_rank(folder: RunFolder, launcher: str) -> str:
    """Return which rank exited first, as srun's words in job.err tell it; empty for nobody.

    srun ends the others then, and hands on the code of the worst: to accounting, SIGTERM ended the step.
    """
    before = _SRUN_ENDS_ALL.split("\n".join(tail(folder.err)), maxsplit=1)[0]
    found = _SRUN_EXIT.search(before)
    if found is None:
        return ""
    host, tasks, code = found.groups()
    ranks = f"rank{'s' if re.search(r'[-,]', tasks) else ''} {tasks}"
    return f"{ranks if launcher == 'srun' else 'the torchrun agent'} on {host} exited with code {code}"


def tail(path: Path) -> list[str]:
    """Return the last lines of a log; none where it cannot be read."""
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


# Slurm's verdict on a job that has ended, together with what the run's folder says.


def judged(
    folder: RunFolder,
    cell: Cell,
    known: JobStatus,
    end: ProvisionalEnd,
    rows: Sequence[AccountingRow] = (),
) -> Outcome:
    """Return Slurm's verdict on an ended job together with what the run's folder says."""
    if known.state is RunState.COMPLETED:
        lack = incomplete(folder, cell)
        if lack:
            reason = "; ".join(filter(None, (f"{lack}, although Slurm says COMPLETED", known.reason)))
            return Outcome(RunState.FAILED, reason, str(FailureClass.BAD_EXIT), 0)
        return Outcome(RunState.COMPLETED, known.reason, None, 0)
    # sacct shows codes above 128 less 128: what the script itself noted is better.
    exit_code = end.exit_code or known.exit_code
    failure_class = known.failure_class
    if failure_class in (FailureClass.BAD_EXIT, FailureClass.KILLED, None):
        said = killed_rank(folder, cell.launcher)
        failure_class = FailureClass.KILLED if said else failure_class
        exited = "" if said else exited_rank(folder, cell.launcher)
        if exited:  # what ended the others is no cause
            failure_class = FailureClass.BAD_EXIT
        said = said or said_error(folder) or exited or unwritable_folder(end, rows)
        slurms = known.reason.replace(f"exit code {known.exit_code} or {exit_code}", f"exit code {exit_code}")
        return ended(known.state, "; ".join(filter(None, (said, slurms))), failure_class, exit_code)
    return ended(known.state, ended_from_outside(folder, known.reason), failure_class, exit_code)


def ended(state: RunState, reason: str, why: FailureClass | None, exit_code: int | None) -> Outcome:
    """Return the outcome of a job that did not complete, or of one that nobody could judge."""
    return Outcome(state, reason, None if why is None else str(why), exit_code)


def last_end(folder: RunFolder, known: JobStatus) -> ProvisionalEnd:
    """Return what the job noted of its end; not what a part noted after which Slurm queued it again."""
    end = ProvisionalEnd.read(folder)
    if known.restarts and known.started and end.time and end.time <= known.started:
        return ProvisionalEnd()
    return end


def age_s(moment: datetime) -> float:
    """Return the seconds since a moment of UTC."""
    return (datetime.now(UTC) - moment).total_seconds()


def iso(time_utc: datetime | None) -> str | None:
    """Return a time as run.json has it."""
    return None if time_utc is None else time_utc.isoformat().replace("+00:00", "Z")
