r"""Load the known causes and their signatures from the TOML files in ``catalogue/``.

An entry of a file::

    [port-in-use]
    explanation = "..."
    remedy = "..."

    [[port-in-use.signature]]
    pattern = '''failed to bind to \S+:(?P<port>\d+).{0,40}Address already in use'''
    words = ["failed bind address"]
    weight = 80
    example = "..."

The ``explanation`` or ``remedy`` of a signature, if any, replaces the cause's text. Placeholders
such as ``{port}`` are filled from the named groups of the pattern. ``severity = "slow"`` marks a cause
that makes a job slow but does not end it. A signature under ``fact`` recognizes a fact other than a
cause, such as "the training makes progress". A signature under ``sign`` recognizes a line that shows a
failure without explaining it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

#: Severities of a cause: it ends the job, or it only makes the job slow.
FAILURE, SLOW = "failure", "slow"

_COMPARISON = re.compile(r"(\w+) (<|>|==|!=|apart) (\w+)")
_SIGNATURE_KEYS = {
    "pattern", "words", "weight", "example", "explanation", "remedy", "near", "not_near",
    "not_here", "needs", "unless", "where", "disagree", "times", "retried", "helper", "shell",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """A known cause with its general explanation and remedy; ``severity`` is "failure" or "slow"."""

    name: str
    explanation: str
    remedy: str
    example: str = ""
    severity: str = FAILURE


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Condition that two lines of a job contradict each other.

    The named groups ``same`` of the signature's pattern must be equal in both lines, and the groups
    ``differ`` must not. Example: two ranks are in the collective with the same number, but one is in an
    all-reduce and the other in a broadcast.
    """

    same: tuple[str, ...]
    differ: tuple[str, ...]


@dataclass(frozen=True)
class Expression:
    """A case-insensitive regular expression, compiled on first use, because few are needed for most logs."""

    text: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The compiled expression."""
        return re.compile(self.text, re.IGNORECASE)

    def search(self, line: str) -> re.Match[str] | None:
        """Return the first match in the line."""
        return self.compiled.search(line)


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    r"""A pattern that recognizes a cause, a fact or a sign of failure in a log line.

    Attributes:
        name: the name of the cause, fact or sign.
        severity: failure or slow for a cause, None for a fact or sign.
        pattern: the expression. If it contains ``\s``, a match may continue in the following lines.
        words: alternative sets of words. The pattern is tried only on lines that contain all
            words of at least one set, which keeps the scan fast.
        weight: how close the line is to the root cause (0 to 99), see ``docs/doctor.md``.
        example: a log that the signature matches.
        explanation, remedy: if not empty, these texts replace the explanation or remedy of the cause.
        near: an expression that must match somewhere between 12 lines above and 4 lines below the line.
        not_near: an expression that must not match in the range of ``near``.
        not_here: an expression that must not match in the line itself.
        needs: at least one of these causes or facts must be found in the job's logs.
        unless: ignore the line if one of these causes or facts is found in the job's logs.
        where: a comparison that must hold between two numbers in the line, as (left, operator, right).
        disagree: two lines must contradict each other, see :class:`Disagreement`.
        times: the number of matching lines required.
        retried: ignore the line if a later line shows that the job continued.
        helper: below a message of success, the line proves nothing: a script ends its helper processes.
        shell: a shell script goes on after this message, so a later failure ranks first.
    """

    name: str
    severity: str | None
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
    helper: bool = False
    shell: bool = False

    @property
    def is_cause(self) -> bool:
        """True if the signature recognizes a cause, not a fact or a sign."""
        return self.severity is not None

    @property
    def spans_lines(self) -> bool:
        """True if the message may continue in the following lines."""
        return r"\s" in self.pattern.text

    @property
    def conditional(self) -> bool:
        """True if the signature has conditions on other lines of the job's logs."""
        return bool(self.needs or self.unless or self.disagree or self.times > 1)


