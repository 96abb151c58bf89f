"""Read what the logs of a run say about its end: messages of srun, torchrun, NCCL and the workload."""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddp_scaling_bench.files import read_json, regular_file
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.failures import FAILURES, Failure, NoStep
from ddp_scaling_bench.measure.nccl_errors import NcclError, logged_nccl_errors
from ddp_scaling_bench.run_folder import RunFolder

from ..study.found import read_findings
from ..study.reasons import ExitedRank, KilledRank, Said, StalledRanks
from .slurm.messages import SIGNALS, TASK_EXITED, TASK_KILLED, TASKS_ENDED, search

_TAIL_BYTES = 20_000
#: The first error is at the start of a log: torch prints 5 kB for each rank that then loses its connection.
_HEAD_BYTES = 1_000_000
_TORCHRUN_RANK = re.compile(r"host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: -(\d+) ")
_TORCHRUN_EXIT = re.compile(
    r"Root Cause .*\n.*\n.*\n *host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: (\d+) "
)
#: The start of an error of a script or of a rank. What follows it is only shown.
_WORKLOAD_ERROR = "bench: error: "
#: Lines with "Error" that are never the cause. torchrun raises ChildFailedError after its ranks have printed
#: their own errors. torch's C++ stack contains ``c10::Error``. NCCL's errors are read by
#: :mod:`ddp_scaling_bench.measure.nccl_errors`.
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


def logged_error(folder: RunFolder) -> tuple[Finding, ...]:
    """Return the workload's first error message, else the last error in the logs, and NCCL's error.

    NCCL's error replaces the last error, unless it is probably an effect. Without any error, return
    torchrun's report.
    """
    last, of_torchrun = tuple[Finding, ...](), tuple[Finding, ...]()
    for path in (folder.err, folder.out):
        lines = log_tail(path)
        for line in map(str.strip, lines):
            if line and line[0] not in "=-[" and "Error" in line and not _NOT_A_CAUSE.search(line):
                last = (Said(text=line, source=path.name),)
        if found := _TORCHRUN_EXIT.search("\n".join(lines)):
            host, rank, code = found.groups()
            one = ExitedRank(host=host, ranks=rank, exit_code=int(code), by_torchrun=True)
            of_torchrun = of_torchrun or (one,)
    reported, of_nccl = _workload_error(folder), logged_nccl_errors(_log_lines(folder))
    if not of_nccl or _contain(reported, of_nccl):
        return reported or last or of_torchrun
    return (*(reported or (last if of_nccl[0].is_effect else ())), _of_nccl(of_nccl[0]))


def nccl_error(folder: RunFolder, reported: tuple[Finding, ...] = ()) -> tuple[Finding, ...]:
    """Return the error that NCCL or torch's watchdog logged, unless ``reported`` contains one.

    The watchdog aborts its process, whose end is then that of a process killed by SIGABRT.
    """
    found = logged_nccl_errors(_log_lines(folder))
    return () if not found or _contain(reported, found) else (_of_nccl(found[0]),)


def _of_nccl(error: NcclError) -> Said:
    return Said(text=str(error), source="NCCL")


def _contain(reported: tuple[Finding, ...], of_nccl: list[NcclError]) -> bool:
    known = {one.nccl for one in reported if isinstance(one, Failure)}
    return not known.isdisjoint(of_nccl)


def _log_lines(folder: RunFolder) -> list[str]:
    return [line for path in (folder.err, folder.out) for line in log_tail(path, head=_HEAD_BYTES)]


def recorded_failures(folder: RunFolder) -> list[Failure]:
    """Return why ranks failed, as they wrote it: the effects of other failures last, else the first first.

    Failures without a time are behind those with one. A training that took no step did not fail by that.
    """
    found = []
    for path in folder.path.glob(FAILURES.format("*")):
        content = read_json(path) or {}
        moment = content.get("time")
        written = (one for one in read_findings(content.get("findings")) if isinstance(one, Failure))
        own = (one for one in written if not isinstance(one, NoStep))
        when = moment if type(moment) in (int, float) and moment == moment else math.inf
        found += [(bool(one.effect), when, one) for one in own]
    return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]


def first_failure(folder: RunFolder, reasons: Iterable[Finding]) -> Failure | None:
    """Return the failure that comes first: what the heartbeats showed, else what ranks wrote, if anything."""
    stalled = (one for one in reasons if isinstance(one, StalledRanks) and one.is_cause)
    return next(itertools.chain(stalled, recorded_failures(folder)), None)


def _workload_error(folder: RunFolder) -> tuple[Finding, ...]:
    """Return why a rank failed first, or else the first error that a program of bench logged, if any."""
    if known := recorded_failures(folder):
        return (known[0],)
    lines = _log_lines(folder)
    found = (line.partition(_WORKLOAD_ERROR)[2].strip() for line in lines if _WORKLOAD_ERROR in line)
    return tuple(Said(text=text, source="bench") for text in itertools.islice(filter(None, found), 1))


def reported_errors(folder: RunFolder) -> tuple[Finding, ...]:
    """Return the workload's error, which can name the missing rank after a time-out, and NCCL's error."""
    reported = _workload_error(folder)
    return (*reported, *nccl_error(folder, reported))


def _killed_by_torchrun(text: str) -> KilledRank | None:
    """Return the rank that a signal killed, according to torchrun's report."""
    for host, rank, number in _TORCHRUN_RANK.findall(text):
        if int(number) != signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
            return KilledRank(host=host, ranks=rank, signal=signal_name(int(number)))
    return None


def _process(launcher: str, tasks: str) -> dict[str, Any]:
    """Return which process the tasks of srun were: ranks, or the one that started the ranks of the node."""
    return {"srun": {"ranks": tasks}, "own": {"of": "command"}}.get(launcher, {})


def killed_rank(folder: RunFolder, launcher: str) -> KilledRank | None:
    """Return the rank that a signal killed, from the launcher's messages in job.err, or None.

    A killed rank logs no error, and a scheduler does not distinguish killed from aborted ranks.
    """
    text = "\n".join(log_tail(folder.err))
    before = _until_srun_ends_all(text)
    was_lost = any(one.effect == "lost" for one in recorded_failures(folder))
    if found := search(TASK_KILLED, text if was_lost else before):
        host, tasks, name = found.groups()
        return KilledRank(host=host, **_process(launcher, tasks), signal=SIGNALS[name])
    return _killed_by_torchrun(text)


def exited_rank(folder: RunFolder, launcher: str) -> ExitedRank | None:
    """Return the rank that exited first, from srun's messages in job.err, or None if there are none.

    When a rank fails, srun ends the other ranks with SIGTERM, and sacct shows only SIGTERM for the step.
    """
    found = search(TASK_EXITED, _until_srun_ends_all("\n".join(log_tail(folder.err))))
    if found is None:
        return None
    host, tasks, code = found.groups()
    return ExitedRank(host=host, **_process(launcher, tasks), exit_code=int(code))


def _until_srun_ends_all(text: str) -> str:
    end = search(TASKS_ENDED, text)
    return text[: end.start()] if end else text
