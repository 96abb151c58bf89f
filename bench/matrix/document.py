"""Read a YAML file with the line of every key and value, by the strict rules of YAML 1.2.

``on`` and ``no`` are strings, ``20:00`` is not the number 1200, and ``010`` is not 8.
Duplicate keys, aliases that expand to too many values, tabs and binary data are rejected with their line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_scaling_bench.errors import BenchError, InputError, Problem, missing_file
from ddp_scaling_bench.variables import is_shown

from .warnings import PlanWarning

MAX_FILE_BYTES = 4_000_000
#: The maximum number of YAML nodes after aliases are expanded; a matrix has dozens.
MAX_NODES = 200_000
MAX_DEPTH = 50
#: The number of problems of a file that are reported at once.
MAX_PROBLEMS = 20
_WRONG_FILE = "is it the right file?"

#: The path of a value in a document, such as ("axes", "nodes", 2).
Place = tuple[str | int, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's composer; :data:`_SCALARS` resolves values by YAML 1.2's core schema."""

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
    """The values that a matrix inherits from a site file.

    ``values`` maps full keys (``cluster.partition``, ``cluster.env.NAME``) to the values in
    the site file. ``executor`` is the executor that the site's defaults apply to.
    """

    path: str
    text: str
    values: dict[str, Any]
    executor: str

    def __str__(self) -> str:
        keys = ", ".join(self.values) or "nothing inherited"
        return f"site defaults of {self.path} (executor {self.executor}): {keys}"


