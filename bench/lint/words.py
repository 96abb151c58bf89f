"""Parse a script with tree-sitter, and expand the words of a command with the values of variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

# bash(1), QUOTING: a backslash keeps its special meaning before these characters.
_ESCAPED_IN_WORD = re.compile(r"\\(.)")
_ESCAPED_IN_STRING = re.compile(r'\\([$`"\\])')
_PARSER = Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the syntax tree of a script; its bytes are the characters of the text.

    Characters outside ASCII become letters: tree-sitter-bash 0.25.1 sometimes crashes on them in isalnum(3).
    """
    return _PARSER.parse(bytes(ord(one) if one < "\x80" else ord("x") for one in text)).root_node


def is_broken(root: Node) -> bool:
    """Return whether a tree has text of unknown structure outside ``$(( ))``."""
    waiting = [root] if root.has_error else []
    while waiting:
        node = waiting.pop()
        if node.is_error or node.is_missing:
            return True
        if node.type != "arithmetic_expansion":
            waiting += [child for child in node.children if child.has_error]
    return False


def text_of(node: Node) -> str:
    """Return the text of a node without the blanks that tree-sitter includes in some tokens."""
    return (node.text or b"").decode("ascii").strip(" \t\n")


def start_of(node: Node) -> int:
    """Return the position of the first byte of a node that is not blank."""
    text = node.text or b""
    return node.start_byte + len(text) - len(text.lstrip(b" \t\n"))


@dataclass(frozen=True, slots=True)
class Unknown:
    """An expansion, such as of a variable, whose result the script does not show: no rule judges it."""

    source: str
    line: int
    name: str = ""
    in_task: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word: text and unknown expansions."""

    parts: tuple[str | Unknown, ...]
    line: int

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
        """True if the word is an unknown expansion, which possibly results in several words."""
        return self.unknowns == list(self.parts)

    def after(self, text: str) -> Word:
        """Return the word without ``text`` at its start."""
        parts = (self.start[len(text) :], *self.parts[1:])
        return Word(parts if parts[0] else parts[1:] or ("",), self.line)


Scope = Mapping[str, Word]


@dataclass(slots=True)
class Expander:
    """Expand the words of a text whose first line is line ``first_line`` of the script.

    If a task of srun expands the text, ``early`` are the expansions that the batch shell has replaced before.
    """

    text: str
    first_line: int = 1
    in_task: bool = False
    early: frozenset[str] = frozenset()

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
            chunks = (
                re.split(r"[ \t\n]+", part.replace("\\\n", "")) if split and isinstance(part, str) else [part]
            )
            for number, chunk in enumerate(chunks):
                if number or not continues:
                    words += [[]] if chunk or not split else []
                    continues = bool(chunk) or not split
                if continues:
                    words[-1].append(chunk)
        return [self.word(word, node) for word in words]

    def value(self, node: Node, scope: Scope) -> Word:
        """Return the value that an assignment of this word has."""
        return self.word([part for part, _ in self._pieces(node, scope, quoted=True)], node)

    def word(self, parts: Sequence[str | Unknown], node: Node) -> Word:
        """Return a word of these parts; neighbouring texts are joined."""
        merged: list[str | Unknown] = []
        for kind, group in groupby(parts, key=type):
            same = list(group)
            merged += ["".join(map(str, same))] if kind is str else same
        return Word(tuple(part for part in merged if part) or ("",), self.line(node))

    def _pieces(self, node: Node, scope: Scope, *, quoted: bool) -> Iterator[tuple[str | Unknown, bool]]:
        """Yield the parts of a word, and whether bash splits each into words."""
        kind = node.type
        if kind in ("raw_string", "ansi_c_string"):
            text = self.source(node)
            known = not any(one in text for one in self.early)
            yield text.removeprefix("$")[1:-1] if known else self._unknown(node), False
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
        elif node.named_children:
            yield self._unknown(node), not quoted
        else:
            yield _ESCAPED_IN_WORD.sub(r"\1", self.source(node).replace("\\\n", "")), False

    def _unknown(self, node: Node, name: str = "") -> Unknown:
        source = self.source(node)
        return Unknown(source, self.line(node), name, self.in_task and source not in self.early)

    def _variable(self, node: Node, scope: Scope) -> tuple[str | Unknown, ...]:
        """Return the value of ``$name`` or ``${name}``; other forms are unknown."""
        name, *rest = [text_of(one) for one in node.children if text_of(one) not in ("$", "${", "}")] or [""]
        if not name.isidentifier() or rest[:1] not in ([], [":-"], ["-"]):
            return (self._unknown(node),)
        return scope[name].parts if name in scope and not rest else (self._unknown(node, name),)
