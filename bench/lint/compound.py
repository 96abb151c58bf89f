"""The compound commands of bash: if, for, while, until, select, case, groups, tests, functions."""

from __future__ import annotations

import re

from bench.lint.nodes import Case, Function, Group, If, Loop, Node, Redirect, ShellError, Test, Word
from bench.lint.words import WordScanner

_KEYWORD = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|select|function|time|coproc|in|\{|\}|!|\[\[)"
    r"(?=[ \t\n;&|()<>]|\Z)"
)
_FUNCTION_NAME = re.compile(r"[^ \t\n'\"\\$`|&;()<>]+")
_FUNCTION_PARENTHESES = re.compile(r"[ \t]*\([ \t]*\)")
_CASE_END = re.compile(r";;&|;;|;&")
_IN_TEST = re.compile(r"&&|\|\||[()<>|&;]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CompoundParser(WordScanner):
    """What is common to all compound commands; the lists inside are parsed by the subclass."""

    #: The lines of the compound commands that are open, innermost last.
    opened: list[int]

    def _skip(self) -> None:
        raise NotImplementedError

    def _skip_lines(self) -> None:
        raise NotImplementedError

    def _statements(self, stops: frozenset[str]) -> tuple[Node, ...]:
        raise NotImplementedError

    def _unexpected(self) -> ShellError:
        raise NotImplementedError

    def _redirection(self) -> Redirect | None:
        raise NotImplementedError

    def _command(self) -> Node:
        raise NotImplementedError

    def _keyword(self) -> str:
        match = _KEYWORD.match(self.text, self.pos)
        return match.group() if match else ""

    def _compound(self, keyword: str) -> Node | None:
        """Parse the compound command that starts here; None where there is none."""
        line = self.line()
        if not keyword:
            return self._parenthesised(line)
        parse = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._braces,
            "[[": self._test,
        }.get(keyword)
        if parse is None:
            return None
        self.pos += len(keyword)
        self.opened.append(line)
        node = parse(line, keyword)
        self.opened.pop()
        return node

    def _list(self, line: int, keyword: str, *stops: str) -> tuple[Node, ...]:
        """Parse the commands up to one of ``stops``; there must be at least one."""
        statements = self._statements(frozenset(stops))
        if self.pos >= len(self.text):
            message = (
                f"syntax error: unexpected end of file; the `{keyword}` is never closed with `{stops[-1]}`"
            )
            raise ShellError(self.line(), message, opened=line)
        if self._keyword() not in stops or not statements:
            raise _opened(self._unexpected(), line)
        return statements

    def _redirects(self) -> tuple[Redirect, ...]:
        redirects: list[Redirect] = []
        while True:
            self._skip()
            redirect = self._redirection()
            if redirect is None:
                return tuple(redirects)
            redirects.append(redirect)

    def _if(self, line: int, keyword: str) -> Node:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        while True:
            condition = self._list(line, keyword, "then")
            self.pos += len("then")
            body = self._list(line, keyword, "elif", "else", "fi")
            branches.append((condition, body))
            ending = self._keyword()
            self.pos += len(ending)
            if ending == "else":
                branches.append(((), self._list(line, keyword, "fi")))
                self.pos += len("fi")
            if ending != "elif":
                return If(tuple(branches), self._redirects(), line)

    def _do_group(self, line: int, keyword: str) -> tuple[Node, ...]:
        """Parse ``do ... done``, or the ``{ ... }`` that bash allows instead."""
        self._skip_lines()
        if self.text.startswith(";", self.pos) and not _CASE_END.match(self.text, self.pos):
            self.pos += 1
            self._skip_lines()
        opener = self._keyword()
        if self.pos >= len(self.text):
            raise ShellError(
                self.line(), f"syntax error: unexpected end of file; the `{keyword}` has no `do`", opened=line
            )
        if opener not in ("do", "{"):
            raise _opened(self._unexpected(), line)
        self.pos += len(opener)
        closer = "done" if opener == "do" else "}"
        body = self._list(line, keyword, closer)
        self.pos += len(closer)
        return body

    def _for(self, line: int, keyword: str) -> Node:
        self._skip()
        if self.text.startswith("((", self.pos):
            start, row = self.pos, self.row()
            self.pos = self._closing_parenthesis(start)
            source = self.text[start + 2 : self.pos - 2]
            if not self.text.startswith("))", self.pos - 2):
                raise ShellError(line, "syntax error: `for ((` is never closed with `))`")
            head = Word(tuple(self._inner(source, row).expanding_text()), line)
            condition: tuple[Node, ...] = (Test((head,), arithmetic=True, line=line),)
            match = _VARIABLE.match(source.strip())
            variable, words = match.group() if match else "", None
        else:
            condition = ()
            name = _VARIABLE.match(self.text, self.pos)
            if not name:
                raise self._unexpected()
            variable, self.pos = name.group(), name.end()
            words = self._for_words()
        body = self._do_group(line, keyword)
        return Loop(keyword, variable, words, condition, body, self._redirects(), line)

    def _for_words(self) -> tuple[Word, ...] | None:
        """Parse ``in word ...`` up to the end of the line, if it is there."""
        self._skip_lines()
        if self._keyword() != "in":
            return None
        self.pos += len("in")
        words: list[Word] = []
        while True:
            self._skip()
            before = self.pos
            if before >= len(self.text) or self.text[before] in ";\n":
                return tuple(words)
            words.append(self.word())
            if self.pos == before:
                raise self._unexpected()

    def _while(self, line: int, keyword: str) -> Node:
        condition = self._list(line, keyword, "do")
        body = self._do_group(line, keyword)
        return Loop(keyword, "", None, condition, body, self._redirects(), line)

    def _case(self, line: int, _: str) -> Node:
        self._skip()
        subject = self.word()
        self._skip_lines()
        if self._keyword() != "in":
            raise _opened(self._unexpected(), line)
        self.pos += len("in")
        arms: list[tuple[tuple[Word, ...], tuple[Node, ...]]] = []
        while True:
            self._skip_lines()
            if self._keyword() == "esac":
                self.pos += len("esac")
                return Case(subject, tuple(arms), self._redirects(), line)
            if self.pos >= len(self.text):
                message = "syntax error: unexpected end of file; the `case` is never closed with `esac`"
                raise ShellError(self.line(), message, opened=line)
            arms.append((self._patterns(), self._arm(line)))

    def _patterns(self) -> tuple[Word, ...]:
        if self.text.startswith("(", self.pos):
            self.pos += 1
        patterns: list[Word] = []
        while True:
            self._skip()
            before = self.pos
            patterns.append(self.word())
            if self.pos == before:
                raise self._unexpected()
            self._skip()
            if self.text.startswith(")", self.pos):
                self.pos += 1
                return tuple(patterns)
            if not self.text.startswith("|", self.pos):
                raise self._unexpected()
            self.pos += 1

    def _arm(self, line: int) -> tuple[Node, ...]:
        body = self._statements(frozenset({"esac"}))
        ending = _CASE_END.match(self.text, self.pos)
        if ending:
            self.pos = ending.end()
        elif self._keyword() != "esac":
            raise _opened(self._unexpected(), line)
        return body

    def _function(self, line: int, _: str) -> Node:
        self._skip()
        name = _FUNCTION_NAME.match(self.text, self.pos)
        if not name:
            raise _opened(self._unexpected(), line)
        self.pos = name.end()
        parentheses = _FUNCTION_PARENTHESES.match(self.text, self.pos)
        if parentheses:
            self.pos = parentheses.end()
        self._skip_lines()
        return Function(name.group(), self._function_command(), line)

    def _function_command(self) -> Node:
        """Parse a function's body, which must be a compound command."""
        if not self._keyword() and not self.text.startswith("(", self.pos):
            raise self._unexpected()
        return self._command()

    def _braces(self, line: int, keyword: str) -> Node:
        body = self._list(line, keyword, "}")
        self.pos += 1
        return Group(body, self._redirects(), subshell=False, line=line)

    def _parenthesised(self, line: int) -> Node:
        """Parse ``(( arithmetic ))`` or a subshell."""
        if self.text.startswith("((", self.pos):
            end = self._closing_parenthesis(self.pos)
            if self.text.startswith("))", end - 2):
                inner = self._inner(self.text[self.pos + 2 : end - 2], self.row())
                self.pos = end
                parts = tuple(inner.expanding_text())
                return Test((Word(parts, line),), arithmetic=True, line=line)
        self.pos += 1
        body = self.commands_until(")")
        if not body:
            self.pos -= 1
            raise self._unexpected()
        return Group(body, self._redirects(), subshell=True, line=line)

    def _test(self, line: int, keyword: str) -> Node:
        words: list[Word] = []
        joined = True
        while True:
            self._skip()
            broken = self.text.startswith("\n", self.pos)
            self._skip_lines()
            if self.pos >= len(self.text):
                raise ShellError(line, f"unexpected end of file while looking for the `]]` of `{keyword}`")
            operator = _IN_TEST.match(self.text, self.pos)
            if operator:
                if operator.group() == ";":
                    raise _opened(self._unexpected(), line)
                joined = True
                self.pos = operator.end()
                continue
            before = self.pos
            word = self.word()
            if word.bare == "]]":
                return Test(tuple(words), arithmetic=False, line=line)
            if self.pos == before or (broken and not joined):
                self.pos = before
                raise _opened(self._unexpected(), line)
            joined = word.bare == "!"
            words.append(word)


def _opened(error: ShellError, line: int) -> ShellError:
    """Return ``error``, noting the line of the command that it breaks."""
    error.opened = line
    return error
