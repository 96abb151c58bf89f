"""Load a matrix file and the site defaults that it inherits, and report all its problems with their lines.

A site file holds settings that all matrices of a cluster share. The inherited values are
stored with the plan, so that a study stays complete without the site file.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ddp_scaling_bench.cores import sizes_up_to, usable_cores
from ddp_scaling_bench.errors import BenchError, InputError, Problem, missing_file

from . import schema
from .document import Document, Inheritance, Place, read_document
from .field_types import Section, did_you_mean
from .schedulers import DEFAULT, SCHEDULERS
from .schema import CORES, STUDY_NAME, STUDY_NAME_RULE, Cluster, Container, Host, Matrix
from .workload import Metrics, NamedCommand

_SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": Cluster,
    "cluster.container": Container,
    "cluster.hosts": Host,
    "axes": schema.Axes,
    "scaling": schema.Scaling,
    "workload": schema.Workload,
    "workload.metrics": Metrics,
    **{f"{section}.command": NamedCommand for section in ("workload", "axes", "exclude", "include")},
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
    if place[:2] == ("axes", "tasks_per_node") and isinstance(value, str):
        remedy = f"write a list such as [1, 2, 4], or `tasks_per_node: {CORES}` (executor local)"
        return f"{name} cannot be {_shown(value)}", remedy
    if kind == "value_error":
        return f"{name}: {finding['ctx']['error']}", ""
    message = _MESSAGES.get(kind)
    if message is None:
        return f"{name}: {finding['msg']}, not {_shown(value)}", "see docs/matrix.md"
    return message(name, value, finding.get("ctx") or {})


def _unknown_key(place: Place) -> tuple[str, str]:
    *section, key = place
    where = _dotted(section) or "the matrix"
    other = next((name for name in ("workload", "cluster", "axes") if key in _known_keys((name,))), None)
    if other and not section:
        return f"unknown key '{key}' in {where}", f"write it below `{other}:`"
    if section and key in _known_keys(()):
        return f"unknown key '{key}' in {where}", "write it at the top level of the matrix"
    remedy = did_you_mean(str(key), _known_keys(tuple(section)), cutoff=0.6)
    return f"unknown key '{key}' in {where}", remedy


def _missing(place: Place) -> tuple[str, str]:
    example = {
        "scaling": "add `scaling: [{mode: strong, global_batch: [352]}]`, or mode weak with per_gpu_batch",
        "mode": "write mode: strong or mode: weak",
        "name": "write {name: NAME, run: COMMAND}, or only the command",
        "run": "write {name: NAME, run: COMMAND}",
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


SITE_VARIABLE = "BENCH_SITE"
_NO_SITE_REMEDY = (
    f"name another file with --site or ${SITE_VARIABLE}; an empty {SITE_VARIABLE} means no site file"
)


def load_matrix(path: Path, *, site: Path | None = None) -> tuple[Matrix, Document]:
    """Load a matrix file with the defaults of a site file; return the matrix and its document.

    Raises:
        BenchError: a file does not exist or cannot be read.
        InputError: all problems of the site file or, if it has none, of the matrix's YAML and
            keys. If the only problems are unknown and duplicate keys, they stay in the document
            and are reported with the problems of :func:`bench.matrix.expansion.expand`.
    """
    document = read_document(path)
    if not isinstance(document.content, dict):
        remedy = "start from `bench init`, or from an example"
        raise InputError([Problem(str(path), 1, "a matrix must be a mapping (key: value)", remedy)])
    content = dict(document.content)
    if content.get("study") is None:
        if not STUDY_NAME.fullmatch(path.stem) or ".." in path.stem:
            what = f"the file name {path.stem!r} is not a valid study name; allowed: {STUDY_NAME_RULE}"
            raise InputError([Problem(str(path), 1, what, "add `study: NAME`")])
        content["study"] = path.stem
    if site is not None:
        content, document.site = inherit(content, read_site(site))
    content = _with_sizes_of_this_machine(content, document)
    try:
        return Matrix.model_validate(content), document
    except ValidationError as error:
        add_validation_problems(document, error)
        rest = without_unknown_keys(content, error)
    if rest is not None:
        with contextlib.suppress(ValidationError):
            return Matrix.model_validate(rest), document
    raise InputError(list(document.problems))


def _with_sizes_of_this_machine(content: dict[str, Any], document: Document) -> dict[str, Any]:
    """Return the matrix with sizes instead of ``tasks_per_node: cores``."""
    axes, cluster = content.get("axes"), content.get("cluster")
    if not isinstance(axes, dict) or axes.get("tasks_per_node") != CORES:
        return content
    cluster = cluster if isinstance(cluster, dict) else {}
    spec = SCHEDULERS.get(str(cluster.get("executor", DEFAULT)))
    if spec is not None and not spec.one_node:
        what = f"axes.tasks_per_node: {CORES} counts the cores of this machine, where no run is executed"
        document.add_problem(("axes", "tasks_per_node"), what, "write a list such as [1, 2, 4]")
    threads = cluster.get("cpus_per_task")
    most = usable_cores() // threads if isinstance(threads, int) and threads > 0 else usable_cores()
    return content | {"axes": axes | {"tasks_per_node": sizes_up_to(most)}}


class SiteWorkload(Section):
    """The workload options that depend on the cluster."""

    device: Literal["cuda", "cpu"] | None = None
    """The device of this cluster's nodes."""


