"""Execute runs one after another on several hosts without Slurm, by starting torchrun on each host over ssh.

The ranks rendezvous at the first host. If the study's folder is on a file system that all hosts share, rank 0
writes into it, as with Slurm. Otherwise each host writes to a local folder, and the host's files are copied
to this machine after the run.

Each host executes ``slurm_templates/ssh_host.sh``. This script reads commands from its standard input.
Its standard output contains both its answers and the run's output. If its input is closed, because
this process was killed or the network failed, the script ends the run.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import selectors
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...errors import BenchError, UnwritableError, unwritable
from ...matrix.cell import Cell, Run
from ...matrix.schema import HOST_ADDRESS, Host
from ...measure.command_conditions import merge_nodes
from ...shipped import shipped
from ...study.files import write_json
from ...study.ledger import FailureClass, RunState, now
from ...study.plan_json import PlannedStudy
from ...study.run_json import Attempt, next_attempt
from ...units import human_duration
from ..outcome import Outcome, error_line, killed_by_torchrun, log_tail, process_outcome, with_workload_error
from ..scheduler import passed_variables
from ..serial import HostBusyError, SerialScheduler

#: Maximum time in which hosts must end a run after its `bench submit` process has died.
BUSY_S = 20.0
#: After the first failure, `bench submit` waits this long for errors of the other hosts.
ERRORS_S = 5.0
#: Maximum time in which a host must end a run; the host sends SIGKILL to the ranks after 10 s.
STOP_S = 25.0
#: Maximum time in which a host must end its run and close the connection.
LEAVE_S = 15.0
#: Interval of heartbeats to the hosts, and time without a heartbeat after which a host ends the run.
HEARTBEAT_S = 10.0
PATIENCE_S = 90
#: Maximum time from the connection until a host is ready.
READY_S = 60.0
#: No password prompts, no terminal, no forwarding (two connections would use the same port). A lost network
#: is detected within a minute. An existing master connection is used, but no master connection is created.
OPTIONS = shlex.split(
    "-T -x -a -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
    " -o ClearAllForwardings=yes -o ControlMaster=no -o RemoteCommand=none -o PermitLocalCommand=no"
)
#: The program is sent on standard input, so that the login shell does not interpret it.
REMOTE = "exec bash -s"
#: Error message and remedy, by the reason with which ssh_host.sh rejects a run.
_REFUSALS = {
    "tool": ("lacks the command {}", "install util-linux (flock, setsid), coreutils and tar on that host"),
    "lock": (
        "cannot lock {}",
        "check that the file and its folder belong to you, that the folder has mode 700, and that the disk is"
        " not full; XDG_RUNTIME_DIR on that host selects another folder",
    ),
    "folder": (
        "cannot enter the folder in which `bench submit` was called, {folder}: {}",
        "run `bench submit` in a folder that every host has: a shared one, or a copy at the same path",
    ),
    "write": (
        "cannot create a folder for results in {folder}: {}",
        "run `bench submit` in a folder that is writable on every host",
    ),
}


class SshScheduler(SerialScheduler):
    """Execute runs of one study on hosts that are reached by ssh."""

    def __init__(self, study: PlannedStudy) -> None:
        super().__init__(study)
        self.hosts = [Host(**host) for host in study.plan.get("hosts") or []]
        self._addresses: dict[str, str] = {}
        #: Errors of unusable hosts, by host. Runs that need such a host wait for the next `bench submit`.
        self._failed_hosts: dict[str, HostError] = {}
        self._waiting: list[Run] = []

    def _conclude(self) -> None:
        """Raise BenchError if runs need a host that cannot be used."""
        if self._waiting:
            reasons = "\n".join(error.message for error in self._failed_hosts.values())
            runs_need = "run needs" if len(self._waiting) == 1 else "runs need"
            host = "this host" if len(self._failed_hosts) == 1 else "one of these hosts"
            what = f"{reasons}\n{len(self._waiting)} {runs_need} {host} and did not start"
            raise BenchError(what, remedy="fix the problem, then run `bench submit` again")

    def command_line(self, run: Run) -> str:
        """Return one ssh command per line and host, followed by ``#`` and the command that it executes."""
        attempt = next_attempt(self.study, run, self.study.records()[run.run_id])
        hosts = self._hosts_of(attempt.cell)
        endpoint = f"{self._address(hosts[0], hosts)}:PORT"
        lines = []
        for node, host in enumerate(hosts):
            words = [str(self._script(attempt)), str(attempt.folder.path.absolute()), str(node), endpoint]
            python = f"BENCH_PYTHON={shlex.quote(self._python)} " if self._python else ""
            there = f"cd {shlex.quote(str(_submission_folder()))} && {python}{shlex.join(['bash', *words])}"
            lines.append(f"{shlex.join(ssh_command(host.host))}  # {there}")
        return "\n".join(lines)

    def _has_hosts(self, run: Run) -> bool:
        needed = {host.host for host in self._hosts_of(self.study.cells[run.cell_id])}
        if needed & set(self._failed_hosts):
            self._waiting.append(run)
            return False
        return True

    def _describe(self, attempt: Attempt, **values: Any) -> dict[str, Any]:
        return super()._describe(
            attempt, hosts=[host.host for host in self._hosts_of(attempt.cell)], **values
        )

    def _start_failed(self, attempt: Attempt, error: BenchError) -> None:
        if not isinstance(error, HostError):
            raise error
        self._failed_hosts[error.host] = error

    def _execute(self, attempt: Attempt) -> Outcome:
        mark = f"bench-{secrets.token_hex(8)}"
        limit_s = int(self.study.plan["time_limit_s"])
        with self._prepared(attempt, mark) as group:
            names = ",".join(_host_name(connection) for connection in group.connections)
            group.command(f"go {self._endpoint(attempt, group)} {names}")
            in_time, problems = True, list[str]()
            try:
                in_time = group.follow(lambda: group.over or group.first_failed is not None, limit_s=limit_s)
                if group.first_failed is not None:
                    group.follow(lambda: group.over, limit_s=ERRORS_S)
            finally:  # also after Ctrl-C
                first_failed = group.first_failed
                group.command("stop")
                group.follow(lambda: group.over, limit_s=STOP_S)
                problems = self._collect(group, attempt, mark)
                self._write_end(group, attempt, first_failed)
                if attempt.cell.is_unrecorded:
                    with contextlib.suppress(UnwritableError):
                        merge_nodes(attempt.folder)
            outcome = _outcome(attempt, group, first_failed, limit_s=None if in_time else limit_s)
        outcome.reason = "; ".join(filter(None, (outcome.reason, *problems)))
        return outcome

    def _prepared(self, attempt: Attempt, mark: str) -> HostGroup:
        """Connect to the hosts of an attempt and wait until all are ready; retry while a host is busy."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return self._try_to_prepare(attempt, mark)
            except HostBusyError:
                if time.monotonic() > deadline:
                    raise
                # Random, so that two submissions that block each other do not retry simultaneously.
                time.sleep(random.uniform(0.2, 2.0))

    def _try_to_prepare(self, attempt: Attempt, mark: str) -> HostGroup:
        token = attempt.folder.path / f".{mark}"
        hosts, own_folder = self._hosts_of(attempt.cell), attempt.folder
        variables = [self._variables(attempt, node, mark) for node in range(len(hosts))]
        passed = passed_variables(self.study)
        with contextlib.ExitStack() as undo:
            try:
                token.touch()
                undo.callback(token.unlink, missing_ok=True)
                group = HostGroup(several=len(hosts) > 1, out=own_folder.out, err=own_folder.err)
            except OSError as error:
                raise unwritable(own_folder.path, error) from None
            with contextlib.ExitStack() as undo_connections:
                undo_connections.push(group)
                for host, own in zip(hosts, variables, strict=True):
                    content = host_program(own, passed)
                    group.connections.append(Connection(host.host, mark=mark, content=content))
                group.follow(lambda: group.answered, limit_s=READY_S)
                job, folder = attempt.job_name, _submission_folder()
                for connection in sorted(group.connections, key=lambda connection: not connection.refused):
                    raise_unless_ready(connection, job=job, folder=folder)
                undo_connections.pop_all()
        return group

    def _variables(self, attempt: Attempt, node: int, mark: str) -> dict[str, str]:
        hosts, script = self._hosts_of(attempt.cell), self._script(attempt)
        peer = hosts[0 if node else 1] if len(hosts) > 1 else None
        holder = f"{attempt.job_name} (process {os.getpid()} of {_user()} on {os.uname().nodename})"
        return {
            "mark": mark,
            "job": attempt.job_name,
            "folder": str(_submission_folder()),
            "run_dir": str(attempt.folder.path.absolute()),
            "token": f".{mark}",
            "cell": attempt.cell.cell_id,
            "script": script.read_text(encoding="utf-8"),
            "script_path": str(script),
            "node": str(node),
            "address": self._address(hosts[node], hosts),
            "peer": self._address(peer, hosts) if peer else "",
            "python": self._python,
            "holder": holder,
            "patience": str(PATIENCE_S),
        }

    def _endpoint(self, attempt: Attempt, group: HostGroup) -> str:
        """Return the rendezvous endpoint: the first host's address and a free port on this host."""
        hosts = self._hosts_of(attempt.cell)
        first = group.connections[0]
        port = first.ready[1] if first.ready else ""
        if not port.isdigit():
            raise HostError(first.host, f"{first.host} did not report a free port: its answer was {port!r}")
        return f"{self._address(hosts[0], hosts)}:{port}"

    def _collect(self, group: HostGroup, attempt: Attempt, mark: str) -> list[str]:
        """Copy the result files of hosts that do not share the run's folder; return error messages."""
        problems = []
        for connection in group.connections:
            if connection.ready is None or connection.ready[0] == "shared" or connection.code is None:
                continue
            remote = f"{_submission_folder()}/.bench-{attempt.job_name}"
            script = f"{attempt.cell.cell_id}.sh"
            why = fetch(connection.host, remote, attempt.folder.path, mark=mark, excluded=script)
            if why:
                problems.append(
                    f"the results could not be copied ({why}); they remain in {connection.host}:{remote}"
                )
            connection.command("keep" if why else "done")
        return problems

    @staticmethod
    def _write_end(group: HostGroup, attempt: Attempt, first_failed: Connection | None) -> None:
        codes = {connection.host: connection.code for connection in group.connections}
        code = first_failed.code if first_failed else next((c for c in codes.values() if c), 0)
        end = {"exit_code": code, "signal": None, "stage": "run", "time": now(), "hosts": codes}
        with contextlib.suppress(UnwritableError):
            write_json(attempt.folder.end, end)

    def _hosts_of(self, cell: Cell) -> list[Host]:
        return self.hosts[: cell.nodes]

    def _script(self, attempt: Attempt) -> Path:
        return self.study.script(attempt.cell.cell_id).absolute()

    @property
    def _python(self) -> str:
        """Path of this Python interpreter, or ``""`` if cluster.setup or a container provides another one."""
        return "" if self.study.plan.get("setup") or self.study.plan.get("container") else sys.executable

    def _address(self, host: Host, hosts: Sequence[Host]) -> str:
        """Return the address at which the other hosts of a run can reach ``host``."""
        if len(hosts) == 1:
            return "localhost"
        if host.host not in self._addresses:
            self._addresses[host.host] = host.address or address_of(host.host)
        address = self._addresses[host.host]
        if (
            not HOST_ADDRESS.pattern.fullmatch(address)
            or address == "localhost"
            or address.startswith("127.")
        ):
            what = f"{host.host} has the address {address}, which other hosts cannot reach"
            entry = f"{{host: {host.host}, address: ADDRESS}}"
            raise HostError(host.host, what, remedy=f"use {entry} in cluster.hosts")
        return address


