"""Expand the words of a command with the values of variables.

An expansion whose result the script does not show stays :class:`Unknown`, and no rule judges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from .syntax import start_of, text_of

#: Marks around the number of an unknown expansion in the text of an inner shell.
OPEN, CLOSE = "\x01", "\x02"
_MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
# bash(1), QUOTING: a backslash keeps its special meaning before these characters.
_ESCAPED_IN_WORD = re.compile(r"\\(.)")
_ESCAPED_IN_STRING = re.compile(r'\\([$`"\\])')
# bash(1), Word Splitting: the default of IFS.
_IFS = re.compile(r"[ \t\n]+")


@dataclass(frozen=True, slots=True)
class Unknown:
    """An expansion whose result the script does not show.

    ``name`` is the variable of ``$NAME``, ``${NAME}`` and ``${NAME:-default}``. ``product`` are the factors
    of ``$((A * B))``. ``in_task`` is True if a shell in a task of srun expands it.
    """

    source: str
    line: int
    name: str = ""
    product: tuple[Word, ...] = ()
    in_task: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word: text and unknown expansions. ``quoted`` is True if bash does not split it into words."""

    parts: tuple[str | Unknown, ...]
    line: int
    quoted: bool = False

    @property
    def literal(self) -> str | None:
        """The text, or None if a part is unknown."""
        return None if self.unknowns else self.shown

    @property
    def shown(self) -> str:
        """The text with each unknown expansion as written."""
        return "".join(part if isinstance(part, str) else part.source for part in self.parts)

    @property
    def start(self) -> str:
        """The text before the first unknown expansion."""
        return self.parts[0] if isinstance(self.parts[0], str) else ""

    @property
    def unknowns(self) -> list[Unknown]:
        """The unknown expansions."""
        return [part for part in self.parts if isinstance(part, Unknown)]

    @property
    def may_be_several(self) -> bool:
        """True if the word is an unknown expansion that possibly results in several words."""
        unquoted = not self.quoted or "@" in self.shown
        return len(self.parts) == 1 and bool(self.unknowns) and unquoted

    def after(self, text: str) -> Word:
        """Return the word without ``text`` at its start."""
        parts = (self.start[len(text) :], *self.parts[1:])
        return Word(parts if parts[0] else parts[1:] or ("",), self.line, self.quoted)

    def as_text(self) -> str:
        """Return the text for an inner shell, with a mark for each of :attr:`unknowns`."""
        numbers = iter(range(len(self.parts)))
        return "".join(p if isinstance(p, str) else f"{OPEN}{next(numbers)}{CLOSE}" for p in self.parts)


Scope = Mapping[str, Word]


@dataclass(slots=True)
class Expander:
    """Expand the words of a text whose first line is line ``first_line`` of the script.

    Marks in the text stand for ``unknowns``.
    """

    text: str
    first_line: int = 1
    unknowns: Sequence[Unknown] = ()
    in_task: bool = False

    def line(self, node: Node) -> int:
        """Return the line of the script in which a node starts."""
        blank = self.text[node.start_byte : start_of(node)]
        return self.first_line + node.start_point.row + blank.count("\n")

    def source(self, node: Node) -> str:
        """Return the text of a node, with characters outside ASCII."""
        return self.text[node.start_byte : node.end_byte].strip(" \t\n")

    def words(self, node: Node, scope: Scope) -> list[Word]:
        """Return the words that bash makes of one word of the script."""
        words: list[list[str | Unknown]] = []
        continues = False
        for part, split in self._pieces(node, scope, quoted=False):
            text = part.replace("\\\n", "") if split and isinstance(part, str) else None
            for number, chunk in enumerate([part] if text is None else _IFS.split(text)):
                if number or not continues:
                    words += [[]] if chunk or not split else []
                    continues = bool(chunk) or not split
                if continues:
                    words[-1].append(chunk)
        quoted = node.type in ("string", "raw_string", "ansi_c_string")
        return [self.word(word, node, quoted=quoted) for word in words]

    def value(self, node: Node, scope: Scope) -> Word:
        """Return the value that an assignment of this word has."""
        parts = [part for part, _ in self._pieces(node, scope, quoted=True)]
        return self.word(parts, node, quoted=node.type in ("string", "raw_string"))

    def word(self, parts: Sequence[str | Unknown], node: Node, *, quoted: bool = False) -> Word:
        """Return a word of these parts: neighbouring texts are joined, and marks replaced."""
        merged: list[str | Unknown] = []
        for part in parts:
            for number, piece in enumerate(_MARK.split(part) if isinstance(part, str) else [part]):
                known = self.unknowns[int(piece)] if number % 2 and isinstance(piece, str) else piece
                if merged and isinstance(known, str) and isinstance(merged[-1], str):
                    merged[-1] += known
                elif known:
                    merged.append(known)
        return Word(tuple(merged) or ("",), self.line(node), quoted)

    def _pieces(self, node: Node, scope: Scope, *, quoted: bool) -> Iterator[tuple[str | Unknown, bool]]:
        """Yield the parts of a word, and whether bash splits each into words."""
        kind = node.type
        if kind in ("raw_string", "ansi_c_string"):
            yield self.source(node).removeprefix("$")[1:-1], False
        elif kind == "string":
            end = start_of(node) + 1  # tree-sitter leaves blanks between the children of a string
            for child in [one for one in node.children[1:-1] if one.type != "string_content"]:
                yield _ESCAPED_IN_STRING.sub(r"\1", self.text[end : start_of(child)]), False
                yield from ((part, False) for part, _ in self._pieces(child, scope, quoted=True))
                end = child.end_byte
            yield _ESCAPED_IN_STRING.sub(r"\1", self.text[end : node.end_byte - 1]), False
        elif kind == "concatenation":
            for child in node.children:
                yield from self._pieces(child, scope, quoted=quoted)
        elif kind in ("simple_expansion", "expansion"):
            yield from ((part, not quoted) for part in self._variable(node, scope))
        elif kind == "arithmetic_expansion":
            yield self._arithmetic(node, scope), False
        elif node.named_children:
            yield self._unknown(node), not quoted
        else:
            yield _ESCAPED_IN_WORD.sub(r"\1", self.source(node).replace("\\\n", "")), False

    def _unknown(self, node: Node, name: str = "", product: tuple[Word, ...] = ()) -> Unknown:
        return Unknown(self.source(node)[:1000], self.line(node), name, product, self.in_task)

    def _arithmetic(self, node: Node, scope: Scope) -> Unknown:
        """Return ``$(( ))``, with its factors if it is a product of numbers and variables."""
        factors: list[Word] = []
        for text in self.source(node)[3:-2].split("*"):
            name = text.strip().strip("${}")
            part = name if name.isdecimal() else Unknown(f"${name}", self.line(node), name)
            factors.append(scope.get(name, Word((part,), 0)))
        return self._unknown(node, product=tuple(factors))

    def _variable(self, node: Node, scope: Scope) -> tuple[str | Unknown, ...]:
        """Return the value of ``$name`` or ``${name}``; other forms are unknown."""
        children = [text_of(child) for child in node.children if text_of(child) not in ("$", "${", "}")]
        name, default = children[0] if children else "", children[1:2] in ([":-"], ["-"])
        if not name.isidentifier() or (len(children) > 1 and not default):
            return (self._unknown(node),)
        known = scope.get(name)
        return known.parts if known and (not default or known.literal) else (self._unknown(node, name),)
