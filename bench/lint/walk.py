"""A walk through a script in the order in which it would run, noting what it sets, uses and starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.lint.builtins import Builtins
from bench.lint.environment import Assigned, Branches, Environment, Unknowns, Value
from bench.lint.expansion import Expander
from bench.lint.launch import CommandReader, Launch, basename
from bench.lint.nodes import (
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
    Test,
    TooDeepError,
)
from bench.lint.programs import SHELLS
from bench.lint.shell import parse_shell

#: Calls of functions and inner scripts beyond these are not followed.
_MAX_CALLS = 200
_MAX_NESTING = 6
_TESTS = frozenset({"[", "[[", "test"})
#: No script that people write has more of anything; the limit keeps rules linear.
_MAX_NOTES = 2_000
_MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command stands: branches, loops, pipelines, and the task that runs it.

    ``task`` is the srun that starts the shell that runs the command; None is the batch shell.
    ``origin`` is the command of the script that starts that shell, if it is not the script itself.
    """

    branches: Branches = ()
    loops: tuple[int, ...] = ()
    background: bool = False
    substitution: bool = False
    condition: bool = False
    piped: bool = False
    function: str = ""
    task: Launch | None = None
    origin: Simple | None = None
    nesting: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """A variable that is expanded; ``guarded`` where it may be unset, ``known`` where it was set."""

    name: str
    line: int
    place: Place
    guarded: bool
    known: bool
    command: str


@dataclass(slots=True)
class Step:
    """One simple command that would run, and what it starts."""

    launch: Launch
    place: Place
    line: int
    end: int
    prefix: dict[str, Value]
    node: Simple

    @property
    def outer(self) -> Simple:
        """The command of the script itself that leads to this one."""
        return self.place.origin or self.node


@dataclass(slots=True)
class Walk:
    """All that a script would do, in order.

    ``broken`` are the texts given to a shell that it cannot parse.
    """

    unknowns: Unknowns = field(default_factory=Unknowns)
    steps: list[Step] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    loops: dict[int, Loop] = field(default_factory=dict)
    sourced: list[str] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    broken: list[tuple[Value, ShellError]] = field(default_factory=list)
    tests: list[tuple[str, Place]] = field(default_factory=list)
    opaque: bool = False
    waits: bool = False
    dies_on_unset: bool = False


def walk(nodes: Sequence[Node]) -> Walk:
    """Return what the statements of a script would do."""
    walker = Walker()
    walker.statements(nodes, Place())
    return walker.seen