def _outcome(
    attempt: Attempt, group: HostGroup, first_failed: Connection | None, *, limit_s: int | None
) -> Outcome:
    """Determine how a run ended; ``limit_s`` is the time limit if the run reached it, else None."""
    if first_failed is not None and first_failed.lost:
        what = f"the connection to {first_failed.host} was lost: {first_failed.last_lines}"
        return Outcome(RunState.FAILED, what, FailureClass.NODE_FAILURE)
    silent = [connection.host for connection in group.connections if not connection.over]
    if silent:  # no answer to the command to stop
        what = f"{', '.join(silent)} stopped answering"
        reason = "; ".join(filter(None, (what, error_line(attempt.folder))))
        return Outcome(RunState.FAILED, reason, FailureClass.NODE_FAILURE)
    if limit_s is not None:
        reason = f"the time limit of {human_duration(limit_s)} was reached"
        reason = with_workload_error(attempt.folder, reason)
        return Outcome(RunState.FAILED, reason, FailureClass.TIME_LIMIT)
    code, host = (first_failed.code, first_failed.host) if first_failed else (0, "")
    outcome = process_outcome(attempt.folder, attempt.cell, code, host=host)
    killed = killed_by_torchrun("\n".join(log_tail(attempt.folder.err)))
    if outcome.state is RunState.FAILED and killed:
        return Outcome(RunState.FAILED, killed, FailureClass.KILLED, code)
    return outcome


