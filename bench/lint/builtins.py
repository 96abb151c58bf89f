"""The builtins that set variables or change how a script runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.lint.environment import MAX_VALUE, Assigned, Environment, Unknown, Value
from bench.lint.nodes import Assign, Node, ShellError, Word
from bench.lint.shell import assignment_in, parse_shell

if TYPE_CHECKING:
    from bench.lint.expansion import Expander
    from bench.lint.walk import Place, Walk

_SET_IN_ARITHMETIC = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_TESTED = re.compile(r"-[znv]\Z")
#: Files that activate an environment but set no variable that a script would rely on by name.
_ACTIVATES = re.compile(
    r"(?:^|/)(?:activate(?:\.\w+)?|conda\.sh|mamba\.sh|micromamba\.sh|\.?bashrc|\.?bash_profile|\.?profile|\.zshrc"
    r"|\.bash_aliases|\.cargo/env|setup-env\.sh|lmod\.sh|modules?\.sh|init/(?:bash|sh|profile)|bash|z00_lmod\.sh"
    r"|setvars\.sh|lmod/lmod/init/\w+|00-modulepath\.sh|zsh|profile\.d/.*)\Z"
)
_HOOKS = re.compile(
    r"conda|mamba|modulecmd|module |ssh-agent|hook|pyenv|direnv|spack|lmod|shellenv|register-python"
)


class Builtins:
    """Carry out builtins on the environment of a walk."""

    seen: Walk
    environment: Environment
    expander: Expander
    place: Place

    declarations = frozenset({"export", "declare", "local", "typeset", "readonly"})

    def assign(self, assigned: Assigned) -> None:
        """Note an assignment."""
        raise NotImplementedError

    def note_test(self, text: str) -> None:
        """Note what a condition compares."""
        raise NotImplementedError

    def statements(self, nodes: Sequence[Node], place: Place) -> None:
        """Walk through statements."""
        raise NotImplementedError

    def evaluate(self, assign: Assign, *, exported: bool = False) -> Assigned:
        """Return what an assignment makes of its variable."""
        expander, branches = self.expander, self.place.branches
        earlier = self.environment.candidates(assign.name, branches) if assign.append else []
        array = assign.value.parts[0].kind == "array" if assign.value.parts else False
        if assign.subscript:
            expander.value(assign.value)
            return Assigned(assign.name, assign.line, branches=branches, exported=exported)
        if array:
            items = expander.items(assign.value)
            before = earlier[0].items or () if earlier else ()
            return Assigned(
                assign.name, assign.line, items=(*before, *items)[:2000], branches=branches, exported=exported
            )
        value = expander.value(assign.value)
        value = Value(value.text, value.lines if value.text else (assign.line,))
        if earlier and earlier[0].value is not None and len(earlier[0].value.text) <= MAX_VALUE:
            value = _joined(earlier[0].value, value)
        elif assign.append and earlier:
            return Assigned(assign.name, assign.line, branches=branches, exported=exported)
        return Assigned(assign.name, assign.line, value, branches=branches, exported=exported)

    def declare(self, command: str, words: Sequence[Word]) -> None:
        """Carry out ``export NAME=value`` and its kin."""
        exported = command == "export"
        for word in words:
            text = word.literal
            if text is not None and text.startswith("-"):
                exported = exported or (command in ("declare", "typeset") and "x" in text)
                continue
            assign = assignment_in(word)
            if assign:
                self.assign(self.evaluate(assign, exported=exported))
                continue
            name = self.expander.value(word).text
            if _NAME.match(name):
                self._declare_name(name, word.line, exported=exported)

    def _declare_name(self, name: str, line: int, *, exported: bool) -> None:
        known = self.environment.candidates(name, self.place.branches)
        if known and exported:
            newest = known[0]
            self.assign(
                Assigned(
                    name, newest.line, newest.value, newest.items, exported=True, branches=newest.branches
                )
            )
        elif not exported:
            self.assign(Assigned(name, line, Value("", (line,)), branches=self.place.branches))

    def builtin(self, name: str, arguments: list[Value], body: Value | None) -> bool:
        """Carry out a builtin; return whether ``name`` is one that starts nothing.

        ``body`` is the here-document that it reads, if any.
        """
        words = [argument.text for argument in arguments[1:]]
        line = arguments[0].line
        if name in ("source", "."):
            self._source(words)
        elif name == "eval":
            self._eval(arguments[1:])
        elif name == "read" and body is not None and "-d" in words and _NAME.match(words[-1]):
            self.assign(Assigned(words[-1], line, body, branches=self.place.branches))
        elif name in ("read", "mapfile", "readarray", "printf", "getopts", "unset", "let"):
            self._set_names(name, words, line)
        elif name == "set":
            self._set_options(words)
        elif name in ("wait", "fg"):
            self.seen.waits = True
        elif name in ("[", "test"):
            self.note_test(" ".join(words))
        else:
            return False
        return True

    def _set_options(self, words: list[str]) -> None:
        for word, following in zip(words, [*words[1:], ""], strict=False):
            if word.startswith("-") and not word.startswith("--"):
                self.seen.dies_on_unset |= "u" in word or (word.endswith("o") and following == "nounset")
                if "a" in word or (word.endswith("o") and following == "allexport"):
                    self.seen.opaque = True

    def _set_names(self, command: str, words: list[str], line: int) -> None:
        names = [word for word in words if _NAME.match(word)]
        if command == "printf":
            names = words[1:2] if words[:1] == ["-v"] else []
        elif command == "getopts":
            names = [*words[1:2], "OPTARG", "OPTIND"]
        elif command == "let":
            self.arithmetic(" ".join(words), line)
            return
        elif command == "unset":
            return
        elif command == "read" and not names:
            names = ["REPLY"]
        elif command in ("mapfile", "readarray") and not names:
            names = ["MAPFILE"]
        for name in names:
            self.assign(Assigned(name, line, branches=self.place.branches))

    def arithmetic(self, text: str, line: int) -> None:
        """Note arithmetic, and the variables that it sets."""
        self.seen.unknowns.mark(Unknown("arith", "", self.seen.unknowns.shown(text), line, default=text))
        for match in _SET_IN_ARITHMETIC.finditer(text[:2000]):
            self.assign(Assigned(match.group(1) or match.group(2), line, branches=self.place.branches))

    def _source(self, words: list[str]) -> None:
        if not words:
            return
        path = self.seen.unknowns.shown(words[0])
        if not _ACTIVATES.search(path):
            self.seen.sourced.append(path)
            self.seen.opaque = True

    def _eval(self, arguments: list[Value]) -> None:
        shown = self.seen.unknowns.shown(" ".join(argument.text for argument in arguments))
        if _HOOKS.search(shown[:2000]):
            return
        if not arguments or any(self.seen.unknowns.of(argument.text) for argument in arguments[:1]):
            self.seen.opaque = True
            return
        text, lines = " ".join(argument.text for argument in arguments), arguments[0].lines
        try:
            self.statements(parse_shell(text, lines=lines), self.place)
        except ShellError:
            self.seen.opaque = True


def _joined(first: Value, second: Value) -> Value:
    """Return the text of both, each row with its line (a row that both share keeps the first's)."""
    rows = second.lines[1:] if first.text and not first.text.endswith("\n") else second.lines
    text = first.text + second.text
    if not first.text:
        return second
    if first.text.endswith("\n"):
        return Value(text, (*first.lines[:-1], *second.lines))
    return Value(text, (*first.lines, *rows))
