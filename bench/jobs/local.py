"""Execute runs on this machine. Each run is a detached process, which goes on if `bench submit` ends.

The process executes the cell's script with the run's folder and the job's name as arguments. The script
enforces the time limit, ends all processes of the run, and writes end.json. The id of a job is its process:
host, process id and start time. A job is alive as long as a process has its name: the script as an argument,
the other processes of the run as ``BENCH_JOB`` in their environment.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_scaling_bench.errors import BenchError, UnavailableError

from ..extras import install_line, missing_packages
from ..matrix.cell import Run
from ..study.ledger import RunState
from .contract import Job, Scheduler, Status

#: Executes a command with its output in job.out and job.err of a folder, which is the first argument.
_START = 'exec "$@" >>"$0/job.out" 2>>"$0/job.err"'
#: Variables of a launcher or another run, if `bench submit` itself is part of one.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "BENCH_JOB",
)


class LocalScheduler(Scheduler):
    """Start one process per run on this machine."""

    slots = 1
    poll_s = 0.2

    def check(self, runs: Sequence[Run]) -> list[str]:
        """Raise BenchError if packages that a command needs are missing here."""
        needed = {tuple(cell.packages): cell for cell in (self.study.cells[run.cell_id] for run in runs)}
        for packages, cell in needed.items():
            missing = missing_packages(packages)
            if not missing or self.study.plan.get("setup"):  # set-up lines can activate another Python
                continue
            what = f"{cell.program} needs {' and '.join(missing)}, which {sys.executable} does not find"
            remedy = f"run {install_line('train')}, or activate an environment with PyTorch in cluster.setup"
            raise BenchError(what, remedy=remedy)
        return []

    def submit(self, job: Job) -> str:
        """Start the process of a job in a session of its own; return its id."""
        env = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        # The command runs with this Python interpreter, unless cluster.setup provides another.
        env["BENCH_PYTHON"] = sys.executable
        words = ["bash", "-c", _START, str(job.folder.path.absolute()), *self.process_words(job)]
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        try:
            pid = os.posix_spawnp("bash", words, env, file_actions=[no_input], setsid=True)
        except OSError as error:
            raise UnavailableError(f"bash could not be started: {error.strerror}") from None
        return process_id(pid)

    def process_words(self, job: Job) -> list[str]:
        """Return the command of a job's process. The job's name is one of the words."""
        return ["bash", str(job.script), str(job.folder.path.absolute()), job.name]

    def words(self, job: Job) -> str:
        """Return the command of a job's process for a shell."""
        return shlex.join(self.process_words(job))

    def poll(self, jobs: Mapping[str, str]) -> dict[str, Status]:
        """Find the jobs' processes: by their ids, and if these have ended, by the jobs' names."""
        here = os.uname().nodename
        hosts = here if self.study.scheduler.one_node else ""
        alive = {name: job_id for name, job_id in jobs.items() if _is_alive(job_id)}
        if others := jobs.keys() - alive.keys():
            alive |= _find(others)
        statuses = {}
        for name, job_id in jobs.items():
            host, pid, _ = _parts(job_id)
            if name in alive:
                statuses[name] = Status(job_id=alive[name], state=RunState.RUNNING, hosts=hosts)
            elif host == here:
                statuses[name] = Status(job_id=job_id, state=RunState.UNKNOWN, hosts=hosts)
            elif job_id:
                reason = f"the run is process {pid} on {host}; run `bench status` there"
                statuses[name] = Status(
                    job_id=job_id,
                    state=RunState.UNKNOWN,
                    remark=reason,
                    settled=False,
                    owner=f"host {host}",
                )
        return statuses

    def cancel(self, ids: Sequence[str]) -> None:
        """Send SIGTERM to jobs. Their scripts end the runs, if necessary with SIGKILL after 10 s.

        Raises:
            BenchError: a process belongs to another user.
        """
        for job_id in ids:
            pid = _parts(job_id)[1]
            try:
                if _is_alive(job_id):
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # it may be stopped
            except ProcessLookupError:
                continue
            except PermissionError:
                what = f"process {pid} belongs to another user"
                raise BenchError(what, remedy="only its owner can cancel the run") from None


def process_id(pid: int) -> str:
    """Return the id of a process: host, process id, and start time, because process ids are reused."""
    return f"{os.uname().nodename}:{pid}:{_stat(pid)[1]}"


def _parts(job_id: str) -> tuple[str, int, str]:
    """Return host, process id and start time; the host is ``""`` if ``job_id`` is not an id."""
    host, pid, start = (*job_id.split(":"), "", "", "")[:3]
    return (host, int(pid), start) if pid.isdigit() else ("", 0, "")


def _stat(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start time in clock ticks; both are ``""`` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _is_alive(job_id: str) -> bool:
    host, pid, start = _parts(job_id)
    state, started = _stat(pid) if host == os.uname().nodename else ("", "")
    if state == "Z":
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # if it is a child of this process, it leaves the process table
    return state not in ("", "Z", "X") and started == start


def _find(names: Collection[str]) -> dict[str, str]:
    """Return the ids of living processes by the names that they have, the script's first, then the oldest."""
    found: dict[str | None, tuple[bool, int, str]] = {}
    for process in psutil.process_iter(["cmdline", "environ"]):  # None: not readable
        named = next((word for word in process.info["cmdline"] or () if word in names), None)
        name = named or (process.info["environ"] or {}).get("BENCH_JOB")
        job_id = process_id(process.pid)
        if name in names and _is_alive(job_id):
            candidate = (named is None, int(_parts(job_id)[2]), job_id)
            found[name] = min(candidate, found.get(name, candidate))
    return {str(name): job_id for name, (_, _, job_id) in found.items()}


SCHEDULER = LocalScheduler
