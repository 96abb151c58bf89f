"""The parsed sbatch script that the rules check: directives, commands and the job's geometry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from ..slurm.parsing import expand_hosts
from .directives import Header, read_header, read_line
from .expansion import MARK, Assigned, Unknowns, Value
from .geometry import Geometry, evaluate
from .launch import CHORES, TRAINS, Launch, basename
from .options import EXPANSION, Option
from .parser import parse_source
from .syntax import ShellError, Source, TooDeepError
from .walk import Step, Walk, walk

#: Slurm refuses larger scripts; this is the default of max_script_size in slurm.conf.
MAX_SCRIPT_SIZE = 4 * 1024 * 1024
#: Number of characters that are analysed; the rest of a larger script is usually data.
ANALYSED_SIZE = 512 * 1024
_SHELL = re.compile(r"#![ \t]*(?:\S*/env[ \t]+(?:-\S+[ \t]+)*)?(?:\S*/)?(?:bash|sh|dash|ksh|zsh)(?:[ \t]|\Z)")
#: A directive, but not a comment such as ``#SBATCH: see below``.
_DIRECTIVE = re.compile(r"#SBATCH[ \t]+(?:[-\u2010-\u2015\u2212]|hetjob|packjob)")
_EXIT = re.compile(r"[ \t]*exit(?:[ \t]+\d+)?[ \t;]*")
#: A first line for a shell, possibly with a mistake, such as ``!/bin/bash``.
_FIRST_LINE = re.compile(r"[ \t\ufeff]*(?:#[ \t]*!|!#|!)[ \t]*/\S*(?:sh|env|python|perl)")
#: A line that is not a comment although it reads like one, or a shell command of a notebook.
_NOTE = re.compile(r"[A-Z][A-Za-z_]*(?: [A-Za-z_]+)+[ \t]*:?|![a-z]\w*[ \t].*")
_OTHER_SHELL = re.compile(r"#!.*\b(?:zsh|ksh)\b")
#: A line that another program replaces before sbatch reads the script: Jinja, ERB, brew, printf of Python.
_TEMPLATE = re.compile(
    r"<%|\$\$[({]|\{%|\{\{[=?~#/]|\{\{\s*[A-Za-z_][\w.]*\s*[|}]|^[^#]*(?<!%)%\(\w+\)[sdif]|^__\w+\{\{|##\w+##"
    r"|^(?:#SBATCH.*)?@[A-Z_]+@|^[^#]*£[({A-Za-z]"
)
#: A value that another program fills in, or that sbatch does not expand.
_FILLED_IN = re.compile(rf"{EXPANSION.pattern}|\{{[a-z_]\w*\}}")
#: A line that a program replaces by directives; the directives below it contain variables.
_LINE_FILLED_IN = re.compile(r"\$\{[A-Z_]+\}")
#: The output of a job below the copy of its script.
_OUTPUT = re.compile(
    r"slurmstepd: |srun: (?:error|job)|Traceback \(most recent call last\)|/\S+\.py:\d+: \w*Warning: "
    r"|(?:GPU|TPU|IPU|HPU) available: (?:True|False)|initializing (?:ddp|distributed): GLOBAL_RANK"
)
#: A directive of a draft.
_UNFINISHED = re.compile(r"#SBATCH[^#]*(?:\?\?|\bTODO\b)")
_STARTS_WORKERS = frozenset(
    {"torchrun", "launch", "accelerate", "deepspeed", "composer", "lightning", "fabric", "colossalai"}
)
#: Maximum number of lines with `exit` that are tried, each of which means to parse the script again.
_MAX_EXITS = 10
#: Maximum number of steps that are checked as possible starts of the training program.
_MAX_STEPS = 300
#: Words in a command that suggest that the program itself starts processes on other nodes.
_REACHES_NODES = re.compile(
    r"submitit|\bray\b|\bscoop\b|\baprun\b|dask|parsl|hostfile|\bmpi\b|pdsh|--multirun|hydra/launcher|deephyper|\bdeepy\.py",
    re.IGNORECASE,
)


@dataclass
class Script:
    """Everything that rules need to know about a script.

    ``lines`` are the lines without line ends, ``swallowed`` the ranges of lines inside strings and
    here-documents. ``error`` is the first syntax error, ``dos_line`` the first line that ends with
    CR LF. ``size`` is the length of the whole script, even if ``lines`` contains only its beginning.
    """

    lines: Sequence[str]
    header: Header
    job: Geometry
    size: int
    dos_line: int | None = None
    walk: Walk = field(default_factory=Walk)
    error: ShellError | None = None
    swallowed: Sequence[tuple[int, int]] = ()
    _mentions: dict[re.Pattern[str], bool] = field(default_factory=dict, init=False, repr=False)

    def line(self, number: int) -> str:
        """Return the text of a line, or an empty string after the last line."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    @property
    def unknowns(self) -> Unknowns:
        """The unknown expansions of the script."""
        return self.walk.unknowns

    def number(self, value: Value | None, geometry: Geometry) -> int | None:
        """Return the whole number that an option's value expands to, or None."""
        return None if value is None else evaluate(value.text.strip(), self.unknowns, geometry)

    def choices(self, text: str) -> list[str]:
        """Return a text, or the values that it has if it is the variable of a ``for`` loop."""
        only = self.unknowns.of(text) if MARK.fullmatch(text) else []
        looped = [one for one in self.assigned_to.get(only[0].name, ()) if one.choices] if only else []
        return [value.text for one in looped for value in one.choices] or [text]

    def geometry(self, step: Step) -> Geometry:
        """Return the nodes, tasks and GPUs of a step, with expressions in srun's options evaluated."""
        if step.launch.via != "srun":
            return self.job
        options = [self._evaluated(option) for option in step.launch.srun]
        components = self.components(step)
        if len(components) == 1:
            return components[0].step(option for option in options if option.name != "het-group")
        return self.job.step(options)

    @property
    def placed(self) -> Iterator[tuple[Step, Geometry]]:
        """Training steps with their geometries; a step on several job components occurs once for each."""
        for step in self.training:
            components = self.components(step)
            for geometry in components if len(components) > 1 else [self.geometry(step)]:
                yield step, geometry

    def components(self, step: Step) -> list[Geometry]:
        """Return the components of a heterogeneous job that a step uses: without --het-group, the first."""
        parts = self.header.components
        groups = next((option.value for option in step.launch.srun if option.name == "het-group"), "0") or ""
        numbers = expand_hosts(f"[{groups}]")
        if len(parts) < 2 or not all(int(number) < len(parts) for number in numbers):
            return []
        return [Geometry({option.name: option for option in parts[int(number)]}) for number in numbers]

    def _evaluated(self, option: Option) -> Option:
        if not option.value or not MARK.search(option.value):
            return option
        result = evaluate(option.value, self.unknowns, self.job)
        return option if result is None else option._replace(value=str(result))

    @cached_property
    def training(self) -> list[Step]:
        """Steps that may start the training program, in order."""
        return [step for step in self.walk.steps if _may_train(step)][:_MAX_STEPS]

    @cached_property
    def assigned_to(self) -> dict[str, list[Assigned]]:
        """All assignments in the script, grouped by the name of the variable."""
        by_name: dict[str, list[Assigned]] = {}
        for assigned in self.walk.assigned:
            by_name.setdefault(assigned.name, []).append(assigned)
        return by_name

    @cached_property
    def settings(self) -> list[Assigned]:
        """All assignments, and the variables that single commands get, for example by ``env``."""
        return [*self.walk.assigned, *self.walk.given]

    @cached_property
    def sruns(self) -> list[Step]:
        """Training steps that srun starts."""
        return [step for step in self.training if step.launch.via == "srun"]

    @cached_property
    def reaches_nodes(self) -> bool:
        """True if srun, another launcher or the program itself starts processes on other nodes."""
        return any(step.launch.via or _reaches_nodes(step.launch) for step in self.training)

    @cached_property
    def is_draft(self) -> bool:
        """True if sbatch cannot take the file as it is: a template, notes, or text without a ``#!`` line."""
        values = [option.value for option in self.header.options]
        variables = sum(bool(_FILLED_IN.search(value or "")) for value in values)
        filled_in = variables > 2 or values.count("") > 1  # such as --partition= and --account=
        notes = sum(map(bool, map(_NOTE.fullmatch, self.lines)))
        output = any(_OUTPUT.match(line) or _UNFINISHED.match(line) for line in self.lines)
        return filled_in or notes > 2 or output or is_template(self.lines) or not first_line(self.lines)

    def options_of_program(self, launch: Launch) -> Iterator[tuple[str, Value]]:
        """Yield the program's options as (name, value), with underscores instead of hyphens in names."""
        words = launch.arguments
        for position, word in enumerate(words):
            name, equals, text = word.text.partition("=")
            plain = name.lstrip("-+")
            if not plain or not (name.startswith("-") or equals) or MARK.search(plain):
                continue
            normal = plain.lower().replace("-", "_")
            if equals:
                yield normal, Value(text, word.lines)
            elif position + 1 < len(words) and not words[position + 1].text.startswith("--"):
                yield normal, words[position + 1]
            else:
                yield normal, Value("", word.lines)

    def one_job_per_node(self, launch: Launch) -> bool:
        """Return whether a launcher's node rank is an argument of the script: each node runs its own job."""
        rank = launch.options.get("node_rank")
        return bool(rank and any(one.name.isdecimal() for one in self.unknowns.within(rank.text)))

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """Return whether ``pattern`` matches in a line that is not a comment."""
        if pattern not in self._mentions:
            self._mentions[pattern] = any(map(pattern.search, self._commands))
        return self._mentions[pattern]

    @cached_property
    def _commands(self) -> list[str]:
        return [line[:4000] for line in self.lines if not line.lstrip().startswith("#")]


