"""A sbatch script as the rules see it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from bench.lint import programs
from bench.lint.directives import Complaint, Option, read_line, read_options
from bench.lint.environment import MARK, Assigned, Unknown, Value
from bench.lint.geometry import RELEVANT, Geometry
from bench.lint.launch import Launch, basename
from bench.lint.nodes import ShellError, TooDeepError
from bench.lint.numbers import number
from bench.lint.options import sbatch_options
from bench.lint.relevance import matters
from bench.lint.shell import Parser
from bench.lint.walk import Step, Walk, walk

_SHELL = re.compile(r"#![ \t]*(?:\S*/env[ \t]+(?:-\S+[ \t]+)*)?(?:\S*/)?(?:bash|sh|dash|ksh|zsh)(?:[ \t]|\Z)")
_ZSH = re.compile(r"#!.*\bzsh\b")
_SPAWNING = frozenset(
    {"torchrun", "launch", "accelerate", "deepspeed", "composer", "lightning", "fabric", "colossalai"}
)
#: Scripts that start more than this are not written by hand; the first ones tell.
_MOST_STEPS = 300
#: Longer lines are read each time, so that the memory of past lines stays small.
_LONGEST = 2_000
#: Words that say the program finds its nodes by itself.
_REACHES = re.compile(
    r"submitit|\bray\b|dask|parsl|hostfile|\bmpi\b|pdsh|--multirun|hydra/launcher", re.IGNORECASE
)


@dataclass(frozen=True)
class Header:
    """The directives of a script: those that decide its geometry, and what is wrong with others."""

    options: tuple[Option, ...] = ()
    complaints: tuple[tuple[int, Complaint], ...] = ()
    heterogeneous: bool = False
    end: int = 0


class _Located(NamedTuple):
    """What one line, at its place in a script, contributes to the header."""

    ends: bool
    options: tuple[Option, ...]
    complaints: tuple[tuple[int, Complaint], ...]
    heterogeneous: bool


def _locate(text: str, number: int) -> _Located:
    line = read_line(text)
    options = tuple(option._replace(line=number) for option in line.options if option.name in RELEVANT)
    complaints = tuple((number, complaint) for complaint in line.complaints)
    return _Located(line.kind == "command", options, complaints, line.heterogeneous)


_remembered = lru_cache(maxsize=8192)(_locate)


def read_header(lines: Sequence[str]) -> Header:
    """Read the lines up to the first command (``end`` is its index, or the number of lines)."""
    options: list[Option] = []
    complaints: list[tuple[int, Complaint]] = []
    heterogeneous = False
    for place, text in enumerate(lines, start=1):
        found = _remembered(text, place) if len(text) < _LONGEST else _locate(text, place)
        if found.ends:
            return Header(tuple(options), tuple(complaints), heterogeneous, place - 1)
        options += found.options
        complaints += found.complaints
        heterogeneous = heterogeneous or found.heterogeneous
    return Header(tuple(options), tuple(complaints), heterogeneous, len(lines))


@dataclass
class Script:
    """Everything that rules ask about a script; ``lines`` are its lines without line ends."""

    lines: Sequence[str]
    header: Header
    job: Geometry
    walk: Walk = field(default_factory=Walk)
    error: ShellError | None = None
    is_shell: bool = True
    swallowed: Sequence[tuple[int, int]] = ()
    dos_line: int | None = None
    size: int = 0

    def shown(self, text: str) -> str:
        """Return ``text`` as it is written in the script."""
        return self.walk.unknowns.shown(text)

    def unknowns(self, text: str) -> list[Unknown]:
        """Return what is unknown in ``text``."""
        return self.walk.unknowns.of(text)

    def number(self, value: Value | None, geometry: Geometry) -> int | None:
        """Return the whole number that an option's value becomes, or None."""
        return None if value is None else number(value.text.strip(), self.walk.unknowns, geometry)

    def geometry(self, step: Step) -> Geometry:
        """Return nodes, tasks and GPUs of a step, with what srun's options compute worked out."""
        if step.launch.via != "srun":
            return self.job
        return self.job.step(self._computed(option) for option in step.launch.srun)

    def _computed(self, option: Option) -> Option:
        if not option.value or not MARK.search(option.value):
            return option
        result = number(option.value, self.walk.unknowns, self.job)
        return option if result is None else option._replace(value=str(result))

    @cached_property
    def training(self) -> list[Step]:
        """Steps that may be what the job is for, in order."""
        return [step for step in self.walk.steps if self._may_train(step)][:_MOST_STEPS]

    def _may_train(self, step: Step) -> bool:
        launch, place = step.launch, step.place
        aside = (place.substitution or place.condition) and not launch.via
        if not launch.is_training or aside:
            return False
        return not (launch.kind == "python" and is_chore(launch))

    @cached_property
    def assigned_to(self) -> dict[str, list[Assigned]]:
        """All assignments, by the variable's name."""
        by_name: dict[str, list[Assigned]] = {}
        for assigned in self.walk.assigned:
            by_name.setdefault(assigned.name, []).append(assigned)
        return by_name

    @cached_property
    def sruns(self) -> list[Step]:
        """Training steps that srun starts."""
        return [step for step in self.training if step.launch.via == "srun"]

    @cached_property
    def reaches_nodes(self) -> bool:
        """Whether something other than the batch shell starts processes on the other nodes."""
        return any(step.launch.via or _says_so(step.launch) for step in self.training)

    def options_of_program(self, launch: Launch) -> Iterator[tuple[str, Value]]:
        """Yield the options given to the program itself: normalised names and values."""
        words = launch.arguments
        for position, word in enumerate(words):
            name, equals, text = word.text.partition("=")
            plain = name.lstrip("-+")
            dashed = name.startswith("-")
            if not plain or not (dashed or equals) or not matters(plain) or MARK.search(plain):
                continue
            normal = plain.lower().replace("-", "_")
            if equals:
                yield normal, Value(text, word.lines)
            elif position + 1 < len(words) and not words[position + 1].text.startswith("--"):
                yield normal, words[position + 1]
            else:
                yield normal, Value("", word.lines)

    def mentions(self, pattern: re.Pattern[str]) -> int | None:
        """Return the first line of the script's code that matches, or None."""
        for index, line in enumerate(self.lines):
            if not line.lstrip().startswith("#") and pattern.search(line[:4000]):
                return index + 1
        return None


