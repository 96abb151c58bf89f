"""Read a YAML file with the line of every key and value, by the strict rules of YAML 1.2.

``on`` and ``no`` are strings, ``20:00`` is not the number 1200, and ``010`` is not 8.
Duplicate keys, aliases that expand to too many values, tabs and binary data are rejected with their line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_scaling_bench.errors import InputError, Problem, missing_file
from ddp_scaling_bench.variables import is_shown

from .warnings import PlanWarning

MAX_FILE_BYTES = 1_000_000
#: The maximum number of YAML nodes after aliases are expanded; a matrix has dozens.
MAX_NODES = 200_000
MAX_DEPTH = 50
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"
_WRONG_FILE = "is it the right file?"
#: Characters of files that are no text, and line breaks of YAML 1.1 that are none in 1.2.
_ODD_CHARACTER = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd-\uffff\x85\u2028\u2029]")
#: A block text; or a blank that YAML does not read as such, in an indentation or after a colon.
_ODD_BLANK = re.compile(
    r"^( *)(?! )[^#\n]*[:-] +[|>][-+\d]* *(?:#.*)?\n(?:\1 +\S.*\n?| *\n)*|"
    r"^(?:[ -]*|[ -]*[\w.]+:)(?P<blank>[\u00a0\u2000-\u200b\u202f\u3000])",
    re.MULTILINE,
)
_GROUP = re.compile(r"\{[^][{}]*\}|\[[^][{}]*\]")
#: A value without quotes, which may contain braces and brackets.
_PLAIN_VALUE = re.compile(
    rf"(?<![^\s\[{{])(?!['\"\s]|-\s)(?:(?!\s+#)[^][{{}},:]|:(?!\s)|{_GROUP.pattern})+(?=\s*(?:[],}}#]|$))"
)

#: Sections whose keys need a value; below `cluster`, `qos:` without a value replaces that of the site file.
_NOT_BLANK = (("axes",), ("workload",))
#: The path of a value in a document, such as ("axes", "nodes", 2).
Place = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's composer; :data:`_SCALARS` resolves values by YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML reads a class attribute)


_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(?:null|Null|NULL|~|)"), lambda text: None),
    (re.compile(r"(?:true|True|TRUE)"), lambda text: True),
    (re.compile(r"(?:false|False|FALSE)"), lambda text: False),
    # Unlike in YAML 1.2, 0123 is a text, because the zero of an account's name counts.
    (re.compile(r"[-+]?(?:0|[1-9][0-9]{0,399})"), int),
    (re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
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

    def value(self, place: Place) -> Any:
        """Return the value at ``place``, or None if the file has no such place."""
        content = self.content
        for part in place:
            is_there = (
                part in content
                if isinstance(content, dict)
                else isinstance(content, list) and type(part) is int
            )
            content = content[part] if is_there else None
        return content

    def location(self, place: Place) -> str:
        """Return ``PATH:LINE`` of ``place``."""
        return f"{self.path}:{self.line(place)}"

    def add_problem(self, place: Place | int, message: str, remedy: str = "") -> None:
        """Record a problem with the value at ``place``, or with a line."""
        line = place if isinstance(place, int) else self.line(place)
        self.problems[Problem(self.path, line, message, remedy)] = None

    def raise_problems(self) -> None:
        """Raise InputError with the problems, if there are any."""
        if self.problems:
            raise InputError(list(self.problems))


def read_document(path: Path, *, may_be_empty: bool = False) -> Document:
    """Read a YAML file; an empty file is an error, or ``{}`` if ``may_be_empty``.

    Raises:
        BenchError: the file does not exist.
        InputError: the file cannot be parsed. Problems that do not stop the parser, such as a duplicate key,
            are recorded in the document instead.
    """
    text = _read_text(path)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        _refuse_script(path, text)
        raise InputError([_syntax_problem(path, text, error)]) from None
    except RecursionError:
        raise _rejection(path, 1, _TOO_DEEP) from None
    document = Document(path=str(path), text=text, content={})
    if root is not None:
        document.content = _Builder(document).build(root)
        if not isinstance(document.content, dict | list):
            _refuse_script(path, text)
    elif not may_be_empty:
        raise _rejection(path, None, "is empty", "start from `bench init`, or from an example in matrices/")
    return document


def _refuse_script(path: Path, text: str) -> None:
    """Raise InputError if a file that is no matrix is a script."""
    first = text.partition("\n")[0]
    if path.suffix == ".py" or (first.startswith("#!") and "python" in first):
        own = "to measure your own training: bench init --command 'python train.py'"
        raise _rejection(path, 1, "is a script, not YAML", own)
    if first.startswith("#!") or path.suffix in (".sh", ".sbatch", ".slurm"):
        raise _rejection(path, 1, "is a script, not YAML", f"to check a job script: bench lint {path}")


def _rejection(path: Path | str, line: int | None, message: str, remedy: str = _WRONG_FILE) -> InputError:
    return InputError([Problem(str(path), line, message, remedy)])


def _read_text(path: Path) -> str:
    if not path.is_file():
        remedy = "give the path of a YAML file, or the name of a shipped example"
        raise missing_file(path, what="matrix file", remedy=remedy)
    data = path.read_bytes()
    if len(data) > MAX_FILE_BYTES:
        raise _rejection(path, None, f"has {len(data)} bytes; a matrix has at most {MAX_FILE_BYTES}")
    text = data.decode("utf-8-sig", "replace")
    if odd := _ODD_CHARACTER.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        if odd[0] not in "\x85\u2028\u2029":
            raise _rejection(path, line, "is not text in UTF-8 (binary data?)")
        code = f"{ord(odd[0]):04X}"
        what = f"contains the character U+{code}, which some YAML readers treat as a line break"
        raise _rejection(path, line, what, f'remove it, or write it as "\\u{code}" in double quotes')
    if blank := next((found for found in _ODD_BLANK.finditer(text) if found["blank"]), None):
        line, code = text.count("\n", 0, blank.end()) + 1, f"{ord(blank['blank']):04X}"
        what = f"contains the character U+{code}, a blank that YAML does not accept"
        raise _rejection(path, line, what, "replace it by a normal blank")
    return text


def _syntax_problem(path: Path, text: str, error: yaml.YAMLError) -> Problem:
    start: Any = getattr(error, "context_mark", None)
    mark: Any = getattr(error, "problem_mark", None) or start
    lines = [*text.splitlines(), ""]
    what = getattr(error, "problem", None) or str(error)
    number = mark.line + 1 if mark else None
    line = "".join(lines[mark.line : number]) if mark else ""
    message = f"not valid YAML: {what}"
    remedy = "check indentation, brackets and quotes here and in the line above"
    if re.match(r"\s*\t", line) or "\\t" in what:
        message, remedy = "the line contains a tab", "write blanks instead"
    elif "another document" in what or "single document" in what:
        message, remedy = "contains more than one YAML document", "keep one matrix per file (no second '---')"
    elif "undefined alias" in what or "expected alphabetic or numeric" in what:
        define = "define it earlier in the file with '&name', or " * ("undefined" in what)
        remedy = f"{define}quote a value that begins with * or &"
    elif mark and what in _AFTER_MISTAKE and (found := _mistake_before(lines[:number], mark.column)):
        return Problem(str(path), *found)
    elif value := _mixed_value(line[:1000]):
        message = "a text needs quotes if it begins with { or [, or contains them inside other { } or [ ]"
        remedy = "write '{}'".format(value.replace("'", "''"))
    elif start and (
        "end of stream" in what
        or (what.startswith("expected ',' or") and (start.line < mark.line or "<stream end>" in what))
    ):
        number, message = start.line + 1, f"the {text[start.index]} in this line is not closed"
        remedy = "close it" if "stream" in what else f"close it, or add a comma before line {mark.line + 1}"
    elif mark:
        word = "".join(line[mark.column :].split()[:1])[:40]
        message, remedy = _in_plain_words(what, word, is_first=not line[: mark.column].strip(" -")) or (
            message,
            remedy,
        )
    last = text.rstrip().count("\n") + 1
    return Problem(str(path), number and min(number, last), message, remedy)


def _in_plain_words(what: str, word: str, *, is_first: bool) -> tuple[str, str] | None:
    """Return message and remedy for an error of the parser at a word, which may be the first of its line."""
    if what.startswith("expected <block end>"):
        if is_first:
            remedy = "begin all keys of a section, or of an entry, in the same column"
            return "the line is not indented like the lines above", remedy
        return f"{word!r} follows a complete value", "remove it, or put the whole value into quotes"
    if what.startswith("expected ',' or"):
        if word[:1] in "]}":
            return f"{word[:1]!r} does not fit the brackets before it", "correct or remove it"
        return f"a comma or a closing bracket is missing before {word!r}", "add it"
    if what.startswith("expected the node content"):
        if not word:
            return "the file ends within { } or [ ]", "close them"
        return f"a value is missing before {word!r}", f"add it, or remove {word[:1]!r}"
    if "cannot start any token" in what:
        return f"a text needs quotes if it begins with {word[:1]!r}", f"write '{word.rstrip(',]}')}'"
    if "escape character" in what:
        return "double quotes allow no such \\", "put the text into single quotes"
    return None


#: What PyYAML says behind a key or a value that is wrong.
_AFTER_MISTAKE = ("mapping values are not allowed here", "could not find expected ':'")


def _mistake_before(lines: list[str], column: int) -> tuple[int, str, str] | None:
    """Return line, message and remedy of a mistake that the parser reports at the last of ``lines``."""
    if glued := _without_blank(lines):
        number, key, value = glued
        return number, f"'{key}:{value}' has no blank after the colon", f"write {key}: {value}"
    number, begin = len(lines), lines[-1][:column]
    if is_key := re.fullmatch(r"\s*(?:- )?(?:\w[\w.-]*)?", begin):  # the mistake is above
        number = next(
            (at for at in range(number - 1, 0, -1) if lines[at - 1].strip()[:1] not in ("", "#")), 1
        )
        begin = re.split(r"\s#|:\s", lines[number - 1])[0]
    text = re.split(r"\s#", lines[number - 1])[0].strip()
    if re.match(r"\s*-(?!\w\s)[^\s-]", begin):
        return number, "there is no blank after the dash", f"write - {text[1:61]}"
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", begin)
    if odd := next((one for one in unquoted if ord(one) > 127 and unicodedata.category(one)[0] == "P"), ""):
        return number, f"{odd!r} has no meaning in YAML", "write : , - or a quote as on a keyboard"
    if not is_key:
        return number, "a text that contains ': ' needs quotes", "put the whole text into quotes"
    if not re.search(r":(\s|$)", text) and not text.startswith("- "):
        parts = re.fullmatch(r"([A-Za-z_][\w.]*)\s*[=\s]\s*(\S.{,60})|([A-Za-z_][\w.]*)", text)
        example = parts and (f"{parts[3]}:" if parts[3] else f"{parts[1]}: {parts[2]}")
        return (
            number,
            f"{text[:40]!r} has no colon",
            f"write {example or 'KEY: VALUE, or # before a comment'}",
        )
    if re.search(r":\s+[^#\s]", text) and _indent(lines[-1]) > _indent(lines[number - 1]):
        return (
            len(lines),
            "the line is indented deeper than the line above",
            "begin both in the same column",
        )
    return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_blank(lines: list[str]) -> tuple[int, str, str] | None:
    """Return line, key and value of the last ``key:value``, if only lists and comments are below it."""
    for number, line in reversed(list(enumerate(lines, start=1))):
        if found := re.fullmatch(r"\s*(?:- )?(\w+):([^\s/#][^#]{,60}?)\s*(?:\s#.*)?", line):
            return number, found[1], found[2]
        if number < len(lines) and not re.match(r"\s*(?:#|- |$)", line):
            return None
    return None


def _mixed_value(line: str) -> str:
    """Return the first value in a line that mixes text with braces or brackets without quotes, or ``""``."""
    for found in _PLAIN_VALUE.finditer(line):
        value = found[0].strip()
        if _GROUP.search(value) and not _GROUP.fullmatch(value):
            before = re.search(r":\s+([^][{}:,'\"]+:\s+)$", line[: found.start()])  # speed: ([0-9]+)
            return (before[1] if before else "") + value
    return ""


class _Builder:
    """Convert composed YAML nodes to plain values; record lines and problems in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.node_count = 0

    def build(self, node: yaml.Node, place: Place = (), depth: int = 0) -> Any:
        self.node_count += 1
        if depth > MAX_DEPTH:
            raise _rejection(self.document.path, node.start_mark.line + 1, _TOO_DEEP)
        if self.node_count > MAX_NODES:
            what = f"the file expands to more than {MAX_NODES} values, probably because of aliases"
            line = self.document.line(place[:1])
            raise _rejection(self.document.path, line, what, "write the values instead of aliases")
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, i), depth + 1) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        value = self._scalar(node)
        is_argument = any(str(part).startswith("args.") for part in place)
        is_variable = place[:2] == ("cluster", "env") or any(str(part).startswith("env.") for part in place)
        # Arguments of a command are text: 1e-3 and true as they are written. So are numbers of variables.
        is_text = isinstance(value, int | float) and (
            is_argument or (is_variable and not isinstance(value, bool))
        )
        return str(node.value) if is_text else value

    def _mapping(self, node: yaml.MappingNode, place: Place, depth: int) -> Any:
        """Return a mapping, or a text if the braces are part of one (``{name}``)."""
        content: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            line, written = key_node.start_mark.line + 1, self._source(key_node)
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            following = self.document.text[key_node.end_mark.index :][:100]
            if key == "<<" and not key_node.style:
                value = self.build(value_node, place, depth + 1)
                for mapping in value if isinstance(value, list) else [value]:
                    if isinstance(mapping, dict):
                        merged = {**mapping, **merged}
                    else:
                        self.document.add_problem(line, "'<<' merges mappings only")
            elif node.flow_style and re.match(r"\s*[,}]", following):
                alone = self._source(node) if len(node.value) == 1 else ""
                if place[-1:] == ("env",) and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=.*", written)):
                    what = f"{assigned[1]} is set as in a shell"
                    self.document.add_problem(line, what, f"write {assigned[1]}: VALUE")
                    continue
                remedy = f"write {alone!r}" if alone else "write KEY: VALUE or a list with [ ], or quote it"
                begin = self.document.text[: key_node.start_mark.index][-100:]
                if value := re.search(
                    r"([\w.]+:) *([^\s{}\[\],:'\"]+,)$", begin
                ):  # CUDA_VISIBLE_DEVICES: 0,1
                    remedy = f'a comma ends a value within {{ }}: write {value[1]} "{value[2]}{written}"'
                self.document.add_problem(line, f"{written!r} is a key without a colon and a value", remedy)
                if alone:
                    return alone
            elif not isinstance(key, str) and type(key) is not int:
                what = f"a key must be a word, not {written!r}"
                self.document.add_problem(line, what, "quote it if it is a name")
            elif key in content:
                what = f"key '{key}' is given twice (first in line {self.document.line((*place, key))})"
                is_group = isinstance(value_node, yaml.CollectionNode)
                remedy = "merge both into one" if is_group else "keep only one of them"
                self.document.add_problem(line, what, remedy)
            elif (
                place[:1] in _NOT_BLANK
                and isinstance(value_node, yaml.ScalarNode)
                and not (value_node.value or value_node.style)
            ):
                what = f"{'.'.join(map(str, (*place, key)))} has no value"
                self.document.add_problem(line, what, "add one, or remove the key")
            else:
                self.document.lines[(*place, key)] = line
                content[key] = self.build(value_node, (*place, key), depth + 1)
        return {**merged, **content}

    def _source(self, node: yaml.Node) -> str:
        text = self.document.text[node.start_mark.index : node.end_mark.index]
        return " ".join(text[:200].split())

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.tag not in ("tag:yaml.org,2002:str", "!", None):
            what = f"the YAML tag {node.tag} is not supported in a matrix"
            self.document.add_problem(node.start_mark.line + 1, what, "remove it")
        elif not node.style:
            for pattern, convert in _SCALARS:
                if pattern.fullmatch(text):
                    return convert(text)
        return text


def shown_text(text: str) -> str:
    """Return the text of a matrix without the values in ``cluster.env`` of variables that are not shown.

    A text that is no YAML is left out.
    """
    try:
        nodes = [yaml.compose(text, Loader=_Loader)]
        for key in ("cluster", "env"):
            nodes = [value for node in nodes for name, value in _entries(node) if name == key]
        hidden = [value for node in nodes for name, value in _entries(node) if not is_shown(name)]
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
