"""Findings of `bench lint`: mistakes in a script."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """The severity of a finding. Commands exit with code 1 only if an error is found.

    Slurm, torchrun or bash alone decide the effect of an error; the program or the site that of a warning.
    """

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Mistake:
    """A mistake at one line of a file.

    ``line`` counts from 1. ``message`` describes the effect at run time, and ``remedy`` the change
    that fixes the mistake.
    """

    path: str
    line: int
    rule: str
    severity: Severity
    message: str
    remedy: str

    def as_json(self) -> dict[str, object]:
        """Return the finding as a dictionary for the JSON output."""
        return dict(vars(self))

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}"
        return f"{place}: {self.severity}: {self.message} [{self.rule}]\n    {self.remedy}"


class Remark(NamedTuple):
    """The part of a finding that a rule yields; path, name and severity are added later."""

    line: int
    message: str
    remedy: str
