"""Submit the job of a preflight, wait for it, and return its result.

Before sbatch is called, preflight.json contains the job's unique name. A later call finds the job of a call
that was killed, and waits for it instead of submitting another job.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BenchError, UnwritableError, unwritable
from ..jobs.outcome import JobStatus, log_tail
from ..jobs.slurm.client import (
    BatchJob,
    Slurm,
    SlurmError,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
)
from ..jobs.slurm.job_states import queue_statuses
from ..jobs.slurm.parsing import NodeGroup
from ..jobs.slurm.scheduler import requested_partitions
from ..render import PREFLIGHT_LIMIT_S
from ..study.files import write_atomically
from ..study.layout import PreflightFolder, RunFolder
from ..study.ledger import RunState, now, submit_lock
from ..study.preflight import last_folder, next_folder, read_preflight, read_result, write_preflight
from ..units import human_duration

_POLL_S = 1.0
#: The files of a job may appear on this machine some seconds after the job has left the queue.
_FILES_WAIT_S = 10.0
#: Time after a job's time limit at which the job has certainly ended.
_END_WAIT_S = 90.0
#: A result that nobody has read is used if it is younger than this.
_RECENT_S = 600.0


class PreflightError(BenchError):
    """The nodes could not be checked."""


@dataclass
class PreflightJob:
    """A preflight to be performed by Slurm.

    ``root`` contains the folders of preflights. ``text`` is the script. ``nodes`` is the value of sbatch's
    --nodes. ``provides_python`` means that the script's set-up lines choose the Python.
    """

    root: Path
    text: str
    nodes: str
    threshold: float
    timeout_s: float
    provides_python: bool
    say: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        own = {} if self.provides_python else {"BENCH_PYTHON": sys.executable}
        self.slurm = Slurm(environment={**os.environ, **own})

    def perform(
        self, record: Callable[[dict[str, Any]], None] = lambda result: None
    ) -> tuple[PreflightFolder, dict[str, Any]]:
        """Submit the job unless one is in progress, wait for it, and return its folder and result.

        ``record`` is called with the result. If this process is killed before that, the next call of this
        method finds the result.

        Raises:
            PreflightError: the nodes could not be checked; the message contains the reason.
        """
        try:
            folder, job_id = self._begin()
            try:
                result = self._wait(folder, job_id)
            except (KeyboardInterrupt, PreflightError):
                with suppress(SlurmError):
                    self.slurm.cancel([job_id])
                _conclude(folder)
                raise
        except SlurmError as error:
            raise PreflightError(error.message, remedy=error.remedy) from None
        record(result)
        _conclude(folder)
        return folder, result

    def _begin(self) -> tuple[PreflightFolder, str]:
        """Return the folder and the job id of the preflight in progress, else of a new preflight."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from None
        with self._lock() as lock:
            if (known := self._in_progress()) is not None:
                return known
            return self._submit(lock)

    def _lock(self) -> Any:
        return submit_lock(self.root / "preflight.lock", wait_s=5.0)

    def _in_progress(self) -> tuple[PreflightFolder, str] | None:
        """Return the preflight that an earlier call submitted, if nobody has read its result."""
        folder = last_folder(self.root)
        content = {} if folder is None else read_preflight(folder)
        if folder is None or not content or content.get("concluded_at"):
            return None
        if (folder.result.is_file()) and time.time() - folder.result.stat().st_mtime > _RECENT_S:
            _conclude(folder)
            return None
        job_id = content.get("job_id") or self._find(content["job_name"])
        if job_id is None:  # sbatch was not called, or did not submit the job
            _conclude(folder)
            return None
        write_preflight(folder, {**content, "job_id": job_id})
        self.say(f"job {job_id} of an earlier `bench preflight` has no result yet: waiting for it")
        return folder, job_id

    def _find(self, job_name: str) -> str | None:
        rows = self.slurm.queue(names=[job_name])
        return rows[0].key.job if rows else None

    def _submit(self, lock: int) -> tuple[PreflightFolder, str]:
        folder = next_folder(self.root)
        write_atomically(folder.script, self.text, private=True)
        name = f"preflight.{secrets.token_hex(4)}"
        content = {"schema": 1, "job_name": name, "job_id": None, "nodes": self.nodes, "submitted_at": now()}
        write_preflight(folder, content)
        job = BatchJob(
            script=folder.script,
            job_name=name,
            output=folder.out.absolute(),
            error=folder.err.absolute(),
            arguments=[str(folder.path.absolute()), f"{self.threshold:g}"],
            options=[f"--nodes={self.nodes}"],
        )
        try:
            job_id = self.slurm.submit(job, pass_fds=(lock,))
        except SubmissionUncertainError as lost:
            if (found := self.slurm.find_uncertain(name)) is None:
                raise lost
            job_id = found
        except SlurmRefusedError as refusal:
            _conclude(folder)
            what = f"Slurm does not accept the preflight's job on {self.nodes} nodes: {refusal.output}"
            raise PreflightError(what, remedy="use fewer nodes (--nodes), or correct the matrix") from None
        except SlurmError:
            _conclude(folder)
            raise
        write_preflight(folder, {**content, "job_id": job_id})
        self.say(
            f"preflight: job {job_id} on {self.nodes} nodes, for at most {human_duration(PREFLIGHT_LIMIT_S)}"
        )
        return folder, job_id

    def _wait(self, folder: PreflightFolder, job_id: str) -> dict[str, Any]:
        """Wait for the result of a job."""
        start_by = time.monotonic() + self.timeout_s
        end_by: float | None = None
        while True:
            if (result := read_result(folder)) is not None:
                return result
            job = self._status(job_id)
            if job is not None and job.state is RunState.QUEUED:
                self._check_queued(job, job_id, start_by)
            elif job is None or job.state.ended:
                return self._last_result(folder, job_id, job)
            elif end_by is None:
                end_by = time.monotonic() + PREFLIGHT_LIMIT_S + _END_WAIT_S
            elif time.monotonic() > end_by:
                raise PreflightError(f"job {job_id} did not end at its time limit", remedy="see squeue")
            time.sleep(_POLL_S)

    def _status(self, job_id: str) -> JobStatus | None:
        """Return the state of a job, or None if Slurm no longer knows the job.

        Wait for Slurm if necessary.
        """
        while True:
            try:
                return queue_statuses(self.slurm.queue([job_id])).get(job_id)
            except SlurmUnavailableError as absent:
                if absent.permanent:
                    raise
                time.sleep(5 * _POLL_S)

    def _check_queued(self, job: JobStatus, job_id: str, start_by: float) -> None:
        if job.stuck:
            what = f"job {job_id} {job.reason}"
            raise PreflightError(what, remedy="the job was cancelled; use fewer nodes (--nodes)")
        if time.monotonic() > start_by:
            what = f"job {job_id} did not start within {human_duration(self.timeout_s)}: {job.reason}"
            remedy = "the job was cancelled; use fewer nodes (--nodes), or wait longer (--timeout)"
            raise PreflightError(what, remedy=remedy)

    def _last_result(self, folder: PreflightFolder, job_id: str, job: JobStatus | None) -> dict[str, Any]:
        """Return the result of a job that has ended; raise the reason if it has none."""
        deadline = time.monotonic() + _FILES_WAIT_S
        while time.monotonic() < deadline:
            if (result := read_result(folder)) is not None:
                return result
            time.sleep(_POLL_S)
        words = _reason(folder) or (job.reason if job is not None else "") or "it left no result"
        raise PreflightError(f"job {job_id} could not check the nodes: {words}", remedy=f"see {folder.err}")


