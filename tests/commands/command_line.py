"""Call `bench` from a test: in the same process, which saves its imports, or in a new one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
