"""One finding about a run, a cell or a study, as values: sentences are made where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Fact:
    """One finding.

    Attributes:
        kind: the name of the finding, such as ``shared-cores``.
        subject: the affected cells or runs; empty if all are affected.
        values: the measured values, by name.
        severity: ``error`` if the numbers of the subject are not valid, else ``warning``.
    """

    kind: str
    subject: tuple[str, ...]
    values: Mapping[str, Any]
    severity: Literal["error", "warning"]

    def affects(self, name: str) -> bool:
        """Return whether the finding affects the cell or run ``name``."""
        return not self.subject or name in self.subject

    def as_json(self) -> dict[str, Any]:
        """Return the finding as it is stored and printed with ``--json``."""
        rest = {"values": dict(self.values), "severity": self.severity}
        return {"kind": self.kind, "subject": list(self.subject), **rest}
