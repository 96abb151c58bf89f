"""Follow a script in execution order and collect what it sets, uses and starts.

:class:`ShellState` contains the variables and the position in the script. :class:`Walker` follows the
statements and records in a :class:`Walk` everything that rules need to know about the script.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .expansion import (
    MARK,
    MAX_VALUE,
    Assigned,
    Branches,
    Environment,
    Expander,
    Unknown,
    Unknowns,
    Value,
)
from .launch import SHELLS, Launch, basename, read_command
from .parser import assignment_in, parse_shell
from .syntax import (
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
    Word,
)

#: Builtins that declare variables.
DECLARATIONS = frozenset({"export", "declare", "local", "typeset", "readonly"})
_TESTS = frozenset({"[", "[[", "test"})
_SET_IN_ARITHMETIC = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
_ONE_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)([^=,]*)")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
#: Files that activate an environment and set no variables that scripts use by name.
_ACTIVATES = re.compile(
    r"(?:^|/)(?:activate(?:\.\w+)?|conda\.sh|mamba\.sh|micromamba\.sh|\.?bashrc|\.?bash_profile|\.?profile|\.zshrc"
    r"|\.bash_aliases|\.cargo/env|setup-env\.sh|lmod\.sh|modules?\.sh|init/(?:bash|sh|profile)|bash|z00_lmod\.sh"
    r"|setvars\.sh|lmod/lmod/init/\w+|00-modulepath\.sh|zsh|profile\.d/.*)\Z"
)
#: Maximum numbers of uses, of assignments and of tests that are recorded, so that the rules stay fast.
_MAX_RECORDS = 2_000
#: Limits for following calls of functions and inner scripts.
_MAX_CALLS = 200
_MAX_NESTING = 6
_MAX_STEPS = 10_000
#: Tools whose output is passed to ``eval`` to set up the shell, not to start a program.
_SETS_UP_SHELL = re.compile(
    r"conda|mamba|modulecmd|module |ssh-agent|hook|pyenv|direnv|spack|lmod|shellenv|register-python"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The context of a command: branches, loops, pipelines and the task that executes it.

    ``task`` is the srun that starts the shell of the command; None means the batch shell.
    ``origin`` is the command of the script that starts an inner shell, such as ``bash -c``, and ``shell`` is
    the command that starts the innermost shell.
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
    shell: Launch | None = None
    nesting: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """One expansion of a variable.

    ``guarded`` is True for expansions that allow an unset variable, such as ``${name:-}``.
    ``known`` is True if the script has set the variable before.
    """

    name: str
    line: int
    place: Place
    guarded: bool
    known: bool
    command: str


@dataclass(slots=True)
class Step:
    """One simple command that the script executes, and the program that it starts."""

    launch: Launch
    place: Place
    line: int
    end: int
    prefix: dict[str, Value]
    node: Simple

    @property
    def outer(self) -> Simple:
        """The command in the script itself that starts this command, directly or through an inner shell."""
        return self.place.origin or self.node


@dataclass(slots=True)
class Walk:
    """The commands, variables and tests of a script, recorded in execution order.

    ``given`` contains the variables that single commands get: ``NAME=value command``, env, ``srun
    --export``. ``expected`` contains the names of variables that the script allows to be unset.
    ``broken`` contains pairs: a text that is passed to a shell, and the syntax error in it. ``split``
    contains each ``"$@"`` within such a text. ``opaque`` is True if variables may be set outside the
    script, such as by a sourced file. ``waits`` is True if the script calls ``wait``.
    """

    unknowns: Unknowns = field(default_factory=Unknowns)
    steps: list[Step] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    given: list[Assigned] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    broken: list[tuple[Value, ShellError]] = field(default_factory=list)
    tests: list[tuple[str, Place]] = field(default_factory=list)
    split: list[Part] = field(default_factory=list)
    opaque: bool = False
    waits: bool = False


class ShellState:
    """The simulated shell: its variables and the current place in the script.

    ``run`` is called with the commands of each command substitution. ``command`` is the name of the
    current command.
    """

    def __init__(self, run: Callable[[tuple[Node, ...]], Value | None]) -> None:
        self.walk = Walk()
        self.environment = Environment()
        self.expander = Expander(self.environment, self.walk.unknowns, self._record_use, run)
        self.expander.split = self.walk.split
        self.place = Place()
        self.command = ""

    def enter(self, place: Place) -> None:
        """Continue at another place of the script."""
        self.place = place
        self.expander.branches = place.branches
        self.expander.in_task = place.task is not None

    def use(self, environment: Environment) -> Environment:
        """Replace the current environment and return the previous environment."""
        previous = self.environment
        self.environment = self.expander.environment = environment
        return previous

    def environment_of_tasks(self, prefix: dict[str, Value]) -> Environment:
        """Return the environment of a child process: exported variables and the variables in ``prefix``."""
        inside = Environment()
        for name, history in self.environment.variables.items():
            if self.environment.exported(name):
                inside.variables[name] = list(history)
        for name, value in prefix.items():
            inside.variables[name] = [Assigned(name, value.line, value, exported=True)]
        return inside

    def assign(self, assigned: Assigned) -> None:
        """Execute and record an assignment."""
        if self.place.task is not None:
            assigned = replace(assigned, in_task=True, exported=True)
        self.environment.assign(assigned)
        if len(self.walk.assigned) < _MAX_RECORDS:
            self.walk.assigned.append(assigned)
        if assigned.exported:
            self.walk.exported.add(assigned.name)

    def record_test(self, text: str) -> None:
        """Record the text of a test such as ``[ ... ]``."""
        if len(self.walk.tests) < _MAX_RECORDS:
            self.walk.tests.append((self.walk.unknowns.shown(text), self.place))

    def _record_use(self, part: Part, name: str, guarded: bool) -> None:
        if guarded or self.command in _TESTS:
            self.walk.expected.add(name)
        known = name in self.environment.variables
        if len(self.walk.uses) < _MAX_RECORDS:
            self.walk.uses.append(Use(name, part.line, self.place, guarded, known, self.command))

    def evaluate(self, assign: Assign, *, exported: bool = False) -> Assigned:
        """Expand the value of an assignment without executing the assignment."""
        branches = self.place.branches
        unknown = Assigned(assign.name, assign.line, branches=branches, exported=exported)
        earlier = self.environment.candidates(assign.name, branches) if assign.append else []
        if assign.subscript:
            self.expander.value(assign.value)
            return unknown
        if assign.value.parts and assign.value.parts[0].kind == "array":
            items = self.expander.items(assign.value)
            before = earlier[0].items or () if earlier else ()
            quoted = not before and _is_one_quoted(assign.value.parts[0].words)
            return replace(unknown, items=(*before, *items)[:2000], quoted=quoted and len(items) == 1)
        value = self.expander.value(assign.value)
        value = Value(value.text, value.lines if value.text else (assign.line,))
        if earlier and earlier[0].value is not None and len(earlier[0].value.text) <= MAX_VALUE:
            value = _joined(earlier[0].value, value)
        elif earlier:
            return unknown
        return replace(unknown, value=value)

    def declare(self, command: str, words: Sequence[Word]) -> None:
        """Execute ``export``, ``declare`` or another builtin in :data:`DECLARATIONS`."""
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
            self.assign(replace(known[0], exported=True, looped=False, in_task=False))
        elif not exported:
            self.assign(Assigned(name, line, Value("", (line,)), branches=self.place.branches))

    def set_parameters(self, values: tuple[Value, ...] | None) -> tuple[Value, ...] | None:
        """Set $1, $2 and so on, and $@; return the previous values. None means unknown values."""
        variables = self.environment.variables
        before = variables["@"][0].items if "@" in variables else None
        for name in [name for name in variables if not _NAME.match(name)]:
            del variables[name]
        if values is not None:
            line, branches = (values[0].line if values else 0), self.place.branches
            for name in "@*":
                variables[name] = [Assigned("@", line, items=values, branches=branches)]
            for number, value in enumerate(values, start=1):
                variables[str(number)] = [Assigned(str(number), value.line, value)]
                if MARK.fullmatch(value.text):
                    break  # possibly several words, so the numbers of the following parameters are unknown
        return before

    def _shift(self, words: list[str]) -> None:
        parameters = self.environment.variables.get("@")
        count = int(words[0]) if words and words[0].isdecimal() else 1
        certain = parameters and parameters[0].branches == self.place.branches and not self.place.loops
        self.set_parameters((parameters[0].items or ())[count:] if parameters and certain else None)

    def run_builtin(self, name: str, arguments: list[Value], body: Value | None) -> bool:
        """Simulate a builtin; return False if ``name`` is not a supported builtin.

        ``body`` is the text of the builtin's here-document.
        """
        words = [argument.text for argument in arguments[1:]]
        line = arguments[0].line
        if name in ("source", "."):
            self._source(words)
        elif name == "read" and body is not None and "-d" in words and _NAME.match(words[-1]):
            self.assign(Assigned(words[-1], line, body, branches=self.place.branches))
        elif name in ("read", "mapfile", "readarray", "printf", "getopts", "unset", "let"):
            self._set_names(name, words, line)
        elif name == "shift":
            self._shift(words)
        elif name == "set":
            self._set_options(words)
        elif name in ("wait", "fg"):
            self.walk.waits = True
        elif name in ("[", "test"):
            self.record_test(" ".join(words))
        else:
            return False
        return True

    def _set_options(self, words: list[str]) -> None:
        for word, following in zip(words, [*words[1:], ""], strict=False):
            exports_all = "a" in word or (word.endswith("o") and following == "allexport")
            if word.startswith("-") and not word.startswith("--") and exports_all:
                self.walk.opaque = True

    def _set_names(self, command: str, words: list[str], line: int) -> None:
        names = [word for word in words if _NAME.match(word)]
        value = None
        if command == "printf":
            names = words[1:2] if words[:1] == ["-v"] else []
            printed = f"$(printf {self.walk.unknowns.shown(' '.join(words[2:]))})"
            value = Value(self.walk.unknowns.mark(Unknown("command", "", printed, line)), (line,))
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
            self.assign(Assigned(name, line, value, branches=self.place.branches))

    def arithmetic(self, text: str, line: int) -> None:
        """Record an arithmetic expression and the variables that it sets."""
        unknowns, value = self.walk.unknowns, None
        only = _ONE_ASSIGNMENT.fullmatch(text)
        right = f"{only[1]} {only[2]} ({only[3]})" if only and only[2] else only and only[3]
        expression = self.expander.expression(right, line) if right else text
        mark = unknowns.mark(Unknown("arith", "", unknowns.shown(text), line, default=expression))
        if only and not self.place.loops:
            value = Value(mark, (line,))
        for match in _SET_IN_ARITHMETIC.finditer(text[:2000]):
            name = match.group(1) or match.group(2)
            self.assign(Assigned(name, line, value, branches=self.place.branches))

    def _source(self, words: list[str]) -> None:
        if words and not _ACTIVATES.search(self.walk.unknowns.shown(words[0])):
            self.walk.opaque = True


def _is_one_quoted(words: Sequence[Word]) -> bool:
    """Return whether the elements of an array are a single quoted expansion."""
    if len(words) != 1 or len(words[0].parts) != 1:
        return False
    part = words[0].parts[0]
    return part.quoted and part.kind in ("param", "command") and "@" not in part.text


def _joined(first: Value, second: Value) -> Value:
    """Concatenate two values. A row that contains text of both has the line number from ``first``."""
    rows = second.lines[1:] if first.text and not first.text.endswith("\n") else second.lines
    text = first.text + second.text
    if not first.text:
        return second
    if first.text.endswith("\n"):
        return Value(text, (*first.lines[:-1], *second.lines))
    return Value(text, (*first.lines, *rows))


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
        self._printed: list[tuple[Place, Value | None]] = []
        self._outputs: tuple[str, ...] = ()

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
                outside, self._outputs = self._outputs, self._written(node.redirects) or self._outputs
                self.statements(node.body, place)
                self._outputs = outside
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
        words = self.state.expander.arguments(node.words or ())
        if node.variable:
            looped = Assigned(node.variable, node.line, looped=True, branches=place.branches)
            self.state.assign(replace(looped, choices=tuple(words)))
        self._redirects(node.redirects)
        self.statements(node.condition, replace(inside, condition=True))
        self.statements(node.body, inside)

    def _case(self, node: Case, place: Place) -> None:
        self.state.command = "case"
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
        if name in ("echo", "printf"):
            words = [argument.text for argument in arguments[1:] if argument.text not in ("-n", "-e")]
            known = name == "echo" or (len(words) == 2 and words[0][:2] in ("%s", "%d"))
            text = Value(" ".join(words[name == "printf" :]), arguments[-1].lines)
            body = Value(f"{text.text}\n", text.lines) if known else None
            if not node.redirects:
                self._printed.append((place, text if known else None))
        self._keep_file(node, arguments, body)
        if name == "eval":
            self._eval(arguments[1:])
        elif self._follow_file(name, arguments[1:], place) or self.state.run_builtin(name, arguments, body):
            return
        elif name in self.functions and place.nesting < _MAX_NESTING and self._may_call():
            inside = replace(place, function=name, nesting=place.nesting + 1)
            parameters = self.state.set_parameters(tuple(arguments[1:]))
            self.statements((self.functions[name].body,), inside)
            self.state.set_parameters(parameters)
        else:
            for part in _components(arguments):
                self._start(node, part, prefix, body)

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
            walk.steps[-1].launch.opaque = True  # probably continues the previous step, see stray-command
        outer = place.task
        if outer is not None and not launch.via:
            launch.via, launch.srun, launch.srun_line = outer.via, outer.srun, outer.srun_line
            launch.opaque = outer.opaque
            launch.wrappers = [*outer.wrappers, *launch.wrappers]
        given = {**prefix, **_exported_by_srun(launch), **launch.environment}
        for name, value in given.items():
            walk.given.append(Assigned(name, value.line, value, exported=True, in_task=outer is not None))
        launch.environment = prefix = {**(outer.environment if outer else {}), **given}
        inner = launch.inner
        if inner is None and launch.kind == "script" and launch.program:
            inner = self.files.get(self._file_name(launch.program.text))
        if inner is None:
            inner = self._wrapper(launch)
        if inner is None and body is not None and _reads_commands(arguments):
            inner = body
        if inner is not None and self._inner(inner, node, launch, prefix):
            return
        if launch.kind == "inner":
            launch.kind = "unknown"
        walk.steps.append(Step(launch, place, node.line, node.end, prefix, node))

    def _wrapper(self, launch: Launch) -> Value | None:
        """Return the text of a written script that gets the program, as in ``./wrapper.sh python a.py``."""
        for at, word in enumerate(launch.words if launch.wrappers else ()):
            text = self.files.get(self._file_name(word.text))
            if text and basename(word.text) in launch.wrappers:
                launch.kind, launch.arguments = "script", launch.words[at + 1 :]
                return text
        return None

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
        outside = self.state.use(self.state.environment_of_tasks(prefix))
        self.state.set_parameters(launch.arguments[launch.kind == "inner" :])
        inside = replace(
            place,
            task=launch if launch.via else place.task,
            origin=place.origin or node,
            shell=launch,
            nesting=place.nesting + 1,
        )
        self.statements(nodes, inside)
        self.state.use(outside)
        return True

    def _follow_file(self, name: str, path: list[Value], place: Place) -> bool:
        """Follow a file that the script has written and now sources; return False for other commands."""
        sources = name in ("source", ".") and path
        text = self.files.get(self._file_name(path[0].text)) if sources else None
        if text is None or place.nesting >= _MAX_NESTING or not self._may_call():
            return False
        try:
            nodes = parse_shell(text.text, lines=text.lines)
        except (ShellError, TooDeepError):
            return False
        self.statements(nodes, replace(place, nesting=place.nesting + 1))
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

    def _run_substitution(self, body: tuple[Node, ...]) -> Value | None:
        """Follow the commands of a substitution; return what a function prints with one command."""
        place, command = self.state.place, self.state.command
        if place.nesting >= _MAX_NESTING:
            return None
        outer, self._printed = self._printed, []
        self.statements(body, replace(place, substitution=True, nesting=place.nesting + 1))
        printed, self._printed = self._printed, outer
        self.state.command = command
        only = body[0] if len(body) == len(printed) == 1 else None
        if not isinstance(only, Simple) or not only.words or only.words[0].literal not in self.functions:
            return None
        there, text = printed[0]
        conditional = there.branches != place.branches or there.loops != place.loops or there.piped
        return None if conditional else text

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
        """Store a text that is written to a file, because the file may be executed later."""
        name = basename(arguments[0].text)
        if body is None or name not in ("cat", "tee", "echo", "printf"):
            return
        written = self._written(node.redirects)
        if name == "tee":
            written += tuple(self._file_name(argument.text) for argument in arguments[1:])
        appends = not written or any(redirect.operator.endswith(">>") for redirect in node.redirects)
        for path in (written or self._outputs)[:3]:
            before = self.files.get(path) if appends else None
            if not before or len(before.text) <= MAX_VALUE:
                self.files[path] = _joined(before, body) if before else body

    def _written(self, redirects: Sequence[Redirect]) -> tuple[str, ...]:
        """Return the names of the files to which redirections write."""
        return tuple(
            self._file_name(self.state.expander.value(redirect.target).text)
            for redirect in redirects
            if redirect.operator.lstrip("012") in (">", ">>", ">|")
        )

    def _file_name(self, path: str) -> str:
        """Return the name of a file. The mark of a variable differs in each expansion, its value does not."""
        name, unknowns = basename(path), self.state.walk.unknowns
        return unknowns.shown(name) if all(one.kind == "param" for one in unknowns.of(name)) else name


def _components(arguments: list[Value]) -> list[list[Value]]:
    """Split ``srun A : B`` into one command for each component of a heterogeneous job."""
    texts = [argument.text for argument in arguments]
    start = next((at for at, text in enumerate(texts) if basename(text) == "srun"), len(texts))
    if ":" not in texts[start:]:
        return [arguments]
    commands: list[list[Value]] = []
    head, rest = arguments[: start + 1], [*arguments[start + 1 :], Value(":", (0,))]
    while rest:
        end = next(at for at, word in enumerate(rest) if word.text == ":")
        named = any(word.text.startswith(("--het-group", "--pack-group")) for word in rest[:end])
        group = [] if named else [Value(f"--het-group={len(commands)}", head[-1].lines)]
        commands.append([*head, *group, *rest[:end]])
        rest = rest[end + 1 :]
    return commands


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
