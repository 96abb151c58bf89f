"""Read what the logs of a run say about its end: messages of srun, torchrun, NCCL and the workload."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from ..measure.nccl_errors import LOST_CONNECTION, logged_nccl_errors
from ..study.files import regular_file
from ..study.layout import RunFolder
from .slurm.messages import SIGNALS, TASK_EXITED, TASK_KILLED, TASKS_ENDED, search

_TAIL_BYTES = 20_000
#: The first error is at the start of a log: torch prints 5 kB for each rank that then loses its connection.
_HEAD_BYTES = 1_000_000
_TORCHRUN_RANK = re.compile(r"host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: -(\d+) ")
_TORCHRUN_EXIT = re.compile(
    r"Root Cause .*\n.*\n.*\n *host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: (\d+) "
)
_WORKLOAD_ERROR = "bench: error: "
#: Lines with "Error" that are never the cause. torchrun raises ChildFailedError after its ranks have printed
#: their own errors. torch's C++ stack contains ``c10::Error``. :mod:`bench.measure.nccl_errors` reads NCCL's
#: errors.
_NOT_A_CAUSE = re.compile(
    r"ChildFailedError|^frame #\d|^Exception raised from \w|NCCL error|\bnccl\w+Error: "
)


def joined(*reasons: str) -> str:
    """Join the reasons that are not empty."""
    return "; ".join(filter(None, reasons))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(path: Path, *, head: int = 0) -> list[str]:
    """Return the lines in the first ``head`` bytes and at the end of a log, or ``[]`` without a log."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            begin = file.read(head)
            file.seek(max(len(begin), file.seek(0, 2) - _TAIL_BYTES))
            return (begin + file.read()).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def error_line(folder: RunFolder) -> str:
    """Return the workload's first error message, else the last error in the logs, and NCCL's error.

    NCCL's error replaces the last error, unless it is probably an effect. Without any error, return
    torchrun's report.
    """
    last, of_torchrun = "", ""
    for path in (folder.err, folder.out):
        lines = log_tail(path)
        for line in map(str.strip, lines):
            if line and line[0] not in "=-[" and "Error" in line and not _NOT_A_CAUSE.search(line):
                last = line
        if found := _TORCHRUN_EXIT.search("\n".join(lines)):
            host, rank, code = found.groups()
            of_torchrun = of_torchrun or f"rank {rank} on {host} ended with exit code {code}"
    reported, of_nccl = _workload_error(folder), logged_nccl_errors(_log_lines(folder))
    if not of_nccl or any(str(one) in reported for one in of_nccl):
        return reported or last or of_torchrun
    return joined(reported or (last if of_nccl[0].is_effect else ""), str(of_nccl[0]))


def nccl_error(folder: RunFolder, reported: str = "") -> str:
    """Return the error that NCCL or torch's watchdog logged, or ``""`` if ``reported`` contains one.

    The watchdog aborts its process, whose end is then that of a process killed by SIGABRT.
    """
    found = [str(one) for one in logged_nccl_errors(_log_lines(folder))]
    return "" if any(one in reported for one in found) else next(iter(found), "")


def _log_lines(folder: RunFolder) -> list[str]:
    return [line for path in (folder.err, folder.out) for line in log_tail(path, head=_HEAD_BYTES)]


def _workload_error(folder: RunFolder) -> str:
    """Return the first error that the workload or the recorder logged, or ``""`` if there is none."""
    lines = _log_lines(folder)
    found = (line.partition(_WORKLOAD_ERROR)[2].strip() for line in lines if _WORKLOAD_ERROR in line)
    return next(found, "")


def with_workload_error(folder: RunFolder, reason: str) -> str:
    """Append the workload's error, which can name the missing rank after a time-out, and NCCL's error."""
    reported = _workload_error(folder)
    return joined(reason, reported, nccl_error(folder, reported))


def killed_by_torchrun(text: str) -> str:
    """Describe the rank that a signal killed, from torchrun's report; return ``""`` if there is none."""
    for host, rank, number in _TORCHRUN_RANK.findall(text):
        if int(number) != signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
            return f"rank {rank} on {host} was killed by {signal_name(int(number))}"
    return ""


def killed_rank(folder: RunFolder, launcher: str) -> str:
    """Describe the rank that a signal killed, from the launcher's messages in job.err; return ``""`` if none.

    A killed rank logs no error, and a scheduler does not distinguish killed from aborted ranks.
    """
    text = "\n".join(log_tail(folder.err))
    before = _until_srun_ends_all(text)
    if found := search(TASK_KILLED, text if LOST_CONNECTION in text else before):
        host, tasks, name = found.groups()
        several = re.search(r"[-,]", tasks) is not None
        ranks = f"ranks {tasks} on {host} were" if several else f"rank {tasks} on {host} was"
        who = ranks if launcher == "srun" else f"the torchrun agent on {host} was"
        return f"{who} killed by {SIGNALS[name]}"
    return killed_by_torchrun(text)


def exited_rank(folder: RunFolder, launcher: str) -> str:
    """Describe the rank that exited first, from srun's messages in job.err, or ``""`` if there are none.

    When a rank fails, srun ends the other ranks with SIGTERM, and sacct shows only SIGTERM for the step.
    """
    found = search(TASK_EXITED, _until_srun_ends_all("\n".join(log_tail(folder.err))))
    if found is None:
        return ""
    host, tasks, code = found.groups()
    ranks = f"rank{'s' if re.search(r'[-,]', tasks) else ''} {tasks}"
    return f"{ranks if launcher == 'srun' else 'the torchrun agent'} on {host} exited with code {code}"


def _until_srun_ends_all(text: str) -> str:
    end = search(TASKS_ENDED, text)
    return text[: end.start()] if end else text
