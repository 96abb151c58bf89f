"""The syntax tree of a bash script, and a reader for the words in it.

The grammar follows the sections "Shell Grammar" and "EXPANSION" of the bash manual. Nothing is
executed. Reading time is linear in the length of the text, and nesting is limited to
:data:`MAX_DEPTH` levels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

#: Deeper nesting of substitutions and compound commands is not analysed.
MAX_DEPTH = 40

_CHUNK = re.compile(r"[^ \t\n'\"\\$`|&;()<>]+")
_DOUBLE_QUOTED = re.compile(r"[^\"\\$`]+")
_EXPANDING_TEXT = re.compile(r"[^\\$`]+")
_BETWEEN_WORDS = re.compile(r"(?:[ \t\n]++|\\\n|#[^\n]*+)*+")
_SUBSCRIPT = re.compile(r"[^\]'\"\\$`]+")
_OPERAND = re.compile(r"[^}'\"\\$`]+")
_ANSI_C = re.compile(r"(?:[^'\\]|\\.)*+'", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED_NAME = re.compile(r"[#!]?(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])|#")
_OPERATOR = re.compile(r":[-=?+]|##|%%|//|/[#%]|\^\^|,,|[-=?+:#%/^,@]")
_ARRAY_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\Z")
_PLACEHOLDER = re.compile(r"<[A-Za-z_][\w./:-]*(?: [\w./:-]+)*>(?![&>|(])")
_PARENTHESIS = re.compile(r"[()]")
_BALANCE = re.compile(r"[()'\"\\]")
_BACKTICKED = re.compile(r"(?:[^`\\]|\\.)*+`", re.DOTALL)
_ESCAPED_IN_BACKTICKS = re.compile(r"\\([`$\\])")


#: Start of the message of a ShellError that bash reports as a warning only.
UNCLOSED_HEREDOC = "the here-document is never closed"


class ShellError(Exception):
    """A syntax error that bash would report.

    ``line`` is the line of the error and ``opened`` the first line of the compound command that
    contains the error. ``quote`` is the quote character that is never closed.
    """

    def __init__(self, line: int, message: str, *, opened: int | None = None, quote: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.message = message
        self.opened = opened
        self.quote = quote


class TooDeepError(ShellError):
    """Valid syntax that is nested more than :data:`MAX_DEPTH` levels deep."""


class Part(NamedTuple):
    """One piece of a word. The content of its attributes depends on ``kind``.

    - ``"text"``: literal characters, which are in ``text``.
    - ``"param"``: a variable. Its name is in ``text``, the rest of ``${...}`` in ``op`` and ``operand``.
    - ``"command"``: ``$(...)``. The commands are in ``body``, and their source in ``text``.
    - ``"arith"``: ``$((...))``. The parts of the expression are in ``operand``.
    - ``"process"``: ``<(...)``. The commands are in ``body``.
    - ``"array"``: ``name=(...)``. The elements are in ``words``.

    A ``quoted`` part is neither split into words nor used as a pattern for file names.
    """

    kind: str
    text: str
    line: int
    quoted: bool = False
    op: str = ""
    operand: tuple[Part, ...] = ()
    body: tuple[Node, ...] = ()
    words: tuple[Word, ...] = ()


class Word(NamedTuple):
    """A word of a command and the line on which it starts."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The text of the word, or None if the word contains an expansion."""
        if len(self.parts) == 1 and self.parts[0].kind == "text":
            return self.parts[0].text
        if all(part.kind == "text" for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None

    @property
    def bare(self) -> str | None:
        """The text of the word, or None if it contains quotes or expansions.

        Only a bare word can be a keyword.
        """
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.text if part.kind == "text" and not part.quoted else None
        return None


class Assign(NamedTuple):
    """``name=value``; the value of an array is a word with one part of kind ``array``."""

    name: str
    value: Word
    line: int
    append: bool = False
    subscript: str = ""


class Redirect:
    """A redirection.

    ``body`` is the text of a here-document; the parser sets ``body`` when it reaches the next line.
    ``verbatim`` is True if the text is not expanded. ``strips`` is True if leading tabs are removed.
    """

    __slots__ = ("body", "line", "operator", "strips", "target", "verbatim")

    def __init__(self, operator: str, target: Word, line: int) -> None:
        self.operator = operator
        self.target = target
        self.line = line
        self.verbatim = any(part.quoted for part in target.parts)
        self.strips = operator.endswith("<<-")
        self.body: Word | None = None


class Simple(NamedTuple):
    """A simple command."""

    assigns: tuple[Assign, ...]
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    line: int
    end: int


class Pipeline(NamedTuple):
    """Commands joined by ``|``."""

    commands: tuple[Node, ...]


class AndOr(NamedTuple):
    """Pipelines joined by ``&&`` and ``||``."""

    items: tuple[Node, ...]


class Background(NamedTuple):
    """A command that ``&`` starts in the background."""

    command: Node


class Group(NamedTuple):
    """A group ``{ ...; }`` or a subshell ``( ... )``."""

    body: tuple[Node, ...]
    redirects: tuple[Redirect, ...]


class If(NamedTuple):
    """``if``: pairs of condition and body. The condition of ``else`` is empty."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    redirects: tuple[Redirect, ...]


class Loop(NamedTuple):
    """``for``, ``select``, ``while`` or ``until``; ``words`` is None if there is no ``in``."""

    variable: str
    words: tuple[Word, ...] | None
    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    redirects: tuple[Redirect, ...]
    line: int


class Case(NamedTuple):
    """``case``: pairs of patterns and body."""

    subject: Word
    arms: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]
    redirects: tuple[Redirect, ...]


class Function(NamedTuple):
    """A function definition."""

    name: str
    body: Node


class Test(NamedTuple):
    """``[[ ... ]]``, or ``(( ... ))`` with its expression as the only word."""

    words: tuple[Word, ...]
    arithmetic: bool
    line: int


Node = Simple | Pipeline | AndOr | Background | Group | If | Loop | Case | Function | Test


class Source:
    """The text to parse and the state of the parser.

    ``pos`` is the position of the parser. ``lines`` contains the script line of each row of the
    text; if it is empty, the text is the script itself. ``swallowed`` lists the ranges of rows inside strings
    and here-documents, ``opened`` the lines of the open compound commands (innermost last), and
    ``waiting`` the here-documents whose text starts on the next line.
    """

    def __init__(self, text: str, *, first_row: int = 1, depth: int = 0, lines: tuple[int, ...] = ()) -> None:
        self.text = text
        self.pos = 0
        self.depth = depth
        self.lines = lines
        self.swallowed: list[tuple[int, int]] = []
        self.opened: list[int] = []
        self.waiting: list[Redirect] = []
        self._row = first_row
        self._counted = 0

    @property
    def ended(self) -> bool:
        """True at the end of the text."""
        return self.pos >= len(self.text)

    def at(self, text: str) -> bool:
        """Return whether ``text`` follows at the current position."""
        return self.text.startswith(text, self.pos)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match ``pattern`` at the current position."""
        return pattern.match(self.text, self.pos)

    def placeholder(self) -> re.Match[str] | None:
        """Match a placeholder such as ``<account>`` at the current position."""
        return _PLACEHOLDER.match(self.text, self.pos) if self.at("<") else None

    def row(self) -> int:
        """Return the current row of the text, counted from ``first_row``."""
        if self.pos > self._counted:
            self._row += self.text.count("\n", self._counted, self.pos)
            self._counted = self.pos
        return self._row

    def line(self) -> int:
        """Return the line of the script at the current position."""
        row = self.row()
        return self.lines[min(row, len(self.lines)) - 1] if self.lines else row

    def deeper(self) -> None:
        """Enter one more level of nesting; raise TooDeepError if there are too many."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooDeepError(self.line(), "nested too deeply")

    def inner(self, text: str, row: int) -> Source:
        """Return a source for a nested ``text`` that starts on ``row``."""
        self.deeper()
        self.depth -= 1
        return Source(text, first_row=row, depth=self.depth + 1, lines=self.lines)

    def closing_parenthesis(self, start: int) -> int:
        """Return the position after the parenthesis that closes the parenthesis at ``start``, or the end."""
        depth, text = 0, self.text
        pos = start
        while match := _BALANCE.search(text, pos):
            pos = match.end()
            char = match.group()
            if char == "\\":
                pos += 1
            elif char in "'\"":
                found = text.find(char, pos)
                pos = found + 1 if found >= 0 else pos
            else:
                depth += 1 if char == "(" else -1
                if depth == 0:
                    return pos
        return len(text)


class WordReader:
    """Read the words of a source.

    ``parse`` parses the commands inside a substitution, up to and including a closing character. If this
    character is an empty string, ``parse`` continues to the end of the source.
    """

    def __init__(self, source: Source, parse: Callable[[Source, str], tuple[Node, ...]]) -> None:
        self.source = source
        self._parse = parse

    def word(self) -> Word:
        """Read the word that starts at the current position."""
        text, start = self.source.text, self.source.pos
        line = self.source.line()
        parts: list[Part] = []
        size = len(text)
        while self.source.pos < size:
            match = _CHUNK.match(text, self.source.pos)
            if match:
                parts.append(Part("text", match.group(), self.source.line()))
                self.source.pos = match.end()
                continue
            if not self._special(text[self.source.pos], parts, started=self.source.pos > start):
                break
        return Word(tuple(parts) or (Part("text", "", line, quoted=True),), line)

    def _special(self, char: str, parts: list[Part], *, started: bool) -> bool:
        """Read a part that starts with a special character; return False if the word ends here."""
        text, pos = self.source.text, self.source.pos
        if char == "\\":
            self._escape(parts)
        elif char == "'":
            parts.append(self._single_quoted())
        elif char == '"':
            parts.extend(self.double_quoted())
        elif char == "$":
            parts.extend(self._dollar(quoted=False))
        elif char == "`":
            parts.append(self._backtick(quoted=False))
        elif char in "<>":
            return self._angle(char, parts)
        elif char == "(" and started and parts[-1].kind == "text" and not parts[-1].quoted:
            before = parts[-1].text
            if len(parts) == 1 and _ARRAY_TARGET.match(before):
                parts.append(self._array())
            elif before[-1] in "?*+@!":  # an extended pattern such as @(a|b)
                self.source.pos = self.source.closing_parenthesis(pos)
                if self.source.pos >= len(text) and not text.endswith(")"):
                    raise ShellError(parts[-1].line, "unexpected end of file while looking for the closing )")
                parts.append(Part("text", text[pos : self.source.pos], self.source.line()))
            else:
                return False
        else:
            return False
        return True

    def _angle(self, char: str, parts: list[Part]) -> bool:
        """Read a process substitution or a placeholder; return False for a redirection."""
        line = self.source.line()
        if self.source.text.startswith("(", self.source.pos + 1):
            self.source.pos += 2
            parts.append(Part("process", char, line, body=self._nested(")")))
            return True
        placeholder = self.source.placeholder()
        if placeholder:
            parts.append(Part("text", placeholder.group(), line, quoted=True))
            self.source.pos = placeholder.end()
            return True
        return False

    def expand(self, text: str, row: int) -> tuple[Part, ...]:
        """Read the expansions in ``text``, a here-document or an arithmetic expression."""
        inner = WordReader(self.source.inner(text, row), self._parse)
        return tuple(inner._expanding(_EXPANDING_TEXT, ""))

    def _array(self) -> Part:
        """Read the words of ``name=(...)``, possibly on several lines."""
        opened = self.source.line()
        self.source.pos += 1
        words: list[Word] = []
        while True:
            self.source.pos = self.source.match(_BETWEEN_WORDS).end()  # type: ignore[union-attr]
            if self.source.ended:
                raise ShellError(opened, "unexpected end of file while looking for the closing )")
            if self.source.text[self.source.pos] == ")":
                self.source.pos += 1
                return Part("array", "", opened, words=tuple(words))
            before = self.source.pos
            words.append(self.word())
            if self.source.pos == before:
                raise ShellError(
                    self.source.line(), f"syntax error near unexpected token `{self.source.text[before]}'"
                )

    def _backtick(self, *, quoted: bool) -> Part:
        line, row = self.source.line(), self.source.row()
        match = _BACKTICKED.match(self.source.text, self.source.pos + 1)
        if not match:
            raise ShellError(line, "unexpected end of file while looking for the closing `", quote="`")
        self.source.pos = match.end()
        source = _ESCAPED_IN_BACKTICKS.sub(r"\1", match.group()[:-1])
        return Part("command", source, line, quoted, body=self._parse(self.source.inner(source, row), ""))

    def _escape(self, parts: list[Part]) -> None:
        following = self.source.text[self.source.pos + 1 : self.source.pos + 2]
        if following != "\n":  # a backslash before the end of a line joins the lines
            parts.append(Part("text", following or "\\", self.source.line(), quoted=True))
        self.source.pos += 2

    def _single_quoted(self) -> Part:
        line = self.source.line()
        end = self.source.text.find("'", self.source.pos + 1)
        if end < 0:
            raise ShellError(line, "unexpected end of file while looking for the closing '", quote="'")
        value = self.source.text[self.source.pos + 1 : end]
        first = self.source.row()
        self.source.pos = end + 1
        self._swallow(first)
        return Part("text", value, line, quoted=True)

    def double_quoted(self) -> list[Part]:
        """Read a string in double quotes, including both quotes."""
        line, first = self.source.line(), self.source.row()
        self.source.pos += 1
        parts = self._expanding(_DOUBLE_QUOTED, '"')
        if not self.source.at('"'):
            raise ShellError(line, 'unexpected end of file while looking for the closing "', quote='"')
        self.source.pos += 1
        self._swallow(first)
        return parts or [Part("text", "", line, quoted=True)]

    def _swallow(self, first: int) -> None:
        if self.source.row() > first:
            self.source.swallowed.append((first + 1, self.source.row()))

    def _expanding(self, plain: re.Pattern[str], end: str) -> list[Part]:
        """Read up to ``end``; only ``$``, backquotes and backslashes are special."""
        text, size = self.source.text, len(self.source.text)
        parts: list[Part] = []
        while self.source.pos < size:
            match = plain.match(text, self.source.pos)
            if match:
                parts.append(Part("text", match.group(), self.source.line(), quoted=True))
                self.source.pos = match.end()
                continue
            char = text[self.source.pos]
            if char == "$":
                parts.extend(self._dollar(quoted=True))
            elif char == "`":
                parts.append(self._backtick(quoted=True))
            elif char == "\\":
                following = text[self.source.pos + 1 : self.source.pos + 2]
                kept = following if following and following in '$`"\\' else "\\" + following
                parts.append(Part("text", kept, self.source.line(), quoted=True))
                self.source.pos += 2
            elif char == end:
                break
        self.source.pos = min(self.source.pos, size)
        return parts

    def _dollar(self, *, quoted: bool) -> list[Part]:
        text, line = self.source.text, self.source.line()
        following = text[self.source.pos + 1 : self.source.pos + 2]
        if following == "(":
            return [self._parenthesis(quoted=quoted)]
        if following == "{":
            return [self._braced(quoted=quoted)]
        if following == "[":
            start = self.source.pos = self.source.pos + 2
            operand = self._until("]", line, quoted=quoted)
            return [Part("arith", text[start : self.source.pos - 1], line, quoted, operand=operand)]
        if following == "'" and not quoted:
            match = _ANSI_C.match(text, self.source.pos + 2)
            if not match:
                raise ShellError(line, "unexpected end of file while looking for the closing '", quote="'")
            self.source.pos = match.end()
            return [Part("text", match.group()[:-1], line, quoted=True)]
        if following == '"' and not quoted:
            self.source.pos += 1
            return self.double_quoted()
        match = _NAME.match(text, self.source.pos + 1)
        if match:
            self.source.pos = match.end()
            return [Part("param", match.group(), line, quoted)]
        self.source.pos += 1
        return [Part("text", "$", line, quoted)]

    def _parenthesis(self, *, quoted: bool) -> Part:
        """Read ``$((arithmetic))`` or ``$(commands)``."""
        line, start = self.source.line(), self.source.pos
        if self.source.text.startswith("((", start + 1):
            end = self.source.closing_parenthesis(start + 1)
            source = self.source.text[start + 3 : end - 2]
            if self.source.text.startswith("))", end - 2) and _never_below_zero(source):
                inner = self.expand(source, self.source.row())
                self.source.pos = end
                return Part("arith", source, line, quoted, operand=inner)
        self.source.pos = start + 2
        body = self._nested(")")
        return Part("command", self.source.text[start + 2 : self.source.pos - 1], line, quoted, body=body)

    def _nested(self, closer: str) -> tuple[Node, ...]:
        self.source.deeper()
        body = self._parse(self.source, closer)
        self.source.depth -= 1
        return body

    def _braced(self, *, quoted: bool) -> Part:
        """Read an expansion such as ``${name}``, ``${name[index]}`` or ``${name:-operand}``."""
        line = self.source.line()
        self.source.pos += 2
        match = self.source.match(_BRACED_NAME)
        name = match.group() if match else ""
        self.source.pos += len(name)
        index = ""
        if name and self.source.at("["):
            start = self.source.pos
            self.source.pos += 1
            self._until("]", line, quoted=quoted)
            index = self.source.text[start : self.source.pos]
        operator = self.source.match(_OPERATOR)
        op = operator.group() if operator else ""
        self.source.pos += len(op)
        self.source.deeper()
        operand = self._until("}", line, quoted=quoted)
        self.source.depth -= 1
        return Part("param", name + index, line, quoted, op=op, operand=operand)

    def _until(self, closer: str, opened: int, *, quoted: bool) -> tuple[Part, ...]:
        """Read up to and including ``closer``, which ends an expansion or an array index."""
        text, size = self.source.text, len(self.source.text)
        plain = _OPERAND if closer == "}" else _SUBSCRIPT
        parts: list[Part] = []
        while self.source.pos < size:
            match = plain.match(text, self.source.pos)
            if match:
                parts.append(Part("text", match.group(), self.source.line(), quoted))
                self.source.pos = match.end()
                continue
            char = text[self.source.pos]
            if char == closer:
                self.source.pos += 1
                return tuple(parts)
            if char == "'" and quoted:
                parts.append(Part("text", "'", self.source.line(), quoted))
                self.source.pos += 1
            else:
                self._special(char, parts, started=False)
        raise ShellError(opened, f"unexpected end of file while looking for the closing {closer}")


def _never_below_zero(source: str) -> bool:
    """Return whether no beginning of ``source`` has more closing than opening parentheses."""
    depth = 0
    for char in _PARENTHESIS.findall(source):
        depth += 1 if char == "(" else -1
        if depth < 0:
            return False
    return True
