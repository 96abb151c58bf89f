"""Find the commands of a script with their words.

A variable has a value only below straight assignments: none of its assignments is in a branch, a loop, a
function or a subshell. A sourced file possibly changes every variable. Nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from tree_sitter import Node

from .launch import Launch, read_command
from .options import names
from .syntax import is_broken, parse, text_of
from .words import Expander, Word

#: Builtins that set the variables that they name, and that declare variables.
_SETS = names("read mapfile readarray getopts printf let unset")
_DECLARES = names("export declare typeset local readonly")
_BRANCHES = names("if_statement elif_clause else_clause case_item")
_LOOPS = names("for_statement c_style_for_statement while_statement")
#: Operators of expansions that allow an unset variable: bash(1), Parameter Expansion.
_ALLOW_UNSET = frozenset({":-", "-", ":=", "=", ":+", "+", ":?", "?"})
#: Longer values are unknown, and deeper statements are not read.
_MAX_LENGTH, _MAX_PARTS, _MAX_DEPTH = 20_000, 200, 200


@dataclass(frozen=True, slots=True)
class Place:
    """The context of a command.

    ``subshell`` is True in a subshell and after ``&&`` and ``||``. ``task`` is the command that starts the
    shell of an inner command.
    """

    conditional: bool = False
    loop: bool = False
    function: str = ""
    subshell: bool = False
    substitution: bool = False
    background: bool = False
    depth: int = 0
    task: Command | None = None

    @property
    def certain(self) -> bool:
        """True if the script certainly runs the commands here once."""
        return not (self.conditional or self.loop or self.function or self.substitution)

    @property
    def straight(self) -> bool:
        """True if an assignment here certainly has an effect below it."""
        return self.certain and not (self.subshell or self.background)


@dataclass(eq=False)
class Command:
    """One simple command. ``end`` is its last line, ``environment`` what certainly is in its environment."""

    words: tuple[Word, ...]
    place: Place
    line: int
    end: int
    environment: dict[str, Word] = field(default_factory=dict)

    @cached_property
    def launch(self) -> Launch:
        """The parts of the command; srun starts a command in the shell of a task."""
        launch = read_command(self.words)
        if self.place.task is not None and not launch.via:
            launch.via, launch.srun = self.place.task.launch.via, self.place.task.launch.srun
        return launch

    @property
    def name(self) -> str:
        """The first word, or an empty string if it is unknown."""
        return self.words[0].literal or ""

    @property
    def outer(self) -> Command:
        """The command in the script itself that starts this command."""
        return self.place.task or self

    def starts(self, *kinds: str) -> bool:
        """Return whether srun certainly starts a program of one of these kinds."""
        return self.launch.via == "srun" and self.launch.kind in kinds and not self.launch.opaque

    @property
    def ends_script(self) -> bool:
        """True if the command is an ``exit`` of the script's own shell that certainly runs."""
        return self.name == "exit" and self.place.task is None and self.place.straight

    def exported(self, name: str) -> Word | None:
        """Return the value of a variable in the environment of the command, or None if it is unknown."""
        chosen = self.launch.srun_option("export")
        known = chosen is None or chosen.value == "ALL"
        return self.launch.environment.get(name, self.environment.get(name)) if known else None


class Use(NamedTuple):
    """An expansion of a variable.

    ``guarded`` is True if the variable may be unset. ``command`` is the start of the command that gets the
    value, ``quoted`` True if bash does not split it. ``subscript`` follows ``$NAME``, such as ``[1]``.
    """

    name: str
    line: int
    guarded: bool
    command: tuple[str, ...]
    quoted: bool
    subscript: str


@dataclass
class Walk:
    """The commands of a script and what its text contains, in order.

    ``broken`` is True if a part has no known structure. ``inner`` are texts for inner shells that tree-sitter
    does not understand, ``strings`` the quoted strings that variables get: (name, line, text). ``comments``
    are the lines of comments at the start of a line.
    """

    commands: list[Command] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    inner: list[tuple[int, str]] = field(default_factory=list)
    strings: list[tuple[str, int, str]] = field(default_factory=list)
    arrays: set[str] = field(default_factory=set)
    scalars: set[str] = field(default_factory=set)
    comments: list[int] = field(default_factory=list)
    broken: bool = False


