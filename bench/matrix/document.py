"""Read a matrix file: YAML with a line for every key and value, and nothing surprising.

The reading is YAML 1.2's: ``on`` and ``no`` are words, ``20:00`` is not the number 1200,
``010`` is not 8. Keys given twice, aliases that explode, tabs and binary data are
refused with their line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.errors import BenchError, InputError, Problem, missing_file

MAX_FILE_BYTES = 4_000_000
MAX_NODES = 200_000  # of YAML after aliases are expanded; a matrix has dozens
MAX_DEPTH = 50

Place = tuple[str | int, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The composer only; values are resolved by YAML 1.2's core schema below."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML reads a class attribute)


_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(?:null|Null|NULL|~|)"), lambda text: None),
    (re.compile(r"(?:true|True|TRUE)"), lambda text: True),
    (re.compile(r"(?:false|False|FALSE)"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,400}"), int),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(?:nan|NaN|NAN)"), lambda text: float("nan")),
)


@dataclass(frozen=True)
class Inheritance:
    """What a matrix took from a site file.

    ``values`` are by key (``cluster.partition``, ``cluster.env.NAME``), as the file has them;
    ``executor`` is the one that the file's defaults are for.
    """

    path: str
    text: str
    values: dict[str, Any]
    executor: str

    def __str__(self) -> str:
        taken = ", ".join(self.values) or "nothing taken"
        return f"site defaults of {self.path} (executor {self.executor}): {taken}"


@dataclass
class Document:
    """The content of a YAML file, with the line (from 1) of each key and list item.

    ``site`` is what a matrix inherited; its content and its lines are its own alone.
    """

    path: str
    text: str
    content: Any
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    site: Inheritance | None = None

    def inherited(self, key: str) -> bool:
        """Whether a key (``cluster.partition``) comes from the site file, and not from this one."""
        return self.site is not None and key in self.site.values

    def line(self, place: Place) -> int | None:
        """Return the line of ``place``, or of the closest thing around it."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def read_document(path: Path, *, may_be_empty: bool = False) -> Document:
    """Return the content of a YAML file; with ``may_be_empty`` that of one without content is ``{}``.

    Raises:
        BenchError: no file, not a file, not readable, not text.
        InputError: nothing that could be read further. Lesser problems (a key given
            twice) are kept in the document, to be told together with the schema's.
    """
    text = _read_text(path)
    try:
        _refuse_depth(path, text)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError([_syntax_problem(path, text, error)]) from None
    if root is None and may_be_empty:
        return Document(path=str(path), text=text, content={})
    if root is None:
        raise InputError(
            [Problem(str(path), None, "is empty", "start from `bench init`, or from an example in matrices/")]
        )
    builder = _Builder(str(path))
    content = builder.build(root, (), 0)
    return Document(
        path=str(path), text=text, content=content, lines=builder.lines, problems=builder.problems
    )


#: Line breaks of YAML 1.1 that are letters like any other in YAML 1.2; PyYAML folds them to spaces.
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise missing_file(
            path, what="matrix file", remedy="give the path of a YAML file, or the name of a shipped example"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BenchError(
            f"{path}: has {len(data)} bytes; a matrix has at most {MAX_FILE_BYTES}",
            remedy="is it the right file?",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(
            [Problem(str(path), line, "is not text in UTF-8 (binary data?)", "is it the right file?")]
        ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise InputError(
            [Problem(str(path), line, "holds a NUL byte (binary data?)", "is it the right file?")]
        )
    if odd := _LINE_BREAKS.search(text):
        code = ord(odd[0])
        line = text[: odd.start()].count("\n") + 1
        what = f"holds the character U+{code:04X}, which YAML readers take for a line break"
        remedy = f'remove it, or write it as "\\u{code:04X}" in double quotes'
        raise InputError([Problem(str(path), line, what, remedy)])
    return text


def _refuse_depth(path: Path, text: str) -> None:
    """Refuse deep nesting from the stream of events: the C composer would overflow its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                what = f"is nested more than {MAX_DEPTH} deep"
                line = event.start_mark.line + 1 if event.start_mark else None
                raise InputError([Problem(str(path), line, what, "is it the right file?")])
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _syntax_problem(path: Path, text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    line = mark.line + 1 if mark else None
    lines = text.splitlines()
    at = lines[line - 1] if line and line <= len(lines) else ""
    if "\t" in at[: len(at) - len(at.lstrip())] or "\\t" in what:
        return Problem(str(path), line, "a tab stands where YAML wants spaces", "indent with spaces")
    if "another document" in what or "single document" in what:
        return Problem(
            str(path), line, "holds more than one YAML document", "keep one matrix per file (no second '---')"
        )
    if "undefined alias" in what:
        return Problem(
            str(path),
            line,
            f"YAML: {what}",
            "define it before with '&name', or quote a value that begins with '*'",
        )
    remedy = "check indentation, brackets and quotes here and in the line above"
    return Problem(str(path), line, f"not valid YAML: {what}", remedy)


class _Builder:
    """Turn composed YAML nodes into plain values and remember where each stood."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self.seen = 0
        self.at = 1  # the line of the top-level key that is being read

    def build(self, node: yaml.Node, place: Place, depth: int) -> Any:
        self.seen += 1
        if self.seen > MAX_NODES or depth > 2 * MAX_DEPTH:
            what = f"the file expands to more than {MAX_NODES} values (aliases?)"
            raise InputError([Problem(self.path, self.at, what, "write the values out")])
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, i), depth + 1) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, place: Place, depth: int) -> dict[str, Any]:
        content: dict[str, Any] = {}
        own: dict[str, int] = {}
        merged: list[dict[str, Any]] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if key == "<<" and not key_node.style:
                merged += self._merge(value_node, place, depth)
                continue
            if not isinstance(key, str):
                written = getattr(key_node, "value", "a list or mapping")
                self.problems.append(
                    Problem(
                        self.path, line, f"a key must be a word, not {written!r}", "quote it if it is a name"
                    )
                )
                continue
            if key in own:
                self.problems.append(
                    Problem(
                        self.path,
                        line,
                        f"key '{key}' is given twice (first in line {own[key]})",
                        "keep one of them",
                    )
                )
                continue
            own[key] = line
            self.at = line if depth == 0 else self.at
            self.lines[(*place, key)] = line
            content[key] = self.build(value_node, (*place, key), depth + 1)
        for mapping in merged:
            content = {**mapping, **content}
        return content

    def _merge(self, node: yaml.Node, place: Place, depth: int) -> list[dict[str, Any]]:
        value = self.build(node, place, depth + 1)
        mappings = value if isinstance(value, list) else [value]
        if not all(isinstance(mapping, dict) for mapping in mappings):
            self.problems.append(Problem(self.path, node.start_mark.line + 1, "'<<' merges mappings only"))
            return []
        return mappings

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.tag not in ("tag:yaml.org,2002:str", "!", None):
            line = node.start_mark.line + 1
            self.problems.append(
                Problem(self.path, line, f"the YAML tag {node.tag} is not used in a matrix", "remove it")
            )
            return text
        if node.style in ("'", '"', "|", ">"):
            return text
        for pattern, convert in _SCALARS:
            if pattern.fullmatch(text):
                return convert(text)
        return text
