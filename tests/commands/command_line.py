"""Call `bench` from a test: in the same process, which saves its imports, or in a new one."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from bench.cli import app, main
from tests.common import forks, run_program


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


def be_bench(*words: str, **env: str) -> NoReturn:
    """Be `bench WORDS` in a fork of the tests' process, with the streams 0 to 2; a start would import for a second."""
    code: Any = 70
    try:
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        os.environ |= env
        sys.argv = ["bench", *words]
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        sys.stdout.flush()
    finally:
        os._exit(code)


class Command(subprocess.Popen[str]):
    """A running `bench WORDS`. A block that fails kills it, so that no failing test waits for it without end."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        def run() -> None:
            os.closerange(3, 1024)  # Popen waits until one of them is closed
            be_bench(*words, **(env or {}))

        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        options |= {"preexec_fn": run, "restore_signals": False}  # Python ignores SIGPIPE
        with forks():  # and nothing is executed
            super().__init__(["bench", *words], text=True, **options)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


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
