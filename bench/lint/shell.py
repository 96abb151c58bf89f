"""A parser for bash scripts: from text to statements, without running anything.

It accepts what ``bash -n`` accepts and refuses what it refuses, apart from placeholders such as
``<account>``, which documentation is full of.
"""

from __future__ import annotations

import re

from bench.lint.compound import CompoundParser
from bench.lint.nodes import (
    AndOr,
    Assign,
    Background,
    Function,
    Node,
    Part,
    Pipeline,
    Redirect,
    ShellError,
    Simple,
    TooDeepError,
    Word,
)

__all__ = ["Node", "ShellError", "TooDeepError", "parse_shell"]

_BLANK_LINES = re.compile(r"(?:[ \t\n]++|\\(?:\n|\Z)|#[^\n]*+)*+")
_SPACE = re.compile(r"(?:[ \t]++|\\(?:\n|\Z)|#[^\n]*+)*+")
_REDIRECTION = re.compile(
    r"(?:[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})?(?:<<<|<<-?|<>|<&|>>|>&|>\||<(?!\()|>(?!\())|&>>|&>"
)
_MAY_REDIRECT = frozenset("<>&{0123456789")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")
_INDEXED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
_END_OF_INDEX = re.compile(r"[^\]]*\](\+?)=")
_NAMED_COPROCESS = re.compile(r"[A-Za-z_]\w*[ \t]+(?=[{(]|if |while |for |until |case )")
_FUNCTION_PARENTHESES = re.compile(r"\([ \t]*\)")
_CASE_END = re.compile(r";;&|;;|;&")
_TOKEN = re.compile(r"&&|\|\||;;|[^ \t\n'\"\\$`|&;()<>]+|.|\n")
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse_shell(
    text: str, *, first_row: int = 1, depth: int = 0, lines: tuple[int, ...] = ()
) -> tuple[Node, ...]:
    """Return the statements of a script (``first_row`` and ``lines`` as for :class:`WordScanner`).

    Raises:
        ShellError: bash would refuse the script.
        TooDeepError: it is legal but nested beyond what is looked into.
    """
    return Parser(text, first_row=first_row, depth=depth, lines=lines).everything()


