"""A machine of the test cluster: an init process in separate namespaces, and commands in them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Seconds after which an event or a command is given up; a busy machine may need most of them.
PATIENCE_S = 180.0
INIT = Path(__file__).with_name("init.sh")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class ClusterError(RuntimeError):
    """The test cluster or one of its commands failed; the message contains the output."""


@dataclass(frozen=True)
class Process:
    """A process, identified by id and start time because ids are reused."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with ``pid``; None if there is none."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks)

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return _start_ticks(self.pid) == self.start_ticks

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not self.alive, what=f"the end of process {self.pid}")


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat; None for an ended process or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def wait_for(condition: Callable[[], bool], *, what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until ``condition`` is true; ask every 0.05 s at first, later every 0.5 s.

    Raises:
        ClusterError: the condition is not true within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    pause_s = 0.05
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.5)


def run(
    command: Sequence[str | Path],
    *,
    check: bool = True,
    timeout_s: float = PATIENCE_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return the completed process with its output.

    Raises:
        ClusterError: the command failed (unless ``check`` is False) or took longer than ``timeout_s``.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=None if env is None else dict(env),
            cwd=cwd,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            check=False,
        )
    except subprocess.TimeoutExpired as slow:
        raise ClusterError(f"{' '.join(words)}: still running after {timeout_s:g} s") from slow
    if check and done.returncode:
        raise ClusterError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}".strip())
    return done


@dataclass(frozen=True)
class Container:
    """A running machine; ``init`` is its init process."""

    name: str
    init: Process

    @classmethod
    def launch(cls, name: str, *, hosts: Path, folder: Path, cgroup: Path | None) -> Callable[[], Container]:
        """Start a machine without waiting; call the returned function to wait until the machine is ready.

        ``hosts`` becomes the machine's /etc/hosts, ``cgroup`` the root of its memory cgroups.
        """
        ready = folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        log = (folder / f"{name}.init.log").open("w")
        holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "bash", str(INIT), name, str(hosts), str(ready), str(cgroup or "")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=daemon_environment(),
            start_new_session=True,  # an interrupt at the keyboard goes to the tests, not to the cluster
        )
        log.close()

        def join() -> Container:
            wait_for(lambda: ready.exists() or holder.poll() is not None, what=f"the start of {name}")
            if holder.poll() is not None:
                words = (folder / f"{name}.init.log").read_text().strip()
                raise ClusterError(f"no namespaces for {name}: {words}")
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            init = Process.of(int(children[0]))
            assert init is not None
            _holders[init.pid] = holder
            return cls(name, init)

        return join

    def command(self, words: Sequence[str | Path], *, cwd: Path | None = None) -> list[str]:
        """Return the command that, executed on the host, runs ``words`` in this machine."""
        inside = ["env", "-C", str(cwd or "/"), *map(str, words)]
        return ["nsenter", "--target", str(self.init.pid), "--all", "--", *inside]

    def run(
        self, words: Sequence[str | Path], *, cwd: Path | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this machine, with its process ids, network and host name; options of ``run``."""
        if not self.init.alive:
            raise ClusterError(f"{self.name} is down")
        return run(self.command(words, cwd=cwd), **options)

    def kill(self) -> None:
        """Kill the machine and all its processes at once, like a power cut."""
        self.init.kill()
        holder = _holders.pop(self.init.pid, None)
        if holder is not None:
            holder.wait(timeout=20)


#: unshare(1) processes started by this process, by the init of their machine, to be reaped.
_holders: dict[int, subprocess.Popen[bytes]] = {}


def daemon_environment() -> dict[str, str]:
    """Return a minimal environment for the daemons, because jobs partly inherit it."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
    }
