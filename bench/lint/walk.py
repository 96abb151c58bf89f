"""Follow a script from top to bottom and collect its commands and assignments.

Only straight-line assignments give a variable a known value. Below a branch, a loop or a function that
assigns a variable, and below a sourced file, its value is unknown. Nothing is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from tree_sitter import Node

from .expand import Assigned, Expander, Use, as_text
from .launch import Launch, read_command
from .options import names
from .syntax import is_broken, line_of, parse, text_of, within
from .values import Unknown, Value, plain

#: The variables whose values rules read.
VARIABLES = names("MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK GLOO_SOCKET_IFNAME")
_ASSIGNS = frozenset({"variable_assignment"})
_TEXT = frozenset({"heredoc_start", "heredoc_body", "heredoc_end", "file_redirect", "file_descriptor"})
#: Builtins that declare or set the variables that they name.
DECLARES = names("export declare typeset local readonly")
_SETS_VARIABLES = names("read mapfile readarray getopts printf let")
_MAX_DEPTH = 50
_EXPANSIONS = frozenset({"simple_expansion", "expansion", "command_substitution"})


@dataclass(frozen=True, slots=True)
class Place:
    """The context of a command.

    ``conditional`` is True in branches and after ``||``. ``loop`` is the name of the innermost loop's
    variable, or ``-`` for another loop. ``task`` is the command that starts the shell of an inner command.
    """

    conditional: bool = False
    loop: str = ""
    function: str = ""
    background: bool = False
    substitution: bool = False
    subshell: bool = False
    task: Command | None = None


@dataclass(eq=False)
class Command:
    """One simple command.

    ``prefix`` are the variables before its words, ``variables`` the last assignments of VARIABLES.
    """

    words: tuple[Value, ...]
    place: Place
    line: int
    end: int
    prefix: dict[str, Value] = field(default_factory=dict)
    variables: dict[str, Assigned] = field(default_factory=dict)

    @cached_property
    def launch(self) -> Launch:
        """What the command starts; a command in a task is started by the srun of the task's shell."""
        launch = read_command(self.words)
        task = self.place.task
        if task is not None and not launch.via:
            launch.via, launch.srun = task.launch.via, task.launch.srun
        return launch

    @property
    def name(self) -> str:
        """The first word, or an empty string if it is unknown."""
        return (self.words[0].literal or "") if self.words else ""

    @property
    def texts(self) -> list[str]:
        """The words, with unknown expansions as written."""
        return [word.shown for word in self.words]

    @property
    def outer(self) -> Command:
        """The command in the script itself that starts this command."""
        return self.place.task or self

    @property
    def certain(self) -> bool:
        """True if the script certainly runs the command once."""
        place = self.outer.place
        nested = place.conditional or place.loop or place.function or place.substitution
        return not nested and not self.place.conditional

    @property
    def ends_script(self) -> bool:
        """True if the command is an ``exit`` of the script's own shell that certainly runs."""
        place = self.place
        own = not (place.task or place.subshell or place.background)
        return self.name == "exit" and own and self.certain

    def exported(self, name: str) -> Value | None:
        """Return the value of a variable in the environment of the command, or None if it is unknown."""
        chosen = self.launch.srun_option("export")
        if chosen and chosen.value != "ALL":
            return None
        given = self.prefix.get(name) or self.launch.environment.get(name)
        known = self.variables.get(name)
        return given or (known.value if known and known.exported else None)


@dataclass
class Walk:
    """The commands, assignments and uses of variables of a script, in order.

    ``broken`` is True if the tree has text of unknown structure outside arithmetic. ``inner`` contains the
    texts for inner shells that tree-sitter does not understand: (line, text). ``comments`` are the lines of
    comments that start a line.
    """

    commands: list[Command] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    arithmetic: list[Unknown] = field(default_factory=list)
    inner: list[tuple[int, str]] = field(default_factory=list)
    comments: list[int] = field(default_factory=list)
    broken: bool = False


def walk(text: str) -> Walk:
    """Follow the commands of a script."""
    root = parse(text)
    found = Walk(broken=is_broken(root))
    comments = within(root, frozenset({"comment", "ERROR"}))
    found.comments += [
        line_of(one) for one in comments if one.type == "comment" and not one.start_point.column
    ]
    try:
        _Walker(text, found, in_task=False).statements(root.children, Place())
    except RecursionError:
        found.broken = True
    return found


