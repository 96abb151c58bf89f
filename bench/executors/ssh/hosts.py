"""The hosts of one run, all listened to at once, and what they leave: logs and files."""

from __future__ import annotations

import contextlib
import selectors
import shlex
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from bench.executors.serial import NotNowError
from bench.executors.ssh.connection import LEAVE_S, Connection, HostError, last_words, ssh_command

#: How often a host hears that the harness lives, and how long it waits for such a word.
HEARTBEAT_S = 10.0
PATIENCE_S = 90
#: The longest from the connection to a host's readiness.
READY_S = 60.0


class Transcript:
    """One log of several hosts: a line ``==> HOST <==`` stands wherever another host goes on."""

    def __init__(self, path: Path, *, sections: bool) -> None:
        self._file: IO[bytes] | None = path.open("ab", buffering=0)
        self._sections = sections
        self._last = ""

    def write(self, host: str, lines: bytes) -> None:
        """Append whole lines of a host; on a disk that is full nothing more is written."""
        if not lines or self._file is None:
            return
        head = f"==> {host} <==\n".encode() if self._sections and host != self._last else b""
        self._last = host
        try:
            self._file.write(head + lines)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


class HostGroup:
    """The connections to all hosts of a run; leaving the ``with`` closes them."""

    def __init__(self, *, several: bool, out: Path, err: Path) -> None:
        self.connections: list[Connection] = []
        self._logs = {"out": Transcript(out, sections=several), "err": Transcript(err, sections=several)}
        self._beat = time.monotonic()
        #: The first host to fail: its script's exit code was not 0, or its connection was lost.
        self.first_failed: Connection | None = None

    def __enter__(self) -> HostGroup:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close(leave_s=LEAVE_S if error[0] is None else 2.0)
        for log in self._logs.values():
            log.close()

    def connect(self, host: str, *, mark: str, content: bytes) -> None:
        """Add the connection to a host, and send it ``content``."""
        self.connections.append(Connection(host, mark=mark, content=content))

    @property
    def answered(self) -> bool:
        """Whether all are ready, or one never will be."""
        return all(c.ready for c in self.connections) or any(c.refused for c in self.connections)

    @property
    def over(self) -> bool:
        """Whether the run has ended on all hosts."""
        return all(connection.over for connection in self.connections)

    @property
    def decided(self) -> bool:
        """Whether the run has ended on all hosts, or failed on one."""
        return self.over or self.first_failed is not None

    def say(self, word: str) -> None:
        """Send a word to all hosts that have not ended."""
        for connection in self.connections:
            if not connection.over:
                connection.say(word)

    def listen(self, until: Callable[[], bool], *, limit_s: float) -> bool:
        """Follow the hosts until something holds; False where it did not within the limit."""
        deadline = time.monotonic() + limit_s
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._step(min(left, 1.0))
        return True

    def _step(self, wait_s: float) -> None:
        """Take what has come, send what is to be sent, and show a sign of life when it is time."""
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
        beat = time.monotonic() - self._beat > HEARTBEAT_S
        for connection in self.connections:
            connection.say(".") if beat else connection.send()
        self._beat = time.monotonic() if beat else self._beat


def fetch(host: str, remote: str, folder: Path, *, mark: str, besides: str) -> str:
    """Copy the files of a folder on a host into ``folder``; return why not, empty where all is here.

    Args:
        host: where they are.
        remote: the folder there.
        folder: the run's folder here.
        mark: tells the copy's beginning from what the host's login prints.
        besides: a file's name that stays there.
    """
    words = [f"printf '%s\\n' {shlex.quote(mark)}", f"cd -- {shlex.quote(remote)} || exit"]
    content = "; ".join([*words, f"exec tar -cf - --exclude={shlex.quote('./' + besides)} .\n"]).encode()
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
        said = process.stderr.read()
        code = process.wait()
        process.stderr.close()
    if code or problem:
        return last_words(said) or problem or f"exit code {code}"
    return ""


def _unpack(stream: Any, folder: Path) -> None:
    """Write an archive's plain files into ``folder``: results lie flat, and nothing else is taken."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isfile() and "/" not in name else None
            if content is None:
                continue
            beside = folder / f".{name}.fetched"
            with beside.open("wb") as file:
                while block := content.read(1 << 20):
                    file.write(block)
            beside.replace(folder / name)


# Why a host cannot take part in a run, in words with a remedy.

_REMEDIES = {
    "tool": ("lacks the command {}", "install util-linux (flock, setsid) and tar there"),
    "lock": ("cannot open its lock {}", "is it another user's, or /tmp full?"),
    "folder": (
        "cannot enter the folder of submission {folder}: {}",
        "submit from a folder that every host has: on a shared file system, or a copy at the same path",
    ),
    "write": (
        "cannot make a folder for results in {folder}: {}",
        "submit from a folder that can be written on every host",
    ),
}


def raise_unless_ready(connection: Connection, *, job: str, folder: Path) -> None:
    """Raise what keeps a host from taking part in ``job``, which is submitted from ``folder``.

    Raises:
        NotNowError: it is at work on another run.
        HostError: anything else.
    """
    host = connection.host
    if connection.refusal is not None:
        why, words = connection.refusal
        if why == "busy" and words.startswith(f"{job} "):
            what = f"{host} is a machine that cluster.hosts names twice"
            raise HostError(host, what, remedy="one entry per machine, with `processes` for its ranks")
        if why == "busy":
            remedy = "wait for it or stop it, then type `bench submit` again"
            raise NotNowError(f"{host} is busy with {words}", remedy=remedy)
        what, remedy = _REMEDIES[why]
        raise HostError(host, f"{host} {what.format(words, folder=folder)}", remedy=remedy)
    if connection.lost:
        what = f"{host} cannot be reached: {connection.last_words}"
        raise HostError(host, what, remedy=f"does `ssh -o BatchMode=yes {host} true` work here?")
    if connection.ready is None:
        what = f"{host} was not ready within {READY_S:g} s: {connection.last_words}"
        raise HostError(host, what, remedy=f"does `ssh -o BatchMode=yes {host} true` work here?")
