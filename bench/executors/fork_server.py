"""The harness's end of the fork server that starts ranks on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from bench.errors import BenchError

GRACE_S = 7.0
_ANOTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ForkServer:
    """A server process with torch loaded, which runs one request after another.

    Raises:
        BenchError: on construction and in :meth:`run`, where the process is gone, with its words.
    """

    def __init__(self, env: Mapping[str, str], *, setup: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="bench-server-")  # noqa: SIM115 (closed in close)
        self._pending = b""
        self._process = subprocess.Popen(
            _command(env, setup),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=launch_environment(env),
            start_new_session=True,  # Ctrl-C reaches the harness, which ends things in order
        )
        if self._answer(deadline=None).get("ready") is None:
            raise self._failed("did not start")

    @property
    def alive(self) -> bool:
        """Whether the server can take another request."""
        return self._process.poll() is None

    def run(self, request: Mapping[str, Any], *, limit_s: float) -> int | None:
        """Return the exit code of a run, or None when its time limit ended it."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + limit_s
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("is gone") from None
        leader = self._answer(deadline=None)["started"]
        try:
            answer = self._answer(deadline=deadline)
        except BaseException:
            self._stop(leader)
            raise
        if "ended" in answer:
            return int(answer["ended"])
        self._stop(leader)
        return None

    def close(self) -> None:
        """Let the server leave; what it still runs is ended by it."""
        assert self._process.stdin is not None
        if self._errors.closed:  # it failed before, and was let go of then
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2 * GRACE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _stop(self, leader: int) -> None:
        """End the run's processes: ask them, then insist."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, number)
            if "ended" in self._answer(deadline=time.monotonic() + GRACE_S):
                return
        self._process.kill()

    def _answer(self, *, deadline: float | None) -> dict[str, Any]:
        """Return the next answer; an empty one at the deadline."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait_s)[0]:
                return {}
            block = os.read(pipe, 65536)
            if not block:
                raise self._failed("ended")
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> BenchError:
        """Let go of the server and return the error that says why it is gone."""
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-3000:].decode("utf-8", "replace").strip() or "it said nothing"
        self._let_go()
        return BenchError(
            f"the process that starts ranks {what} (exit code {code}):\n{words}",
            remedy="does `python -m bench.workload --help` work here, after the set-up lines?",
        )


def _command(env: Mapping[str, str], setup: Sequence[str]) -> list[str]:
    module = ["-m", "bench.workload.server"]
    if not setup:
        return [sys.executable, *module]
    # As in the cell's script: what a set-up line loads must not change what is measured.
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines = ["set -e", *setup, "set +e", *exports, "exec python -m bench.workload.server"]
    return ["bash", "-c", "\n".join(lines)]


def launch_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without another launcher's words, plus the cell's."""
    own = {name: value for name, value in os.environ.items() if name not in _ANOTHER_LAUNCHERS}
    # Ranks of one machine meet on the loopback, whatever its host name resolves to.
    return {
        **own,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
