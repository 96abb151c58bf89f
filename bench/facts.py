"""One finding about a run, a cell or a study, as values: sentences are made where it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Fact:
    """One finding.

    Attributes:
        kind: the name of the finding, such as ``shared-cores``.
        subject: the affected cells, runs or nodes, or quantities of one run; empty if all are affected.
        values: the measured values, by name.
        severity: ``error`` if the numbers of the subject are not valid, ``warning`` if they may be affected,
            ``info`` if not.
    """

    kind: str
    subject: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = "warning"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as it is stored and printed with ``--json``."""
        rest = {"values": dict(self.values), "severity": self.severity}
        return {"kind": self.kind, "subject": list(self.subject), **rest}

    @classmethod
    def from_json(cls, content: Any) -> Fact:
        """Return the fact that :meth:`as_json` wrote.

        Raises:
            ValueError: the content is not a fact.
        """
        match content:
            case {"kind": str(kind), "subject": list(subject), "values": dict(values), "severity": severity}:
                if severity in get_args(Severity):
                    return cls(kind, tuple(map(str, subject)), values, severity)
        raise ValueError(f"not a fact: {content!r:.80}")


def facts_in(entries: Any) -> Iterator[Fact]:
    """Yield the facts in a list of env.json or the ledger; what is not a fact is left out."""
    for entry in entries if isinstance(entries, list | tuple) else ():
        with suppress(ValueError):
            yield Fact.from_json(entry)


def facts_of_env(env: Any) -> list[Fact]:
    """Return the facts in the content of an env.json."""
    return list(facts_in(env.get("facts"))) if isinstance(env, Mapping) else []
