"""Findings of `bench lint`: mistakes in a script and the edits that fix them."""

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
class Finding:
    """A mistake at one line of a file.

    ``line`` counts from 1. ``message`` describes the effect at run time, and ``remedy`` the change
    that fixes the mistake. ``replacement`` is the corrected line, an empty string to delete the line, or
    None if the correction is unknown.
    """

    path: str
    line: int
    rule: str
    severity: Severity
    message: str
    remedy: str
    replacement: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return the finding as a dictionary for the JSON output, without ``replacement``."""
        return {name: value for name, value in vars(self).items() if name != "replacement"}

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}"
        return f"{place}: {self.severity}: {self.message} [{self.rule}]\n    {self.remedy}"


class Edit(NamedTuple):
    """A change of one line: ``old`` (the whole line if ``old`` is empty) becomes ``new``."""

    line: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Apply the edit to the text of its line, unless the line contains ``old`` several times."""
        if not self.old:
            return self.new
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else text


class Remark(NamedTuple):
    """The part of a finding that a rule yields; path, name and severity are added later."""

    line: int
    message: str
    remedy: str
    edit: Edit | None = None
