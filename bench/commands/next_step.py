"""The next command: for a study, from the states of its runs, and in a folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_scaling_bench.errors import BenchError

from ..study.layout import StudyFolder, latest_first
from ..study.ledger import Record, RunState
from ..study.plan_json import open_study

#: The section that each matrix has.
_SCALING = re.compile(r"^scaling:", re.MULTILINE)


def shown_name(folder: StudyFolder) -> str:
    """Return how a user names a study: by its name if it is in ``results``, else by its folder or archive."""
    is_found = folder.path.parent.resolve() == Path("results").resolve()
    return shlex.quote(folder.name if is_found else str(folder.source))


def step_of_study(folder: StudyFolder, records: Mapping[str, Record]) -> str:
    """Return the next command for a study."""
    states, name = {record.state for record in records.values()}, shown_name(folder)
    if any(state.active for state in states):
        return f"bench status {name}"
    if RunState.FAILED in states and RunState.COMPLETED not in states:
        return f"bench doctor {name}"
    return f"bench {'submit' if {RunState.PLANNED, RunState.CANCELLED} & states else 'report'} {name}"


def matrices(folder: Path) -> list[Path]:
    """Return the matrices in a folder, the newest first."""
    found = []
    for path in (*folder.glob("*.yaml"), *folder.glob("*.yml")):
        with suppress(OSError):
            if _SCALING.search(path.read_text(encoding="utf-8", errors="replace")):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def step_in_folder(root: Path) -> str:
    """Return the next command in this folder, whose studies are below ``root``."""
    for folder in latest_first(root):
        with suppress(BenchError, OSError):  # planned by another version, or of another user
            return step_of_study(folder, open_study(folder).records())
    found = matrices(Path())
    return f"bench plan {shlex.quote(str(found[0]))}" if found else "bench init"
