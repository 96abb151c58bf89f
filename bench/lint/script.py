"""A script as rules see it: its lines, its directives, and its commands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .directives import Header, is_heterogeneous, read_header
from .geometry import Geometry, geometry_of, number, step_of
from .walk import Command, Walk, walk

#: Slurm refuses larger scripts; this is the default of max_script_size in slurm.conf.
MAX_SCRIPT_SIZE = 4 * 1024 * 1024
#: The interpreter line of a shell that reads the syntax of bash: execve(2).
BASH = re.compile(r"#![ \t]*(?:\S*/env[ \t]+(?:-\S+[ \t]+)*)?(?:\S*/)?(?:bash|sh|dash)(?:[ \t]|\Z)")
# The prefix of a syntax error: bash, print_prefix of error.c.
_MESSAGE = re.compile(r"\S+: line (\d+): (?!warning: )(.+)")


@dataclass
class Script:
    """A script: its lines without line ends, its directives, its job, and what its commands do."""

    lines: Sequence[str]
    header: Header
    job: Geometry
    too_large: bool = False
    dos_line: int | None = None
    error: tuple[int, str] | None = None
    walk: Walk = field(default_factory=Walk)

    def line(self, number: int) -> str:
        """Return the text of a line, or an empty string after the last line."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    @cached_property
    def commands(self) -> list[Command]:
        """The commands up to an ``exit`` that certainly runs; none if a part has no known structure."""
        found = [] if self.walk.broken else self.walk.commands
        return found[: next((at for at, one in enumerate(found) if ends_script(one)), len(found))]

    def launchers(self, *names: str) -> list[Command]:
        """Return the commands that start a launcher, or one of some names, with known options."""
        found = [one for one in self.commands if one.launch.launcher and not one.launch.opaque]
        return [one for one in found if one.launch.launcher in names or not names]

    def geometry(self, command: Command) -> Geometry:
        """Return the nodes, tasks and GPUs of the step that srun starts, or those of the job."""
        if command.launch.via != "srun":
            return self.job
        numbers = [(option, number(option.word, self.job)) for option in command.launch.srun]
        return step_of(self.job, [one if n is None else one._replace(value=str(n)) for one, n in numbers])


def ends_script(command: Command) -> bool:
    """Return whether a command is an ``exit`` of the script's own shell that certainly runs."""
    return command.name == "exit" and command.task is None and not command.place


def read_script(text: str) -> Script:
    """Read a script and follow its commands."""
    text = text.replace("\0", "")  # bash ignores NUL
    dos_line = next((at for at, line in enumerate(text.split("\n"), start=1) if line.endswith("\r")), None)
    lines = [line.rstrip("\r") for line in text.split("\n")]
    header = read_header(lines)
    single = not is_heterogeneous(lines)
    job = geometry_of({option.name: option for option in header.options if single})
    script = Script(lines, header, job, len(text) > MAX_SCRIPT_SIZE, dos_line)
    if single and not script.too_large and (not lines[0].startswith("#!") or BASH.match(lines[0][:500])):
        script.walk = walk("\n".join(lines))
        script.error = check_syntax("\n".join(lines))
    return script


def check_syntax(text: str) -> tuple[int, str] | None:
    """Return the line and words of the first error of ``bash -n``, which executes nothing; None without."""
    words = ["bash", "--norc", "--noprofile", "-O", "extglob", "-n", "/dev/stdin"]
    script, env = text.encode(errors="replace"), {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        done = subprocess.run(words, input=script, capture_output=True, env=env, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    printed = done.stderr.decode("utf-8", errors="replace").splitlines()
    error = next((match for match in map(_MESSAGE.match, printed) if match), None)
    # The status is 0 after an error in [[ ]] (bash 5.2).
    return (int(error[1]), error[2]) if error else None
