r"""Load the known causes and their signatures from the TOML files in ``catalogue/``.

An entry of a file::

    [port-in-use]
    explanation = "..."
    remedy = "..."

    [[port-in-use.signature]]
    pattern = '''failed to bind to \S+:(?P<port>\d+).{0,40}Address already in use'''
    words = ["failed bind address"]
    kind = "origin"
    example = "..."

The ``explanation`` or ``remedy`` of a signature, if any, replaces the cause's text. ``of-run.explanation``
and ``of-run.remedy``, if any, replace all of them for runs that `bench` started. Placeholders such as
``{port}`` are filled from the named groups of the pattern, but not in these. ``kind`` of a cause is that of
its signatures without one.
``severity = "slow"`` marks a cause that makes a job slow but does not end it, and
``severity = "warning"`` one that changes what a run measures. A signature under ``fact`` recognizes a
fact that ``needs`` or ``unless`` of other signatures name.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any

#: Severities of a cause: it ends the job, only makes it slow, or changes what it measures.
FAILURE, SLOW, WARNING = "failure", "slow", "warning"
#: Kinds of messages, in the order in which they are preferred as the first cause.
HINT, PEER, ENDED = "hint", "peer", "ended"
KINDS = ("origin", "error", HINT, PEER, ENDED, "script")

#: Parts that many patterns share, by name; a pattern contains them as ``(?&name)``. ``start`` is the start
#: of a line and what precedes a message: time, rank, node, level and names, each followed by a colon or
#: bracket. ``program`` requires at least one of these, ``error`` the name of an exception,
#: which ``modules`` may precede. ``slurm``
#: and ``cuda`` are what Slurm and CUDA print before an error. ``end`` is the end of a message of the system
#: (strerror), ``stop`` its end within a longer message.
FORMS = {
    "start": (
        r"^(?P<prefix>[^\w\[(]{0,24}(?:"
        r"(?:\[[^\]]{0,160}\][:>|]?|\([\w./=, ]{1,80}\)|\d[\d.,:TZ+/-]{0,40}(?=[ \t])|[IWEF]\d{3,4}(?= \d)"
        r"|(?:ERROR|WARN|WARNING|INFO|FATAL|CRITICAL|NCCL|E)(?=[ \t])|line \d{1,6}:"
        r"|[\w./-]{1,160}\.\w{1,4}:\d{1,6}\]"
        r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64}(?= )"
        r"|[^\[ \t:>|\d][^ \t:>|]{0,120}[:>|]{1,2})[^\w\[(]{0,24}){0,12})"
    ),
    "program": r"(?<=: )",
    "modules": r"(?:\w{1,60}\.){0,8}",
    "error": r"(?:\w{1,60}\.){0,8}\w{0,60}(?:Error|Exception): ",
    "slurm": r"(?:^|[: ])(?:error|fatal): (?:[\w ,/=.-]{1,100}: ){0,3}",
    "cuda": (
        r"(?:(?:CUDA|HIP)(?: driver| runtime)? (?:error|failure)|error=\d+)"
        r"(?: \(?\d+\)?| \S{1,40}:\d+)? ?:? ?'?"
    ),
    "stop": r"(?=$|[.,:;)'\"]| \(| at /)",
    "end": r"(?: \(\d+\)|: ?'[^']{1,300}')?\.?$",
}
_FORM = re.compile(r"\(\?&(\w+)\)")
_COMPARISON = re.compile(r"(\w+) ([<>]) (\w+)")


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """The general explanation and remedy of a cause; ``of_run`` are those for a run of `bench`, if any."""

    explanation: str
    remedy: str
    of_run: CauseInfo | None = None


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Signature:
    r"""A pattern that recognizes a cause or a fact in a log line.

    Attributes:
        name: the name of the cause or fact.
        severity: failure, slow or warning for a cause, None for a fact.
        pattern: the expression. If it contains ``\s`` or ``\n``, a match may continue in the following lines.
        words: alternative sets of words. The pattern is tried only on lines that contain all
            words of at least one set, which keeps the scan fast.
        example: a log that the signature matches.
        kind: one of :data:`KINDS`, see :mod:`bench.doctor.diagnosis`.
        explanation, remedy: if not empty, these texts replace the explanation or remedy of the cause.
        near: an expression that must match somewhere between 12 lines above and 4 lines below the line.
        needs: at least one of these causes or facts must be found in the job's logs.
        unless: ignore the line if one of these causes or facts is found in the job's logs.
        where: a comparison that must hold between two numbers in the line, as (left, operator, right).
        disagree: two lists of groups of the pattern. Another matching line must have equal values of the
            first groups and different values of the second.
        repeated: two groups of the pattern. A value of the first must occur in several lines, and fewer
            different values must occur than the second one says.
        combined: groups of the pattern. The placeholder ``{calls}`` tells the groups ``op``, ``numel`` and
            ``rank`` of all matching lines that have equal values of these groups.
        general: leave the cause out if a less general one explains the same line.
        traceback: the pattern is tried on the last line of the traceback that starts in the line.
    """

    name: str
    severity: str | None
    pattern: Expression
    words: tuple[frozenset[bytes], ...]
    example: str
    kind: str = KINDS[0]
    explanation: str = ""
    remedy: str = ""
    near: Expression | None = None
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    where: tuple[str, str, str] | None = None
    disagree: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    repeated: tuple[str, str] | None = None
    combined: tuple[str, ...] = ()
    general: int = 0
    traceback: bool = False

    @property
    def is_cause(self) -> bool:
        """True if the signature recognizes a cause, not a fact."""
        return self.severity is not None

    @property
    def spans_lines(self) -> bool:
        """True if the message may continue in the following lines."""
        return any(blank in self.pattern.text for blank in (r"\s", r"\n"))


@dataclass(frozen=True)
class Catalogue:
    """All causes by name, all signatures, and an index from words to signatures."""

    causes: dict[str, CauseInfo]
    signatures: tuple[Signature, ...]
    index: dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]
    vocabulary: frozenset[bytes]

    def candidates(self, words: frozenset[bytes]) -> tuple[Signature, ...]:
        """Return the signatures of which at least one set of required words is contained in ``words``."""
        found: dict[Signature, None] = {}
        for word in words:
            for required, signature in self.index.get(word, ()):
                if required <= words:
                    found[signature] = None
        return tuple(found)


@cache
def load() -> Catalogue:
    """Load the packaged catalogue."""
    causes: dict[str, CauseInfo] = {}
    signatures: list[Signature] = []
    folder = resources.files("bench.doctor").joinpath("catalogue")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            for name, entry in content.pop("fact", {}).items():
                signatures += _signatures(name, entry, severity=None)
            for name, entry in content.items():
                assert name not in causes, f"{file.name}: {name} is described twice"
                of_run = _info(entry["of-run"]) if "of-run" in entry else None
                causes[name] = replace(_info(entry), of_run=of_run)
                signatures += _signatures(name, entry, severity=entry.get("severity", FAILURE))
    vocabulary = frozenset(word for signature in signatures for words in signature.words for word in words)
    return Catalogue(dict(sorted(causes.items())), tuple(signatures), _index(signatures), vocabulary)


def _info(entry: dict[str, Any]) -> CauseInfo:
    return CauseInfo(_unwrapped(entry.get("explanation", "")), _unwrapped(entry["remedy"]))


def _unwrapped(text: str) -> str:
    """Remove the line breaks of a wrapped text."""
    return " ".join(text.split())


def _signatures(name: str, entry: dict[str, Any], *, severity: str | None) -> list[Signature]:
    kind = entry.get("kind", KINDS[0])
    return [_signature(name, {"kind": kind, **body}, severity=severity) for body in entry["signature"]]


def _signature(name: str, body: dict[str, Any], *, severity: str | None) -> Signature:
    """Return the signature of an entry; an unknown key raises TypeError."""
    for key in ("pattern", "near"):
        if key in body:
            body[key] = Expression(_FORM.sub(lambda form: FORMS[form[1]], body[key]))
    for key in ("explanation", "remedy"):
        body[key] = _unwrapped(body.get(key, ""))
    if "where" in body:
        where = _COMPARISON.fullmatch(body["where"])
        assert where, f"{name}: cannot read {body['where']!r}"
        body["where"] = where.groups()
    if "disagree" in body:
        body["disagree"] = tuple(tuple(groups) for groups in body["disagree"])
    for key in {"repeated", "combined"} & body.keys():
        body[key] = tuple(body[key])
    body["words"] = tuple(frozenset(words.encode().split()) for words in body["words"])
    body["example"] = body["example"].strip("\n")
    for key in ("needs", "unless"):
        body[key] = tuple(body.get(key, ()))
    return Signature(name=name, severity=severity, **body)


def _index(signatures: list[Signature]) -> dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]:
    """Index each word set by its longest word, which is probably the rarest one."""
    index: dict[bytes, list[tuple[frozenset[bytes], Signature]]] = {}
    for signature in signatures:
        for words in signature.words:
            index.setdefault(max(sorted(words), key=len), []).append((words, signature))
    return {word: tuple(entries) for word, entries in index.items()}