def _host_name(connection: Connection) -> str:
    """Return the host name that a host's ranks report, or the configured name if that is invalid."""
    name = connection.ready[2] if connection.ready else ""
    return name if HOST_ADDRESS.pattern.fullmatch(name) else connection.host.rpartition("@")[2]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _submission_folder() -> Path:
    """Return the current folder as ``$PWD`` names it, without resolving links or automounts."""
    shown = Path(os.environ.get("PWD", ""))
    try:
        return shown if shown.is_absolute() and shown.samefile(Path.cwd()) else Path.cwd()
    except OSError:
        return Path.cwd()


class HostError(BenchError):
    """A host cannot take part in a run."""

    def __init__(self, host: str, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.host = host


def ssh_words() -> list[str]:
    """Split the ssh command in ``$BENCH_SSH`` (by default ``ssh``) into words."""
    value = os.environ.get("BENCH_SSH") or "ssh"
    try:
        return shlex.split(value)
    except ValueError:
        raise BenchError(f"BENCH_SSH={value}: a quote is not closed", remedy="close the quote") from None


def ssh_command(host: str) -> list[str]:
    """Return the command that starts a shell on a host."""
    return [*ssh_words(), *OPTIONS, host, REMOTE]


def address_of(host: str) -> str:
    """Return the address of a host according to ssh's configuration (``ssh -G``), without connecting."""
    command = [*ssh_words(), "-G", host]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _no_ssh(command[0], error) from None
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    if done.returncode or not names:
        raise HostError(host, f"ssh does not accept the host {host}: {last_lines(done.stderr.encode())}")
    return names[0]


def host_program(variables: Mapping[str, str], passed: Mapping[str, str]) -> bytes:
    """Return the text of ssh_host.sh with shell assignments of ``variables``, to be sent to a host.

    ``passed`` are variables of the run's environment.
    """
    text = (shipped("slurm_templates") / "ssh_host.sh").read_text(encoding="utf-8")
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in passed.items()]
    lines += ["pass_variables() {", *exports, ":", "}"]
    return "\n".join([text, *lines, "bench_host; exit", ""]).encode(errors="surrogateescape")


