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
_TELLING = re.compile(r"nccl|gloo|cuda|cpu|localhost|127\.|lightning|slurm|\Axpu", re.IGNORECASE)
# What follows a blank may be a program behind a flag, unless it starts with a digit.
_OPTION = re.compile(
    r"(?<=[ \t])(--[A-Za-z][\w.-]*+(?:=(?=[^\s'\"`$\\|&;<>()#])|[ \t]++(?=[0-9])))([^\s'\"`$\\|&;<>()#]++)"
)
# An echo of text and plain variables; which variables is all that matters of it.
_ECHO = re.compile(r"""[ \t]*echo[ \t]+"(?:[\w :.,/%+=@-]|\$[A-Za-z_]\w*+|\$\{\w++\})*+"[ \t]*""")
_EXPANDED = re.compile(r"\$[A-Za-z_]\w*|\$\{\w+\}")
_ASSIGNED = re.compile(
    r"""((?:export[ \t]+)?)([A-Za-z_]\w*+)="""
    r"""("[^"'`$\\()&;|<>#]*+"|'[^'"`()&;|<>#]*+'|[\w./:@%+,=^-]*+)[ \t]*"""
)
_IDENTIFIER = re.compile(r"[A-Za-z][\w.]*+(?:-[\w.]++){2,}+")
# A comment that is harmless even where an unclosed quote or brace makes it text.
_PLAIN = re.compile(r"[^'\"`\\${}()<>]*")
_DIGITS = re.compile(r"\d+")
_LONGEST = 2000


def matters(name: str) -> bool:
    """Return whether a rule may look at an option of a program."""
    return bool(_MATTERS.search(name)) and "batch" not in name


def _value_matters(name: str) -> bool:
    """Return whether a rule may look at more than the presence of an option or a variable."""
    return matters(name) and "world" not in name.lower()


def _masked(match: re.Match[str]) -> str:
    option, value = match.groups()
    if _value_matters(option) or _TELLING.search(value) or value.endswith(".py"):
        return match.group()
    return f"{option}0"


class Assigned(NamedTuple):
    """An assignment of plain text to a variable that no rule knows by name.

    ``unused`` stands for it where nothing else names the variable, ``shape`` where something does:
    the digits of a name such as n16x4-nccl-b22 are masked, for they count nothing.
    """

    name: str
    shape: str
    unused: str


def _shape(line: str) -> str | Assigned:
    stripped = line.lstrip(" \t")
    if stripped.startswith("#") and not stripped.startswith("#SBATCH"):
        return "" if _PLAIN.fullmatch(line) else line
    said = _ECHO.fullmatch(line)
    if said:
        return f'echo "{" ".join(_EXPANDED.findall(line))}"'
    assigned = _ASSIGNED.fullmatch(line)
    if assigned and not _value_matters(assigned.group(2)):
        start = line[: assigned.start(3)]
        value = assigned.group(3)
        shape = start + _DIGITS.sub("0", value) if _IDENTIFIER.fullmatch(value) else line
        return Assigned(assigned.group(2), shape, f"{start}0")
    return _OPTION.sub(_masked, line)


_remembered = lru_cache(maxsize=16384)(_shape)


def shapes(lines: Sequence[str], text: str) -> list[str]:
    """Return the lines of a script (whose text is ``text``) without what cannot matter.

    Where quotes are out of pairs, anything may be text or command, so all of it is kept.
    """
    if text.count('"') % 2:
        return list(lines)
    found = [_remembered(line) if len(line) <= _LONGEST else _shape(line) for line in lines]
    for position, shape in enumerate(found):
        if shape.__class__ is Assigned:
            found[position] = shape.unused if text.count(shape.name) == 1 else shape.shape
    return found  # type: ignore[return-value]
