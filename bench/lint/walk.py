"""Find the commands of a script with their words.

A variable has a value only below straight assignments, outside of branches, loops, functions and subshells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from tree_sitter import Node

from .launch import Launch, read_command
from .options import names
from .words import Expander, Word, is_broken, parse, text_of

#: Builtins that set the variables that they name, that declare variables, and that run other files or text.
_SETS = names("read mapfile readarray getopts printf let unset")
_DECLARES = names("export declare typeset local readonly")
_SOURCES = names("source . eval")
#: Longer values are unknown, and deeper scripts are not read.
_MAX_LENGTH, _MAX_DEPTH = 2_000, 200
#: The flags of places inside statements: what runs there possibly runs several times, or not at all.
_PLACES = {
    **dict.fromkeys(("if_statement", "elif_clause", "else_clause", "case_item"), "conditional"),
    **dict.fromkeys(("for_statement", "c_style_for_statement", "while_statement"), "loop"),
    **dict.fromkeys(("command_substitution", "process_substitution"), "substitution"),
    **dict.fromkeys(("pipeline", "subshell"), "subshell"),
    "function_definition": "function",
}
Place = frozenset[str]


@dataclass(frozen=True)
class Command:
    """One simple command, in the script or in the shell of ``task``, with what its environment has."""

    words: tuple[Word, ...]
    launch: Launch
    place: Place
    line: int
    end: int
    environment: Mapping[str, Word]
    task: Command | None = None

    @property
    def name(self) -> str:
        """The first word, or an empty string if it is unknown."""
        return self.words[0].literal or ""

    @property
    def outer(self) -> Command:
        """The command in the script itself that starts this command."""
        return self.task or self

    def starts(self, *kinds: str) -> bool:
        """Return whether srun certainly starts a program of one of these kinds."""
        return self.launch.via == "srun" and self.launch.kind in kinds and not self.launch.opaque

    def exported(self, name: str) -> Word | None:
        """Return the value of a variable in the environment of the command, or None if it is unknown."""
        known = all(one.name != "export" or one.value == "ALL" for one in self.launch.srun)
        return self.environment.get(name) if known else None


class Use(NamedTuple):
    """An expansion of a variable, and the program that gets its value unquoted."""

    name: str
    line: int
    may_be_unset: bool
    program: str
    subscript: str


@dataclass
class Walk:
    """The commands of a script and what its text contains.

    ``broken`` is True if a part has no known structure. ``strings`` are the quoted strings of variables:
    (name, line, text). ``comments`` are the lines of comments at the start of a line.
    """

    commands: list[Command] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    strings: list[tuple[str, int, str]] = field(default_factory=list)
    arrays: set[str] = field(default_factory=set)
    scalars: set[str] = field(default_factory=set)
    comments: list[int] = field(default_factory=list)
    broken: bool = False


def walk(text: str) -> Walk:
    """Follow the commands of a script."""
    found = Walk()
    _Walker(found, Expander(text), {}).follow()
    return found


class _Walker:
    """Follow the script, or the text of the shell of ``task``, which starts with ``environment``."""

    def __init__(
        self, found: Walk, expander: Expander, environment: dict[str, Word], task: Command | None = None
    ) -> None:
        self.found, self.expander, self.task = found, expander, task
        self.scope, self.exported = dict(environment), set(environment)
        self.changed: set[str] = set()
        self.all_changed = False

    def follow(self) -> None:
        root = parse(self.expander.text)
        nodes = _nodes(root)
        broken = is_broken(root) or not nodes
        if broken and self.task is not None:
            return
        self.found.broken |= broken
        for node, place in nodes:
            self._survey(node, place)
        self.scope = {name: word for name, word in self.scope.items() if name not in self.changed}
        for node, place in nodes:
            if node.type == "variable_assignment" and not place and _parent(node) != "command":
                self._assign(node)
            elif node.type in ("command", "declaration_command"):
                self._command(node, place)

    def _survey(self, node: Node, place: Place) -> None:
        """Collect what the text says about variables, wherever it says it."""
        if node.type == "variable_assignment":
            name, right = text_of(node.children[0]).partition("[")[0], node.child_by_field_name("value")
            changes = place or any(child.type == "+=" for child in node.children)
            self.changed |= {name} if changes and _parent(node) != "command" else set()
            array = node.children[0].type == "subscript" or (right and right.type == "array")
            (self.found.arrays if array else self.found.scalars).add(name)
            if right and right.type in ("string", "raw_string"):
                self.found.strings.append((name, self.expander.line(right), self.expander.source(right)))
        elif node.type in ("command", "declaration_command", "unset_command"):
            self._survey_builtin([text_of(one) for one in node.children], place)
        elif node.type in ("simple_expansion", "expansion"):
            self._use(node)
        elif _PLACES.get(node.type) == "loop":
            self.changed |= {text_of(one) for one in node.children if one.type == "variable_name"}
        elif node.type == "compound_statement" and text_of(node).startswith("(("):
            self.changed |= {text_of(one) for one, _ in _nodes(node) if not one.children}
        elif node.type == "comment" and not node.start_point.column and self.task is None:
            self.found.comments.append(self.expander.line(node))

    def _survey_builtin(self, texts: Sequence[str], place: Place) -> None:
        name, named = texts[0], {text.partition("=")[0] for text in texts[1:]}
        self.changed |= named if name in _SETS else set()
        declares = name in _DECLARES
        self.all_changed |= declares and not named.isdisjoint({"-n", "+x"})
        self.all_changed |= "function" in place and not _SOURCES.isdisjoint(texts)
        if name == "export" or (declares and "-x" in named):
            self.exported |= named

    def _use(self, node: Node) -> None:
        children = [text_of(child) for child in node.children if text_of(child) not in ("$", "${", "}")]
        user = node.parent
        while user is not None and user.type in ("string", "concatenation", "command_name"):
            user = user.parent
        kind = user.type if user else ""
        unset = kind in ("test_command", "unary_expression", "binary_expression") or len(children) > 1
        after = self.expander.text[node.end_byte : node.end_byte + 100]
        index = after[: after.find("]") + 1] if node.type == "simple_expansion" and after[:1] == "[" else ""
        split = kind == "command" and _parent(node) != "string"
        program = text_of(user)[:200].split()[0] if user and split else ""
        name = (children or [""])[0].partition("[")[0]
        self.found.uses.append(Use(name, self.expander.line(node), unset, program, index))

    def _value(self, node: Node, scope: Mapping[str, Word]) -> Word:
        right = node.child_by_field_name("value")
        return self.expander.value(right, scope) if right else Word(("",), self.expander.line(node))

    def _assign(self, node: Node) -> None:
        name, word = text_of(node.children[0]), self._value(node, self.scope)
        self.scope.pop(name, None)
        known = len(word.shown) < _MAX_LENGTH and not self.all_changed
        if known and name not in self.changed | self.found.arrays:
            self.scope[name] = word

    def _command(self, node: Node, place: Place) -> None:
        scope = {} if "function" in place else self.scope
        environment = {name: word for name, word in scope.items() if name in self.exported}
        words: list[Word] = []
        for child in node.children:
            name = text_of(child.children[0]) if child.type == "variable_assignment" else ""
            if node.type == "declaration_command" or (name and not name.isidentifier()):
                words.append(self.expander.word([self.expander.source(child)], child))
            elif name:
                environment[name] = self._value(child, scope)
            elif child.type == "command_name":
                words += self.expander.words(child.children[0], scope)
            elif not child.type.endswith("_redirect") and child.type not in ("comment", "ERROR"):
                words += self.expander.words(child, scope)
        if words:
            launch, end = read_command(words), self.expander.first_line + node.end_point.row
            if self.task is not None and not launch.via:
                launch.via, launch.srun = self.task.launch.via, self.task.launch.srun
            line = self.expander.line(node)
            self._record(Command(tuple(words), launch, place, line, end, environment, self.task))

    def _record(self, command: Command) -> None:
        """Record a command, and follow the text that it passes to a shell."""
        self.found.commands.append(command)
        launch, text = command.launch, command.launch.program
        if {command.name, text.literal if text else ""} & _SOURCES:
            self.scope.clear()
        if launch.kind == "inner" and self.task is None and text is not None:
            late = "".join(part for part in text.parts if isinstance(part, str))
            early = frozenset(one.source for one in text.unknowns if one.source not in late)
            expander = Expander(text.shown, text.line, launch.via == "srun", early)
            _Walker(self.found, expander, dict(command.environment), command).follow()


def _parent(node: Node) -> str:
    return node.parent.type if node.parent else ""


def _nodes(root: Node) -> list[tuple[Node, Place]]:
    """Return the descendants of a node with their places, in order, or none if it is too deep."""
    found: list[tuple[Node, Place]] = []
    waiting = [(root, Place(), 0)]
    while waiting:
        node, place, depth = waiting.pop()
        found.append((node, place))
        if depth > _MAX_DEPTH:
            return []
        inside = []
        for child, following in zip_longest(node.children, node.children[1:]):
            flags = {_PLACES.get(node.type, ""), "background" if following and following.type == "&" else ""}
            if node.type == "list" and child.start_byte > node.start_byte:  # a && b: b runs if a succeeds
                tested = node.children[0].type in ("test_command", "list") or node.children[1].type == "||"
                flags |= {"subshell", "conditional" if tested else ""}
            inside.append((child, place | flags - {""}, depth + 1))
        waiting += reversed(inside)
    return found[1:]
