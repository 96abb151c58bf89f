"""What the doctor works with: causes, signatures of causes, and a diagnosis."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """A cause by name, with what it means and what to change, whatever the log says of it."""

    name: str
    explanation: str
    remedy: str
    example: str = ""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """That lines of a job contradict each other: equal in ``same``, unequal in ``differ``.

    Both name groups of the signature's pattern, as in two ranks that sit in collective
    number 7 (same) but in different operations (differ).
    """

    same: tuple[str, ...]
    differ: tuple[str, ...]


@dataclass(frozen=True)
class Expression:
    """A regular expression without regard to case; compiled when first used: a log needs few of them."""

    text: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The expression, ready to use."""
        return re.compile(self.text, re.IGNORECASE)

    def search(self, line: str) -> re.Match[str] | None:
        """Return where it matches first."""
        return self.compiled.search(line)


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One way in which a log shows a cause (or, without a cause, a fact or a sign of failure).

    ``name`` is the cause, or the fact. ``words`` are alternatives: a line is looked at when
    it holds all words of one of them; this keeps ``pattern`` away from all other lines.
    ``weight`` says how far the line stands from the root: see ``docs/doctor.md``. ``near``
    must, ``not_near`` must not match between 12 lines above and 4 below, ``not_here`` not in
    the line itself. One of ``needs`` must, none of ``unless`` may be seen anywhere in the
    job's logs (facts or causes). ``where`` compares two numbers of the line. ``disagree``
    and ``times`` ask for more than one line. A line that is ``retried`` counts only while
    nothing below it shows that the job went on.
    """

    name: str
    is_cause: bool
    pattern: Expression
    words: tuple[frozenset[bytes], ...]
    weight: int
    example: str
    explanation: str = ""
    remedy: str = ""
    near: Expression | None = None
    not_here: Expression | None = None
    not_near: Expression | None = None
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    where: tuple[str, str, str] | None = None
    disagree: Disagreement | None = None
    times: int = 1
    retried: bool = False

    @property
    def wraps(self) -> bool:
        """Whether its message may go on in the lines below."""
        return r"\s" in self.pattern.text

    @property
    def conditional(self) -> bool:
        """Whether other lines decide if this one counts."""
        return bool(self.needs or self.unless or self.disagree or self.times > 1)


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that a signature matched.

    ``line`` counts from 1; ``clock_s`` (seconds of the year) orders lines of different logs
    where the line, or one above it, says when it was written.
    """

    signature: Signature
    path: str
    line: int
    evidence: str
    groups: dict[str, str]
    clock_s: float | None = None

    @property
    def weight(self) -> int:
        """The weight of the signature."""
        return self.signature.weight


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause that the logs show, with the line that shows it."""

    cause: str
    path: str
    line: int
    evidence: str
    explanation: str
    remedy: str
    weight: int = field(default=0, compare=False)

    def as_json(self) -> dict[str, object]:
        """Return the promised keys."""
        return {
            "cause": self.cause,
            "path": self.path,
            "line": self.line,
            "evidence": self.evidence,
            "explanation": self.explanation,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class TellingLine:
    """A line that says most about a failure that no signature explains."""

    path: str
    line: int
    text: str

    def as_json(self) -> dict[str, object]:
        """Return path, line and text."""
        return {"path": self.path, "line": self.line, "text": self.text}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the logs of one job show.

    ``verdict`` is ``cause`` (the first of ``causes`` is where to begin), ``unknown`` (the
    job failed, and ``telling_lines`` are all there is to say), ``harmless`` (only warnings
    of attempts that are repeated) or ``ok`` (nothing shows a failure).
    """

    verdict: str
    causes: list[Cause]
    telling_lines: list[TellingLine]

    def as_json(self) -> dict[str, Any]:
        """Return what ``bench doctor --json`` prints."""
        return {
            "verdict": self.verdict,
            "causes": [cause.as_json() for cause in self.causes],
            "telling_lines": [line.as_json() for line in self.telling_lines],
        }
