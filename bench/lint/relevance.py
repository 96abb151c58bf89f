"""What of a script can matter to a rule, so that scripts that differ elsewhere share one analysis.

Rules look at options of a program only through :func:`matters`; the values of all others are
masked in a script's shape, as are comments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_MATTERS = re.compile(
    r"node|rank|proc|gpu|device|port|master|rdzv|machine|backend|world|task|addr|host|init|url|endpoint|accelerator"
    r"|strategy|cpu|cuda|local|dist|launch|config|lightning|trainer|bind|bytes|lines|chars|jobid|job-id|het|env"
    r"|image|mem|gres|slurm|standalone|module|multi|ray|spawn",
    re.IGNORECASE,
)
_VALUE_MATTERS = re.compile(r"nccl|gloo|cuda|cpu|localhost|127\.|lightning|slurm|\Axpu", re.IGNORECASE)
# What follows a blank may be a program behind a flag, unless it starts with a digit.
_OPTION = re.compile(
    r"(?<=[ \t])(--[A-Za-z][\w.-]*+(?:=(?=[^\s'\"`$\\|&;<>()#])|[ \t]++(?=[0-9])))([^\s'\"`$\\|&;<>()#]++)"
)
# An echo of text and plain variables; which variables is all that matters of it.
_ECHO = re.compile(r"""[ \t]*echo[ \t]+"(?:[^"`\\$]|\$[A-Za-z_]\w*+|\$\{\w++\})*+\"[ \t]*""")
_EXPANDED = re.compile(r"\$[A-Za-z_]\w*|\$\{\w+\}")
_ASSIGNED = re.compile(
    r"""((?:export[ \t]+)?)([A-Za-z_]\w*+)=("[^"`$\\]*+"|'[^']*+'|[\w./:@%+,=^-]*+)[ \t]*"""
)
_LONGEST = 2000


def matters(name: str) -> bool:
    """Return whether a rule may look at the value of a program's option."""
    return bool(_MATTERS.search(name)) and "batch" not in name


def _masked(match: re.Match[str]) -> str:
    option, value = match.groups()
    if matters(option) or _VALUE_MATTERS.search(value) or value.endswith(".py"):
        return match.group()
    return f"{option}0"


class Unused(NamedTuple):
    """An assignment of plain text: ``masked`` stands for it where nothing else names the variable."""

    name: str
    line: str
    masked: str


def _shape(line: str) -> str | Unused:
    stripped = line.lstrip(" \t")
    if stripped.startswith("#") and not stripped.startswith("#SBATCH"):
        return line if any(char in line for char in "'\"`\\") else ""
    said = _ECHO.fullmatch(line)
    if said:
        return f'echo "{" ".join(_EXPANDED.findall(line))}"'
    assigned = _ASSIGNED.fullmatch(line)
    if assigned and not matters(assigned.group(2)):
        return Unused(assigned.group(2), line, f"{assigned.group(1) or ''}{assigned.group(2)}=0")
    return _OPTION.sub(_masked, line)


_remembered = lru_cache(maxsize=16384)(_shape)


def shapes(lines: Sequence[str], text: str) -> list[str]:
    """Return the lines of a script (whose text is ``text``) without what cannot matter."""
    found = [_remembered(line) if len(line) <= _LONGEST else _shape(line) for line in lines]
    for position, shape in enumerate(found):
        if shape.__class__ is Unused:
            found[position] = shape.masked if text.count(shape.name) == 1 else shape.line
    return found  # type: ignore[return-value]
