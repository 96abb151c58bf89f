"""Parse a script with tree-sitter, and check it with ``bash -n``.

bash decides whether a script is valid. tree-sitter gives its structure.
"""

from __future__ import annotations

import os
import re
import subprocess

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

# The prefix of a syntax error: bash, print_prefix of error.c.
_MESSAGE = re.compile(r"\S+: line (\d+): (?!warning: )(.+)")


_PARSER = Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the root of the syntax tree of a script; its bytes are the characters of the text.

    Characters outside ASCII are parsed as letters: tree-sitter-bash 0.25.1 sometimes crashes on them, because
    its scanner passes them to isalnum(3).
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


def check_syntax(text: str) -> tuple[int, str] | None:
    """Return the line and words of the first syntax error that bash finds; None if there is none or no bash.

    ``bash -n`` reads a script and executes nothing of it. It reads no start-up file: BASH_ENV is not set.
    """
    command = ["bash", "--norc", "--noprofile", "-O", "extglob", "-n", "/dev/stdin"]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    sent = text.encode("utf-8", errors="replace")
    try:
        done = subprocess.run(
            command, input=sent, capture_output=True, env=environment, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    printed = done.stderr.decode("utf-8", errors="replace").splitlines()
    error = next((match for match in map(_MESSAGE.match, printed) if match), None)
    # The status is 0 after an error in [[ ]] (bash 5.2).
    return (int(error[1]), error[2]) if error else None
