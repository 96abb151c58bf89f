"""Read and write the result files of preflights, and the list of nodes that a study excludes.

A study excludes the nodes that a preflight found faulty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import unwritable
from .files import read_json, write_json
from .layout import PreflightFolder, StudyFolder


def next_folder(root: Path) -> PreflightFolder:
    """Create and return the folder of the next preflight below ``root``."""
    number = 1 + max((number for number, _ in _numbered(root)), default=0)
    folder = PreflightFolder(root / f"preflight-{number}")
    try:
        folder.path.mkdir(mode=0o755, parents=True)  # only the owner may replace scripts
    except OSError as error:
        raise unwritable(folder.path, error) from None
    return folder


def last_folder(root: Path) -> PreflightFolder | None:
    """Return the folder of the most recent preflight below ``root``, or None if there is no preflight."""
    found = max(_numbered(root), key=lambda one: one[0], default=None)
    return None if found is None else PreflightFolder(found[1])


def _numbered(root: Path) -> list[tuple[int, Path]]:
    paths = root.glob("preflight-*") if root.is_dir() else ()
    named = [(path.name.removeprefix("preflight-"), path) for path in paths]
    return [(int(number), path) for number, path in named if number.isdigit()]


def write_preflight(folder: PreflightFolder, content: Mapping[str, Any]) -> None:
    """Write preflight.json: ``job_name``, ``job_id``, ``submitted_at`` and ``concluded_at``."""
    write_json(folder.preflight_json, content)


def read_preflight(folder: PreflightFolder) -> dict[str, Any]:
    """Return the content of preflight.json, or ``{}`` if the file is missing or broken."""
    return read_json(folder.preflight_json) or {}


def write_measured(folder: PreflightFolder, content: Mapping[str, Any]) -> None:
    """Write measured.json, the values measured so far."""
    write_json(folder.measured, content)


def write_result(folder: PreflightFolder, result: Mapping[str, Any]) -> None:
    """Write the result of a preflight."""
    write_json(folder.result, result)


def read_result(folder: PreflightFolder) -> dict[str, Any] | None:
    """Return the result of a preflight, or None if there is no result (yet)."""
    return read_json(folder.result)


def write_unfit(study: StudyFolder, *, nodes: Sequence[str], job_id: str | None) -> None:
    """Record the nodes that submissions of a study exclude; nodes of an earlier preflight are forgotten."""
    write_json(study.unfit, {"schema": 1, "nodes": list(nodes), "job_id": job_id})


def unfit_nodes(study: StudyFolder) -> list[str]:
    """Return the nodes to exclude from runs, as found by the last preflight."""
    content = read_json(study.unfit) or {}
    return [str(name) for name in content.get("nodes", [])]