class Parser(CompoundParser):
    """Recursive descent over the shell's grammar."""

    def __init__(self, text: str, *, first_row: int = 1, depth: int = 0, lines: tuple[int, ...] = ()) -> None:
        super().__init__(text, first_row=first_row, depth=depth, lines=lines)
        self._waiting: list[Redirect] = []
        self.opened = []

    def everything(self) -> tuple[Node, ...]:
        """Parse the whole text."""
        statements = self._statements(frozenset())
        if self.pos < len(self.text):
            raise self._unexpected()
        if self._waiting:
            self._line_end()
        return statements

    def commands_until(self, closer: str) -> tuple[Node, ...]:
        """Parse commands up to and including ``closer`` (a parenthesis)."""
        opened = self.line()
        statements = self._statements(frozenset())
        if self.pos >= len(self.text):
            raise ShellError(opened, f"unexpected end of file while looking for the closing {closer}")
        if not self.text.startswith(closer, self.pos):
            raise self._unexpected()
        self.pos += len(closer)
        return statements

    # -- blanks, line ends and here-documents -------------------------------------------------

    def _skip(self) -> None:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]

    def _skip_lines(self) -> None:
        """Skip blanks, comments and line ends, reading the here-documents that are due."""
        while True:
            self._skip()
            if not self.text.startswith("\n", self.pos):
                return
            self._line_end()
            if not self._waiting:
                self.pos = _BLANK_LINES.match(self.text, self.pos).end()  # type: ignore[union-attr]

    def _line_end(self) -> None:
        self.pos += 1
        waiting, self._waiting = self._waiting, []
        for redirect in waiting:
            self._read_heredoc(redirect)

    def _read_heredoc(self, redirect: Redirect) -> None:
        delimiter = "".join(part.text for part in redirect.target.parts)
        first, row, start = self.line(), self.row(), self.pos
        end = self._find_delimiter(delimiter, strips=redirect.strips)
        if end is None:
            message = f"the here-document is never closed: no line is exactly {delimiter!r}"
            raise ShellError(redirect.line, message)
        body = self.text[start:end]
        self.swallowed.append((row, self.row()))
        if redirect.verbatim:
            parts: tuple[Part, ...] = (Part("text", body, first, quoted=True),)
        else:
            parts = tuple(self._inner(body, row).expanding_text())
        redirect.body = Word(parts, first)

    def _find_delimiter(self, delimiter: str, *, strips: bool) -> int | None:
        """Move behind the line that closes a here-document; return where its body ends."""
        text = self.text
        while self.pos < len(text):
            begin, found = self.pos, text.find("\n", self.pos)
            end = found if found >= 0 else len(text)
            self.pos = min(end + 1, len(text))
            if end - begin > len(delimiter) + 1000:
                continue
            line = text[begin:end].lstrip("\t") if strips else text[begin:end]
            if line == delimiter:
                return begin
        return None

    # -- lists and pipelines ------------------------------------------------------------------

    def _statements(self, stops: frozenset[str]) -> tuple[Node, ...]:
        """Parse commands until a keyword of ``stops``, a closing parenthesis, ``;;`` or the end."""
        statements: list[Node] = []
        while True:
            self._skip_lines()
            if self.pos >= len(self.text) or self.text[self.pos] == ")":
                return tuple(statements)
            if _CASE_END.match(self.text, self.pos) or self._keyword() in stops:
                return tuple(statements)
            line = self.line()
            node = self._and_or()
            self._skip()
            if self.text.startswith("&", self.pos) and not self.text.startswith("&&", self.pos):
                self.pos += 1
                node = Background(node, line)
            elif self.text.startswith(";", self.pos) and not _CASE_END.match(self.text, self.pos):
                self.pos += 1
            elif not self._at_end_of_command():
                raise self._unexpected()
            statements.append(node)

    def _at_end_of_command(self) -> bool:
        if self.pos >= len(self.text) or self.text[self.pos] in "\n)":
            return True
        return bool(_CASE_END.match(self.text, self.pos))

    def _and_or(self) -> Node:
        line = self.line()
        items, operators = [self._pipeline()], []
        while True:
            self._skip()
            operator = self.text[self.pos : self.pos + 2]
            if operator not in ("&&", "||"):
                break
            operators.append(operator)
            self.pos += 2
            self._skip_lines()
            items.append(self._pipeline())
        return AndOr(tuple(items), tuple(operators), line) if operators else items[0]

    def _pipeline(self) -> Node:
        line = self.line()
        while (keyword := self._keyword()) in ("!", "time"):
            self.pos += len(keyword)
            self._skip()
            if keyword == "time" and self.text.startswith("-p ", self.pos):
                self.pos += 3
                self._skip()
            if self._at_end_of_command() or self.text[self.pos] in ";&":
                return Simple((), (), (), line, line)
        commands = [self._command()]
        while True:
            self._skip()
            if not self.text.startswith("|", self.pos) or self.text.startswith("||", self.pos):
                break
            self.pos += 2 if self.text.startswith("|&", self.pos) else 1
            self._skip_lines()
            commands.append(self._command())
        return Pipeline(tuple(commands), line) if len(commands) > 1 else commands[0]

    def _unexpected(self) -> ShellError:
        """Return the error for the token that the parser stands on, in bash's words."""
        line = self.line()
        if self.pos >= len(self.text):
            return ShellError(line, "syntax error: unexpected end of file")
        match = _TOKEN.match(self.text, self.pos)
        token = match.group() if match else self.text[self.pos]
        return ShellError(
            line, f"syntax error near unexpected token `{'newline' if token == chr(10) else token[:40]}'"
        )

    # -- commands -----------------------------------------------------------------------------

    def _command(self) -> Node:
        keyword = self._keyword()
        if keyword in _CLOSERS:
            error = self._unexpected()
            error.opened = self.opened[-1] if self.opened else None
            raise error
        if keyword == "coproc":
            line = self.line()
            self.pos += len(keyword)
            self._skip()
            named = _NAMED_COPROCESS.match(self.text, self.pos)
            if named:
                self.pos = named.end()
            return Background(self._command(), line)
        if keyword or self.text.startswith("(", self.pos):
            self.deeper()
            node = self._compound(keyword)
            self.depth -= 1
            if node is not None:
                return node
        return self._simple()

    def _simple(self) -> Node:
        """Parse a simple command, or the definition of a function that starts like one."""
        line = self.line()
        assigns: list[Assign] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        while True:
            self._skip()
            redirect = self._redirection()
            if redirect:
                redirects.append(redirect)
                continue
            before = self.pos
            if before >= len(self.text) or self.text[before] in "\n;&|)":
                break
            if self.text[before] == "(":
                if len(words) == 1 and not assigns and words[0].literal:
                    return self._function_body(words[0].literal, line)
                raise self._unexpected()
            word = self.word()
            if self.pos == before:
                raise self._unexpected()
            assign = None if words else assignment_in(word)
            if assign:
                assigns.append(assign)
            else:
                words.append(word)
        if not (assigns or words or redirects):
            raise self._unexpected()
        return Simple(tuple(assigns), tuple(words), tuple(redirects), line, self.line())

    def _function_body(self, name: str, line: int) -> Node:
        match = _FUNCTION_PARENTHESES.match(self.text, self.pos)
        if not match:
            raise self._unexpected()
        self.pos = match.end()
        self._skip_lines()
        return Function(name, self._function_command(), line)

    def _redirection(self) -> Redirect | None:
        if self.pos >= len(self.text) or self.text[self.pos] not in _MAY_REDIRECT:
            return None
        match = _REDIRECTION.match(self.text, self.pos)
        if not match or self._placeholder_here():
            return None
        line = self.line()
        self.pos = match.end()
        self._skip()
        before = self.pos
        target = self.word()
        if self.pos == before:
            raise self._unexpected()
        redirect = Redirect(match.group(), target, line)
        if match.group().endswith(("<<", "<<-")) and not match.group().endswith("<<<"):
            self._waiting.append(redirect)
        return redirect


def assignment_in(word: Word) -> Assign | None:
    """Return the assignment that a word is, if it is one."""
    first = word.parts[0]
    if first.kind != "text" or first.quoted:
        return None
    match = _ASSIGNMENT.match(first.text)
    if match:
        rest = first.text[match.end() :]
    elif _INDEXED.match(first.text) and len(word.parts) > 1:
        return _computed_index(word)
    else:
        return None
    name, index, plus = match.groups()
    parts = ((first._replace(text=rest),) if rest else ()) + word.parts[1:]
    return Assign(name, Word(parts, word.line), word.line, append=bool(plus), subscript=index or "")


def _computed_index(word: Word) -> Assign | None:
    """Return the assignment to ``name[$index]=value``, whose subscript is expanded."""
    for position, part in enumerate(word.parts[1:], start=1):
        if part.kind == "text" and not part.quoted and "]" in part.text:
            match = _END_OF_INDEX.match(part.text)
            if not match:
                return None
            name = word.parts[0].text.partition("[")[0]
            rest = part.text[match.end() :]
            parts = ((part._replace(text=rest),) if rest else ()) + word.parts[position + 1 :]
            return Assign(
                name, Word(parts, word.line), word.line, append=match.group(1) == "+", subscript="[?]"
            )
    return None
