"""The values of words: text, and expansions that this package does not resolve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """An expansion whose result the script does not show.

    ``kind`` is ``variable``, ``command``, ``arithmetic`` or ``text``, and ``source`` the text as written.
    ``operator`` is that of a variable, such as ``:-`` in ``${name:-default}``, or ``[``. ``operand`` is the
    default, or the expression of ``$(( ))``. ``in_task`` is True if a shell in a task of srun expands it.
    """

    kind: str
    source: str
    line: int
    name: str = ""
    operator: str = ""
    operand: Value | None = None
    in_task: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a word: text and unknown expansions.

    ``line`` is the line of the script that determines the value. ``quoted`` is True if bash splits no part
    of it into words.
    """

    parts: tuple[str | Unknown, ...]
    line: int
    quoted: bool = False

    @property
    def literal(self) -> str | None:
        """The text, or None if a part is unknown."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def shown(self) -> str:
        """The text with each unknown expansion as written."""
        return "".join(part if isinstance(part, str) else part.source for part in self.parts)

    @property
    def start(self) -> str:
        """The text before the first unknown expansion."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], str) else ""

    @property
    def only(self) -> Unknown | None:
        """The unknown expansion that is the whole value, or None."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return part if isinstance(part, Unknown) else None

    def unknowns(self) -> Iterator[Unknown]:
        """Yield all unknown expansions, including those in defaults and arithmetic."""
        waiting = list(self.parts)
        for _ in range(1000):
            if not waiting:
                return
            part = waiting.pop(0)
            if isinstance(part, Unknown):
                yield part
                waiting += part.operand.parts if part.operand else ()

    def after(self, text: str) -> Value:
        """Return the value without ``text`` at its start."""
        return Value((self.start[len(text) :], *self.parts[1:]), self.line, self.quoted)


def plain(text: str, line: int) -> Value:
    """Return the value of a literal text."""
    return Value((text,), line)