@dataclass(frozen=True)
class Catalogue:
    """All causes by name, all signatures, and an index from words to signatures."""

    causes: dict[str, CauseInfo]
    signatures: tuple[Signature, ...]
    signs: tuple[Signature, ...]
    index: dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]
    vocabulary: frozenset[bytes]

    def candidates(self, words: frozenset[bytes]) -> tuple[Signature, ...]:
        """Return the signatures of which at least one set of required words is contained in ``words``."""
        found: dict[int, Signature] = {}
        for word in words & self.index.keys():
            for required, signature in self.index[word]:
                if required <= words:
                    found[id(signature)] = signature
        return tuple(found.values())


@cache
def load() -> Catalogue:
    """Load the packaged catalogue."""
    causes: dict[str, CauseInfo] = {}
    signatures: list[Signature] = []
    signs: list[Signature] = []
    folder = resources.files("bench.doctor").joinpath("catalogue")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
                if name in ("fact", "sign"):
                    for fact, body in entry.items():
                        found = _signatures(fact, body, severity=None)
                        signatures += found
                        signs += found if name == "sign" else []
                    continue
                assert name not in causes, f"{file.name}: {name} is described twice"
                severity = entry.get("severity", FAILURE)
                assert severity in (FAILURE, SLOW), f"{name}: unknown severity {severity!r}"
                found = _signatures(name, entry, severity=severity)
                example = found[0].example if found else ""
                explanation, remedy = _unwrapped(entry["explanation"]), _unwrapped(entry["remedy"])
                causes[name] = CauseInfo(name, explanation, remedy, example, severity)
                signatures += found
    vocabulary = frozenset(word for signature in signatures for words in signature.words for word in words)
    return Catalogue(
        dict(sorted(causes.items())), tuple(signatures), tuple(signs), _index(signatures), vocabulary
    )


def causes() -> list[CauseInfo]:
    """Return all known causes, sorted by name."""
    return list(load().causes.values())


def _unwrapped(text: str) -> str:
    """Remove the line breaks of a wrapped text."""
    return " ".join(text.split())


def _signatures(name: str, entry: dict[str, Any], *, severity: str | None) -> list[Signature]:
    return [_signature(name, body, severity=severity) for body in entry.get("signature", [])]


def _signature(name: str, body: dict[str, Any], *, severity: str | None) -> Signature:
    unknown = body.keys() - _SIGNATURE_KEYS
    assert not unknown, f"{name}: unknown keys {sorted(unknown)}"
    where = _COMPARISON.fullmatch(body["where"]) if "where" in body else None
    assert where or "where" not in body, f"{name}: cannot read {body['where']!r}"
    groups = where.groups() if where else None
    disagree = body.get("disagree")
    return Signature(
        name=name,
        severity=severity,
        pattern=Expression(body["pattern"]),
        words=tuple(frozenset(words.encode().split()) for words in body["words"]),
        weight=body["weight"],
        example=body["example"].strip("\n"),
        explanation=_unwrapped(body.get("explanation", "")),
        remedy=_unwrapped(body.get("remedy", "")),
        near=Expression(body["near"]) if "near" in body else None,
        not_here=Expression(body["not_here"]) if "not_here" in body else None,
        not_near=Expression(body["not_near"]) if "not_near" in body else None,
        needs=tuple(body.get("needs", ())),
        unless=tuple(body.get("unless", ())),
        where=(groups[0], groups[1], groups[2]) if groups else None,
        disagree=Disagreement(tuple(disagree["same"]), tuple(disagree["differ"])) if disagree else None,
        times=body.get("times", 1),
        retried=body.get("retried", False),
        helper=body.get("helper", False),
        shell=body.get("shell", False),
    )


def _index(signatures: list[Signature]) -> dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]:
    """Index each word set by its longest word, which is probably the rarest one."""
    index: dict[bytes, list[tuple[frozenset[bytes], Signature]]] = {}
    for signature in signatures:
        for words in signature.words:
            index.setdefault(max(sorted(words), key=len), []).append((words, signature))
    return {word: tuple(entries) for word, entries in index.items()}