def _may_train(step: Step) -> bool:
    launch, place = step.launch, step.place
    if not launch.is_training or ((place.substitution or place.condition) and not launch.via):
        return False
    return not (launch.kind == "python" and is_chore(launch))


def is_chore(launch: Launch) -> bool:
    """Return whether the name of a Python program suggests that it does not train."""
    name = basename(launch.program.text).removesuffix(".py") if launch.program else ""
    return bool(CHORES.search(name)) and not TRAINS.search(name)


def starts_workers(launch: Launch) -> bool:
    """Return whether the program is a launcher, such as torchrun, that starts several workers."""
    return launch.launcher in _STARTS_WORKERS


def _reaches_nodes(launch: Launch) -> bool:
    """Return whether the command line shows that the program starts processes on other nodes."""
    if launch.launcher in ("deepspeed", "colossalai"):
        return bool({"hostfile", "H", "launcher", "host"} & set(launch.options))
    if launch.launcher == "accelerate" and "deepspeed_hostfile" in launch.options:
        return True
    words = [launch.program.text if launch.program else "", *(word.text for word in launch.arguments[:200])]
    return any(_REACHES_NODES.search(word[:500]) for word in words)


def read_script(text: str, *, size: int) -> Script:
    """Parse a script and collect what its commands do.

    ``text`` contains at most the first :data:`ANALYSED_SIZE` characters of the script, and ``size`` is
    the length of the whole script.
    """
    lines = text.split("\n")
    dos_line = None
    if "\r" in text:
        dos_line = next((number for number, line in enumerate(lines, start=1) if line.endswith("\r")), None)
        lines = [line.rstrip("\r") for line in lines]
    header = read_header(lines)
    script = Script(lines, header, Geometry({}), size, dos_line)
    if is_shell(lines):
        _follow(script)
    late = [option for _, options in ignored_directives(script) for option in options]
    options = {option.name: option for option in (*header.options, *late)}
    script.job = Geometry(options, header.heterogeneous)
    return script


