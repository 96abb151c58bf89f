"""Follow a script in execution order and collect what it sets, uses and starts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from bench.lint.expansion import Assigned, Value
from bench.lint.launch import SHELLS, Launch, basename, read_command
from bench.lint.parser import parse_shell
from bench.lint.shell_state import DECLARATIONS, Place, ShellState, Step, Walk
from bench.lint.syntax import (
    AndOr,
    Assign,
    Background,
    Case,
    Function,
    Group,
    If,
    Loop,
    Node,
    Pipeline,
    Redirect,
    ShellError,
    Simple,
    Test,
    TooDeepError,
)

#: Limits for following calls of functions and inner scripts.
_MAX_CALLS = 200
_MAX_NESTING = 6
_MAX_STEPS = 10_000
#: Output of these tools is passed to ``eval`` to set up the shell, not to start a program.
_SETS_UP_SHELL = re.compile(
    r"conda|mamba|modulecmd|module |ssh-agent|hook|pyenv|direnv|spack|lmod|shellenv|register-python"
)


def walk(nodes: Sequence[Node]) -> Walk:
    """Follow the statements of a script and record what they set, use and start."""
    walker = Walker()
    walker.statements(nodes, Place())
    return walker.state.walk


class Walker:
    """Follow the statements of a script, including functions, inner shells and here-documents."""

    def __init__(self) -> None:
        self.state = ShellState(self._run_substitution)
        self.functions: dict[str, Function] = {}
        self.files: dict[str, Value] = {}
        self._numbers = itertools.count(1)
        self._calls = 0

    def statements(self, nodes: Sequence[Node], place: Place) -> None:
        """Follow the statements ``nodes``, which are located at ``place``."""
        before = self.state.place
        for node in nodes:
            if len(self.state.walk.steps) > _MAX_STEPS:
                break
            self.state.enter(place)
            self._statement(node, place)
        self.state.enter(before)

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
        inside = replace(place, loops=(*place.loops, next(self._numbers)))
        if node.words is not None:
            self.state.expander.arguments(node.words)
        if node.variable:
            self.state.assign(Assigned(node.variable, node.line, looped=True, branches=place.branches))
        self._redirects(node.redirects)
        self.statements(node.condition, replace(inside, condition=True))
        self.statements(node.body, inside)

    def _case(self, node: Case, place: Place) -> None:
        self.state.expander.value(node.subject)
        number = next(self._numbers)
        for index, (patterns, body) in enumerate(node.arms):
            for pattern in patterns:
                self.state.expander.value(pattern)
            self.statements(body, replace(place, branches=(*place.branches, (number, index))))
        self._redirects(node.redirects)

    def _test(self, node: Test) -> None:
        self.state.command = "[["
        text = " ".join([self.state.expander.value(word).text for word in node.words])
        self.state.record_test(text)
        if node.arithmetic:
            self.state.arithmetic(text, node.line)

    def _simple(self, node: Simple, place: Place) -> None:
        literal = node.words[0].literal if node.words else ""
        self.state.command = literal or ""
        body = self._redirects(node.redirects)
        prefix = self._assignments(node.assigns, kept=not node.words)
        if not node.words:
            return
        if literal in DECLARATIONS:
            self.state.declare(literal, node.words[1:])
            if any(word.bare == "=" for word in node.words):
                self.state.walk.steps.append(Step(Launch(node.line), place, node.line, node.end, {}, node))
            return
        arguments = self.state.expander.arguments(node.words)
        if not arguments:
            return
        name = arguments[0].text
        self._keep_file(node, arguments, body)
        if name == "eval":
            self._eval(arguments[1:])
        elif self.state.run_builtin(name, arguments, body):
            return
        elif name in self.functions and place.nesting < _MAX_NESTING and self._may_call():
            inside = replace(place, function=name, nesting=place.nesting + 1)
            self.statements((self.functions[name].body,), inside)
        else:
            self._start(node, arguments, prefix, body)

    def _may_call(self) -> bool:
        self._calls += 1
        return self._calls <= _MAX_CALLS

    def _start(
        self, node: Simple, arguments: list[Value], prefix: dict[str, Value], body: Value | None
    ) -> None:
        """Record the start of a program, or follow the commands that an inner shell executes."""
        walk, place = self.state.walk, self.state.place
        launch = read_command(arguments, walk.unknowns)
        if arguments[0].text.startswith("--") and walk.steps:
            walk.steps[-1].launch.opaque = True  # this line probably continues that step, see stray-command
        outer = place.task
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
        walk.steps.append(Step(launch, place, node.line, node.end, prefix, node))

    def _inner(self, text: Value, node: Simple, launch: Launch, prefix: dict[str, Value]) -> bool:
        """Follow the commands in a text that is passed to a shell; return False if this is impossible."""
        place = self.state.place
        if place.nesting >= _MAX_NESTING or not self._may_call():
            return False
        try:
            nodes = parse_shell(text.text, lines=text.lines)
        except TooDeepError:
            return False
        except ShellError as error:
            self.state.walk.broken.append((text, error))
            return False
        if not nodes:
            return False
        given = {**prefix, **_exported_by_srun(launch)}
        outside = self.state.use(self.state.environment_of_tasks(given))
        inside = replace(
            place,
            task=launch if launch.via else place.task,
            origin=place.origin or node,
            nesting=place.nesting + 1,
        )
        self.statements(nodes, inside)
        self.state.use(outside)
        return True

    def _eval(self, arguments: list[Value]) -> None:
        walk = self.state.walk
        text = " ".join(argument.text for argument in arguments)
        if _SETS_UP_SHELL.search(walk.unknowns.shown(text)[:2000]):
            return
        if not arguments or walk.unknowns.of(arguments[0].text):
            walk.opaque = True
            return
        try:
            self.statements(parse_shell(text, lines=arguments[0].lines), self.state.place)
        except ShellError:
            walk.opaque = True

    def _run_substitution(self, body: tuple[Node, ...]) -> None:
        place, command = self.state.place, self.state.command
        if place.nesting < _MAX_NESTING:
            self.statements(body, replace(place, substitution=True, nesting=place.nesting + 1))
            self.state.command = command

    def _assignments(self, assigns: Sequence[Assign], *, kept: bool) -> dict[str, Value]:
        """Execute assignments if ``kept``; otherwise return them, because they apply to one command only."""
        prefix: dict[str, Value] = {}
        for assign in assigns:
            assigned = self.state.evaluate(assign)
            if kept:
                self.state.assign(assigned)
            elif assigned.value is not None:
                prefix[assign.name] = assigned.value
        return prefix

    def _redirects(self, redirects: Sequence[Redirect]) -> Value | None:
        """Expand redirections; return the text of a here-document among them."""
        body = None
        for redirect in redirects:
            if redirect.body is None:
                self.state.expander.value(redirect.target)
            else:
                body = self.state.expander.value(redirect.body)
        return body

    def _keep_file(self, node: Simple, arguments: list[Value], body: Value | None) -> None:
        """Store a here-document that is written to a file, because the file may be executed later."""
        if body is None or basename(arguments[0].text) not in ("cat", "tee"):
            return
        written = [
            self.state.expander.value(redirect.target).text
            for redirect in node.redirects
            if redirect.operator.lstrip("012") in (">", ">>", ">|")
        ]
        if basename(arguments[0].text) == "tee":
            written += [argument.text for argument in arguments[1:]]
        for path in written[:3]:
            self.files[basename(path)] = body


def _exported_by_srun(launch: Launch) -> dict[str, Value]:
    """Return the variables in ``srun --export=ALL,NAME=value``."""
    given = {}
    for option in launch.srun:
        if option.name == "export" and option.value:
            pairs = (item.partition("=") for item in option.value.split(",") if "=" in item)
            given.update({name: Value(value, (option.line,)) for name, _, value in pairs})
    return given


def _reads_commands(arguments: list[Value]) -> bool:
    """Return whether the command is a shell that reads its commands from standard input."""
    last = [argument.text for argument in arguments[-2:]]
    return basename(last[-1]) in SHELLS or (
        len(last) > 1 and last[-1] == "-s" and basename(last[0]) in SHELLS
    )