class Site(Section):
    """A site file: defaults for all matrices of a cluster."""

    cluster: Cluster = Cluster()
    """Defaults for the matrix's `cluster` section; keys that the matrix sets take precedence."""
    workload: SiteWorkload = SiteWorkload()
    """Defaults for the matrix's `workload` section; only `device` is allowed."""


def find_site(named: str | None = None) -> Path | None:
    """Return the site file: ``named``, else ``$BENCH_SITE``, else the user's own site file if it exists.

    An empty name means no site file. The user's own site file is ``ddp-scaling-bench/site.yaml`` below
    ``$XDG_CONFIG_HOME`` (default ``~/.config``).

    Raises:
        BenchError: the named file does not exist, or the user's own site file is not accessible.
    """
    name = os.environ.get(SITE_VARIABLE) if named is None else named
    if name is not None:
        path = Path(name).expanduser()
        if name and not path.is_file():
            raise missing_file(path, what="site file", remedy=_NO_SITE_REMEDY)
        return path if name else None
    own = _own_site_file()
    try:
        return own if own is not None and own.is_file() else None
    except OSError as error:
        raise BenchError(f"{own}: cannot be read: {error.strerror}", remedy=_NO_SITE_REMEDY) from None


def _own_site_file() -> Path | None:
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification says to ignore relative paths
        try:
            config = Path.home() / ".config"
        except RuntimeError:  # an account without a home
            return None
    return config / "ddp-scaling-bench" / "site.yaml"


def read_site(path: Path) -> Document:
    """Read and validate a site file. A file that contains only comments is valid."""
    document = read_document(path, may_be_empty=True)
    content = document.content
    if not isinstance(content, dict):
        problem = Problem(str(path), 1, "a site file must be a mapping (key: value)", "begin with `cluster:`")
        raise InputError([problem])
    known = _known_keys_only(document, content, (), Site)
    if isinstance(workload := known.get("workload"), dict):
        known["workload"] = _known_keys_only(document, workload, ("workload",), SiteWorkload)
    try:
        Site.model_validate({name: value for name, value in known.items() if value is not None})
    except ValidationError as error:
        add_validation_problems(document, error)
    if document.problems:
        raise InputError(list(document.problems))
    return document


def _known_keys_only(
    document: Document, section: dict[str, Any], place: tuple[str, ...], model: type[BaseModel]
) -> dict[str, Any]:
    """Return a section without keys that are unknown to ``model``; record a problem for each unknown key."""
    allowed = list(model.model_fields)
    where = f"{place[0]} of a site file" if place else "a site file"
    for key in section:
        if key not in allowed:
            remedy = f"allowed: {', '.join(allowed)}; other keys belong in the matrix"
            document.add_problem((*place, key), f"unknown key '{key}' in {where}", remedy)
    return {key: value for key, value in section.items() if key in allowed}


def inherit(content: dict[str, Any], site: Document) -> tuple[dict[str, Any], Inheritance]:
    """Add the defaults of a site file to a matrix's content; also return the inherited values.

    Keys of the matrix take precedence. A list is replaced as a whole, because the order of set-up
    lines matters and a matrix must be able to drop a line. Only ``env`` is merged by name. The
    defaults apply to the executor that the site file names (default: slurm); a matrix with another
    executor inherits nothing.
    """
    values: dict[str, Any] = {}
    own, defaults = _section(content, "cluster"), _section(site.content, "cluster") or {}
    executor = defaults.get("executor") or DEFAULT
    if own is None or (own.get("executor") or executor) != executor:
        return content, Inheritance(site.path, site.text, values, executor)
    cluster = _merged(own, defaults, values)
    merged = {**content, "cluster": cluster} if cluster else content
    workload, device = _section(content, "workload"), (_section(site.content, "workload") or {}).get("device")
    if workload is not None and "device" not in workload and device is not None:
        values["workload.device"] = device
        merged = {**merged, "workload": {**workload, "device": device}}
    return merged, Inheritance(site.path, site.text, values, executor)


def _section(content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a section, ``{}`` if it is missing, or None if it is not a mapping."""
    section = content.get(name, {})
    return section if isinstance(section, dict) else None


def _merged(own: dict[str, Any], defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``own``, completed by ``defaults``; add the inherited settings to ``values``."""
    merged = dict(own)
    for key, value in defaults.items():
        mine = own.get(key)
        if key == "env" and isinstance(mine, dict) and value:
            new = {name: text for name, text in value.items() if name not in mine}
            values.update({f"cluster.env.{name}": text for name, text in new.items()})
            merged["env"] = {**new, **mine}
        elif key not in own and value is not None:
            merged[key] = value
            new = {f"env.{name}": text for name, text in value.items()} if key == "env" else {key: value}
            values.update({f"cluster.{name}": setting for name, setting in new.items()})
    return merged


def site_schema() -> dict[str, Any]:
    """Return the JSON Schema of a site file, for editors."""
    schema = Site.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Site defaults of scaling studies"
    return schema
