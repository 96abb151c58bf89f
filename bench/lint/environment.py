r"""What a script's variables hold, as far as it can be told without running it.

Text whose value is only known on the cluster is kept as a *mark*: a number between two private
characters that stands for an :class:`Unknown`. So ``--node_rank=$SLURM_NODEID``, expanded by the
batch shell, stays recognisable wherever its text goes, and ``\$SLURM_NODEID`` stays plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.lint.nodes import Node

_OPEN, _CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_PRIVATE = re.compile(f"[{_OPEN}{_CLOSE}]")
#: Values longer than this are not followed any further.
MAX_VALUE = 20_000
_MAX_UNKNOWNS = 5_000


def without_marks(text: str) -> str:
    """Return a script's text with the characters that marks are made of replaced."""
    return _PRIVATE.sub("\ufffd", text)


class Unknown(NamedTuple):
    """An expansion whose value is not known: of a variable, a command or arithmetic.

    ``kind`` is ``param``, ``command`` or ``arith``; ``source`` the text as written; ``default``
    the text of ``${name:-default}``; ``body`` the commands of a substitution; for arithmetic,
    ``default`` is the expression with its own expansions resolved. ``in_task`` says that not the
    batch shell but a task that srun started expands it.
    """

    kind: str
    name: str
    source: str
    line: int
    op: str = ""
    default: str | None = None
    body: tuple[Node, ...] = ()
    in_task: bool = False


class Value(NamedTuple):
    """Text and, for each line of it, the line of the script that it comes from."""

    text: str
    lines: tuple[int, ...]

    @property
    def line(self) -> int:
        """The line of the script where the text starts."""
        return self.lines[0]

    def words(self) -> Iterator[Value]:
        """Yield the pieces between blanks, each with its own line."""
        for number, row in enumerate(self.text.split("\n")):
            line = self.lines[min(number, len(self.lines) - 1)]
            for piece in row.split():
                if piece != "\\":
                    yield Value(piece, (line,))


#: Which branch of which if or case a command stands in, from the outside in.
Branches = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """One assignment; ``value`` and ``items`` are both None where nothing is known of it."""

    name: str
    line: int
    value: Value | None = None
    items: tuple[Value, ...] | None = None
    exported: bool = False
    branches: Branches = ()
    looped: bool = False
    in_task: bool = False


class Unknowns:
    """The unknown expansions of one script, by the numbers that marks carry."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []

    def mark(self, unknown: Unknown) -> str:
        """Return the mark that stands for ``unknown``."""
        if len(self._all) < _MAX_UNKNOWNS:
            self._all.append(unknown)
        return f"{_OPEN}{len(self._all) - 1}{_CLOSE}"

    def __iter__(self) -> Iterator[Unknown]:
        """Yield every unknown expansion of the script."""
        return iter(self._all)

    def of(self, text: str) -> list[Unknown]:
        """Return the unknown expansions within ``text``, outermost only."""
        if _OPEN not in text:
            return []
        return [self._all[int(number)] for number in MARK.findall(text) if int(number) < len(self._all)]

    def within(self, text: str, *, depth: int = 0) -> list[Unknown]:
        """Return the unknown expansions within ``text``, and those inside arithmetic and defaults."""
        found = self.of(text)
        if depth < 6:
            found += [inner for one in found for inner in self.within(one.default or "", depth=depth + 1)]
        return found

    def shown(self, text: str) -> str:
        """Return ``text`` as a person would write it: marks as their sources."""
        return MARK.sub(lambda match: self._source(int(match.group(1))), text).replace("\\\n", "")

    def _source(self, number: int) -> str:
        return self._all[number].source if number < len(self._all) else "$?"


@dataclass(slots=True)
class Environment:
    """All assignments so far, in the order in which they would run."""

    variables: dict[str, list[Assigned]] = field(default_factory=dict)

    def assign(self, assigned: Assigned) -> None:
        """Note an assignment; one that certainly replaces all others forgets them."""
        history = self.variables.setdefault(assigned.name, [])
        exported = assigned.exported or any(earlier.exported for earlier in history)
        if exported and not assigned.exported:
            assigned = Assigned(
                assigned.name,
                assigned.line,
                assigned.value,
                assigned.items,
                exported=True,
                branches=assigned.branches,
                looped=assigned.looped,
                in_task=assigned.in_task,
            )
        if not assigned.branches:
            history.clear()
        elif len(history) > 20:
            del history[0]
        history.append(assigned)

    def candidates(self, name: str, branches: Branches) -> list[Assigned]:
        """Return the assignments that may have set ``name``, newest first."""
        found: list[Assigned] = []
        here = dict(branches)
        for assigned in reversed(self.variables.get(name, ())):
            if any(here.get(identity, index) != index for identity, index in assigned.branches):
                continue  # the other branch of an `if` that we are in
            found.append(assigned)
            if all(identity in here for identity, _ in assigned.branches):
                break  # it ran for certain, so nothing older is left
        return found

    def exported(self, name: str) -> bool:
        """Return whether the tasks that srun starts see ``name``."""
        return any(assigned.exported for assigned in self.variables.get(name, ()))
