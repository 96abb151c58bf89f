"""Print a diagnosis as text, and list all known causes in ``docs/doctor.md``.

``python -m bench.doctor.report docs/doctor.md`` updates the list in the page.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from .catalogue import FAILURE, SLOW, CauseInfo, causes
from .diagnosis import Cause, Diagnosis

BEGIN = "<!-- causes: written by python -m bench.doctor.report -->"
END = "<!-- end of causes -->"

_WIDTH = 100
_SUCCEEDED = "The logs show that the job succeeded."
_UNKNOWN = "The job failed for an unknown reason. The most informative lines:"
_UNDECIDED = "The logs do not show whether the job failed or succeeded."
_POSSIBLE = f"{_UNDECIDED} The program continued after these lines. If the job failed, the cause may be:"
_HARMLESS = "The logs show neither a failure nor success, only warnings about operations that are retried:"


def as_text(diagnosis: Diagnosis) -> str:
    """Format a diagnosis as text in lines of about 100 characters, starting with the first cause."""
    failures = [cause for cause in diagnosis.causes if cause.severity == FAILURE]
    slow = [cause for cause in diagnosis.causes if cause.severity == SLOW]
    blocks = _failures(failures)
    possible = diagnosis.verdict == "unknown" and not diagnosis.failed and bool(failures)
    if possible:
        blocks.insert(0, _POSSIBLE)
    if diagnosis.verdict == "harmless":
        blocks.insert(0, _HARMLESS)
    if diagnosis.verdict == "ok":
        blocks.append(_SUCCEEDED)
    if diagnosis.verdict == "unknown" and not possible:
        last = " The most informative lines:" if diagnosis.telling_lines else ""
        blocks.append(_UNKNOWN if diagnosis.failed else _UNDECIDED + last)
    if diagnosis.telling_lines and failures:
        blocks.append("Other informative lines:")
    if diagnosis.telling_lines:
        lines = diagnosis.telling_lines
        blocks.append("\n".join(f"  {at.path}:{at.line}\n{_evidence(at.text)}" for at in lines))
    if slow:
        blocks += ["Slow, but not a failure:", *map(_cause, slow)]
    return "\n\n".join(blocks) + "\n"


def _failures(causes: list[Cause]) -> list[str]:
    further = ["Further causes, which may be consequences of the first:"] if len(causes) > 1 else []
    blocks = [_cause(cause) for cause in causes]
    return blocks[:1] + further + blocks[1:]


def _cause(cause: Cause) -> str:
    share = f"{cause.share:.0%} of the step  " if cause.share is not None else ""
    place = cause.path if cause.line is None else f"{cause.path}:{cause.line}"
    heading = f"{cause.cause}  {share}{place}\n{_evidence(cause.evidence)}"
    why, remedy = _wrapped(f"Why: {cause.explanation}", "  "), _wrapped(f"Do:  {cause.remedy}", "  ")
    return f"{heading}\n{why}\n{remedy}"


def _evidence(text: str) -> str:
    return _wrapped(text, "    ", max_lines=3)


def _wrapped(text: str, indent: str, max_lines: int | None = None) -> str:
    """Wrap text at about 100 characters and shorten it to ``max_lines``."""
    width = _WIDTH - len(indent)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, max_lines=max_lines, placeholder=" …")
    return "\n".join(indent + line for line in lines)


def _section(info: CauseInfo) -> str:
    severity = ["", "Severity: slow."] if info.severity == SLOW else []
    explanation, remedy = _wrapped(info.explanation, ""), _wrapped(f"**Do:** {info.remedy}", "")
    lines = [f"### {info.name}", *severity, "", explanation, "", remedy]
    if info.example:
        lines += ["", "```text", *(line.rstrip() for line in info.example.splitlines()), "```"]
    return "\n".join(lines)


def updated_page(page: str) -> str:
    """Return a page with the list of causes between its two markers replaced."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    sections = "\n\n".join(_section(info) for info in causes())
    return f"{before}{BEGIN}\n\n{sections}\n\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(updated_page(target.read_text(encoding="utf-8")), encoding="utf-8")