class Connection:
    """Connection to one host of a run, with the answers of ssh_host.sh on that host.

    Attributes:
        ready: None until the host is ready, then three texts: ``shared`` or ``apart`` (whether the host
            shares the run's folder with this machine), a free port, and the host's name.
        refusal: None, or the reason why the host cannot execute the run, and the host's message.
        code: exit code of the cell's script, or None until the script has ended.
        lost: True if the connection ended before the script.
    """

    def __init__(self, host: str, *, mark: str, content: bytes) -> None:
        self.host = host
        self.ready: tuple[str, str, str] | None = None
        self.refusal: tuple[str, str] | None = None
        self.code: int | None = None
        self.lost = False
        self.stderr = b""
        self._mark = f"{mark} ".encode()
        self._outgoing = bytearray(content)
        self._pending = {"out": b"", "err": b""}
        command = ssh_command(host)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches only this process, which shuts the run down cleanly
            )
        except OSError as error:
            raise _no_ssh(command[0], error) from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def refused(self) -> bool:
        """True if the host will not become ready."""
        return self.refusal is not None or self.lost

    @property
    def over(self) -> bool:
        """True if the run has ended on the host, or the connection was lost."""
        return self.code is not None or self.lost

    @property
    def last_lines(self) -> str:
        """Last lines of the remote command's standard error, or ssh's messages if the connection failed."""
        return last_lines(self.stderr) or f"ssh ended with exit code {self._process.poll()}"

    def streams(self) -> dict[str, IO[bytes]]:
        """Return the open output streams of the ssh process by name (``out``, ``err``)."""
        process = self._process
        both = {"out": process.stdout, "err": process.stderr}
        return {name: stream for name, stream in both.items() if stream and not stream.closed}

    def command(self, words: str) -> None:
        """Send a command to ssh_host.sh; if the pipe is full, :meth:`send` sends the rest later."""
        self._outgoing += f"{words}\n".encode()
        self.send()

    def send(self) -> None:
        """Send pending input to the host until the pipe is full."""
        stdin = self._process.stdin
        assert stdin is not None
        while self._outgoing and not stdin.closed:
            try:
                sent = os.write(stdin.fileno(), self._outgoing[:65536])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self, name: str, write: Callable[[str, bytes], None]) -> None:
        """Read one block from stream ``name``; process answers and pass the run's output to ``write``."""
        stream = self.streams()[name]
        block = os.read(stream.fileno(), 65536)
        text = self._pending[name] + block
        complete, newline, rest = text.rpartition(b"\n")
        if not block:  # end of the stream
            complete, newline, rest = text, b"", b""
            stream.close()
            self.lost = self.lost or (not self.streams() and self.code is None)
        self._pending[name] = rest
        if name == "err":
            self.stderr = (self.stderr + complete + newline)[-4000:]
            write(self.host, complete + newline)
            return
        for line in (complete + newline).splitlines(keepends=True):
            output, mark, answer = line.partition(self._mark)
            if mark:
                self._take(answer.decode("utf-8", "replace").split(maxsplit=1))
                output += b"\n" * bool(output)
            write(self.host, output)

    def _take(self, answer: Sequence[str]) -> None:
        kind, words = answer[0], answer[1].strip() if len(answer) > 1 else ""
        if kind == "ready":
            where, port, name = (*words.split(), "", "", "")[:3]
            self.ready = (where, port, name)
        elif kind == "refused":
            why, _, detail = words.partition(" ")
            self.refusal = (why, detail)
        elif kind == "ended":
            self.code = int(words)

    def close(self, *, leave_s: float = LEAVE_S) -> None:
        """Close the connection; the host ends the run. After ``leave_s`` seconds ssh is killed."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout=leave_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in self.streams().values():
            stream.close()


class HostLog:
    """Log file with the output of several hosts; ``==> HOST <==`` is written when the host changes."""

    def __init__(self, path: Path, *, sections: bool) -> None:
        self._file: IO[bytes] | None = path.open("ab", buffering=0)
        self._sections = sections
        self._last = ""

    def write(self, host: str, lines: bytes) -> None:
        """Append complete lines from a host; after an error (disk full), ignore all further lines."""
        if not lines or self._file is None:
            return
        head = f"==> {host} <==\n".encode() if self._sections and host != self._last else b""
        self._last = host
        try:
            self._file.write(head + lines)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the log file; further lines are ignored."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


class HostGroup:
    """Context manager for the connections to all hosts of a run."""

    def __init__(self, *, several: bool, out: Path, err: Path) -> None:
        self.connections: list[Connection] = []
        self._logs = {"out": HostLog(out, sections=several), "err": HostLog(err, sections=several)}
        self._last_beat = time.monotonic()
        #: The first host with a nonzero exit code or a lost connection.
        self.first_failed: Connection | None = None

    def __enter__(self) -> HostGroup:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close(leave_s=LEAVE_S if error[0] is None else 2.0)
        for log in self._logs.values():
            log.close()

    @property
    def answered(self) -> bool:
        """True if all hosts are ready, or if a host cannot become ready."""
        return all(c.ready for c in self.connections) or any(c.refused for c in self.connections)

    @property
    def over(self) -> bool:
        """True if the run has ended on all hosts."""
        return all(connection.over for connection in self.connections)

    def command(self, words: str) -> None:
        """Send a command to all hosts on which the run has not ended."""
        for connection in self.connections:
            if not connection.over:
                connection.command(words)

    def follow(self, until: Callable[[], bool], *, limit_s: float) -> bool:
        """Exchange data with the hosts until ``until()`` is true; return False after ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._step(min(left, 1.0))
        return True

    def _step(self, wait_s: float) -> None:
        """Read available output and send pending input; also send a heartbeat when it is due."""
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                for name, stream in connection.streams().items():
                    selector.register(stream, selectors.EVENT_READ, (connection, name))
            ready = selector.select(wait_s) if selector.get_map() else []
        for key, _ in ready:
            connection, name = key.data
            connection.receive(name, self._logs[name].write)
            failed = connection.lost or connection.code not in (None, 0)
            if failed and self.first_failed is None:
                self.first_failed = connection
        is_due = time.monotonic() - self._last_beat > HEARTBEAT_S
        for connection in self.connections:
            connection.command(".") if is_due else connection.send()
        self._last_beat = time.monotonic() if is_due else self._last_beat