def walk(text: str) -> Walk:
    """Follow the commands of a script."""
    found = Walk()
    _Walker(found, Expander(text), {}).follow(Place())
    return found


class _Walker:
    """Follow one text: the script, or the text of an inner shell, which starts with ``environment``."""

    def __init__(self, found: Walk, expander: Expander, environment: dict[str, Word]) -> None:
        self.found = found
        self.expander = expander
        self.scope = dict(environment)
        self.exported = set(environment)
        self.changed: set[str] = set()
        self.sourcing = {"source", ".", "eval"}

    def follow(self, place: Place) -> None:
        root = parse(self.expander.text)
        if is_broken(root):
            self.found.broken = self.found.broken or place.task is None
            inner = place.task is not None and not self.expander.unknowns
            self.found.inner += [(self.expander.first_line, self.expander.text)] if inner else []
        nodes = list(_nodes(root, place))
        self.found.broken = self.found.broken or any(where.depth > _MAX_DEPTH for _, where in nodes)
        for node, where in nodes:
            self._survey(node, where)
        self.scope = {name: word for name, word in self.scope.items() if name not in self.changed}
        for node, where in nodes:
            if node.type == "variable_assignment" and where.straight and _parent(node) != "command":
                self._assign(node)
            elif node.type in ("command", "declaration_command"):
                self._command(node, where)

    def _survey(self, node: Node, place: Place) -> None:
        """Collect what the text says about variables, wherever it says it."""
        if node.type == "variable_assignment":
            name, right = text_of(node.children[0]).partition("[")[0], node.child_by_field_name("value")
            if not place.straight and _parent(node) != "command":
                self.changed.add(name)
            array = node.children[0].type == "subscript" or (right and right.type == "array")
            (self.found.arrays if array else self.found.scalars).add(name)
            if right and right.type in ("string", "raw_string"):
                self.found.strings.append((name, self.expander.line(right), self.expander.source(right)))
        elif node.type in ("command", "declaration_command", "unset_command"):
            texts = [text_of(one) for one in node.children]
            self._survey_builtin(texts[0], {text.partition("=")[0] for text in texts[1:]}, texts, place)
        elif node.type in ("simple_expansion", "expansion"):
            self._use(node)
        elif node.type in _LOOPS:
            self.changed |= {text_of(one) for one in node.children if one.type == "variable_name"}
        elif node.type == "compound_statement" and text_of(node).startswith("(("):
            self.changed |= {text_of(one) for one, _ in _nodes(node, place) if not one.children}
        elif node.type == "comment" and not node.start_point.column and place.task is None:
            self.found.comments.append(self.expander.line(node))

    def _survey_builtin(self, name: str, named: set[str], texts: Sequence[str], place: Place) -> None:
        if name in self.sourcing and place.function:
            self.sourcing.add(place.function)  # calling the function possibly changes every variable
        if name in _SETS:
            self.changed |= named
        if name in _DECLARES and {"-n", "+x"} & named:
            self.changed |= named | {text.rpartition("=")[2] for text in texts}
        if name == "export" or (name in _DECLARES and "-x" in named):
            self.exported |= named
        if name == "set" and {"-a", "allexport"} & named:
            self.exported.add("*")
        if name in ("mapfile", "readarray") or (name in _DECLARES | _SETS and {"-a", "-A"} & named):
            self.found.arrays |= {one for one in named if one.isidentifier()}

    def _use(self, node: Node) -> None:
        children = [text_of(child) for child in node.children if text_of(child) not in ("$", "${")]
        user = node.parent
        while user is not None and user.type in ("string", "concatenation", "command_name"):
            user = user.parent
        tested = user is not None and user.type in ("test_command", "unary_expression", "binary_expression")
        guarded = tested or not _ALLOW_UNSET.isdisjoint(children[1:2])
        command = text_of(user)[:200].split() if user is not None and user.type == "command" else ()
        after = self.expander.text[node.end_byte : node.end_byte + 100]
        index = after[: after.find("]") + 1] if node.type == "simple_expansion" and after[:1] == "[" else ""
        name, quoted = (children or [""])[0].partition("[")[0], _parent(node) == "string"
        self.found.uses.append(Use(name, self.expander.line(node), guarded, tuple(command), quoted, index))

    def _assign(self, node: Node) -> None:
        name, right = text_of(node.children[0]), node.child_by_field_name("value")
        word = self.expander.value(right, self.scope) if right else Word(("",), self.expander.line(node))
        if any(child.type == "+=" for child in node.children):
            before = self.scope.get(name)
            word = replace(word, parts=(*before.parts, *word.parts) if before else ())
        known = 0 < len(word.parts) < _MAX_PARTS and len(word.shown) < _MAX_LENGTH
        self.scope.pop(name, None)
        if known and name not in self.changed | self.found.arrays:
            self.scope[name] = word

    def _command(self, node: Node, place: Place) -> None:
        scope = {} if place.function else self.scope
        exported = scope.keys() if "*" in self.exported else self.exported
        environment = {name: word for name, word in scope.items() if name in exported}
        words: list[Word] = []
        for child in node.children:
            if node.type == "declaration_command":
                words.append(self.expander.word([self.expander.source(child)], child))
            elif child.type == "variable_assignment" and text_of(child.children[0]).isidentifier():
                right = child.child_by_field_name("value")
                value = self.expander.value(right, scope) if right else Word(("",), 0)
                environment[text_of(child.children[0])] = value
            elif child.type == "variable_assignment":  # an option such as --name=value
                words.append(self.expander.word([self.expander.source(child)], child))
            elif child.type == "command_name":
                words += [word for part in child.children for word in self.expander.words(part, scope)]
            elif not child.type.endswith("_redirect") and child.type not in ("comment", "ERROR"):
                words += self.expander.words(child, scope)
        if not words:
            return
        line, end = self.expander.line(node), self.expander.first_line + node.end_point.row
        command = Command(tuple(words), place, line, end, environment)
        self.found.commands.append(command)
        launch = command.launch
        if {command.name, launch.program.literal if launch.program else ""} & self.sourcing:
            self.scope.clear()
        if launch.kind == "inner" and place.task is None and launch.program is not None:
            text, in_task = launch.program, launch.via == "srun"
            expander = Expander(text.as_text(), text.line, text.unknowns, in_task)
            _Walker(self.found, expander, {**environment, **launch.environment}).follow(Place(task=command))


