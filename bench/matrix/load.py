"""Load a matrix file and the site defaults that it inherits, and report all its problems with their lines.

A site file holds settings that all matrices of a cluster share. The inherited values are
stored with the plan, so that a study stays complete without the site file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ddp_scaling_bench.cores import sizes_up_to, usable_cores
from ddp_scaling_bench.errors import InputError, Problem, missing_file

from .document import Document, Inheritance, read_document
from .mistakes import add_findings, without_unknown_keys
from .schedulers import DEFAULT, SCHEDULERS
from .schema import CORES, STUDY_NAME, STUDY_NAME_RULE, Matrix, Site

M = TypeVar("M", bound=BaseModel)

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
        add_findings(document, error, Matrix)
        rest = without_unknown_keys(content, error)
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


def read_section(path: Path, model: type[M], *, what: str, example: str = "", alone: str = "") -> M:
    """Read a YAML file with the keys of ``model``.

    ``what`` is the name of such a file, and ``example`` a remedy for a file that is no such file. If
    ``alone`` is a key, other keys are ignored, and a file without it contains the value of this key.

    Raises:
        BenchError: the file does not exist.
        InputError: all problems of the file.
    """
    if not path.is_file():
        give = ", or ".join(filter(None, ("give the path of a YAML file", example)))
        raise missing_file(path, what=what, remedy=give)
    document = read_document(path, may_be_empty=True)
    content = document.content
    needed = [name for name, field in model.model_fields.items() if field.is_required() and name != alone]
    if content == {} or (needed and isinstance(content, dict) and content.keys().isdisjoint(needed)):
        lack = f"it has none of the keys {', '.join(needed)}" if content else "it is empty"
        raise InputError([Problem(str(path), None, f"is not a {what}: {lack}", example)])
    if alone and isinstance(content, dict) and alone in content:
        content = {alone: content[alone]}
    elif alone:
        content = {alone: content}
        document.lines = {(alone, *place): line for place, line in document.lines.items()}
    if not isinstance(content, dict):
        raise InputError([Problem(str(path), 1, f"a {what} must be a mapping (key: value)", example)])
    try:
        found = model.model_validate(content)
    except ValidationError as error:
        add_findings(document, error, model)
    document.raise_problems()
    return found


def find_site(named: str | None = None) -> Path | None:
    """Return the site file: ``named``, else ``$BENCH_SITE``, else the user's own site file if it exists.

    An empty name means no site file. The user's own site file is ``ddp-scaling-bench/site.yaml`` below
    ``$XDG_CONFIG_HOME`` (default ``~/.config``).

    Raises:
        BenchError: the named file does not exist.
    """
    name = os.environ.get(SITE_VARIABLE) if named is None else named
    if name is not None:
        path = Path(name).expanduser()
        if name and not path.is_file():
            raise missing_file(path, what="site file", remedy=_NO_SITE_REMEDY)
        return path if name else None
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification says to ignore relative paths
        config = Path(os.path.expanduser("~/.config"))  # noqa: PTH111 (no error for an account without a home)
    own = config / "ddp-scaling-bench" / "site.yaml"
    return own if own.is_file() else None


def read_site(path: Path) -> Document:
    """Read and validate a site file. A file that contains only comments is valid."""
    document = read_document(path, may_be_empty=True)
    if not isinstance(document.content, dict):
        problem = Problem(str(path), 1, "a site file must be a mapping (key: value)", "begin with `cluster:`")
        raise InputError([problem])
    document.content = {name: section for name, section in document.content.items() if section is not None}
    try:
        Site.model_validate(document.content)
    except ValidationError as error:
        add_findings(document, error, Site)
    document.raise_problems()
    return document


def inherit(content: dict[str, Any], site: Document) -> tuple[dict[str, Any], Inheritance]:
    """Add the defaults of a site file to a matrix's content; also return the inherited values.

    Keys of the matrix take precedence. A list is replaced as a whole, because the order of set-up
    lines matters and a matrix must be able to drop a line. Only ``env`` is merged by name. The
    defaults apply to the executor that the site file names (default: slurm); a matrix with another
    executor inherits nothing.
    """
    limits = site.content.get("ask_above")
    values: dict[str, Any] = {"ask_above": limits} if limits else {}
    executor = site.content.get("cluster", {}).get("executor") or DEFAULT
    cluster = content.get("cluster", {})
    if not isinstance(cluster, dict) or (cluster.get("executor") or executor) != executor:
        return content, Inheritance(site.path, site.text, values, executor)
    merged = dict(content)
    for section in ("cluster", "workload"):
        if not isinstance(content.get(section, {}), dict):
            continue
        own = merged[section] = dict(content.get(section, {}))
        for key, value in site.content.get(section, {}).items():
            if key == "env" and isinstance(value, dict) and isinstance(own.get(key, {}), dict):
                new = {name: text for name, text in value.items() if name not in own.get(key, {})}
                own[key] = {**new, **own.get(key, {})}
                values |= {f"{section}.{key}.{name}": text for name, text in new.items()}
            elif key not in own and value is not None:
                own[key] = values[f"{section}.{key}"] = value
    return merged, Inheritance(site.path, site.text, values, executor)
