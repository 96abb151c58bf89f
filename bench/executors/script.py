"""A run as one process of this machine: a cell's script, started as a person would start it.

For commands of the matrix, which are programs of their own: nothing can be forked for them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from bench.executors.fork_server import launch_environment
from bench.layout import RunFolder

#: How long processes may take to leave when asked to; torchrun gives its ranks most of it.
GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_script(script: Path, folder: RunFolder, *, env: Mapping[str, str], limit_s: float) -> int | None:
    """Run ``bash script RUN_FOLDER`` to its end; its output goes to job.out and job.err.

    Returns:
        the exit code; None where the time limit ended it.
    """
    # The python that submits runs the command, unless a set-up line provides another.
    environment = launch_environment({"BENCH_PYTHON": sys.executable, **env})
    with folder.out.open("ab") as out, folder.err.open("ab") as err:
        process = subprocess.Popen(
            ["bash", str(script), str(folder.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the harness, which ends things in order
            preexec_fn=_end_with_parent,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end_with_parent() -> None:
    """Have the kernel ask this process to end when the harness dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: ask its leader, then insist, its ranks (sessions of their own) included."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for left in family:
        if left.is_running():
            left.kill()
