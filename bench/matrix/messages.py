"""Turn pydantic's findings into one message each: where, what, what is allowed, what to do."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from bench.errors import Problem
from bench.matrix import schema
from bench.matrix.cluster import Cluster, Container, Host
from bench.matrix.document import Document, Place
from bench.matrix.metrics import Metrics
from bench.matrix.workload import Workload

_SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": Cluster,
    "cluster.container": Container,
    "cluster.hosts": Host,
    "axes": schema.Axes,
    "scaling": schema.Scaling,
    "workload": Workload,
    "workload.metrics": Metrics,
    "exclude": schema.Selection,
    "include": schema.Selection,
    "": schema.Matrix,
}


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """Return one problem per finding, without those that only repeat another."""
    problems = dict.fromkeys(_problem(finding, document) for finding in error.errors())
    return list(problems)


def _problem(finding: Any, document: Document) -> Problem:
    place: Place = tuple(part for part in finding["loc"] if part != "[key]")
    what, remedy = _words(finding, place, document)
    return Problem(document.path, document.line(place) or 1, what, remedy)


def _words(finding: Any, place: Place, document: Document) -> tuple[str, str]:
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden" or str(finding.get("ctx", {}).get("error")) == schema.UNKNOWN_KEY:
        return _unknown_key(place)
    name = spoken(place)
    if kind == "missing":
        return _missing(place)
    if kind == "value_error":
        return f"{name}: {finding['ctx']['error']}", ""
    words = _WORDS.get(kind)
    if words is None:
        return f"{name}: {finding['msg']}, not {_shown(value)}", "see docs/matrix.md"
    return words(name, value, finding.get("ctx") or {}, place)


def _unknown_key(place: Place) -> tuple[str, str]:
    *section, key = place
    where = spoken(tuple(section)) or "the matrix"
    allowed = known_keys(tuple(section))
    near = difflib.get_close_matches(str(key), allowed, n=1, cutoff=0.6)
    remedy = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown key '{key}' in {where}", f"{remedy}allowed: {', '.join(allowed)}"


def _missing(place: Place) -> tuple[str, str]:
    example = {
        "scaling": "add `scaling: [{mode: strong, global_batch: [352]}]`, or mode weak with per_gpu_batch",
        "mode": "write mode: strong or mode: weak",
    }.get(str(place[-1]), "")
    where = spoken(place[:-1]) or "the matrix"
    return f"key '{place[-1]}' is missing in {where}", example


def _list_wanted(name: str, value: Any, ctx: Any, place: Place) -> tuple[str, str]:
    remedy = "" if isinstance(value, dict | type(None)) else f"write [{_shown(value)}]"
    return f"{name} must be a list, not {_shown(value)}", remedy


def _literal(name: str, value: Any, ctx: Any, place: Place) -> tuple[str, str]:
    allowed = [word.strip("'") for word in ctx["expected"].replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    what = f"{name} cannot be {_shown(value)}"
    return what, (f"did you mean '{near[0]}'? " if near else "") + f"allowed: {', '.join(allowed)}"


def _type_wanted(wanted: str, example: str = "") -> Callable[..., tuple[str, str]]:
    def words(name: str, value: Any, ctx: Any, place: Place) -> tuple[str, str]:
        remedy = (
            "remove the quotes"
            if isinstance(value, str) and value.strip().isdigit() and "number" in wanted
            else example
        )
        return f"{name} must be {wanted}, not {_shown(value)}", remedy

    return words


def _text_wanted(name: str, value: Any, ctx: Any, place: Place) -> tuple[str, str]:
    remedy = f'put it in quotes: "{_shown(value)}"' if isinstance(value, bool | int | float) else ""
    return f"{name} must be text, not {_shown(value)}", remedy


def _bound(word: str) -> Callable[..., tuple[str, str]]:
    def words(name: str, value: Any, ctx: Any, place: Place) -> tuple[str, str]:
        limit = next(ctx[key] for key in ("ge", "le", "gt", "lt") if key in ctx)
        return f"{name} must be {word} {limit}, not {_shown(value)}", f"write a number that is {word} {limit}"

    return words


_WORDS: dict[str, Callable[..., tuple[str, str]]] = {
    "list_type": _list_wanted,
    "literal_error": _literal,
    "int_type": _type_wanted("a whole number", "write a number such as 4"),
    "int_from_float": _type_wanted("a whole number", "write a number such as 4"),
    "float_type": _type_wanted("a number"),
    "float_parsing": _type_wanted("a number"),
    "finite_number": _type_wanted("a finite number"),
    "bool_type": _type_wanted("true or false"),
    "string_type": _text_wanted,
    "dict_type": _type_wanted("a mapping (key: value)"),
    "model_type": _type_wanted("a mapping (key: value)"),
    "model_attributes_type": _type_wanted("a mapping (key: value)"),
    "too_short": lambda name, value, ctx, place: (
        f"{name} is an empty list",
        "give it at least one value, or remove the key",
    ),
    "string_too_short": lambda name, value, ctx, place: (
        f"{name} is empty",
        "give it a value, or remove the key",
    ),
    "greater_than_equal": _bound("at least"),
    "greater_than": _bound("greater than"),
    "less_than_equal": _bound("at most"),
    "less_than": _bound("less than"),
}


def without_unknown_keys(content: dict[str, Any], error: ValidationError) -> dict[str, Any] | None:
    """Return the matrix without its unknown keys, where those are all that is wrong with it.

    What remains can be expanded, so that its problems are told together with these.
    """
    places = []
    for finding in error.errors():
        unknown = finding["type"] == "extra_forbidden"
        if not unknown and str((finding.get("ctx") or {}).get("error")) != schema.UNKNOWN_KEY:
            return None
        places.append(tuple(part for part in finding["loc"] if part != "[key]"))
    rest: Any = copy.deepcopy(content)
    for *section, key in places:
        holder = rest
        for part in section:
            holder = holder[part]
        holder.pop(key, None)
    return rest if isinstance(rest, dict) else None


def known_keys(section: Place) -> list[str]:
    """Return the keys that may stand in a section of the matrix."""
    path = ".".join(str(part) for part in section if not isinstance(part, int))
    model = _SECTIONS.get(path)
    if model is None:
        return []
    keys = list(model.model_fields)
    return [*keys, "env.NAME"] if path in ("axes", "exclude", "include") else keys


def spoken(place: Iterable[str | int]) -> str:
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
