"""Words of a bash script: quotes, expansions and substitutions, without running any of them.

The grammar follows the "Shell Grammar" and "EXPANSION" sections of bash's manual. Scanning
is linear in the text, and nesting is bounded by :data:`MAX_DEPTH`.
"""

from __future__ import annotations

import re
from typing import Self

from bench.lint.nodes import Node, Part, ShellError, TooDeepError, Word

#: Nested substitutions and compound commands beyond this are not looked into.
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


class WordScanner:
    """Read words from ``text``, whose first row is ``first_row``.

    ``lines`` has, for text that was put together from pieces of a script, the line of the script
    that each row (from 1) comes from. ``swallowed`` are the rows within strings and here-documents.
    """

    def __init__(self, text: str, *, first_row: int = 1, depth: int = 0, lines: tuple[int, ...] = ()) -> None:
        self.text = text
        self.pos = 0
        self.depth = depth
        self.lines = lines
        self.swallowed: list[tuple[int, int]] = []
        self._row = first_row
        self._counted = 0

    def row(self) -> int:
        """Return the number of the row that the scanner stands on."""
        if self.pos > self._counted:
            self._row += self.text.count("\n", self._counted, self.pos)
            self._counted = self.pos
        return self._row

    def line(self) -> int:
        """Return the line of the script that the scanner stands on."""
        row = self.row()
        return self.lines[min(row, len(self.lines)) - 1] if self.lines else row

    def commands_until(self, closer: str) -> tuple[Node, ...]:
        """Parse commands up to and including ``closer``; the parser knows how."""
        raise NotImplementedError

    def everything(self) -> tuple[Node, ...]:
        """Parse the whole text as commands; the parser knows how."""
        raise NotImplementedError

    def deeper(self) -> None:
        """Enter one more level of nesting."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooDeepError(self.line(), "nested too deeply")

    def word(self) -> Word:
        """Read the word that starts here; the caller has skipped blanks."""
        text, start = self.text, self.pos
        line = self.line()
        parts: list[Part] = []
        size = len(text)
        while self.pos < size:
            match = _CHUNK.match(text, self.pos)
            if match:
                parts.append(Part("text", match.group(), self.line()))
                self.pos = match.end()
                continue
            if not self._special(text[self.pos], parts, started=self.pos > start):
                break
        return Word(tuple(parts) or (Part("text", "", line, quoted=True),), line)

    def _special(self, char: str, parts: list[Part], *, started: bool) -> bool:
        """Read a piece that starts with a special character; False where the word ends."""
        text, pos = self.text, self.pos
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
                self.pos = self._closing_parenthesis(pos)
                if self.pos >= len(text) and not text.endswith(")"):
                    raise ShellError(parts[-1].line, "unexpected end of file while looking for the closing )")
                parts.append(Part("text", text[pos : self.pos], self.line()))
            else:
                return False
        else:
            return False
        return True

    def _placeholder_here(self) -> re.Match[str] | None:
        """Return the match of a placeholder such as ``<account>`` where one starts here."""
        return _PLACEHOLDER.match(self.text, self.pos) if self.text.startswith("<", self.pos) else None

    def _angle(self, char: str, parts: list[Part]) -> bool:
        """Read a process substitution or a placeholder such as <account>; False for a redirection."""
        line = self.line()
        if self.text.startswith("(", self.pos + 1):
            self.pos += 2
            parts.append(Part("process", char, line, body=self._nested(")")))
            return True
        placeholder = self._placeholder_here()
        if placeholder:
            parts.append(Part("text", placeholder.group(), line, quoted=True))
            self.pos = placeholder.end()
            return True
        return False

    def expanding_text(self) -> list[Part]:
        """Read all of the text as bash reads a here-document or arithmetic: expansions only."""
        return self._expanding(_EXPANDING_TEXT, "")

    def _array(self) -> Part:
        """Read the words of ``name=(...)``, which may span lines."""
        opened = self.line()
        self.pos += 1
        words: list[Word] = []
        while True:
            self.pos = _BETWEEN_WORDS.match(self.text, self.pos).end()  # type: ignore[union-attr]
            if self.pos >= len(self.text):
                raise ShellError(opened, "unexpected end of file while looking for the closing )")
            if self.text[self.pos] == ")":
                self.pos += 1
                return Part("array", "", opened, words=tuple(words))
            before = self.pos
            words.append(self.word())
            if self.pos == before:
                raise ShellError(self.line(), f"syntax error near unexpected token `{self.text[before]}'")

    def _backtick(self, *, quoted: bool) -> Part:
        line, row = self.line(), self.row()
        match = _BACKTICKED.match(self.text, self.pos + 1)
        if not match:
            raise ShellError(line, "unexpected end of file while looking for the closing `", quote="`")
        self.pos = match.end()
        source = _ESCAPED_IN_BACKTICKS.sub(r"\1", match.group()[:-1])
        return Part("command", source, line, quoted, body=self._inner(source, row).everything())

    def _escape(self, parts: list[Part]) -> None:
        following = self.text[self.pos + 1 : self.pos + 2]
        if following != "\n":  # a backslash before the end of a line joins the lines
            parts.append(Part("text", following or "\\", self.line(), quoted=True))
        self.pos += 2

    def _single_quoted(self) -> Part:
        line = self.line()
        end = self.text.find("'", self.pos + 1)
        if end < 0:
            raise ShellError(line, "unexpected end of file while looking for the closing '", quote="'")
        value = self.text[self.pos + 1 : end]
        first = self.row()
        self.pos = end + 1
        self._swallow(first)
        return Part("text", value, line, quoted=True)

    def double_quoted(self) -> list[Part]:
        """Read a string in double quotes, from its opening quote to behind its closing one."""
        line, first = self.line(), self.row()
        self.pos += 1
        parts = self._expanding(_DOUBLE_QUOTED, '"')
        if not self.text.startswith('"', self.pos):
            raise ShellError(line, 'unexpected end of file while looking for the closing "', quote='"')
        self.pos += 1
        self._swallow(first)
        return parts or [Part("text", "", line, quoted=True)]

    def _swallow(self, first: int) -> None:
        if self.row() > first:
            self.swallowed.append((first + 1, self.row()))

    def _expanding(self, plain: re.Pattern[str], end: str) -> list[Part]:
        """Read text in which only ``$``, backquotes and backslashes are special, up to ``end``."""
        text, size = self.text, len(self.text)
        parts: list[Part] = []
        while self.pos < size:
            match = plain.match(text, self.pos)
            if match:
                parts.append(Part("text", match.group(), self.line(), quoted=True))
                self.pos = match.end()
                continue
            char = text[self.pos]
            if char == "$":
                parts.extend(self._dollar(quoted=True))
            elif char == "`":
                parts.append(self._backtick(quoted=True))
            elif char == "\\":
                following = text[self.pos + 1 : self.pos + 2]
                kept = following if following and following in '$`"\\' else "\\" + following
                parts.append(Part("text", kept, self.line(), quoted=True))
                self.pos += 2
            elif char == end:
                break
        self.pos = min(self.pos, size)
        return parts

    def _dollar(self, *, quoted: bool) -> list[Part]:
        text, line = self.text, self.line()
        following = text[self.pos + 1 : self.pos + 2]
        if following == "(":
            return [self._parenthesis(quoted=quoted)]
        if following == "{":
            return [self._braced(quoted=quoted)]
        if following == "[":
            start = self.pos = self.pos + 2
            operand = self._until("]", line, quoted=quoted)
            return [Part("arith", text[start : self.pos - 1], line, quoted, operand=operand)]
        if following == "'" and not quoted:
            match = _ANSI_C.match(text, self.pos + 2)
            if not match:
                raise ShellError(line, "unexpected end of file while looking for the closing '", quote="'")
            self.pos = match.end()
            return [Part("text", match.group()[:-1], line, quoted=True)]
        if following == '"' and not quoted:
            self.pos += 1
            return self.double_quoted()
        match = _NAME.match(text, self.pos + 1)
        if match:
            self.pos = match.end()
            return [Part("param", match.group(), line, quoted)]
        self.pos += 1
        return [Part("text", "$", line, quoted)]

    def _parenthesis(self, *, quoted: bool) -> Part:
        """Read ``$((arithmetic))`` or ``$(commands)``."""
        line, start = self.line(), self.pos
        if self.text.startswith("((", start + 1):
            end = self._closing_parenthesis(start + 1)
            source = self.text[start + 3 : end - 2]
            if self.text.startswith("))", end - 2) and _never_below_zero(source):
                inner = self._inner(source, self.row())
                self.pos = end
                return Part("arith", source, line, quoted, operand=tuple(inner.expanding_text()))
        self.pos = start + 2
        body = self._nested(")")
        return Part("command", self.text[start + 2 : self.pos - 1], line, quoted, body=body)

    def _inner(self, text: str, row: int) -> Self:
        """Return a scanner of its own for ``text``, one level deeper."""
        self.deeper()
        self.depth -= 1
        return type(self)(text, first_row=row, depth=self.depth + 1, lines=self.lines)

    def _closing_parenthesis(self, start: int) -> int:
        """Return the position behind the parenthesis that closes the one at ``start`` (or the end)."""
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

    def _nested(self, closer: str) -> tuple[Node, ...]:
        self.deeper()
        body = self.commands_until(closer)
        self.depth -= 1
        return body

    def _braced(self, *, quoted: bool) -> Part:
        """Read ``${name}``, ``${name[index]}``, ``${name:-operand}`` and their kin."""
        line = self.line()
        self.pos += 2
        match = _BRACED_NAME.match(self.text, self.pos)
        name = match.group() if match else ""
        self.pos += len(name)
        index, subscript = "", tuple[Part, ...]()
        if name and self.text.startswith("[", self.pos):
            start = self.pos
            self.pos += 1
            subscript = self._until("]", line, quoted=quoted)
            index = self.text[start : self.pos]
        operator = _OPERATOR.match(self.text, self.pos)
        op = operator.group() if operator else ""
        self.pos += len(op)
        self.deeper()
        operand = self._until("}", line, quoted=quoted)
        self.depth -= 1
        return Part("param", name + index, line, quoted, op=op, operand=operand, subscript=subscript)

    def _until(self, closer: str, opened: int, *, quoted: bool) -> tuple[Part, ...]:
        """Read up to and including the brace or bracket that closes an expansion or its index."""
        text, size = self.text, len(self.text)
        plain = _OPERAND if closer == "}" else _SUBSCRIPT
        parts: list[Part] = []
        while self.pos < size:
            match = plain.match(text, self.pos)
            if match:
                parts.append(Part("text", match.group(), self.line(), quoted))
                self.pos = match.end()
                continue
            char = text[self.pos]
            if char == closer:
                self.pos += 1
                return tuple(parts)
            if char == "'" and quoted:
                parts.append(Part("text", "'", self.line(), quoted))
                self.pos += 1
            else:
                self._special(char, parts, started=False)
        raise ShellError(opened, f"unexpected end of file while looking for the closing {closer}")


def _never_below_zero(source: str) -> bool:
    """Return whether no parenthesis in ``source`` closes one that was opened before it."""
    depth = 0
    for char in _PARENTHESIS.findall(source):
        depth += 1 if char == "(" else -1
        if depth < 0:
            return False
    return True