def nodes_to_check(groups: Sequence[NodeGroup], text: str, *, largest: int | None) -> str:
    """Return a range of node counts for sbatch's --nodes, from which Slurm takes as many nodes as are free.

    At most twice ``largest`` nodes (those of the largest run) are checked, which leaves spare nodes without
    occupying a large cluster. If ``largest`` is None, all idle nodes are checked.
    """
    partitions = requested_partitions(groups, text).values()
    in_service = max((sum(g.nodes for g in own if g.in_service) for own in partitions), default=0)
    idle = max((sum(g.nodes for g in own if g.state.startswith("idle")) for own in partitions), default=0)
    if largest is None:
        low, high = min(2, in_service), idle or in_service
    else:
        low, high = min(largest, in_service or largest), min(2 * largest, in_service or largest)
    return f"{low}-{high}" if low < high else str(max(1, low))


def _reason(folder: PreflightFolder) -> str:
    """Return the line of job.err that says why a job failed, or ``""`` if there is none."""
    lines = [line.strip() for line in log_tail(RunFolder(folder.path).err) if line.strip()]
    ours = [line.partition("bench: error: ")[2] for line in lines if "bench: error: " in line]
    return (ours or lines or [""])[-1 if not ours else 0]


def _conclude(folder: PreflightFolder) -> None:
    """Record that a preflight has ended and its result was read, or that the preflight has no job."""
    content = read_preflight(folder)
    with suppress(UnwritableError):
        write_preflight(folder, {**content, "concluded_at": now()})
