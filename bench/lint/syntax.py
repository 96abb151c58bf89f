"""Parse a script with tree-sitter, and check it with ``bash -n``.

bash decides whether a script is valid. tree-sitter gives its structure. The text of an ``ERROR`` node has
no known structure, so that no rule judges it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

# The prefix of a syntax error: bash, print_prefix of error.c.
_MESSAGE = re.compile(r"\S+: line (\d+): (.+)")


class ShellError(NamedTuple):
    """A syntax error, in the words of bash."""

    line: int
    message: str


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the root of the syntax tree of a script; its bytes are the characters of the text.

    Characters outside ASCII are parsed as letters: tree-sitter-bash 0.25.1 sometimes crashes on them, because
    its scanner passes them to isalnum(3).
    """
    letters = text if text.isascii() else "".join(one if one < "\x80" else "x" for one in text)
    return _parser().parse(letters.encode("ascii")).root_node


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


def line_of(node: Node) -> int:
    """Return the number of the line in which a node starts, from 1."""
    leading = (node.text or b"")[: _blanks(node)].count(b"\n")
    return node.start_point.row + 1 + leading


def _blanks(node: Node) -> int:
    text = node.text or b""
    return len(text) - len(text.lstrip(b" \t\n"))


def start_of(node: Node) -> int:
    """Return the position of the first byte of a node that is not blank."""
    return node.start_byte + _blanks(node)


def within(node: Node, kinds: frozenset[str]) -> Iterator[Node]:
    """Yield the outermost descendants of some kinds, in order."""
    waiting = list(reversed(node.children))
    while waiting:
        child = waiting.pop()
        if child.type in kinds:
            yield child
        else:
            waiting.extend(reversed(child.children))


def check_syntax(text: str) -> ShellError | None:
    """Return the first syntax error that bash finds, or None if there is none or no bash.

    ``bash -n`` reads a script and executes nothing of it. It reads no start-up file: BASH_ENV is not set.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    command = ["bash", "--norc", "--noprofile", "-O", "extglob", "-n", "/dev/stdin"]
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8", errors="replace"),
            capture_output=True,
            env=environment,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    printed = done.stderr.decode("utf-8", errors="replace").splitlines()
    messages = [match for match in map(_MESSAGE.match, printed) if match and "warning: " not in match[2]]
    # The status is 0 after an error in [[ ]] (bash 5.2).
    return ShellError(int(messages[0][1]), messages[0][2]) if messages else None