def fetch(host: str, remote: str, folder: Path, *, mark: str, excluded: str) -> str:
    """Copy the files of a remote folder into ``folder``; return an error message, or an empty string.

    ``mark`` separates the archive from text that login scripts print. The file ``excluded`` is not copied.
    """
    words = [f"printf '%s\\n' {shlex.quote(mark)}", f"cd -- {shlex.quote(remote)} || exit"]
    content = "; ".join([*words, f"exec tar -cf - --exclude={shlex.quote('./' + excluded)} .\n"]).encode()
    process = subprocess.Popen(
        ssh_command(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    problem = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(content)
            process.stdin.close()
        while (line := process.stdout.readline()) and mark.encode() not in line:
            pass
        _unpack(process.stdout, folder)
    except (tarfile.TarError, OSError) as error:
        problem = str(error)
    finally:
        process.stdout.close()
        stderr = process.stderr.read()
        code = process.wait()
        process.stderr.close()
    if code or problem:
        return last_lines(stderr) or problem or f"exit code {code}"
    return ""


def _unpack(stream: Any, folder: Path) -> None:
    """Extract the regular files of a tar stream into ``folder``, ignoring subfolders and links."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isfile() and "/" not in name else None
            if content is None:
                continue
            temporary = folder / f".{name}.fetched"
            with temporary.open("wb") as file:
                while block := content.read(1 << 20):
                    file.write(block)
            temporary.replace(folder / name)


def raise_unless_ready(connection: Connection, *, job: str, folder: Path) -> None:
    """Raise HostBusyError or HostError if a host cannot execute ``job``, submitted from ``folder``."""
    host = connection.host
    if connection.refusal is not None:
        why, words = connection.refusal
        if why == "busy" and words.startswith(f"{job} "):
            what = f"{host} is a machine that appears twice in cluster.hosts"
            raise HostError(host, what, remedy="list each machine once, with its ranks in `processes`")
        if why == "busy":
            remedy = "wait until that run has ended, or stop it; then run `bench submit` again"
            raise HostBusyError(f"{host} is busy with {words}", remedy=remedy)
        what, remedy = _REFUSALS[why]
        raise HostError(host, f"{host} {what.format(words, folder=folder)}", remedy=remedy)
    remedy = f"check that `ssh -o BatchMode=yes {host} true` works on this machine"
    if connection.lost:
        raise HostError(host, f"{host} cannot be reached: {connection.last_lines}", remedy=remedy)
    if connection.ready is None:
        what = f"{host} was not ready within {READY_S:g} s: {connection.last_lines}"
        raise HostError(host, what, remedy=remedy)


def last_lines(output: bytes) -> str:
    """Join the last three nonblank lines of ``output`` with semicolons."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])


def _no_ssh(command: str, error: OSError) -> BenchError:
    return BenchError(f"{command}: {error.strerror}", remedy="install an OpenSSH client, or set BENCH_SSH")


SCHEDULER = SshScheduler