def _follow(script: Script) -> None:
    """Parse the commands of a script and collect what they do."""
    source = Source("\n".join(script.lines))
    try:
        script.walk = walk(parse_source(source))
    except TooDeepError:
        pass
    except ShellError as error:
        script.walk = _until_exit(script, error.line)
        known = not _OTHER_SHELL.match(script.lines[0][:500])  # the grammars of other shells differ
        if script.size <= ANALYSED_SIZE and known and not script.walk.steps:
            script.error = error
    except RecursionError:  # deeply nested functions and loops cannot be analysed
        pass
    script.swallowed = source.swallowed


def _until_exit(script: Script, line: int) -> Walk:
    """Follow the commands up to an ``exit`` above a line: bash does not read the lines after it."""
    exits = [number for number in range(1, line) if _EXIT.fullmatch(script.line(number))]
    for number in reversed(exits[-_MAX_EXITS:]):
        with suppress(ShellError, RecursionError):  # the exit is part of an unfinished `if` or loop
            return walk(parse_source(Source("\n".join(script.lines[:number]))))
    return Walk()


def ignored_directives(script: Script) -> Iterator[tuple[int, tuple[Option, ...]]]:
    """Yield the line number and options of each ``#SBATCH`` line after the first command.

    Strings and here-documents are left out. The search stops at a later ``#!`` line, because there another
    script begins.
    """
    if is_template(script.lines) or not is_shell(script.lines):
        return
    inside = {number for begin, end in script.swallowed for number in range(begin, end + 1)}
    for number in range(script.header.end + 1, len(script.lines) + 1):
        text = script.line(number)
        if text.startswith("#!/") and number not in inside:
            return
        if _DIRECTIVE.match(text) and number not in inside:
            yield number, read_line(text, number).options


def is_template(lines: Sequence[str]) -> bool:
    """Return whether another program fills in the script before sbatch reads it."""
    filled_in = any(map(_LINE_FILLED_IN.fullmatch, lines))
    return any(
        _TEMPLATE.search(line[:400]) or (filled_in and line.startswith("#SBATCH") and "${" in line)
        for line in lines
    )


def first_line(lines: Sequence[str]) -> int | None:
    """Return the number of the ``#!`` line, or None if there is none or a command is above it."""
    for number, line in enumerate(lines, start=1):
        if _FIRST_LINE.match(line) or (number == 1 and line.startswith("#!")):
            return number
        if line.strip() and not line.lstrip().startswith(("#", "<<<<<<<")):
            return None
    return None


def is_shell(lines: Sequence[str]) -> bool:
    """Return whether bash or a similar shell executes the script."""
    first = lines[0] if lines else ""
    return not first.startswith("#!") or bool(_SHELL.match(first[:500]))
