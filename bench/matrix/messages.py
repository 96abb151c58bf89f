"""Convert pydantic's validation errors to messages with the place, the mistake and the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from bench.matrix import schema
from bench.matrix.cluster import Cluster, Container, Host
from bench.matrix.command import Metrics
from bench.matrix.document import Document, Place
from bench.matrix.field_types import did_you_mean

_SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": Cluster,
    "cluster.container": Container,
    "cluster.hosts": Host,
    "axes": schema.Axes,
    "scaling": schema.Scaling,
    "workload": schema.Workload,
    "workload.metrics": Metrics,
    "exclude": schema.Selection,
    "include": schema.Selection,
    "": schema.Matrix,
}


def add_validation_problems(document: Document, error: ValidationError) -> None:
    """Add every finding of a validation error to the document's problems."""
    for finding in error.errors():
        place = _place(finding)
        document.add_problem(place, *_message(finding, place))


def _place(finding: Any) -> Place:
    return tuple(part for part in finding["loc"] if part != "[key]")


def _is_unknown_key(finding: Any) -> bool:
    """Return whether pydantic or the schema's own check of axes reported an unknown key."""
    own = str((finding.get("ctx") or {}).get("error")) == schema.UNKNOWN_KEY
    return finding["type"] == "extra_forbidden" or own


def _message(finding: Any, place: Place) -> tuple[str, str]:
    """Return the message and the remedy for a finding of pydantic."""
    kind, value, name = finding["type"], finding["input"], _dotted(place)
    if _is_unknown_key(finding):
        return _unknown_key(place)
    if kind == "missing":
        return _missing(place)
    if kind == "value_error":
        return f"{name}: {finding['ctx']['error']}", ""
    message = _MESSAGES.get(kind)
    if message is None:
        return f"{name}: {finding['msg']}, not {_shown(value)}", "see docs/matrix.md"
    return message(name, value, finding.get("ctx") or {})


def _unknown_key(place: Place) -> tuple[str, str]:
    *section, key = place
    where = _dotted(section) or "the matrix"
    remedy = did_you_mean(str(key), _known_keys(tuple(section)), cutoff=0.6)
    return f"unknown key '{key}' in {where}", remedy


def _missing(place: Place) -> tuple[str, str]:
    example = {
        "scaling": "add `scaling: [{mode: strong, global_batch: [352]}]`, or mode weak with per_gpu_batch",
        "mode": "write mode: strong or mode: weak",
    }.get(str(place[-1]), "")
    where = _dotted(place[:-1]) or "the matrix"
    return f"key '{place[-1]}' is missing in {where}", example


def _not_a_list(name: str, value: Any, ctx: Any) -> tuple[str, str]:
    remedy = "" if isinstance(value, dict | type(None)) else f"write [{_shown(value)}]"
    return f"{name} must be a list, not {_shown(value)}", remedy


def _not_allowed(name: str, value: Any, ctx: Any) -> tuple[str, str]:
    allowed = [word.strip("'") for word in ctx["expected"].replace(" or ", ", ").split(", ")]
    return f"{name} cannot be {_shown(value)}", did_you_mean(str(value), allowed, cutoff=0.5)


def _not_text(name: str, value: Any, ctx: Any) -> tuple[str, str]:
    remedy = f'put it in quotes: "{_shown(value)}"' if isinstance(value, bool | int | float) else ""
    return f"{name} must be text, not {_shown(value)}", remedy


def _wrong_type(wanted: str, example: str = "") -> Callable[..., tuple[str, str]]:
    def message(name: str, value: Any, ctx: Any) -> tuple[str, str]:
        quoted = isinstance(value, str) and value.strip().isdigit() and "number" in wanted
        return f"{name} must be {wanted}, not {_shown(value)}", "remove the quotes" if quoted else example

    return message


def _out_of_bounds(word: str) -> Callable[..., tuple[str, str]]:
    def message(name: str, value: Any, ctx: Any) -> tuple[str, str]:
        limit = next(ctx[key] for key in ("ge", "le", "gt", "lt") if key in ctx)
        return f"{name} must be {word} {limit}, not {_shown(value)}", f"write a number that is {word} {limit}"

    return message


_MESSAGES: dict[str, Callable[..., tuple[str, str]]] = {
    "list_type": _not_a_list,
    "literal_error": _not_allowed,
    "int_type": _wrong_type("a whole number", "write a number such as 4"),
    "int_from_float": _wrong_type("a whole number", "write a number such as 4"),
    "float_type": _wrong_type("a number"),
    "float_parsing": _wrong_type("a number"),
    "finite_number": _wrong_type("a finite number"),
    "bool_type": _wrong_type("true or false"),
    "string_type": _not_text,
    "dict_type": _wrong_type("a mapping (key: value)"),
    "model_type": _wrong_type("a mapping (key: value)"),
    "model_attributes_type": _wrong_type("a mapping (key: value)"),
    "too_short": lambda name, *_: (
        f"{name} is an empty list",
        "give it at least one value, or remove the key",
    ),
    "string_too_short": lambda name, *_: (f"{name} is empty", "give it a value, or remove the key"),
    "greater_than_equal": _out_of_bounds("at least"),
    "greater_than": _out_of_bounds("greater than"),
    "less_than_equal": _out_of_bounds("at most"),
    "less_than": _out_of_bounds("less than"),
}


def without_unknown_keys(content: dict[str, Any], error: ValidationError) -> dict[str, Any] | None:
    """Return the matrix without its unknown keys, or None if it has other mistakes, too.

    The matrix can then be expanded, so that all problems are reported together.
    """
    findings = error.errors()
    if not all(map(_is_unknown_key, findings)):
        return None
    rest: Any = copy.deepcopy(content)
    for *section, key in map(_place, findings):
        holder = rest
        for part in section:
            holder = holder[part]
        holder.pop(key, None)
    return rest if isinstance(rest, dict) else None


def _known_keys(section: Place) -> list[str]:
    """Return the keys that a section of the matrix can contain."""
    path = ".".join(str(part) for part in section if not isinstance(part, int))
    model = _SECTIONS.get(path)
    if model is None:
        return []
    return [*model.model_fields, *(["env.NAME"] if path in ("axes", "exclude", "include") else [])]


def _dotted(place: Iterable[str | int]) -> str:
    """Return ``axes.nodes[2]`` for ("axes", "nodes", 2)."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if len(value) != 1 else f"the list [{_shown(value[0])}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
