"""A server that imports torch once and forks the ranks of each run.

A study on one machine has dozens of runs, and importing torch can take longer than a short run. The server
reads one request per line from standard input::

    {"run_dir": "...", "arguments": ["--model", "mlp", ...], "ranks": 4, "env": {...}}

The server writes ``{"started": PID}`` and ``{"ended": EXIT_CODE}`` to standard output. The ranks get the
environment variables that torchrun sets. torchrun itself is not used, because its agent has threads, and
forking a process with threads can hang.

When standard input closes, the harness has ended. The server then ends the current run, writes its end.json,
and exits. No process outlives the server.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UnwritableError
from ..study.files import write_json
from ..study.layout import RunFolder

try:
    from .__main__ import main as workload_main
except ModuleNotFoundError as absent:
    if __name__ != "__main__" or str(absent.name).startswith(f"{__package__}."):
        raise
    os.write(1, (json.dumps({"missing": absent.name, "python": sys.executable}) + "\n").encode())
    sys.exit(1)

#: Time between SIGTERM and SIGKILL, in which ranks can end.
GRACE_S = 5.0
#: Time after the first failure in which the other ranks can report their own errors.
REPORT_S = 3.0
_PR_SET_PDEATHSIG = 1


def serve() -> int:
    """Run all requests until standard input closes, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness handles Ctrl-C
    requests = _LineReader(sys.stdin.fileno())
    _send({"ready": os.getpid()})
    while (line := requests.next()) is not None:
        _run(json.loads(line), requests)
    return 0


class _LineReader:
    """Read lines from a pipe without buffering, so that ``select`` works for the next line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = b""

    def next(self) -> bytes | None:
        """Return the next line, or None after the pipe has closed."""
        while b"\n" not in self._pending:
            block = os.read(self.descriptor, 65536)
            if not block:
                return None
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def _run(request: Mapping[str, Any], requests: _LineReader) -> None:
    folder = RunFolder(Path(request["run_dir"]))
    server = os.getpid()
    child = os.fork()
    if child == 0:
        _run_agent(request, folder, server=server, inherited=requests.descriptor)
    _send({"started": child})
    pidfd = os.pidfd_open(child)
    try:
        # Wait until the run ends or the pipe closes: the harness sends nothing during a run.
        ready, _, _ = select.select([pidfd, requests.descriptor], [], [])
        if pidfd not in ready:
            _end_group(child, pidfd)
            _write_end(folder, exit_code=137, signal_name="KILL", stage="the harness had ended")
    finally:
        os.close(pidfd)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):  # the group still has processes if the agent died before its ranks
        os.killpg(child, signal.SIGKILL)
    _send({"ended": os.waitstatus_to_exitcode(status)})


def _end_group(leader: int, pidfd: int) -> None:
    """End the processes of a run with SIGTERM, then SIGKILL."""
    os.killpg(leader, signal.SIGTERM)
    if not select.select([pidfd], [], [], GRACE_S)[0]:
        os.killpg(leader, signal.SIGKILL)
        select.select([pidfd], [], [])


def _run_agent(request: Mapping[str, Any], folder: RunFolder, *, server: int, inherited: int) -> None:
    """Run the ranks in a new process group, as torchrun's agent does, and exit."""
    code = 1
    try:
        os.setsid()
        die_with_parent(server)
        _redirect(folder, inherited)
        os.environ.update(request["env"])
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        failures = _run_ranks(request["arguments"], request["ranks"])
        code = 1 if failures else 0
        _write_end(folder, exit_code=code, stage="run", failures=failures)
    except SystemExit:  # raised on SIGTERM
        code = 128 + signal.SIGTERM
        _write_end(folder, exit_code=code, signal_name="TERM", stage="run")
    except BaseException as error:
        print(f"bench: error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _write_end(folder, exit_code=1, stage="launch")
    finally:
        os._exit(code)


def _run_ranks(arguments: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Run the ranks until all have ended, and return the failures in the order in which they occurred.

    :data:`REPORT_S` seconds after the first failure, the ranks that still run are ended, so that no
    collective waits for a dead rank.
    """
    port = _free_port()
    alive = {_fork_rank(arguments, rank=rank, ranks=ranks, port=port): rank for rank in range(ranks)}
    failures: list[dict[str, Any]] = []
    signals: list[tuple[float, int]] = []  # (time, signal) to send to the ranks that still run
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG if failures else 0)
        if pid in alive:
            rank, code = alive.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not (failures and code == -signal.SIGTERM):
                if not failures:
                    first = time.monotonic() + REPORT_S
                    signals = [(first, signal.SIGTERM), (first + GRACE_S, signal.SIGKILL)]
                failures.append({"rank": rank, "exit_code": code})
            continue
        if signals and time.monotonic() >= signals[0][0]:
            _, number = signals.pop(0)
            for other in alive:
                os.kill(other, number)
        time.sleep(0.02)
    return failures


def _fork_rank(arguments: Sequence[str], *, rank: int, ranks: int, port: int) -> int:
    """Fork one rank with torchrun's variables and return its process id."""
    agent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(agent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update({"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        code = workload_main(list(arguments))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skip the server's atexit handlers


def _free_port() -> int:
    """Return a port that is not in use; rank 0 opens it immediately afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call of prctl
        os._exit(137)


def _redirect(folder: RunFolder, inherited: int) -> None:
    """Redirect output to the run's files, and standard input from the harness's pipe to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, inherited)
    for stream, path in ((1, folder.out), (2, folder.err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, stream)
        os.close(file)


def _write_end(
    folder: RunFolder,
    *,
    exit_code: int,
    stage: str,
    signal_name: str | None = None,
    failures: Sequence[Mapping[str, Any]] = (),
) -> None:
    time_utc = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    end: dict[str, Any] = {"exit_code": exit_code, "signal": signal_name, "stage": stage, "time": time_utc}
    end["failures"] = list(failures)
    try:
        write_json(folder.end, end)
    except UnwritableError as error:
        print(f"bench: error: {error}", file=sys.stderr, flush=True)


def _send(message: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the harness has ended; the server notices this on standard input
        os.write(1, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    sys.exit(serve())
