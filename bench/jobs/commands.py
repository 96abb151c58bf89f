"""Describe the commands that runs execute, for run.json.

During a submission, each script that commands execute is read once, and git is called once for each folder
with such scripts. Jobs never call git.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.files import file_sha256
from ddp_scaling_bench.units import join_names
from ddp_scaling_bench.variables import shown_variables

from ..matrix.cell import Cell
from ..matrix.launchers import read_launch
from ..matrix.workload import INTERPRETER, command_values, filled_words, runs_python, uses_python
from ..study.plan_json import PlannedStudy

#: Larger files, such as container images, are not scripts.
_MAX_SCRIPT_BYTES = 16 * 2**20
#: Time limit of git for one folder.
GIT_S = 5.0
# No locks and no file system monitor: git only reads, and starts no other program.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_DESCRIBE = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


class SubmittedCommands:
    """Describe the commands of one submission; each file and repository is read once."""

    def __init__(self, study: PlannedStudy) -> None:
        self._name, self._interpreter = study.folder.name, _interpreter(study)
        self._has_container = bool(study.plan.get("container"))
        self._script_of_word = cache(_is_script)
        self._sha256 = cache(file_sha256)
        self._git = cache(_git_state)

    def describe(self, cell: Cell) -> dict[str, Any]:
        """Return ``command`` and ``interpreter`` for a cell's run.json.

        ``script`` is the first word that is a file, without a launcher and its options; ``""`` if there is
        none, as for ``python -m``.
        Unknown values are None. Placeholders of variables that are not shown are kept. ``interpreter`` is
        the Python interpreter with which the command begins, in a form that the job can call.
        """
        values = command_values(cell, self._name)
        words = filled_words(cell.argv, values)
        shown = shown_variables(cell.env, cell.swept)
        hidden = {f"env.{name}": f"{{env.{name}}}" for name, value in shown.items() if value is None}
        script = self._script(words)
        commit, is_dirty = self._git(Path(script).parent) if script else (None, None)
        return {
            "command": {
                "name": cell.name or None,
                "words": filled_words(cell.argv, values | hidden),
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
        launch = read_launch(words)  # a file before the program configures the launcher
        words = launch.started if launch else words
        for at, word in enumerate(words):
            if word in ("-m", "--module") and (not at or any(map(_starts_modules, words[:at]))):
                return ""
            if self._script_of_word(word):
                return word
        return ""


def _interpreter(study: PlannedStudy) -> str | None:
    """Return the Python interpreter that jobs of the study can call, or None if it is unknown."""
    if not study.plan.get("setup"):
        return sys.executable
    return None if study.scheduler.one_node else "python"


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


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of a folder's repository, and whether tracked files differ from this commit.

    Both values are None if there is no commit, or git does not answer in time.
    """
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(folder), *_DESCRIBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    if done.returncode:
        return None, None
    commit, _, dirty = done.stdout.strip().partition("-")
    return commit, bool(dirty)


def passed_variables(study: PlannedStudy) -> dict[str, str]:
    """Return the variables of ``cluster.env_from`` with their values; raise BenchError if one is not set."""
    names = study.plan.get("env_from") or []
    if missing := [name for name in names if name not in os.environ]:
        what = f"{join_names(missing, most=5)} of cluster.env_from: not set in this shell"
        remedy = (
            f"set {missing[0]} (read -rs {missing[0]}; export {missing[0]}), then run `bench submit` again"
        )
        raise BenchError(what, remedy=remedy)
    return {name: os.environ[name] for name in names}
