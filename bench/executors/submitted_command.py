"""Describe the command of a run as it is submitted: its words, its script and the script's git commit.

A submission reads each script once, and calls git once for each folder with scripts. Jobs never call git.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.matrix.cell import Cell
from bench.matrix.command import INTERPRETER, command_values, filled_words, runs_python, uses_python
from bench.matrix.secret_values import without_secrets
from bench.study.files import file_sha256
from bench.study.plan_json import PlannedStudy

#: Larger files, such as container images, are no scripts.
_MAX_SCRIPT_BYTES = 16 * 2**20
#: Time limit of all calls of git for one folder.
GIT_S = 5.0
# No locks and no file system monitor: git only reads, and starts no other program.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C")


class SubmittedCommands:
    """Describes the commands of one submission; files and repositories are read once."""

    def __init__(self, study: PlannedStudy) -> None:
        self._name, self._interpreter = study.folder.name, _interpreter(study)
        self._has_container = bool(study.plan.get("container"))
        self._script_of_word = cache(_is_script)
        self._sha256 = cache(file_sha256)
        self._git = cache(_git_state)

    def describe(self, cell: Cell) -> dict[str, Any]:
        """Return ``command`` and ``interpreter`` for the run.json of a cell; empty for the built-in training.

        ``script`` is the first word that is a file; empty if there is none, as for ``python -m``. Values that
        are not known are None. Secrets are masked. ``interpreter`` is the python with which the command
        begins, as the job can call it.
        """
        if cell.command is None:
            return {}
        words = filled_words(cell.command, command_values(cell, self._name))
        script = self._script(words)
        commit, is_dirty = self._git(Path(script))
        return {
            "command": {
                "words": without_secrets(words),
                "script": script,
                "script_sha256": self._sha256(Path(script)) if script else None,
                "git_commit": commit,
                "git_dirty": is_dirty,
            },
            "interpreter": self._interpreter_of(words),
        }

    def _interpreter_of(self, words: Sequence[str]) -> str | None:
        if self._has_container or not runs_python(words[0]):
            return None
        return self._interpreter if uses_python(words) else words[0]

    def _script(self, words: Sequence[str]) -> str:
        for at, word in enumerate(words):
            if word == "-m" and any(map(_starts_modules, words[:at])):
                return ""
            if self._script_of_word(word):
                return word
        return ""


def _interpreter(study: PlannedStudy) -> str | None:
    """Return the python of the study's scripts, as a job can call it; None if only the script can."""
    if not study.plan.get("setup"):
        return sys.executable
    return None if study.executor == "local" else "python"


def _starts_modules(word: str) -> bool:
    return runs_python(word) or word.rpartition("/")[2] == "torchrun"


def _is_script(word: str) -> bool:
    if INTERPRETER.fullmatch(word.rpartition("/")[2]) or _starts_modules(word):
        return False
    try:
        path = Path(word)
        return path.is_file() and path.stat().st_size <= _MAX_SCRIPT_BYTES
    except (OSError, ValueError):
        return False


def _git_state(script: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the script's repository, and whether tracked files differ from it.

    A script that the repository does not track is not part of any commit. Without a script, the repository
    is that of the working folder.
    """
    deadline = time.monotonic() + GIT_S
    folder = script.parent
    if script.name and _git(folder, ["ls-files", "--error-unmatch", "--", script.name], deadline) is None:
        return None, None
    commit = _git(folder, ["rev-parse", "--verify", "HEAD"], deadline)
    changes = None if commit is None else _git(folder, ["status", "--porcelain", "-uno"], deadline)
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, words: Sequence[str], deadline: float) -> str | None:
    """Return the output of git; None if it fails or does not end before ``deadline``."""
    try:
        done = subprocess.run(
            [*_GIT, str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