class Walker(Builtins):
    """Follow the statements; see :class:`Walk` for what is noted."""

    def __init__(self) -> None:
        self.seen = Walk()
        self.environment = Environment()
        self.expander = Expander(self.environment, self.seen.unknowns, self._note_use, self._note_run)
        self.functions: dict[str, Function] = {}
        self.files: dict[str, Value] = {}
        self.place = Place()
        self._command = ""
        self._numbers = itertools.count(1)
        self._calls = 0

    # -- statements ---------------------------------------------------------------------------

    def statements(self, nodes: Sequence[Node], place: Place) -> None:
        """Walk through ``nodes`` at ``place``."""
        before = self.place
        for node in nodes:
            if len(self.seen.steps) > _MAX_STEPS:
                break
            self._at(place)
            self._statement(node, place)
        self._at(before)

    def _at(self, place: Place) -> None:
        self.place = place
        self.expander.branches = place.branches
        self.expander.in_task = place.task is not None

    def _statement(self, node: Node, place: Place) -> None:
        match node:
            case Simple():
                self._simple(node, place)
            case Background():
                self.statements((node.command,), replace(place, background=True))
            case Pipeline():
                for command in node.commands:
                    self.statements((command,), replace(place, piped=True))
            case AndOr():
                self._and_or(node, place)
            case If():
                self._if(node, place)
            case Loop():
                self._loop(node, place)
            case Case():
                self._case(node, place)
            case Group():
                self.statements(node.body, place)
                self._redirects(node.redirects)
            case Function():
                self.functions[node.name] = node
            case Test():
                self._test(node)

    def _and_or(self, node: AndOr, place: Place) -> None:
        self.statements(node.items[:1], place)
        for item in node.items[1:]:
            branch = (next(self._numbers), 0)
            self.statements((item,), replace(place, branches=(*place.branches, branch)))

    def _if(self, node: If, place: Place) -> None:
        number = next(self._numbers)
        for index, (condition, body) in enumerate(node.branches):
            self.statements(condition, replace(place, condition=True))
            self.statements(body, replace(place, branches=(*place.branches, (number, index))))
        self._redirects(node.redirects)

    def _loop(self, node: Loop, place: Place) -> None:
        number = next(self._numbers)
        self.seen.loops[number] = node
        inside = replace(place, loops=(*place.loops, number))
        if node.words is not None:
            self.expander.arguments(node.words)
        if node.variable:
            self.assign(Assigned(node.variable, node.line, looped=True, branches=place.branches))
        self._redirects(node.redirects)
        self.statements(node.condition, replace(inside, condition=True))
        self.statements(node.body, inside)

    def _case(self, node: Case, place: Place) -> None:
        self.expander.value(node.subject)
        number = next(self._numbers)
        for index, (patterns, body) in enumerate(node.arms):
            for pattern in patterns:
                self.expander.value(pattern)
            self.statements(body, replace(place, branches=(*place.branches, (number, index))))
        self._redirects(node.redirects)

    def _test(self, node: Test) -> None:
        self._command = "[["
        texts = [self.expander.value(word).text for word in node.words]
        self.note_test(" ".join(texts))
        if node.arithmetic:
            self.arithmetic(" ".join(texts), node.line)

    # -- simple commands ----------------------------------------------------------------------

    def _simple(self, node: Simple, place: Place) -> None:
        literal = node.words[0].literal if node.words else ""
        self._command = literal or ""
        body = self._redirects(node.redirects)
        prefix = self._assignments(node.assigns, kept=not node.words)
        if not node.words:
            return
        if literal in self.declarations:
            self.declare(literal, node.words[1:])
            if any(word.bare == "=" for word in node.words):
                self.seen.steps.append(Step(Launch(node.line), place, node.line, node.end, {}, node))
            return
        arguments = self.expander.arguments(node.words)
        if not arguments:
            return
        name = arguments[0].text
        self._keep_file(node, arguments, body)
        if self.builtin(name, arguments, body):
            return
        if name in self.functions and place.nesting < _MAX_NESTING and self._may_call():
            inside = replace(place, function=name, nesting=place.nesting + 1)
            self.statements((self.functions[name].body,), inside)
            return
        self._start(node, arguments, prefix, body)

    def _may_call(self) -> bool:
        self._calls += 1
        return self._calls <= _MAX_CALLS

    def _start(
        self, node: Simple, arguments: list[Value], prefix: dict[str, Value], body: Value | None
    ) -> None:
        launch = CommandReader(arguments, self.seen.unknowns).read()
        if arguments[0].text.startswith("--") and self.seen.steps:
            self.seen.steps[-1].launch.opaque = True  # its options were broken off, see stray-command
        outer = self.place.task
        if outer is not None and not launch.via:
            launch.via, launch.srun, launch.srun_line = outer.via, outer.srun, outer.srun_line
            launch.opaque = outer.opaque
            launch.wrappers = [*outer.wrappers, *launch.wrappers]
        inner = launch.inner
        if inner is None and launch.kind == "script" and launch.program:
            inner = self.files.get(basename(launch.program.text))
        if inner is None and body is not None and _reads_commands(arguments):
            inner = body
        if inner is not None and self._inner(inner, node, launch, prefix):
            return
        if launch.kind == "inner":
            launch.kind = "unknown"
        self.seen.steps.append(Step(launch, self.place, node.line, node.end, prefix, node))

    def _inner(self, text: Value, node: Simple, launch: Launch, prefix: dict[str, Value]) -> bool:
        """Walk through the text that a shell is given; False where it cannot be parsed."""
        place = self.place
        if place.nesting >= _MAX_NESTING or not self._may_call():
            return False
        try:
            nodes = parse_shell(text.text, lines=text.lines)
        except TooDeepError:
            return False
        except ShellError as error:
            self.seen.broken.append((text, error))
            return False
        if not nodes:
            return False
        task = launch if launch.via else place.task
        given = {**prefix, **_given_by_srun(launch)}
        outside, self.environment = self.environment, self._seen_by_tasks(given)
        self.expander.environment = self.environment
        origin = place.origin or node
        self.statements(nodes, replace(place, task=task, origin=origin, nesting=place.nesting + 1))
        self.environment = self.expander.environment = outside
        return True

    def _seen_by_tasks(self, prefix: dict[str, Value]) -> Environment:
        """Return what a child process sees: what is exported, and what stands before its command."""
        inside = Environment()
        for name, history in self.environment.variables.items():
            if self.environment.exported(name):
                inside.variables[name] = list(history)
        for name, value in prefix.items():
            inside.variables[name] = [Assigned(name, value.line, value, exported=True)]
        return inside

    def _assignments(self, assigns: Sequence[Assign], *, kept: bool) -> dict[str, Value]:
        """Carry out assignments; those before a command (not ``kept``) are returned only."""
        prefix: dict[str, Value] = {}
        for assign in assigns:
            assigned = self.evaluate(assign)
            if kept:
                self.assign(assigned)
            elif assigned.value is not None:
                prefix[assign.name] = assigned.value
        return prefix

    def _redirects(self, redirects: Sequence[Redirect]) -> Value | None:
        """Expand redirections; return the text of a here-document among them."""
        body = None
        for redirect in redirects:
            if redirect.body is None:
                self.expander.value(redirect.target)
            else:
                body = self.expander.value(redirect.body)
        return body

    def _keep_file(self, node: Simple, arguments: list[Value], body: Value | None) -> None:
        """Remember a here-document that is written to a file, which may be run later."""
        if body is None or basename(arguments[0].text) not in ("cat", "tee"):
            return
        written = [
            self.expander.value(redirect.target).text
            for redirect in node.redirects
            if redirect.operator.lstrip("012") in (">", ">>", ">|")
        ]
        if basename(arguments[0].text) == "tee":
            written += [argument.text for argument in arguments[1:]]
        for path in written[:3]:
            self.files[basename(path)] = body

    # -- notes --------------------------------------------------------------------------------

    def assign(self, assigned: Assigned) -> None:
        """Note an assignment."""
        if self.place.task is not None:
            assigned = replace(assigned, in_task=True, exported=True)
        self.environment.assign(assigned)
        if len(self.seen.assigned) < _MAX_NOTES:
            self.seen.assigned.append(assigned)
        if assigned.exported:
            self.seen.exported.add(assigned.name)

    def note_test(self, text: str) -> None:
        """Note what a condition compares."""
        if len(self.seen.tests) < _MAX_NOTES:
            self.seen.tests.append((self.seen.unknowns.shown(text), self.place))

    def _note_use(self, part: Part, name: str, guarded: bool) -> None:
        if guarded or self._command in _TESTS:
            self.seen.expected.add(name)
        known = name in self.environment.variables
        if len(self.seen.uses) < _MAX_NOTES:
            self.seen.uses.append(Use(name, part.line, self.place, guarded, known, self._command))

    def _note_run(self, body: tuple[Node, ...]) -> None:
        if self.place.nesting < _MAX_NESTING:
            before = self._command
            inside = replace(self.place, substitution=True, nesting=self.place.nesting + 1)
            self.statements(body, inside)
            self._command = before


def _given_by_srun(launch: Launch) -> dict[str, Value]:
    """Return the variables that srun sets: ``--export=ALL,NAME=value``."""
    given = {}
    for option in launch.srun:
        if option.name == "export" and option.value:
            pairs = (item.partition("=") for item in option.value.split(",") if "=" in item)
            given.update({name: Value(value, (option.line,)) for name, _, value in pairs})
    return given


def _reads_commands(arguments: list[Value]) -> bool:
    """Return whether the last words start a shell that reads its commands from its input."""
    last = [argument.text for argument in arguments[-2:]]
    return basename(last[-1]) in SHELLS or (
        len(last) > 1 and last[-1] == "-s" and basename(last[0]) in SHELLS
    )
