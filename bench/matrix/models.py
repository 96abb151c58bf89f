"""The models of the built-in training, as a matrix needs them.

Each file of ``bench/workload/models`` describes its model by a call ``SPEC = ModelSpec(...)``. Importing
such a file would import torch, which takes seconds and is missing on many login nodes. The literals of that
call are therefore read from the text of the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "workload" / "models"


@dataclass(frozen=True)
class Model:
    """A model: the name of its module, and the options that it uses and not every model does."""

    module: str
    options: tuple[str, ...]


def _models(folder: Path) -> Iterator[tuple[str, Model]]:
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SPEC":
                assert isinstance(node.value, ast.Call)
                named = {one.arg: one.value for one in node.value.keywords}
                options = ast.literal_eval(named["options"]) if "options" in named else ()
                yield ast.literal_eval(node.value.args[0]), Model(path.stem, options)


#: All models by their name in a matrix.
MODELS = dict(_models(_FOLDER))


def models_using(option: str) -> tuple[str, ...]:
    """Return the models that use an option; empty for an option that concerns every model."""
    return tuple(name for name, model in MODELS.items() if option in model.options)
