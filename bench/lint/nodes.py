"""What a parsed shell script consists of: pieces, words, and the commands made of them."""

from __future__ import annotations

from typing import NamedTuple


class ShellError(Exception):
    """What bash would refuse to parse, with the line it would be found on."""

    def __init__(self, line: int, message: str, *, opened: int | None = None, quote: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.message = message
        self.opened = opened
        self.quote = quote


class TooDeepError(ShellError):
    """Nesting that is legal but beyond what is looked into."""


class Part(NamedTuple):
    """One piece of a word.

    ``kind`` is ``text``, ``param`` (``text`` is its name, ``op`` and ``operand`` what follows
    in braces), ``command`` (``body`` is parsed, ``text`` its source), ``arith``, ``process``
    or ``array`` (``words``). ``quoted`` pieces are neither split nor globbed.
    """

    kind: str
    text: str
    line: int
    quoted: bool = False
    op: str = ""
    operand: tuple[Part, ...] = ()
    subscript: tuple[Part, ...] = ()
    body: tuple[Node, ...] = ()
    words: tuple[Word, ...] = ()


class Word(NamedTuple):
    """A word of a command, and the line it starts on."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The word's text where nothing in it is expanded, else None."""
        if len(self.parts) == 1 and self.parts[0].kind == "text":
            return self.parts[0].text
        if all(part.kind == "text" for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None

    @property
    def bare(self) -> str | None:
        """The word's text where it has neither quotes nor expansions (so may be a keyword)."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.text if part.kind == "text" and not part.quoted else None
        return None


class Assign(NamedTuple):
    """``name=value``; an array's value is a word with one part of kind ``array``."""

    name: str
    value: Word
    line: int
    append: bool = False
    subscript: str = ""


class Redirect:
    """A redirection; ``body`` is the text of a here-document, known once its lines are read."""

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
    line: int


class AndOr(NamedTuple):
    """Pipelines joined by ``&&`` and ``||``; ``operators`` has one less than ``items``."""

    items: tuple[Node, ...]
    operators: tuple[str, ...]
    line: int


class Background(NamedTuple):
    """A command that ``&`` sends to the background."""

    command: Node
    line: int


class Group(NamedTuple):
    """``{ ...; }`` or, with ``subshell``, ``( ... )``."""

    body: tuple[Node, ...]
    redirects: tuple[Redirect, ...]
    subshell: bool
    line: int


class If(NamedTuple):
    """``if``: pairs of condition and body, the last with an empty condition for ``else``."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    redirects: tuple[Redirect, ...]
    line: int


class Loop(NamedTuple):
    """``for``, ``select``, ``while``, ``until``; ``words`` is None without ``in``."""

    kind: str
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
    line: int


class Function(NamedTuple):
    """A function's definition."""

    name: str
    body: Node
    line: int


class Test(NamedTuple):
    """``[[ ... ]]`` (``words``) or ``(( ... ))`` (one word)."""

    words: tuple[Word, ...]
    arithmetic: bool
    line: int


Node = Simple | Pipeline | AndOr | Background | Group | If | Loop | Case | Function | Test
