"""Findings of `bench lint`: something wrong at a line, and the edit that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """The severity of a finding; only an error makes a command exit with 1."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """Something wrong at one line of one file.

    ``line`` counts from 1. ``message`` describes the effect at run time, ``remedy`` the change that
    fixes it. ``replacement`` is the corrected line if it is known; an empty string deletes the line.
    """

    path: str
    line: int
    rule: str
    severity: Severity
    message: str
    remedy: str
    replacement: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return the keys of the JSON output: path, line, rule, severity, message, remedy."""
        return {
            "path": self.path,
            "line": self.line,
            "rule": self.rule,
            "severity": str(self.severity),
            "message": self.message,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.severity}: {self.message} [{self.rule}]\n    {self.remedy}"


class Edit(NamedTuple):
    """A change to one line: replace the first ``old`` by ``new``, or the whole line if ``old`` is empty."""

    line: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the changed text of the line."""
        return text.replace(self.old, self.new, 1) if self.old else self.new


class Remark(NamedTuple):
    """A finding as a rule yields it: without the path and the name of the rule.

    Without a ``severity``, the remark has the severity of its rule.
    """

    line: int | None
    message: str
    remedy: str
    severity: Severity | None = None
    edit: Edit | None = None
