"""What lint, verify and the doctor find: one shape for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is; only an error makes a command exit with 1."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One remark about one line of one file.

    ``line`` counts from 1. ``message`` says what happens at run time, ``remedy`` what to
    change. ``replacement``, where known, is the text that the line(s) from ``line`` to
    ``end_line`` should become (an empty string deletes them).
    """

    path: str
    line: int
    rule: str
    severity: Severity
    message: str
    remedy: str
    replacement: str | None = None
    end_line: int | None = None

    def as_json(self) -> dict[str, object]:
        """Return the promised keys: path, line, rule, severity, message, remedy."""
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
