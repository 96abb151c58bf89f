"""The models of the built-in training, as a matrix needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .errors import BenchError


def read_specs(folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the module, the name and the other literals of each spec in a folder of ``train``.

    Each file there has one spec, such as ``SPEC = ModelSpec(...)``. Importing such a file would import torch,
    which takes seconds and is missing on many login nodes. The literals of that call are therefore read from
    the text of the file.

    Raises:
        BenchError: a file has no spec whose name is a literal.
    """
    found = files(__package__) / "train" / folder  # the package can be a zip file
    texts = {one.name[:-3]: one.read_text("utf-8") for one in found.iterdir() if one.name.endswith(".py")}
    for module in sorted(texts.keys() - {"__init__", "spec"}):
        literals = _literals(module, texts)
        if "name" not in literals:
            what = f"{found / module}.py: no SPEC with a name"
            raise BenchError(what, remedy="write it as a literal in one call")
        yield module, literals.pop("name"), literals


def _literals(module: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the literal arguments of the ``SPEC`` in a module, or nothing if there is none.

    ``SPEC = replace(fsdp.SPEC, ...)`` also has those of ``fsdp.py`` that it does not replace.
    """
    _, start, rest = texts[module].partition("\nSPEC")  # most of a file is above it, and need not be parsed
    for node in ast.parse(start + rest).body:
        match node:
            case ast.Assign([ast.Name("SPEC")], ast.Call() as call) | ast.AnnAssign(
                ast.Name("SPEC"), value=ast.Call() as call
            ):
                given = dict(zip(["name"], call.args, strict=False))
                given |= {str(one.arg): one.value for one in call.keywords}
                literals = {
                    key: ast.literal_eval(value)
                    for key, value in given.items()
                    if isinstance(value, ast.Constant | ast.Tuple)
                }
                match call.args:
                    case [ast.Attribute(ast.Name(base), "SPEC")]:
                        return _literals(base, texts) | literals
                return literals
    return {}


@dataclass(frozen=True)
class Model:
    """A model: the name of its module, and the literals of its ``SPEC``."""

    module: str
    options: tuple[str, ...] = ()
    fp32_weights: bool = False


#: All models by their name in a matrix.
MODELS = {
    name: Model(module, own.get("options", ()), own.get("fp32_weights", False))
    for module, name, own in read_specs("models")
}


#: The sizes of a language model of which a matrix says nothing: as small as a CPU needs it, or for a GPU.
_SIZES = {
    "cpu": {"parameters": 10_000_000, "seq_len": 128},
    "cuda": {"parameters": 124_000_000, "seq_len": 1024},
}


def default_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return those workload options that have no value, and of which the device determines the default.

    They are those of models of text, which use ``seq_len``. Plan, ranks and analysis call this function only.
    """
    used = MODELS[values["model"]].options
    sizes = _SIZES[values["device"]] if "seq_len" in used else {}
    return {name: size for name, size in sizes.items() if name in used and values[name] is None}


def models_using(option: str) -> tuple[str, ...]:
    """Return the models that use an option; empty for an option that concerns every model."""
    return tuple(name for name, model in MODELS.items() if option in model.options)
