"""Call `bench` from a test: in the same process, which saves its imports, or in a new one."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from tests.common import run_program


def bench(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Call `bench` in this process and return its exit code and both streams."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, words, prog_name="bench", env={"COLUMNS": "120", **env})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def answer(*words: str, cwd: Path | None = None) -> dict[str, Any]:
    """Return what `bench` answers as JSON."""
    done = bench(*words, "--json", cwd=cwd or Path.cwd())
    assert done.stdout, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def refusal(*words: str, cwd: Path, **env: str) -> str:
    """Return the error with which `bench` refuses what a user asks for."""
    done = bench(*words, cwd=cwd, **env)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    return done.stderr.removeprefix("error: ").removesuffix("\n")


def is_reported(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a report was written, with the exit code 1 if it shows an error.

    On a busy machine, the runs of a test may be disturbed, which is an error.
    """
    return done.returncode == any(line.startswith("error: ") for line in done.stderr.splitlines())


def bench_process(
    *words: str, cwd: Path, prefix: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Call `python -m bench` and return its exit code and both streams."""
    return run_program(
        [*prefix, sys.executable, "-m", "bench", *words], cwd=cwd, env={**os.environ, "COLUMNS": "120", **env}
    )


def on_terminal(*words: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Call `bench` on a terminal of this width, and return what it shows."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while part := os.read(main, 4096):
                shown.extend(part)

    main, terminal = pty.openpty()
    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(terminal, "w")
    with stream, redirect_stdout(stream), redirect_stderr(stream), suppress(SystemExit):
        app(words, prog_name="bench")
    reader.join()
    os.close(main)
    return shown.decode().replace("\r\n", "\n")
