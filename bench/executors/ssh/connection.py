"""One host of a run, at the end of an ssh.

What a host does is in ``slurm_templates/ssh_host.sh``: it gets words on standard input and
gives answers among the lines of its standard output, which are the run's own. When the words
cease, because this process was killed or the network is cut, the host ends the run by itself.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from bench.errors import BenchError
from bench.shipped import shipped

LEAVE_S = 15.0

#: No questions, no terminal, nothing forwarded (two connections would want one port), a lost
#: network is noticed within a minute. A master connection that is there is used, none is left behind.
OPTIONS = (
    "-T",
    "-x",
    "-a",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ControlMaster=no"),
    *("-o", "RemoteCommand=none"),
    *("-o", "PermitLocalCommand=no"),
)
#: The program comes by standard input: nothing of it is read by the login shell, whichever that is.
REMOTE = "exec bash -s"


class HostError(BenchError):
    """A host cannot take part in a run."""

    def __init__(self, host: str, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.host = host


def ssh_words() -> list[str]:
    """Return the ssh command: ``$BENCH_SSH`` with its own options, else ``ssh``.

    Raises:
        BenchError: the variable is no command line.
    """
    written = os.environ.get("BENCH_SSH") or "ssh"
    try:
        return shlex.split(written)
    except ValueError:
        raise BenchError(f"BENCH_SSH={written}: a quote is never closed", remedy="close it") from None


def ssh_command(host: str) -> list[str]:
    """Return the command that starts a host's end of a run."""
    return [*ssh_words(), *OPTIONS, host, REMOTE]


def address_of(host: str) -> str:
    """Return the address at which ssh reaches a host, after its configuration; asks nobody.

    Raises:
        BenchError: there is no ssh here, or it cannot read its configuration.
    """
    command = [*ssh_words(), "-G", host]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _no_ssh(command[0], error) from None
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    if done.returncode or not names:
        raise HostError(host, f"ssh does not take the host {host}: {last_words(done.stderr.encode())}")
    return names[0]


def program(variables: Mapping[str, str]) -> bytes:
    """Return what a host runs; the variables' values are quoted here, and only here."""
    text = (shipped("slurm_templates") / "ssh_host.sh").read_text(encoding="utf-8")
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([text, *lines, "bench_host; exit", ""]).encode()


class Connection:
    """The ssh to one host, and what the host has answered.

    Attributes:
        ready: where its results go (``shared`` with this machine, or ``apart``), a free port,
            and its own name; None until it is ready.
        refusal: why it cannot be ready, and its words for it.
        code: the script's exit code; None until it has ended.
        lost: whether the connection ended before the script did.
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
                start_new_session=True,  # Ctrl-C reaches the harness, which ends things in order
            )
        except OSError as error:
            raise _no_ssh(command[0], error) from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def refused(self) -> bool:
        """Whether it will not become ready."""
        return self.refusal is not None or self.lost

    @property
    def over(self) -> bool:
        """Whether nothing runs there any more, as far as can be known."""
        return self.code is not None or self.lost

    @property
    def last_words(self) -> str:
        """The last lines of its standard error, which are ssh's own where it has failed."""
        return last_words(self.stderr) or f"ssh ended with exit code {self._process.poll()}"

    def streams(self) -> dict[str, IO[bytes]]:
        """Return its open output streams."""
        process = self._process
        both = {"out": process.stdout, "err": process.stderr}
        return {name: stream for name, stream in both.items() if stream and not stream.closed}

    def say(self, word: str) -> None:
        """Send a word, as soon as the host takes it."""
        self._outgoing += f"{word}\n".encode()
        self.send()

    def send(self) -> None:
        """Send what is still to be sent, as far as the pipe takes it."""
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
        """Read what a stream has; answers are taken out of it, the rest is the run's and is written."""
        stream = self.streams()[name]
        block = os.read(stream.fileno(), 65536)
        text = self._pending[name] + block
        whole, newline, rest = text.rpartition(b"\n")
        if not block:  # its end
            whole, newline, rest = text, b"", b""
            stream.close()
            self.lost = self.lost or (not self.streams() and self.code is None)
        self._pending[name] = rest
        if name == "err":
            self.stderr = (self.stderr + whole + newline)[-4000:]
            write(self.host, whole + newline)
            return
        for line in (whole + newline).splitlines(keepends=True):
            own, mark, answer = line.partition(self._mark)
            if mark:
                self._take(answer.decode("utf-8", "replace").split(maxsplit=1))
                own += b"\n" * bool(own)
            write(self.host, own)

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
        """Let the host go: without further words it ends what it still runs."""
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


def last_words(said: bytes) -> str:
    """Return the last three lines that say anything."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])


def _no_ssh(command: str, error: OSError) -> BenchError:
    return BenchError(f"{command}: {error.strerror}", remedy="install an OpenSSH client, or set BENCH_SSH")
