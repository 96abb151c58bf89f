"""Execute runs on several hosts without Slurm, by starting torchrun on each host over ssh.

The process of a job is this module, ``python -P -m ddp_scaling_bench.start bench.jobs.ssh SCRIPT FOLDER
NAME``. It keeps one ``ssh HOST bash -s`` per host, through which it sends ``slurm_templates/ssh_host.sh`` and
the cell's script, and writes end.json. A host's standard output contains both its answers and the output of
the run. If the process is killed, its connections close, and the hosts end their ranks.

The ranks rendezvous at the first host. If the study's folder is on a file system that all hosts share, rank 0
writes into it, as with Slurm. Otherwise each host writes to a local folder, which is copied at the end.
"""

from __future__ import annotations

import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

import psutil

from ddp_scaling_bench.errors import BenchError, UnwritableError
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.node_counters import merge_nodes
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell, Run
from ..matrix.schema import HOST_ADDRESS, Host
from ..shipped import shipped
from ..study.layout import StudyFolder
from ..study.ledger import now
from ..study.plan_json import PlannedStudy, open_study
from ..study.reasons import ExitCode, LostHost, Said
from .contract import Job
from .local import LocalScheduler, process_id

#: Maximum time from the connection until a host is ready, and until a busy host is free.
READY_S, BUSY_S = 60.0, 20.0
#: After the first failure, errors of the other hosts are awaited this long.
ERRORS_S = 5.0
#: Maximum time in which a host must end a run (it sends SIGKILL to the ranks after 10 s) and disconnect.
STOP_S, LEAVE_S = 25.0, 15.0
#: Interval of heartbeats to the hosts, and time without a heartbeat after which a host ends the run.
HEARTBEAT_S, PATIENCE_S = 10.0, 90
#: Exit code if results could not be copied (EX_IOERR).
NOT_COPIED = 74
#: No password prompts, no terminal, no forwarding (two connections would use the same port). A lost network
#: is detected within a minute. An existing master connection is used, but no master connection is created.
OPTIONS = shlex.split(
    "-T -x -a -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
    " -o ClearAllForwardings=yes -o ControlMaster=no -o RemoteCommand=none -o PermitLocalCommand=no"
)
#: The program is sent on standard input, so that the login shell does not interpret it.
REMOTE = "exec bash -s"


class SshScheduler(LocalScheduler):
    """Start one process per run on this machine, which executes the run on the study's hosts."""

    def check(self, runs: Sequence[Run]) -> list[str]:
        """Raise BenchError if this machine has no ssh client."""
        if shutil.which(ssh_words()[0]) is None:
            what = f"{ssh_words()[0]}: No such file or directory"
            raise BenchError(what, remedy="install an OpenSSH client, or set BENCH_SSH")
        return []

    def process_words(self, job: Job) -> list[str]:
        """Return the command of the process that connects to the hosts."""
        module = [sys.executable, "-P", "-m", "ddp_scaling_bench.start", "bench.jobs.ssh"]
        return [*module, *super().process_words(job)[1:]]


def ssh_words() -> list[str]:
    """Split the ssh command in ``$BENCH_SSH`` (by default ``ssh``) into words."""
    value = os.environ.get("BENCH_SSH") or "ssh"
    try:
        return shlex.split(value)
    except ValueError:
        raise BenchError(f"BENCH_SSH={value}: a quote is not closed", remedy="close the quote") from None


def address_of(host: Host, hosts: Sequence[Host]) -> str:
    """Return the address of a host for the other hosts of a run: of the matrix, or of ssh's configuration."""
    if len(hosts) == 1:
        return "localhost"
    address = host.address
    if address is None:
        words = [*ssh_words(), "-G", host.host]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        settings = dict(line.split(" ", 1) for line in done.stdout.decode().splitlines() if " " in line)
        address = settings.get("hostname")
        if done.returncode or not address:
            raise BenchError(f"ssh does not accept the host {host.host}: {last_lines(done.stderr)}")
    if not HOST_ADDRESS.pattern.fullmatch(address) or address == "localhost" or address.startswith("127."):
        what = f"{host.host} has the address {address}, which other hosts cannot reach"
        raise BenchError(what, remedy=f"use {{host: {host.host}, address: ADDRESS}} in cluster.hosts")
    return address