def is_chore(launch: Launch) -> bool:
    """Return whether a python program prepares or looks rather than trains, by its name."""
    name = basename(launch.program.text).removesuffix(".py") if launch.program else ""
    return bool(programs.CHORES.search(name)) and not programs.TRAINS.search(name)


def spawns_workers(launch: Launch) -> bool:
    """Return whether a launcher that starts its own workers is started."""
    return launch.launcher in _SPAWNING


def _says_so(launch: Launch) -> bool:
    """Return whether a program says on its command line that it reaches other nodes by itself."""
    if launch.launcher in ("deepspeed", "colossalai"):
        return bool({"hostfile", "H", "launcher", "host"} & set(launch.options))
    if launch.launcher == "accelerate" and "deepspeed_hostfile" in launch.options:
        return True
    words = [launch.program.text if launch.program else "", *(word.text for word in launch.arguments[:200])]
    return any(_REACHES.search(word[:500]) for word in words)


@dataclass(frozen=True)
class Followed:
    """What a script's commands would do, whatever its directives say."""

    lines: Sequence[str]
    walk: Walk
    error: ShellError | None
    is_shell: bool
    swallowed: Sequence[tuple[int, int]]


def follow(lines: Sequence[str], *, complete: bool) -> Followed:
    """Parse and follow a script; with ``complete`` False its end was cut off."""
    if not is_shell(lines):
        return Followed(lines, Walk(), None, is_shell=False, swallowed=())
    parser = Parser("\n".join(lines))
    seen, problem = Walk(), None
    try:
        seen = walk(parser.everything())
    except TooDeepError:
        pass
    except ShellError as error:
        problem = error if complete and not _ZSH.match(lines[0][:500]) else None
    except RecursionError:  # functions within functions within loops: there is nothing to say about it
        seen = Walk()
    return Followed(lines, seen, problem, is_shell=True, swallowed=tuple(parser.swallowed))


def read_script(followed: Followed, header: Header, arguments: Sequence[str]) -> Script:
    """Return a script as the rules see it."""
    given = [item for item in read_options(arguments, sbatch_options()) if isinstance(item, Option)]
    late = [option for _, options in ignored_directives(followed.lines, header) for option in options]
    job = Geometry({option.name: option for option in (*header.options, *late, *given)}, header.heterogeneous)
    return Script(
        followed.lines, header, job, followed.walk, followed.error, followed.is_shell, followed.swallowed
    )


def ignored_directives(lines: Sequence[str], header: Header) -> Iterator[tuple[int, tuple[Option, ...]]]:
    """Yield number and options of the ``#SBATCH`` lines below the first command."""
    for index in range(header.end, len(lines)):
        text = lines[index]
        if text.startswith("#SBATCH"):
            line = read_line(text)
            relevant = (option._replace(line=index + 1) for option in line.options if option.name in RELEVANT)
            yield index + 1, tuple(relevant)


def is_shell(lines: Sequence[str]) -> bool:
    """Return whether bash, or a shell like it, runs the script."""
    first = lines[0] if lines else ""
    return not first.startswith("#!") or bool(_SHELL.match(first[:500]))
