r"""Load the causes and their signatures: the TOML files beside this module.

One entry of a file::

    [port-in-use]
    explanation = "..."
    remedy = "..."

    [[port-in-use.signature]]
    pattern = '''failed to bind to \S+:(?P<port>\d+).{0,40}Address already in use'''
    words = ["failed bind address"]
    weight = 80
    example = "..."

``explanation`` and ``remedy`` of a signature replace the cause's; ``{port}`` in them is
filled from the pattern's group. A table under ``fact`` names something a log says that is
no cause (that a scheduler runs the job, that training goes on); one under ``sign`` a line
that tells of a failure without explaining it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bench.doctor.model import CauseInfo, Disagreement, Expression, Signature

_COMPARISON = re.compile(r"(\w+) (<|>|==|!=|apart) (\w+)")
_SIGNATURE_KEYS = {
    "pattern", "words", "weight", "example", "explanation", "remedy", "near", "not_near",
    "not_here", "needs", "unless", "where", "disagree", "times", "retried",
}  # fmt: skip


@dataclass(frozen=True)
class Catalogue:
    """All causes by name, all signatures, and an index from words to signatures."""

    causes: dict[str, CauseInfo]
    signatures: tuple[Signature, ...]
    index: dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]
    vocabulary: frozenset[bytes]

    def candidates(self, words: frozenset[bytes]) -> tuple[Signature, ...]:
        """Return the signatures whose words are all among these."""
        found: dict[int, Signature] = {}
        for word in words & self.index.keys():
            for wanted, signature in self.index[word]:
                if wanted <= words:
                    found[id(signature)] = signature
        return tuple(found.values())


@cache
def load() -> Catalogue:
    """Return the catalogue that the doctor uses."""
    causes: dict[str, CauseInfo] = {}
    signatures: list[Signature] = []
    folder = resources.files("bench.doctor").joinpath("catalogue")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
                if name in ("fact", "sign"):
                    for fact, body in entry.items():
                        signatures += _signatures(fact, body, is_cause=False)
                    continue
                assert name not in causes, f"{file.name}: {name} is described twice"
                found = _signatures(name, entry, is_cause=True)
                example = found[0].example if found else ""
                causes[name] = CauseInfo(name, _flat(entry["explanation"]), _flat(entry["remedy"]), example)
                signatures += found
    vocabulary = frozenset(word for signature in signatures for words in signature.words for word in words)
    return Catalogue(dict(sorted(causes.items())), tuple(signatures), _index(signatures), vocabulary)


def causes() -> list[CauseInfo]:
    """Return every cause that the doctor knows, by name, with explanation and remedy."""
    return list(load().causes.values())


def _flat(text: str) -> str:
    """Undo the line breaks of a text that was wrapped in the file."""
    return " ".join(text.split())


def _signatures(name: str, entry: dict[str, Any], *, is_cause: bool) -> list[Signature]:
    return [_signature(name, body, is_cause=is_cause) for body in entry.get("signature", [])]


def _signature(name: str, body: dict[str, Any], *, is_cause: bool) -> Signature:
    unknown = body.keys() - _SIGNATURE_KEYS
    assert not unknown, f"{name}: unknown keys {sorted(unknown)}"
    where = _COMPARISON.fullmatch(body["where"]) if "where" in body else None
    assert where or "where" not in body, f"{name}: cannot read {body['where']!r}"
    groups = where.groups() if where else None
    disagree = body.get("disagree")
    return Signature(
        name=name,
        is_cause=is_cause,
        pattern=Expression(body["pattern"]),
        words=tuple(frozenset(words.encode().split()) for words in body["words"]),
        weight=body["weight"],
        example=body["example"].strip("\n"),
        explanation=_flat(body.get("explanation", "")),
        remedy=_flat(body.get("remedy", "")),
        near=Expression(body["near"]) if "near" in body else None,
        not_here=Expression(body["not_here"]) if "not_here" in body else None,
        not_near=Expression(body["not_near"]) if "not_near" in body else None,
        needs=tuple(body.get("needs", ())),
        unless=tuple(body.get("unless", ())),
        where=(groups[0], groups[1], groups[2]) if groups else None,
        disagree=Disagreement(tuple(disagree["same"]), tuple(disagree["differ"])) if disagree else None,
        times=body.get("times", 1),
        retried=body.get("retried", False),
    )


def _index(signatures: list[Signature]) -> dict[bytes, tuple[tuple[frozenset[bytes], Signature], ...]]:
    """Index each alternative by its longest word, which is likely its rarest."""
    index: dict[bytes, list[tuple[frozenset[bytes], Signature]]] = {}
    for signature in signatures:
        for words in signature.words:
            index.setdefault(max(sorted(words), key=len), []).append((words, signature))
    return {word: tuple(entries) for word, entries in index.items()}