def last_lines(output: bytes) -> str:
    """Join the last three nonblank lines of ``output`` with semicolons."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])


class Connection:
    """Connection to one host of a run, with the answers of ssh_host.sh on that host.

    Attributes:
        ready: None until the host is ready, then three texts: ``shared`` or ``apart`` (whether the host
            shares the run's folder with this machine), a free port, and the host's name.
        refusal: why the host cannot execute the run, or ``""``.
        busy_with: the name of the run that uses the host, or ``""``.
        code: exit code of the cell's script, or None until the script has ended.
        is_lost: True if the connection ended before the script.
        copied: ``""`` after the host's files were copied, or the reason why not; None before.
    """

    def __init__(self, run: HostedRun, host: str, program: bytes) -> None:
        self.run, self.host = run, host
        self.ready: Sequence[str] | None = None
        self.refusal = self.busy_with = ""
        self.is_lost = False
        self.code: int | None = None
        self.copied: str | None = None
        self._stderr, self._failed = b"", run.failed
        pipe = subprocess.PIPE
        words = [*ssh_words(), *OPTIONS, host, REMOTE]
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
        self._errors = Thread(target=self._read_errors, args=[self._process.stderr], daemon=True)
        self._errors.start()
        Thread(target=self._read_output, args=[self._process.stdout], daemon=True).start()
        self._send(program)

    @property
    def is_over(self) -> bool:
        """True if the run has ended on the host, or the connection was lost."""
        return self.code is not None or self.is_lost

    @property
    def last_lines(self) -> str:
        """Last lines of the remote command's standard error, or ssh's messages if the connection failed."""
        return last_lines(self._stderr) or f"ssh ended with exit code {self._process.poll()}"

    def problem(self) -> str:
        """Return why the host will not execute the run, if it is not ready by now, or ``""``."""
        if self.ready or self.refusal:
            return self.refusal
        what = "cannot be reached" if self.is_lost else f"was not ready within {READY_S:g} s"
        remedy = f"check that `ssh -o BatchMode=yes {self.host} true` works on this machine"
        return f"{self.host} {what}: {self.last_lines}; {remedy}"

    def command(self, words: str) -> None:
        """Send a command to ssh_host.sh."""
        self._send(f"{words}\n".encode())

    def close(self) -> None:
        """Close the connection; the host ends the run. If ssh does not end, kill it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=LEAVE_S if self.is_over else 2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the connection is lost or closed
            self._process.stdin.write(content)
            self._process.stdin.flush()

    def _read_errors(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._stderr = (self._stderr + line)[-4000:]
            self.run.log(2, self.host, line)

    def _read_output(self, stream: IO[bytes]) -> None:
        try:
            for line in stream:
                output, mark, answer = line.partition(f"{self.run.mark} ".encode())
                if mark:
                    self._take(*answer.decode("utf-8", "replace").strip().partition(" ")[::2], stream)
                    output += b"\n" * bool(output)
                if self.code is None:  # afterwards, only the end of an archive comes
                    self.run.log(1, self.host, output)
        finally:
            self._errors.join(LEAVE_S)
            if self.code is None:
                self.is_lost = True
                self._failed.append(self)

    def _take(self, kind: str, words: str, stream: IO[bytes]) -> None:
        if kind == "ready":
            self.ready = (*words.split(), "", "", "")[:3]
        elif kind == "refused":
            self.refusal = f"{self.host} {words}"
        elif kind == "busy":
            self.busy_with = words.partition(" ")[0]
            remedy = "wait until that run has ended, or stop it; then run `bench submit` again"
            self.refusal = f"{self.host} is busy with {words}; {remedy}"
        elif kind == "measured":
            self.run.is_measured = True
        elif kind == "ended":
            self.code = int(words)
            if self.code:
                self._failed.append(self)
            if self.ready and self.ready[0] == "apart":  # an archive of the host's files follows
                self.copied = _unpack(stream, self.run.folder.path)
                self.command("keep" if self.copied else "done")
            else:
                self.copied = ""


def _unpack(stream: IO[bytes], folder: Path) -> str:
    """Extract the regular files of an archive into ``folder``; return an error message, or ``""``."""
    try:  # block by block, because the connection stays open after the archive
        with tarfile.open(fileobj=stream, mode="r|", bufsize=tarfile.BLOCKSIZE) as archive:
            own = (one for one in archive if one.isfile() and "/" not in one.name.removeprefix("./"))
            archive.extractall(folder, own, filter="data")
    except (tarfile.TarError, OSError) as error:
        return str(error)
    return ""


class HostedRun:
    """One run on its hosts. SIGTERM ends it."""

    def __init__(self, study: PlannedStudy, cell: Cell, script: Path, folder: RunFolder, name: str) -> None:
        self.study, self.cell, self.script, self.folder, self.name = study, cell, script, folder, name
        self.hosts = [Host(**host) for host in study.plan["hosts"][: cell.nodes]]
        self.connections: list[Connection] = []
        self.failed: list[Connection] = []  # a nonzero exit code, or the connection was lost
        self.is_stopped = self.is_measured = False
        self.mark = f"bench-{secrets.token_hex(8)}"
        self._beat = time.monotonic()
        self._lock, self._last_hosts = Lock(), {1: "", 2: ""}

    def execute(self) -> dict[str, Any]:
        """Execute the run; return the content of end.json.

        Raises:
            BenchError: a host cannot be used; no rank was started.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        token = self.folder.path / f".{self.mark}"
        token.touch()
        try:
            self._prepare()
            end = self._follow()
        finally:
            token.unlink(missing_ok=True)
            self._close()
        if self.cell.is_unrecorded:
            with suppress(UnwritableError):
                merge_nodes(self.folder)
        return end

    def _stop(self, number: int, frame: object) -> None:
        self.is_stopped = True

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections, self.failed = [], []

    def log(self, descriptor: int, host: str, line: bytes) -> None:
        """Write a line to job.out (1) or job.err (2), after ``==> HOST <==`` if the host changes."""
        with self._lock, suppress(OSError):  # the disk is full
            if line and len(self.hosts) > 1 and self._last_hosts[descriptor] != host:
                self._last_hosts[descriptor] = host
                line = f"==> {host} <==\n".encode() + line
            os.write(descriptor, line)

    def _command(self, words: str) -> None:
        for connection in self.connections:
            if connection.ready and not connection.is_over:
                connection.command(words)

    def _wait(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Send heartbeats until ``until()`` is true; return False after ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                return False
            if time.monotonic() - self._beat > HEARTBEAT_S:
                self._beat = time.monotonic()
                self._command(".")
            time.sleep(0.05)
        return True

    def _prepare(self) -> None:
        """Connect to the hosts and wait until all are ready; try again while a host is busy."""
        deadline = time.monotonic() + BUSY_S
        programs = [self._program(node) for node in range(len(self.hosts))]
        while True:
            for host, program in zip(self.hosts, programs, strict=True):
                self.connections.append(Connection(self, host.host, program))
            self._wait(self._have_answered, READY_S)
            # The hosts that have answered come first: others may only not be ready yet.
            answers = sorted(self.connections, key=lambda one: not (one.refusal or one.is_lost))
            problem = next(filter(None, (one.problem() for one in answers)), "")
            if not problem or self.is_stopped:
                return
            if self.name == answers[0].busy_with:
                what = f"{answers[0].host} is a machine that appears twice in cluster.hosts"
                raise BenchError(what, remedy="list each machine once, with its ranks in `processes`")
            if not answers[0].busy_with or time.monotonic() > deadline:
                raise BenchError(problem)
            self._close()
            # Random, so that two runs that block each other do not retry simultaneously.
            time.sleep(random.uniform(0.2, 2.0))

    def _have_answered(self) -> bool:
        """Return True if all hosts are ready, one of them never will be, or the run is stopped."""
        is_refused = any(one.refusal or one.is_lost for one in self.connections)
        return self.is_stopped or is_refused or all(one.ready for one in self.connections)

    def _program(self, node: int) -> bytes:
        """Return the text of ssh_host.sh, the values of its variables, and the call of its function."""
        hosts, plan = self.hosts, self.study.plan
        peer = hosts[0 if node else 1] if len(hosts) > 1 else None
        user = psutil.Process().username()
        stops = plan.get("stop_after_measurement") and not self.cell.is_unrecorded
        variables = {
            "mark": self.mark,
            "job": self.name,
            "folder": os.environ["PWD"],
            "run_dir": self.folder.path,
            "token": f".{self.mark}",
            "script": self.script.read_text(encoding="utf-8"),
            "node": node,
            "address": address_of(hosts[node], hosts),
            "peer": address_of(peer, hosts) if peer else "",
            # Set-up lines or a container provide another Python.
            "python": "" if plan.get("setup") or plan.get("container") else sys.executable,
            "holder": f"{self.name} (process {os.getpid()} of {user} on {os.uname().nodename})",
            "patience": PATIENCE_S,
            "epochs": self.cell.workload["epochs"] if stops else "",
        }
        names = ("ssh_host.sh", "measured.j2")
        texts = [(shipped("slurm_templates") / name).read_text(encoding="utf-8") for name in names]
        lines = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
        # Only in this stream: no file contains the values of cluster.env_from.
        passed = [name for name in plan.get("env_from") or () if name in os.environ]
        exports = [f"export {name}={shlex.quote(os.environ[name])}" for name in passed]
        lines += ["pass_variables() {", *exports, ":", "}", "bench_host; exit", ""]
        return "\n".join([*texts, *lines]).encode(errors="surrogateescape")

    def _follow(self) -> dict[str, Any]:
        """Start the ranks and wait for their end; return the content of end.json."""
        hosts = self.connections
        if self.is_stopped:
            return {"exit_code": 143, "by": "term", "stage": "run"}
        _, ports, names = zip(*(host.ready or "" for host in hosts), strict=True)
        addresses = [address_of(host, self.hosts) for host in self.hosts]
        self._command(f"go {addresses[0]}:{ports[0]} {','.join(names)} {' '.join(addresses)}")
        limit_s = self.cell.resources.time_limit_s
        has_ended = self._wait(
            lambda: self.is_stopped or self.is_measured or self._has_ended() or bool(self.failed), limit_s
        )
        if self.failed:
            self._wait(self._is_over, ERRORS_S)
        first = self.failed[0] if self.failed else None
        by = "exit" if has_ended else "limit"
        if self.is_stopped or (self.is_measured and not first):
            by = "term" if self.is_stopped else "measured"
        self._command("stop")
        self._wait(self._is_over, STOP_S)
        codes = {host.host: host.code for host in hosts}
        code = 0 if by == "measured" else first.code if first else next(filter(None, codes.values()), 0)
        ended = [host for host in hosts if host.code is not None]
        self._wait(lambda: all(host.copied is not None for host in ended), float("inf"))
        for host in ended:
            if host.copied:
                left = f"they remain in {host.host}:{os.environ['PWD']}/.bench-{self.name}"
                print_error(f"the results could not be copied ({host.copied}); {left}")
                code = code or NOT_COPIED
        end = {"exit_code": code, "by": by, "stage": "run", "hosts": codes}
        if first is not None and first.is_lost:
            return end | _because(LostHost(host=first.host, said=first.last_lines), stage="lost")
        if silent := ", ".join(host.host for host in hosts if not host.is_over):
            return end | _because(LostHost(host=silent), stage="lost")
        return end | _because(ExitCode(exit_code=code, host=first.host), stage="run") if first else end

    def _has_ended(self) -> bool:
        """Return whether the ranks have ended: on every host, or if host 0 started them, there."""
        return self.connections[0].is_over if self.cell.command_per == "job" else self._is_over()

    def _is_over(self) -> bool:
        return all(host.is_over for host in self.connections)


def _because(reason: Finding, *, stage: str) -> dict[str, Any]:
    return {"stage": stage, "reasons": [reason.as_json()]}


def print_error(message: str) -> None:
    """Print an error into job.err."""
    with suppress(OSError):
        print(f"bench: error: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Execute a job: ``SCRIPT FOLDER NAME``."""
    script, folder, name = Path(sys.argv[1]), RunFolder(Path(sys.argv[2])), sys.argv[3]
    try:
        with open(folder.start, "x", encoding="utf-8") as file:
            file.write(f"{process_id(os.getpid())} {now()} {os.uname().nodename} 0\n")
    except FileExistsError:
        owner = folder.start.read_text(encoding="utf-8", errors="replace").strip()
        print_error(f"another start owns this folder: {owner}")
        return 1
    try:
        study = open_study(StudyFolder(folder.path.parents[2]))
        cell = study.cell_of(folder.path.parent.name)
        end = HostedRun(study, cell, script, folder, name).execute()
    except (BenchError, OSError) as error:
        print_error(str(error))
        said = Said(text=str(error), source="ssh")
        end = {"exit_code": 1, "by": "exit", **_because(said, stage="connect")}
    write_json(folder.end, {"signal": None, "time": now(), **end})
    return 0


SCHEDULER = SshScheduler

if __name__ == "__main__":
    sys.exit(main())
