"""Expand the words of a script with the values of straight-line assignments.

A variable has a known value only below an assignment that certainly runs. All other expansions stay
:class:`~bench.lint.values.Unknown`, and keep their source text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tree_sitter import Node

from .syntax import line_of, start_of, text_of, within
from .values import Unknown, Value, plain

#: Marks around the number of an unknown expansion in the text of an inner shell.
OPEN, CLOSE = "\x01", "\x02"
_MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
# bash(1), QUOTING: a backslash keeps its special meaning before these characters.
_ESCAPED_IN_WORD = re.compile(r"\\([^\n])")
_ESCAPED_IN_STRING = re.compile(r'\\([$`"\\])')
# bash(1), Word Splitting: the default of IFS.
_IFS = re.compile(r"[ \t\n]+")
_DEFAULTS = (":-", "-", ":=", "=")
_ALLOWS_UNSET = (*_DEFAULTS, ":+", "+", ":?", "?")
_IN_ARITHMETIC = frozenset({"variable_name", "simple_expansion", "expansion", "command_substitution"})
#: Maximum lengths of a value, and number of words; longer values are unknown.
_MAX_VALUE, _MAX_PARTS, _MAX_WORDS = 20_000, 200, 2_000


@dataclass(frozen=True, slots=True)
class Assigned:
    """One assignment. ``value`` and ``items`` (of an array) are None if they are unknown."""

    name: str
    line: int
    value: Value | None = None
    items: tuple[Value, ...] | None = None
    exported: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """One expansion of a variable; ``guarded`` is True if the expansion allows an unset variable."""

    name: str
    line: int
    guarded: bool


#: A part of a word, and whether bash splits it into words.
Piece = tuple[str | Unknown, bool]


class Expander:
    """Expand words in a scope.

    ``scope`` contains the last assignment of each variable. ``first_line`` is the line of the script in which
    the text begins. Marks in the text stand for ``unknowns``. ``run`` follows a command substitution.
    """

    def __init__(
        self, text: str, unknowns: Sequence[Unknown], run: Callable[[Node], None], *, in_task: bool
    ) -> None:
        self.source = text
        self.scope: dict[str, Assigned] = {}
        self.uses: list[Use] = []
        self.arithmetic: list[Unknown] = []
        self.first_line = 1
        self.in_task = in_task
        self.testing = False
        self._unknowns = unknowns
        self._run = run

    def line(self, node: Node) -> int:
        """Return the line of the script in which a node starts."""
        return self.first_line + line_of(node) - 1

    def text(self, node: Node) -> str:
        """Return the text of a node, with characters outside ASCII."""
        return self.source[node.start_byte : node.end_byte].strip(" \t\n")

    def words(self, node: Node) -> list[Value]:
        """Return the words that bash makes of one word of the script."""
        items = self._items(node)
        if items is not None:
            return list(items)
        words: list[list[str | Unknown]] = []
        continues = False
        for part, split in self._pieces(node, quoted=False):
            chunks = _IFS.split(part) if split and isinstance(part, str) else [part]
            for number, chunk in enumerate(chunks):
                if number or not continues:
                    words += [[]] if chunk or not split else []
                    continues = bool(chunk) or not split
                if continues:
                    words[-1].append(chunk)
        quoted = node.type in ("string", "raw_string", "ansi_c_string")
        return [Value(_merged(word), self.line(node), quoted) for word in words[:_MAX_WORDS]]

    def written(self, node: Node) -> Value:
        """Return the text of a node without expansions."""
        parts = _merged([part for part, _ in self._marked(self.text(node), True)])
        return Value(parts, self.line(node))

    def value(self, node: Node) -> Value:
        """Return the value that an assignment of this word has."""
        parts = _merged([part for part, _ in self._pieces(node, quoted=True)])
        return Value(parts, self.line(node), node.type in ("string", "raw_string"))

    def assign(self, node: Node, *, exported: bool) -> Assigned:
        """Return the assignment of a ``variable_assignment`` node without executing it."""
        target, right = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target is not None, "an assignment has a name"
        line, before = self.line(node), self.scope.get(text_of(target))
        unknown = Assigned(text_of(target).partition("[")[0], line, exported=exported)
        appends = any(child.type == "+=" for child in node.children)
        if right is not None and right.type == "array":
            elements = [child for child in right.named_children if child.type != "comment"]
            items = [word for child in elements for word in self.words(child)]
            kept = before.items if appends and before else ()
            return unknown if kept is None else replace(unknown, items=(*kept, *items)[:_MAX_WORDS])
        value = self.value(right) if right is not None else plain("", line)
        if appends and before and before.value:
            value = Value(_merged([*before.value.parts, *value.parts]), line, value.quoted)
        large = len(value.parts) > _MAX_PARTS or len(value.literal or "") > _MAX_VALUE
        if large or target.type == "subscript" or (appends and not (before and before.value)):
            return unknown
        return replace(unknown, value=value)

    def _items(self, node: Node) -> tuple[Value, ...] | None:
        """Return the items of a known array if the word is ``"${array[@]}"``, or None."""
        alone = node.type == "string" and text_of(node).startswith('"${') and len(node.named_children) == 1
        name, index = self._subscript(node.named_children[0] if alone else node)
        known = self.scope.get(name)
        return known.items if known and (index == "@" or (index == "*" and not alone)) else None

    def _subscript(self, node: Node) -> tuple[str, str]:
        """Return the name and the index of ``${name[index]}``, or empty strings for another word."""
        children = node.named_children if node.type == "expansion" else []
        if len(children) != 1 or children[0].type != "subscript" or text_of(node)[2:3] in "#!":
            return "", ""
        name, _, index = text_of(children[0]).removesuffix("]").partition("[")
        self.uses.append(Use(name, self.line(node), True))
        return name, index

    def _pieces(self, node: Node, *, quoted: bool) -> Iterator[Piece]:
        """Yield the parts of a word; ``quoted`` is True where bash splits nothing."""
        kind = node.type
        if kind in ("word", "number"):
            yield from self._marked(_ESCAPED_IN_WORD.sub(r"\1", self.text(node).replace("\\\n", "")), quoted)
        elif kind in ("raw_string", "ansi_c_string"):
            yield from self._marked(self.text(node).removeprefix("$")[1:-1], True)
        elif kind == "string":
            yield from self._string(node)
        elif kind == "concatenation":
            for child in node.children:
                yield from self._pieces(child, quoted=quoted)
        elif kind in ("simple_expansion", "expansion"):
            yield from ((part, not quoted) for part in self._variable(node))
        elif kind == "command_substitution":
            self._run(node)
            yield self._unknown("command", node), not quoted
        elif kind == "arithmetic_expansion":
            yield self._arithmetic(node), False
        elif not node.named_children:
            yield from self._marked(self.text(node), quoted)
        else:
            for child in within(node, _IN_ARITHMETIC):
                self.value(child)
            yield self._unknown("text", node), not quoted

    def _string(self, node: Node) -> Iterator[Piece]:
        """Yield the parts of a double-quoted string; tree-sitter leaves blanks between its children."""
        end = node.start_byte + 1 + self.source[node.start_byte : node.end_byte].find('"')
        yield "", False
        for child in node.children[1:-1]:
            if child.type == "string_content":
                continue
            begin = start_of(child)
            yield from self._marked(self._unescaped(end, begin), True)
            yield from ((part, False) for part, _ in self._pieces(child, quoted=True))
            end = child.end_byte
        yield from self._marked(self._unescaped(end, node.end_byte - 1), True)

    def _unescaped(self, begin: int, end: int) -> str:
        return _ESCAPED_IN_STRING.sub(r"\1", self.source[begin:end])

    def _marked(self, text: str, quoted: bool) -> Iterator[Piece]:
        """Yield literal text, and the unknown expansions that marks in it stand for."""
        for number, piece in enumerate(_MARK.split(text)):
            if not number % 2:
                yield from [(piece, False)] if piece or quoted else []
            elif int(piece) < len(self._unknowns):
                yield self._unknowns[int(piece)], not quoted

    def _unknown(self, kind: str, node: Node, **more: object) -> Unknown:
        line = self.line(node)
        return Unknown(kind, self.text(node)[:1000], line, in_task=self.in_task, **more)  # type: ignore[arg-type]

    def _arithmetic(self, node: Node) -> Unknown:
        """Return the expansion ``$(( ))`` with its expression, in which known variables have values."""
        parts: list[str | Unknown] = []
        at = node.start_byte + self.source[node.start_byte : node.end_byte].find("$") + 3
        for child in within(node, _IN_ARITHMETIC):
            begin = start_of(child)
            parts.append(self.source[at:begin])
            if child.type == "variable_name":
                parts += self._named(child, text_of(child), "")
            else:
                parts += [part for part, _ in self._pieces(child, quoted=True)]
            at = child.end_byte
        parts.append(self.source[at : node.end_byte - 2])
        unknown = self._unknown("arithmetic", node, operand=Value(_merged(parts), self.line(node)))
        self.arithmetic.append(unknown)
        return unknown

    def _variable(self, node: Node) -> tuple[str | Unknown, ...]:
        """Return the value of ``$name`` or ``${name...}``."""
        name, index = self._subscript(node)
        if name:
            return self._element(node, name, index)
        children = [child for child in node.children if text_of(child) not in ("$", "${", "}")]
        if not children or children[0].type not in ("variable_name", "special_variable_name"):
            return (self._unknown("variable", node, operator="?"),)  # such as ${#name} and ${!name}
        operator = text_of(children[1]) if len(children) > 1 else ""
        operands = [self.value(child) for child in children[2:] if child.is_named]
        operand = operands[0] if operator in _DEFAULTS and len(operands) == 1 else None
        return self._named(node, text_of(children[0]), operator, operand)

    def _element(self, node: Node, name: str, index: str) -> tuple[str | Unknown, ...]:
        known = self.scope.get(name)
        items = known.items or () if known else ()
        single = all(item.quoted or item.literal is not None for item in items)
        if index == "*" and items and not any(part.name == "@" for item in items for part in item.unknowns()):
            return tuple(part for item in items for part in (" ", *item.parts))[1:]
        if index.isdecimal() and single and int(index[:5]) < len(items):
            return items[int(index[:5])].parts
        return (self._unknown("variable", node, name=name, operator="["),)

    def _named(
        self, node: Node, name: str, operator: str, operand: Value | None = None
    ) -> tuple[str | Unknown, ...]:
        guarded = self.testing or operator in _ALLOWS_UNSET
        self.uses.append(Use(name, self.line(node), guarded))
        known = self.scope.get(name)
        value = known.value if known else None
        if value is not None and (not operator or (operator in _DEFAULTS and value.literal)):
            return value.parts
        return (self._unknown("variable", node, name=name, operator=operator, operand=operand),)


def _merged(parts: Sequence[str | Unknown]) -> tuple[str | Unknown, ...]:
    """Join neighbouring texts."""
    merged: list[str | Unknown] = []
    for part in parts:
        if merged and isinstance(part, str) and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(part for part in merged if part) or ("",)


def as_text(value: Value, unknowns: list[Unknown]) -> str:
    """Return a value as the text of an inner shell; marks stand for the expansions added to ``unknowns``."""
    text = ""
    for part in value.parts:
        if isinstance(part, str):
            text += part
        else:
            text += f"{OPEN}{len(unknowns)}{CLOSE}"
            unknowns.append(part)
    return text
