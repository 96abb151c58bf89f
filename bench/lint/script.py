"""A script as rules see it: its lines, its directives, and its commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .directives import Header, read_header
from .expand import CLOSE, OPEN
from .geometry import Geometry, number
from .launch import LAUNCHERS
from .syntax import ShellError, check_syntax
from .walk import Command, Walk, walk

#: Slurm refuses larger scripts; this is the default of max_script_size in slurm.conf.
MAX_SCRIPT_SIZE = 4 * 1024 * 1024
# The interpreter line of a shell that reads the syntax of bash: execve(2).
_BASH = re.compile(r"#![ \t]*(?:\S*/env[ \t]+(?:-\S+[ \t]+)*)?(?:\S*/)?(?:bash|sh|dash)(?:[ \t]|\Z)")


@dataclass
class Script:
    """A script: its lines without line ends, its directives, its job, and what its commands do.

    ``dos_line`` is the first line that ends with CR LF. ``too_large`` is True if Slurm refuses the script's
    size; its commands are then not read.
    """

    lines: Sequence[str]
    header: Header
    job: Geometry
    too_large: bool = False
    dos_line: int | None = None
    error: ShellError | None = None
    walk: Walk = field(default_factory=Walk)
    _steps: dict[Command, Geometry] = field(default_factory=dict)

    def line(self, number: int) -> str:
        """Return the text of a line, or an empty string after the last line."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    @cached_property
    def commands(self) -> list[Command]:
        """The commands up to an ``exit`` that certainly runs; none if a part has no known structure."""
        found = [] if self.walk.broken else self.walk.commands
        end = next((at for at, one in enumerate(found) if one.ends_script), len(found))
        return found[: end + 1]

    @cached_property
    def sruns(self) -> list[Command]:
        """The commands that srun starts, without ``bash -c``: its inner commands are listed instead."""
        found = [one for one in self.commands if one.launch.via == "srun"]
        return [one for one in found if one.launch.kind != "inner"]

    @cached_property
    def launchers(self) -> list[Command]:
        """The commands that start a launcher such as torchrun."""
        return [one for one in self.commands if one.launch.launcher in LAUNCHERS]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all variables that the script assigns."""
        return frozenset(one.name for one in self.walk.assigned)

    def geometry(self, command: Command) -> Geometry:
        """Return the nodes, tasks and GPUs of the step that srun starts, or those of the job."""
        if command.launch.via == "srun" and command not in self._steps:
            given = [(option, number(option.expanded, self.job)) for option in command.launch.srun]
            known = [one if value is None else one._replace(value=str(value)) for one, value in given]
            self._steps[command] = self.job.step(known)
        return self._steps.get(command, self.job)


def read_script(text: str) -> Script:
    """Read a script and follow its commands."""
    text = text.replace("\0", "").replace(OPEN, " ").replace(CLOSE, " ")  # bash ignores NUL
    lines = text.split("\n")
    dos_line = next((number for number, line in enumerate(lines, start=1) if line.endswith("\r")), None)
    lines = [line.rstrip("\r") for line in lines]
    header = read_header(lines)
    options = {option.name: option for option in header.options}
    job = Geometry(options, header.components > 1)
    script = Script(lines, header, job, len(text) > MAX_SCRIPT_SIZE, dos_line)
    if not script.too_large and (not lines[0].startswith("#!") or _BASH.match(lines[0][:500])):
        script.walk = walk("\n".join(lines))
        script.error = check_syntax("\n".join(lines))
    return script
