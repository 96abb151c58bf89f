"""Site defaults: what every matrix of a cluster would say, said once, in a file of the user's.

A matrix inherits what it does not say itself. What it took is kept with the plan, so that
a study stays complete without the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from bench.errors import BenchError, InputError, Problem, missing_file
from bench.matrix.cluster import Cluster
from bench.matrix.document import Document, Inheritance, read_document
from bench.matrix.field_types import Section
from bench.matrix.messages import problems_of

VARIABLE = "BENCH_SITE"
_NONE_REMEDY = f"name another with --site or ${VARIABLE}; {VARIABLE}= (empty) is none"


class SiteWorkload(Section):
    """What the cluster decides of the workload."""

    device: Literal["cuda", "cpu"] | None = None
    """What this cluster's nodes train on."""


class Site(Section):
    """A site file: defaults that the matrices of this cluster inherit."""

    cluster: Cluster = Cluster()
    """As in a matrix; a key that the matrix gives itself is not inherited."""
    workload: SiteWorkload = SiteWorkload()
    """As in a matrix; only the device."""


def find_site(named: str | None = None) -> Path | None:
    """Return the site file in force: ``named``, else ``$BENCH_SITE``, else the user's own, if there is one.

    An empty name means none. The user's own is ``ddp-scaling-bench/site.yaml`` in
    ``$XDG_CONFIG_HOME``, which is ``~/.config`` where it is not set.

    Raises:
        BenchError: the file that was named is not there, or cannot be looked at.
    """
    name = os.environ.get(VARIABLE) if named is None else named
    if name is not None:
        path = Path(name).expanduser()
        if name and not path.is_file():
            raise missing_file(path, what="site file", remedy=_NONE_REMEDY)
        return path if name else None
    own = _own_file()
    try:
        return own if own is not None and own.is_file() else None
    except OSError as error:
        raise BenchError(f"{own}: cannot be looked at: {error.strerror}", remedy=_NONE_REMEDY) from None


def _own_file() -> Path | None:
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification has relative paths ignored
        try:
            config = Path.home() / ".config"
        except RuntimeError:  # an account without a home
            return None
    return config / "ddp-scaling-bench" / "site.yaml"


def read_site(path: Path) -> Document:
    """Return a site file, checked by the rules of a matrix; one of comments alone gives nothing.

    Raises:
        BenchError: it cannot be read.
        InputError: everything that is wrong with it, each with its line.
    """
    document = read_document(path, may_be_empty=True)
    content = document.content
    if not isinstance(content, dict):
        problem = Problem(str(path), 1, "a site file is a mapping (key: value)", "begin with `cluster:`")
        raise InputError([problem])
    known = _known_part(document, content, (), Site)
    if isinstance(workload := known.get("workload"), dict):
        known["workload"] = _known_part(document, workload, ("workload",), SiteWorkload)
    try:
        Site.model_validate({name: value for name, value in known.items() if value is not None})
    except ValidationError as error:
        document.problems += problems_of(error, document)
    if document.problems:
        raise InputError(document.problems)
    return document


def _known_part(
    document: Document, section: dict[str, Any], place: tuple[str, ...], model: type[BaseModel]
) -> dict[str, Any]:
    """Return what ``model`` knows of a section; the rest becomes problems of the document."""
    allowed = list(model.model_fields)
    unknown = [key for key in section if key not in allowed]
    document.problems += [_unknown(document, (*place, key), allowed) for key in unknown]
    return {key: value for key, value in section.items() if key in allowed}


def _unknown(document: Document, place: tuple[str, ...], allowed: list[str]) -> Problem:
    where = f"{place[0]} of a site file" if len(place) > 1 else "a site file"
    what = f"unknown key '{place[-1]}' in {where}"
    remedy = f"allowed: {', '.join(allowed)}; what is to be measured belongs into the matrix"
    return Problem(document.path, document.line(place), what, remedy)


def inherit(content: dict[str, Any], site: Document) -> tuple[dict[str, Any], Inheritance]:
    """Return a matrix's content with what it inherits from a site file, and what that is.

    What the matrix says itself wins, a list as a whole: the order of set-up lines matters, and
    a matrix must be able to do without one. Only ``env`` is merged, name by name. The site's
    defaults are for the executor that it names (slurm): a matrix with another inherits nothing.
    """
    values: dict[str, Any] = {}
    own, given = _section(content, "cluster"), _section(site.content, "cluster") or {}
    executor = given.get("executor") or "slurm"
    if own is None or (own.get("executor") or executor) != executor:
        return content, Inheritance(site.path, site.text, values, executor)
    cluster = _merged(own, given, values)
    merged = {**content, "cluster": cluster} if cluster else content
    workload, device = _section(content, "workload"), (_section(site.content, "workload") or {}).get("device")
    if workload is not None and "device" not in workload and device is not None:
        values["workload.device"] = device
        merged = {**merged, "workload": {**workload, "device": device}}
    return merged, Inheritance(site.path, site.text, values, executor)


def _section(content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a section, an empty one where it is not given; None where it is no mapping."""
    section = content.get(name, {})
    return section if isinstance(section, dict) else None


def _merged(own: dict[str, Any], given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster section, and note in ``values`` what is inherited."""
    merged = dict(own)
    for key, value in given.items():
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