def _parent(node: Node) -> str:
    return node.parent.type if node.parent else ""


def _nodes(root: Node, place: Place) -> Iterator[tuple[Node, Place]]:
    """Yield the descendants of a node with their contexts, in the order of the text."""
    waiting = [(root, place)]
    while waiting:
        parent, place = waiting.pop()
        if parent is not root:
            yield parent, place
        inside = []
        for child, following in zip_longest(parent.children, parent.children[1:]):
            background = following is not None and following.type == "&"
            inner = _inside(parent, child, place)
            inside.append((child, replace(inner, background=True) if background else inner))
        waiting += reversed(inside) if place.depth <= _MAX_DEPTH else []


def _inside(parent: Node, child: Node, place: Place) -> Place:
    """Return the context of a child of a node."""
    place, kind = replace(place, depth=place.depth + 1), parent.type
    if kind in _BRANCHES:
        return replace(place, conditional=True)
    if kind == "list" and child.start_byte > parent.start_byte:  # a && b: b always runs if a succeeds
        tested = parent.children[0].type in ("test_command", "list")
        tested = tested or any(one.type == "||" for one in parent.children)
        return replace(place, conditional=place.conditional or tested, subshell=True)
    if kind in _LOOPS:
        return replace(place, loop=True)
    if kind == "function_definition":
        return Place(function=text_of(parent.child_by_field_name("name") or parent), task=place.task)
    if kind in ("pipeline", "subshell"):
        return replace(place, subshell=True)
    if kind in ("command_substitution", "process_substitution"):
        return replace(place, substitution=True, background=False)
    return place
