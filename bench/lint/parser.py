"""A parser for bash scripts: from text to statements, without executing anything.

The parser accepts exactly the scripts that ``bash -n`` accepts. The only exception is placeholders
such as ``<account>``, which are common in documentation.
"""

from __future__ import annotations

import re

from .syntax import (
    UNCLOSED_HEREDOC,
    AndOr,
    Assign,
    Background,
    Case,
    Function,
    Group,
    If,
    Loop,
    Node,
    Part,
    Pipeline,
    Redirect,
    ShellError,
    Simple,
    Source,
    Test,
    Word,
    WordReader,
)

_KEYWORD = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|select|function|time|coproc|in|\{|\}|!|\[\[)"
    r"(?=[ \t\n;&|()<>]|\Z)"
)
_FUNCTION_NAME = re.compile(r"[^ \t\n'\"\\$`|&;()<>]+")
_FUNCTION_PARENTHESES = re.compile(r"[ \t]*\([ \t]*\)")
_CASE_END = re.compile(r";;&|;;|;&")
_IN_TEST = re.compile(r"&&|\|\||[()<>|&;]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
_TOKEN = re.compile(r"&&|\|\||;;|[^ \t\n'\"\\$`|&;()<>]+|.|\n")
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse_shell(text: str, *, lines: tuple[int, ...] = ()) -> tuple[Node, ...]:
    """Return the statements in ``text``; ``lines`` contains the script line number of each row.

    Raises:
        ShellError: bash would report a syntax error.
        TooDeepError: the nesting is too deep to be analysed.
    """
    return parse_source(Source(text, lines=lines))


def parse_source(source: Source, closer: str = "") -> tuple[Node, ...]:
    """Parse commands up to and including ``closer``, or the whole source if ``closer`` is empty."""
    parser = Parser(source)
    return parser.commands_until(closer) if closer else parser.everything()


class Parser:
    """A recursive descent parser for bash scripts."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.words = WordReader(source, parse_source)

    def everything(self) -> tuple[Node, ...]:
        """Parse the whole source and return its statements."""
        statements = self._statements(frozenset())
        if not self.source.ended:
            raise self._unexpected()
        if self.source.waiting:
            self._line_end()
        return statements

    def commands_until(self, closer: str) -> tuple[Node, ...]:
        """Parse commands up to and including the parenthesis ``closer``."""
        opened = self.source.line()
        statements = self._statements(frozenset())
        if self.source.ended:
            raise ShellError(opened, f"unexpected end of file while looking for the closing {closer}")
        if not self.source.at(closer):
            raise self._unexpected()
        self.source.pos += len(closer)
        return statements

    def _skip(self) -> None:
        self.source.pos = self.source.match(_SPACE).end()  # type: ignore[union-attr]

    def _skip_lines(self) -> None:
        """Skip blanks, comments and line ends, and read the here-documents between them."""
        while True:
            self._skip()
            if not self.source.at("\n"):
                return
            self._line_end()
            if not self.source.waiting:
                self.source.pos = self.source.match(_BLANK_LINES).end()  # type: ignore[union-attr]

    def _line_end(self) -> None:
        self.source.pos += 1
        waiting, self.source.waiting = self.source.waiting, []
        for redirect in waiting:
            self._read_heredoc(redirect)

    def _read_heredoc(self, redirect: Redirect) -> None:
        delimiter = "".join(part.text for part in redirect.target.parts)
        first, row, start = self.source.line(), self.source.row(), self.source.pos
        end = self._find_delimiter(delimiter, strips=redirect.strips)
        if end is None:
            message = f"{UNCLOSED_HEREDOC}: no line consists only of {delimiter!r}"
            raise ShellError(redirect.line, message)
        body = self.source.text[start:end]
        self.source.swallowed.append((row, self.source.row() - 1))
        if redirect.verbatim:
            parts: tuple[Part, ...] = (Part("text", body, first, quoted=True),)
        else:
            parts = self.words.expand(body, row)
        redirect.body = Word(parts, first)

    def _find_delimiter(self, delimiter: str, *, strips: bool) -> int | None:
        """Skip the here-document and the line that closes it; return the end of its body, or None."""
        text = self.source.text
        while self.source.pos < len(text):
            begin, found = self.source.pos, text.find("\n", self.source.pos)
            end = found if found >= 0 else len(text)
            self.source.pos = min(end + 1, len(text))
            if end - begin > len(delimiter) + 1000:
                continue
            line = text[begin:end].lstrip("\t") if strips else text[begin:end]
            if line == delimiter:
                return begin
        return None

    def _statements(self, stops: frozenset[str]) -> tuple[Node, ...]:
        """Parse commands up to a keyword in ``stops``, a closing parenthesis, ``;;`` or the end."""
        statements: list[Node] = []
        while True:
            self._skip_lines()
            if self.source.ended or self.source.text[self.source.pos] == ")":
                return tuple(statements)
            if self.source.match(_CASE_END) or self._keyword() in stops:
                return tuple(statements)
            node = self._and_or()
            self._skip()
            if self.source.at("&") and not self.source.at("&&"):
                self.source.pos += 1
                node = Background(node)
            elif self.source.at(";") and not self.source.match(_CASE_END):
                self.source.pos += 1
            elif not self._at_end_of_command() and self._keyword() not in stops:
                raise self._unexpected()  # a keyword may follow a compound command: if (true) then
            statements.append(node)

    def _at_end_of_command(self) -> bool:
        if self.source.ended or self.source.text[self.source.pos] in "\n)":
            return True
        return bool(self.source.match(_CASE_END))

    def _and_or(self) -> Node:
        items = [self._pipeline()]
        while True:
            self._skip()
            if not (self.source.at("&&") or self.source.at("||")):
                return AndOr(tuple(items)) if len(items) > 1 else items[0]
            self.source.pos += 2
            self._skip_lines()
            items.append(self._pipeline())

    def _pipeline(self) -> Node:
        line = self.source.line()
        while (keyword := self._keyword()) in ("!", "time"):
            self.source.pos += len(keyword)
            self._skip()
            if keyword == "time" and self.source.at("-p "):
                self.source.pos += 3
                self._skip()
            if self._at_end_of_command() or self.source.text[self.source.pos] in ";&":
                return Simple((), (), (), line, line)
        commands = [self._command()]
        while True:
            self._skip()
            if not self.source.at("|") or self.source.at("||"):
                break
            self.source.pos += 2 if self.source.at("|&") else 1
            self._skip_lines()
            commands.append(self._command())
        return Pipeline(tuple(commands)) if len(commands) > 1 else commands[0]

    def _unexpected(self) -> ShellError:
        """Return the error that bash reports for the current token."""
        line = self.source.line()
        if self.source.ended:
            return ShellError(line, "syntax error: unexpected end of file")
        match = self.source.match(_TOKEN)
        token = match.group() if match else self.source.text[self.source.pos]
        return ShellError(
            line, f"syntax error near unexpected token `{'newline' if token == chr(10) else token[:40]}'"
        )

    def _command(self) -> Node:
        keyword = self._keyword()
        if keyword in _CLOSERS:
            error = self._unexpected()
            error.opened = self.source.opened[-1] if self.source.opened else None
            raise error
        if keyword == "coproc":
            self.source.pos += len(keyword)
            self._skip()
            named = self.source.match(_NAMED_COPROCESS)
            if named:
                self.source.pos = named.end()
            return Background(self._command())
        if keyword or self.source.at("("):
            self.source.deeper()
            node = self._compound(keyword)
            self.source.depth -= 1
            if node is not None:
                return node
        return self._simple()

    def _simple(self) -> Node:
        """Parse a simple command, or a function definition such as ``name() { ...; }``."""
        line = self.source.line()
        assigns: list[Assign] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        while True:
            self._skip()
            redirect = self._redirection()
            if redirect:
                redirects.append(redirect)
                continue
            before = self.source.pos
            if before >= len(self.source.text) or self.source.text[before] in "\n;&|)":
                break
            if self.source.text[before] == "(":
                if len(words) == 1 and not assigns and words[0].literal:
                    return self._function_body(words[0].literal, line)
                raise self._unexpected()
            word = self.words.word()
            if self.source.pos == before:
                raise self._unexpected()
            assign = None if words else assignment_in(word)
            if assign:
                assigns.append(assign)
            else:
                words.append(word)
        if not (assigns or words or redirects):
            raise self._unexpected()
        return Simple(tuple(assigns), tuple(words), tuple(redirects), line, self.source.line())

    def _function_body(self, name: str, line: int) -> Node:
        match = self.source.match(_FUNCTION_PARENTHESES)
        if not match:
            raise self._unexpected()
        self.source.pos = match.end()
        self._skip_lines()
        return Function(name, self._function_command())

    def _redirection(self) -> Redirect | None:
        if self.source.ended or self.source.text[self.source.pos] not in _MAY_REDIRECT:
            return None
        match = self.source.match(_REDIRECTION)
        if not match or self.source.placeholder():
            return None
        line = self.source.line()
        self.source.pos = match.end()
        self._skip()
        before = self.source.pos
        target = self.words.word()
        if self.source.pos == before:
            raise self._unexpected()
        redirect = Redirect(match.group(), target, line)
        if match.group().endswith(("<<", "<<-")) and not match.group().endswith("<<<"):
            self.source.waiting.append(redirect)
        return redirect

    def _keyword(self) -> str:
        match = self.source.match(_KEYWORD)
        return match.group() if match else ""

    def _compound(self, keyword: str) -> Node | None:
        """Parse a compound command; return None if ``keyword`` does not start one."""
        line = self.source.line()
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
        self.source.pos += len(keyword)
        self.source.opened.append(line)
        node = parse(line, keyword)
        self.source.opened.pop()
        return node

    def _list(self, line: int, keyword: str, *stops: str) -> tuple[Node, ...]:
        """Parse one or more commands, up to one of the keywords ``stops``."""
        statements = self._statements(frozenset(stops))
        if self.source.ended:
            message = (
                f"syntax error: unexpected end of file; the `{keyword}` is never closed with `{stops[-1]}`"
            )
            raise ShellError(self.source.line(), message, opened=line)
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
            self.source.pos += len("then")
            body = self._list(line, keyword, "elif", "else", "fi")
            branches.append((condition, body))
            ending = self._keyword()
            self.source.pos += len(ending)
            if ending == "else":
                branches.append(((), self._list(line, keyword, "fi")))
                self.source.pos += len("fi")
            if ending != "elif":
                return If(tuple(branches), self._redirects())

    def _do_group(self, line: int, keyword: str) -> tuple[Node, ...]:
        """Parse ``do ... done``, or ``{ ... }``, which bash also accepts."""
        self._skip_lines()
        if self.source.at(";") and not self.source.match(_CASE_END):
            self.source.pos += 1
            self._skip_lines()
        opener = self._keyword()
        if self.source.ended:
            raise ShellError(
                self.source.line(),
                f"syntax error: unexpected end of file; the `{keyword}` has no `do`",
                opened=line,
            )
        if opener not in ("do", "{"):
            raise _opened(self._unexpected(), line)
        self.source.pos += len(opener)
        closer = "done" if opener == "do" else "}"
        body = self._list(line, keyword, closer)
        self.source.pos += len(closer)
        return body

    def _for(self, line: int, keyword: str) -> Node:
        self._skip()
        if self.source.at("(("):
            start, row = self.source.pos, self.source.row()
            self.source.pos = self.source.closing_parenthesis(start)
            source = self.source.text[start + 2 : self.source.pos - 2]
            if not self.source.text.startswith("))", self.source.pos - 2):
                raise ShellError(line, "syntax error: `for ((` is never closed with `))`")
            head = Word(self.words.expand(source, row), line)
            condition: tuple[Node, ...] = (Test((head,), arithmetic=True, line=line),)
            match = _VARIABLE.match(source.strip())
            variable, words = match.group() if match else "", None
        else:
            condition = ()
            name = self.source.match(_VARIABLE)
            if not name:
                raise self._unexpected()
            variable, self.source.pos = name.group(), name.end()
            words = self._for_words()
        body = self._do_group(line, keyword)
        return Loop(variable, words, condition, body, self._redirects(), line)

    def _for_words(self) -> tuple[Word, ...] | None:
        """Parse ``in word ...`` up to the end of the line; return None if there is no ``in``."""
        self._skip_lines()
        if self._keyword() != "in":
            return None
        self.source.pos += len("in")
        words: list[Word] = []
        while True:
            self._skip()
            before = self.source.pos
            if before >= len(self.source.text) or self.source.text[before] in ";\n":
                return tuple(words)
            words.append(self.words.word())
            if self.source.pos == before:
                raise self._unexpected()

    def _while(self, line: int, keyword: str) -> Node:
        condition = self._list(line, keyword, "do")
        body = self._do_group(line, keyword)
        return Loop("", None, condition, body, self._redirects(), line)

    def _case(self, line: int, _: str) -> Node:
        self._skip()
        subject = self.words.word()
        self._skip_lines()
        if self._keyword() != "in":
            raise _opened(self._unexpected(), line)
        self.source.pos += len("in")
        arms: list[tuple[tuple[Word, ...], tuple[Node, ...]]] = []
        while True:
            self._skip_lines()
            if self._keyword() == "esac":
                self.source.pos += len("esac")
                return Case(subject, tuple(arms), self._redirects())
            if self.source.ended:
                message = "syntax error: unexpected end of file; the `case` is never closed with `esac`"
                raise ShellError(self.source.line(), message, opened=line)
            arms.append((self._patterns(), self._arm(line)))

    def _patterns(self) -> tuple[Word, ...]:
        if self.source.at("("):
            self.source.pos += 1
        patterns: list[Word] = []
        while True:
            self._skip()
            before = self.source.pos
            patterns.append(self.words.word())
            if self.source.pos == before:
                raise self._unexpected()
            self._skip()
            if self.source.at(")"):
                self.source.pos += 1
                return tuple(patterns)
            if not self.source.at("|"):
                raise self._unexpected()
            self.source.pos += 1

    def _arm(self, line: int) -> tuple[Node, ...]:
        body = self._statements(frozenset({"esac"}))
        ending = self.source.match(_CASE_END)
        if ending:
            self.source.pos = ending.end()
        elif self._keyword() != "esac":
            raise _opened(self._unexpected(), line)
        return body

    def _function(self, line: int, _: str) -> Node:
        self._skip()
        name = self.source.match(_FUNCTION_NAME)
        if not name:
            raise _opened(self._unexpected(), line)
        self.source.pos = name.end()
        parentheses = self.source.match(_FUNCTION_PARENTHESES)
        if parentheses:
            self.source.pos = parentheses.end()
        self._skip_lines()
        return Function(name.group(), self._function_command())

    def _function_command(self) -> Node:
        """Parse the body of a function, which must be a compound command."""
        if not self._keyword() and not self.source.at("("):
            raise self._unexpected()
        return self._command()

    def _braces(self, line: int, keyword: str) -> Node:
        body = self._list(line, keyword, "}")
        self.source.pos += 1
        return Group(body, self._redirects())

    def _parenthesised(self, line: int) -> Node:
        """Parse ``(( arithmetic ))`` or a subshell."""
        if self.source.at("(("):
            end = self.source.closing_parenthesis(self.source.pos)
            if self.source.text.startswith("))", end - 2):
                parts = self.words.expand(self.source.text[self.source.pos + 2 : end - 2], self.source.row())
                self.source.pos = end
                return Test((Word(parts, line),), arithmetic=True, line=line)
        self.source.pos += 1
        body = self.commands_until(")")
        if not body:
            self.source.pos -= 1
            raise self._unexpected()
        return Group(body, self._redirects())

    def _test(self, line: int, keyword: str) -> Node:
        words: list[Word] = []
        joined = True
        while True:
            self._skip()
            broken = self.source.at("\n")
            self._skip_lines()
            if self.source.ended:
                raise ShellError(line, f"unexpected end of file while looking for the `]]` of `{keyword}`")
            operator = self.source.match(_IN_TEST)
            if operator:
                if operator.group() == ";":
                    raise _opened(self._unexpected(), line)
                joined = True
                self.source.pos = operator.end()
                continue
            before = self.source.pos
            word = self.words.word()
            if word.bare == "]]":
                return Test(tuple(words), arithmetic=False, line=line)
            if self.source.pos == before or (broken and not joined):
                self.source.pos = before
                raise _opened(self._unexpected(), line)
            joined = word.bare == "!"
            words.append(word)


def _opened(error: ShellError, line: int) -> ShellError:
    """Return ``error`` with ``line`` as the first line of the command that contains the error."""
    error.opened = line
    return error


def assignment_in(word: Word) -> Assign | None:
    """Return the assignment in a word such as ``name=value``, or None."""
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
    """Return the assignment in ``name[$index]=value``, or None."""
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