class _Walker:
    """Follow the statements of one text: the script, or the text of an inner shell."""

    def __init__(self, text: str, found: Walk, *, in_task: bool, unknowns: Sequence[Unknown] = ()) -> None:
        self.found = found
        self.expander = Expander(text, unknowns, self._substitution, in_task=in_task)
        self.expander.uses, self.expander.arithmetic = found.uses, found.arithmetic
        self.place = Place()
        self._functions: dict[str, set[str]] = {}
        self._sourcing: set[str] = set()
        self._sources = False
        self._depth = 0
        self._exports_all = False

    @property
    def scope(self) -> dict[str, Assigned]:
        return self.expander.scope

    def statements(self, nodes: Sequence[Node], place: Place) -> None:
        """Follow statements in order."""
        for node, following in zip_longest(nodes, nodes[1:]):
            if node.is_named and node.type != "comment":
                background = following is not None and following.type == "&"
                self._statement(node, replace(place, background=True) if background else place)

    def _statement(self, node: Node, place: Place) -> None:
        before, self.place = self.place, place
        handler = getattr(self, f"_{node.type}", None)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self.found.broken = True
        elif handler:
            handler(node, place)
        else:
            self._uses(node)
        self._depth -= 1
        self.place = before

    # One method for each kind of statement of the grammar.

    def _command(self, node: Node, place: Place) -> None:
        words: list[Value] = []
        prefix: dict[str, Value] = {}
        for child in node.children:
            if child.type == "variable_assignment":
                assigned = self.expander.assign(child, exported=True)
                if assigned.name.isidentifier():
                    prefix[assigned.name] = assigned.value or plain("", assigned.line)
                else:  # an option such as --name=value
                    words.append(self.expander.written(child))
            elif child.type == "command_name":
                words += [word for part in child.children for word in self.expander.words(part)]
            elif child.type.endswith("_redirect"):
                self._redirect(child, place)
            elif child.type not in ("comment", "ERROR"):
                words += self.expander.words(child)
        self._record(node, words, place, prefix)

    def _record(
        self, node: Node, words: list[Value], place: Place, prefix: dict[str, Value] | None = None
    ) -> None:
        """Record a command, and follow what it does to variables and what it passes to a shell."""
        if not words:
            return
        end = self.expander.first_line + node.end_point.row
        variables = {name: self.scope[name] for name in VARIABLES & self.scope.keys()}
        command = Command(tuple(words), place, self.expander.line(node), end, prefix or {}, variables)
        self.found.commands.append(command)
        self._builtin(command)
        if command.launch.kind == "inner" and place.task is None and command.launch.program is not None:
            self._inner(command, command.launch.program)

    def _builtin(self, command: Command) -> None:
        """Forget the variables that a builtin or a function of the script may set."""
        program = command.launch.program  # behind words such as `builtin`
        name, words = (program.literal or "") if program else "", command.texts[1:]
        sources = name in ("source", ".", "eval") or name in self._sourcing
        self._sources = self._sources or sources
        if sources or (name in DECLARES and {"-n", "+x"} & set(words)):
            self.scope.clear()
        elif name in _SETS_VARIABLES or (name in DECLARES and name != command.name):
            self._forget({word.partition("=")[0] for word in words})
        elif name == "set":
            self._exports_all = self._exports_all or "allexport" in words or "-a" in words
        elif name in self._functions:
            self._forget(self._functions[name])

    def _declaration_command(self, node: Node, place: Place) -> None:
        words = [self.expander.written(child) for child in node.children]
        exported = words[0].literal == "export" or any(word.literal == "-x" for word in words)
        for child in node.children[1:]:
            known = self.scope.get(text_of(child))
            if child.type == "variable_assignment":
                self._assign(child, exported=exported)
            elif child.type == "variable_name" and exported and known:
                self._keep(replace(known, exported=True))
            else:
                self._uses(child)
        self._record(node, words, place)

    def _variable_assignment(self, node: Node, place: Place) -> None:
        if text_of(node).startswith("-"):  # an option such as --name=value
            self._record(node, [self.expander.written(node)], place)
        else:
            self._assign(node, exported=False)

    def _variable_assignments(self, node: Node, place: Place) -> None:
        for child in node.named_children:
            self._assign(child, exported=False)

    def _unset_command(self, node: Node, place: Place) -> None:
        self._forget({text_of(child) for child in node.named_children})

    def _negated_command(self, node: Node, place: Place) -> None:
        self.statements(node.named_children, place)

    def _redirected_statement(self, node: Node, place: Place) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self._statement(body, place)
        for child in node.children_by_field_name("redirect"):
            self._redirect(child, place)

    def _redirect(self, node: Node, place: Place) -> None:
        """Follow the commands that the first line of a here-document contains, such as ``<<EOF | sbatch``."""
        for child in node.named_children:
            follows = node.type == "heredoc_redirect" and child.type not in _TEXT
            self._statement(child, place) if follows else self._uses(child)

    def _list(self, node: Node, place: Place) -> None:
        """Follow ``a && b`` and ``a || b``: an assignment on the right possibly does not run."""
        left, right = node.named_children[0], node.named_children[-1]
        self._statement(left, place)
        tested = left.type in ("test_command", "list") or any(child.type == "||" for child in node.children)
        self._branch([right], replace(place, conditional=place.conditional or tested))

    def _pipeline(self, node: Node, place: Place) -> None:
        for child in node.named_children:
            self._subshell_of([child], place)

    def _subshell(self, node: Node, place: Place) -> None:
        self._subshell_of(node.children, place)

    def _compound_statement(self, node: Node, place: Place) -> None:
        if node.children and node.children[0].type == "((":
            self._uses(node)
            kinds = frozenset({"variable_name", "word"})
            self._forget({text_of(child) for child in within(node, kinds)})
        else:
            self.statements(node.children, place)

    def _if_statement(self, node: Node, place: Place) -> None:
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        body = [child for child in node.children if child not in clauses]
        for nodes in (body, *(clause.children for clause in clauses)):
            self._branch(nodes, replace(place, conditional=True))

    def _case_statement(self, node: Node, place: Place) -> None:
        self.statements(node.children, replace(place, conditional=True))

    def _case_item(self, node: Node, place: Place) -> None:
        self._branch(node.children, place)

    def _function_definition(self, node: Node, place: Place) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is None or body is None:
            return
        before, self.expander.scope = self.scope, {}
        sourced, self._sources = self._sources, False
        self._statement(body, replace(place, function=text_of(name), conditional=False))
        assigned = set(self.scope)
        self._sourcing |= {text_of(name)} if self._sources else set()
        self.expander.scope, self._sources = before, sourced
        self._functions[text_of(name)] = assigned
        self._forget(assigned)

    def _loop(self, node: Node, place: Place) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        counter = next(within(node, _ASSIGNS), None) if node.type == "c_style_for_statement" else None
        variable = counter.child_by_field_name("name") if counter else variable
        name = text_of(variable) if variable else ""
        for one in node.children_by_field_name("value"):
            self.expander.words(one)
        assigned = ({name} if name else set()) | self._changed_in(node)
        self._forget(assigned)
        inside = replace(place, loop=name or "-")
        if node.type == "while_statement":
            self.statements([child for child in node.children[1:] if child != body], inside)
        if body is not None:
            self._branch(body.children, inside)
        self._forget(assigned)

    _for_statement = _c_style_for_statement = _while_statement = _loop

    def _ERROR(self, node: Node, place: Place) -> None:  # noqa: N802 (the grammar's name)
        self._forget(set(self.scope))

    # Scopes.

    def _branch(self, nodes: Sequence[Node], place: Place) -> None:
        """Follow statements that possibly do not run: what they assign is unknown below them."""
        before = dict(self.scope)
        self.statements(nodes, place)
        changed = {name for name, known in self.scope.items() if before.get(name) is not known}
        self._forget(changed)

    def _subshell_of(self, nodes: Sequence[Node], place: Place) -> None:
        before, self.expander.scope = self.scope, dict(self.scope)
        self.statements(nodes, replace(place, subshell=True))
        self.expander.scope = before

    def _substitution(self, node: Node) -> None:
        """Follow the commands of a command substitution."""
        background = replace(self.place, substitution=True, background=False)
        self._subshell_of(node.named_children, background)

    def _inner(self, command: Command, text: Value) -> None:
        """Follow the text of ``bash -c``, in which only exported variables have values."""
        unknowns: list[Unknown] = []
        written = as_text(text, unknowns)
        in_task = command.launch.via == "srun"
        inner = _Walker(written, self.found, in_task=in_task, unknowns=unknowns)
        inner.expander.first_line = text.line
        inner.expander.scope = {name: known for name, known in self.scope.items() if known.exported}
        given = {**command.prefix, **command.launch.environment}
        for name, value in given.items():
            inner.scope[name] = Assigned(name, value.line, value, exported=True)
        root = parse(written)
        if is_broken(root) and not unknowns:
            self.found.inner.append((text.line, written))
        inner.statements(root.children, Place(task=command))

    def _assign(self, node: Node, *, exported: bool) -> None:
        assigned = self.expander.assign(node, exported=exported)
        before = self.scope.get(assigned.name)
        if self._exports_all or (before and before.exported):
            assigned = replace(assigned, exported=True)
        self._keep(assigned)

    def _keep(self, assigned: Assigned) -> None:
        self.scope[assigned.name] = assigned
        self.found.assigned.append(assigned)

    def _forget(self, names: set[str]) -> None:
        """Make the values of variables unknown."""
        for name in names:
            known = self.scope.get(name)
            exported = bool(known and known.exported)
            self.scope[name] = Assigned(name, known.line if known else 0, exported=exported)

    def _changed_in(self, node: Node) -> set[str]:
        """Return the known variables that a loop may change: all that it names without a $."""
        tokens = within(node, frozenset({"variable_name", "word", "expansion", "simple_expansion"}))
        named = {text_of(one).partition("=")[0].rstrip("+-*/") for one in tokens}
        return named & self.scope.keys()

    def _uses(self, node: Node) -> None:
        """Record the uses of variables in text that tests or prints them."""
        testing, self.expander.testing = self.expander.testing, True
        for child in [node] if node.type in _EXPANSIONS else within(node, _EXPANSIONS):
            self.expander.value(child)
        self.expander.testing = testing