@dataclass
class Document:
    """The content of a YAML file, the line of each key and item, and the problems found so far.

    Lines count from 1. ``problems`` is used as an ordered set. ``site`` describes the values that a
    matrix inherited from a site file; ``content`` and ``lines`` do not include them.
    """

    path: str
    text: str
    content: Any
    lines: dict[Place, int] = field(default_factory=dict)
    problems: dict[Problem, None] = field(default_factory=dict)
    warnings: list[PlanWarning] = field(default_factory=list)
    site: Inheritance | None = None

    def inherited(self, key: str) -> bool:
        """Return whether a key (``cluster.partition``) is inherited from the site file."""
        return self.site is not None and key in self.site.values

    def line(self, place: Place) -> int:
        """Return the line of ``place``, or of the closest enclosing value if the file has no such place."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def location(self, place: Place) -> str:
        """Return ``PATH:LINE`` of ``place``."""
        return f"{self.path}:{self.line(place)}"

    def add_problem(self, place: Place, message: str, remedy: str = "") -> None:
        """Record a problem with the value at ``place``."""
        self.problems[Problem(self.path, self.line(place), message, remedy)] = None

    def raise_problems(self) -> None:
        """Raise InputError with the first 20 problems, if there are any."""
        problems = list(self.problems)
        if len(problems) > MAX_PROBLEMS:
            rest = Problem(self.path, None, f"and {len(problems) - MAX_PROBLEMS} more problems")
            problems = [*problems[:MAX_PROBLEMS], rest]
        if problems:
            raise InputError(problems)


def read_document(path: Path, *, may_be_empty: bool = False) -> Document:
    """Read a YAML file; an empty file is an error, or ``{}`` if ``may_be_empty``.

    Raises:
        BenchError: the file does not exist, or is not a readable text file.
        InputError: the YAML cannot be parsed. Problems that do not stop the parser, such as
            a duplicate key, are recorded in the document instead.
    """
    text = _read_text(path)
    try:
        _reject_deep_nesting(path, text)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError([_syntax_problem(path, text, error)]) from None
    document = Document(path=str(path), text=text, content={})
    if root is not None:
        document.content = _Builder(document).build(root, (), 0)
    elif not may_be_empty:
        raise _rejection(path, None, "is empty", "start from `bench init`, or from an example in matrices/")
    return document


def _rejection(path: Path, line: int | None, message: str, remedy: str = _WRONG_FILE) -> InputError:
    return InputError([Problem(str(path), line, message, remedy)])


#: Characters that are line breaks in YAML 1.1 but not in 1.2; PyYAML replaces them by spaces.
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
        what = f"{path}: has {len(data)} bytes; a matrix has at most {MAX_FILE_BYTES}"
        raise BenchError(what, remedy=_WRONG_FILE)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _rejection(path, line, "is not text in UTF-8 (binary data?)") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise _rejection(path, line, "contains a NUL byte (binary data?)")
    if odd := _LINE_BREAKS.search(text):
        code = ord(odd[0])
        line = text[: odd.start()].count("\n") + 1
        what = f"contains the character U+{code:04X}, which some YAML readers treat as a line break"
        raise _rejection(path, line, what, f'remove it, or write it as "\\u{code:04X}" in double quotes')
    return text


def _reject_deep_nesting(path: Path, text: str) -> None:
    """Reject deep nesting before the file is composed, because libyaml would overflow its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else None
                raise _rejection(path, line, f"is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _syntax_problem(path: Path, text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    line = mark.line + 1 if mark else None
    lines = text.splitlines()
    at = lines[line - 1] if line and line <= len(lines) else ""
    message = f"not valid YAML: {what}"
    remedy = "check indentation, brackets and quotes here and in the line above"
    if "\t" in at[: len(at) - len(at.lstrip())] or "\\t" in what:
        message, remedy = "the line is indented with a tab", "indent with spaces"
    elif "another document" in what or "single document" in what:
        message = "contains more than one YAML document"
        remedy = "keep one matrix per file (no second '---')"
    elif "undefined alias" in what:
        message = f"YAML: {what}"
        remedy = "define it earlier in the file with '&name', or quote a value that begins with '*'"
    elif mark and isinstance(error, yaml.parser.ParserError):
        with suppress(yaml.YAMLError):  # another mistake further down
            if value := _unquoted_value(text, mark.index):
                message, remedy = _NEEDS_QUOTES, f"write {_quoted(value)}"
    return Problem(str(path), line, message, remedy)


_STARTS = (yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken)
_ENDS = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_NEEDS_QUOTES = "a text needs quotes if it begins with { or [, or contains them inside other { } or [ ]"


def _quoted(value: str) -> str:
    """Return a text as a YAML scalar in single quotes."""
    return "'" + " ".join(value.split()).replace("'", "''") + "'"


def _unquoted_value(text: str, index: int) -> str:
    """Return the value at ``index`` if it mixes text with braces or brackets; else an empty text.

    Without quotes, YAML reads the first brace or bracket as the begin of a mapping or list, or as its end.
    """
    starts: list[int | None] = []  # start of the current value in each open mapping and list
    has_text: list[bool] = []
    outermost = 0
    for token in yaml.scan(text, Loader=_Loader):
        at, is_end = token.start_mark.index, isinstance(token, _ENDS)
        if not starts and not isinstance(token, _STARTS):
            continue
        if is_end or isinstance(token, yaml.FlowEntryToken | yaml.KeyToken | yaml.ValueToken):
            start = starts[-1]
            if start is not None and start <= index < at:
                is_value = has_text[-1] and not isinstance(token, yaml.ValueToken)
                value = text[start:at].strip()
                return value if is_value and re.search(r"[][{}]", value) else ""
            starts[-1], has_text[-1] = None, False
            if is_end:
                del starts[-1], has_text[-1]
                between = text[token.end_mark.index : index]
                if not starts and at < index and not between.strip(" "):
                    return re.split(r"\n| #", text[outermost:])[0].strip()
            continue
        outermost = outermost if starts else at
        if starts and starts[-1] is None:
            starts[-1] = at
        if isinstance(token, yaml.ScalarToken):
            has_text[-1] = True
        elif isinstance(token, _STARTS):
            starts.append(None)
            has_text.append(False)
    return ""


class _Builder:
    """Convert composed YAML nodes to plain values; record lines and problems in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.lines = document.lines
        self.node_count = 0
        self.top_level_line = 1

    def build(self, node: yaml.Node, place: Place, depth: int) -> Any:
        self.node_count += 1
        if self.node_count > MAX_NODES or depth > 2 * MAX_DEPTH:
            what = f"the file expands to more than {MAX_NODES} values, probably because of aliases"
            path = Path(self.document.path)
            raise _rejection(path, self.top_level_line, what, "write the values instead of aliases")
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            if braces := self._unquoted_braces(node):
                remedy = f"write {_quoted(braces)}"
                self._add_problem(node.start_mark.line + 1, f"{braces} needs quotes", remedy)
                return braces
            return self._mapping(node, place, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, i), depth + 1) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _unquoted_braces(self, node: yaml.MappingNode) -> str:
        """Return the text of a mapping such as ``{name}``: braces around one key without a colon."""
        if not node.flow_style or len(node.value) != 1 or not self._lacks_colon(node.value[0][0]):
            return ""
        text = self.document.text[node.start_mark.index : node.end_mark.index]
        return text if re.fullmatch(r"\{[^{}\n]+\}", text) else ""

    def _lacks_colon(self, key: yaml.Node) -> bool:
        return re.match(r"\s*[,}]", self.document.text[key.end_mark.index :][:100]) is not None

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
            if node.flow_style and self._lacks_colon(key_node):
                what = f"'{key_node.value}' is a key without a colon and a value"
                self._add_problem(line, what, "quote a text that contains a comma inside { }")
                continue
            if not isinstance(key, str):
                written = getattr(key_node, "value", "a list or mapping")
                self._add_problem(line, f"a key must be a word, not {written!r}", "quote it if it is a name")
                continue
            if key in own:
                what = f"key '{key}' is given twice (first in line {own[key]})"
                self._add_problem(line, what, "keep only one of these lines")
                continue
            own[key] = line
            self.top_level_line = line if depth == 0 else self.top_level_line
            self.lines[(*place, key)] = line
            content[key] = self.build(value_node, (*place, key), depth + 1)
        for mapping in merged:
            content = {**mapping, **content}
        return content

    def _merge(self, node: yaml.Node, place: Place, depth: int) -> list[dict[str, Any]]:
        value = self.build(node, place, depth + 1)
        mappings = value if isinstance(value, list) else [value]
        if not all(isinstance(mapping, dict) for mapping in mappings):
            self._add_problem(node.start_mark.line + 1, "'<<' merges mappings only")
            return []
        return mappings

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.tag not in ("tag:yaml.org,2002:str", "!", None):
            line = node.start_mark.line + 1
            self._add_problem(line, f"the YAML tag {node.tag} is not supported in a matrix", "remove it")
            return text
        if node.style in ("'", '"', "|", ">"):
            return text
        for pattern, convert in _SCALARS:
            if pattern.fullmatch(text):
                return convert(text)
        return text

    def _add_problem(self, line: int, message: str, remedy: str = "") -> None:
        self.document.problems[Problem(self.document.path, line, message, remedy)] = None


def shown_text(text: str) -> str:
    """Return the text of a matrix without the values in ``cluster.env`` of variables that are not shown.

    A text that is no YAML is left out.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        sections = [value for key, value in _entries(root) if key == "cluster"]
        variables = [node for one in sections for key, node in _entries(one) if key == "env"]
        hidden = [node for one in variables for name, node in _entries(one) if not is_shown(name)]
    except (yaml.YAMLError, RecursionError):
        return ""
    for start, end in sorted({(node.start_mark.index, node.end_mark.index) for node in hidden}, reverse=True):
        text = text[:start] + "..." + "\n" * text[start:end].endswith("\n") + text[end:]
    return text


def _entries(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the keys and values of a mapping, with those that it merges."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "<<":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _entries(merged)
        elif isinstance(key, yaml.ScalarNode):
            yield key.value, value
