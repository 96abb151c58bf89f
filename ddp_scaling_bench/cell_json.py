"""Read cell.json, by which the ranks of a run learn what to do.

The script of a run writes the file into the run's folder. Ranks of any program read it, with the standard
library only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from .errors import BenchError
from .run_folder import RunFolder

#: Time for which readers wait for the file, because another node can see a new file late.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class CellFile:
    """The content of cell.json: the sizes of a cell and the options of its program."""

    launcher: str
    backend: str
    tasks_per_node: int | list[int]
    world_size: int
    per_gpu_batch: int
    workload: Mapping[str, Any]


#: The remedy for a wrong or missing value of the file.
REMEDY = "correct the lines `cell_json=(` of the run's script, or write the script again with `bench plan`"
_TYPES = get_type_hints(CellFile) | {"tasks_per_node": int | list, "workload": dict}


def read_cell(run_dir: Path) -> CellFile:
    """Read the cell.json of a run.

    Raises:
        BenchError: the file is missing or damaged, or a value is missing or of another type.
    """
    path = RunFolder(run_dir).cell
    try:
        content = json.loads(_read(path))
        problem = _problem(content)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:
        problem = f"is not valid JSON: {error}"
    if problem:
        raise BenchError(f"{path}: {problem}", remedy=REMEDY)
    return CellFile(**{field.name: content[field.name] for field in fields(CellFile)})


def _problem(content: Any) -> str:
    """Return the first problem of the content of a cell.json, or ``""``."""
    if not isinstance(content, dict):
        return "is not a JSON object"
    for name, kind in _TYPES.items():
        if name not in content:
            return f"{name} is missing"
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            return f"{name} is {content[name]!r}"
    return ""


def _read(path: Path) -> bytes:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)
