"""A diagnosis in words, for people: what `bench doctor` prints without --json."""

from __future__ import annotations

import textwrap

from bench.doctor.model import Cause, Diagnosis

_WIDTH = 100
_EVIDENCE_LINES = 3

_HEADINGS = {
    "ok": "Nothing in it shows a failure.",
    "unknown": "Unknown: the job failed, and no known cause shows. The most telling lines:",
    "harmless": "Nothing in it shows a failure, only warnings of attempts that are repeated:",
}


def as_text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis, the first cause first, in lines of about 100 characters."""
    blocks = [_HEADINGS[diagnosis.verdict]] if diagnosis.verdict in _HEADINGS else []
    for place, cause in enumerate(diagnosis.causes):
        if place == 1:
            blocks.append("Also seen; look at the first cause first, these may follow from it:")
        blocks.append(_cause(cause))
    if diagnosis.telling_lines and diagnosis.causes:
        blocks.append("Other telling lines:")
    if diagnosis.telling_lines:
        blocks.append("\n".join(_line(line.path, line.line, line.text) for line in diagnosis.telling_lines))
    return "\n\n".join(blocks) + "\n"


def _cause(cause: Cause) -> str:
    return "\n".join(
        (
            f"{cause.cause}  {cause.path}:{cause.line}",
            _wrapped(cause.evidence, "    ", _EVIDENCE_LINES),
            _wrapped(f"Why: {cause.explanation}", "  "),
            _wrapped(f"Do:  {cause.remedy}", "  "),
        )
    )


def _line(path: str, line: int, text: str) -> str:
    return f"  {path}:{line}\n" + _wrapped(text, "    ", _EVIDENCE_LINES)


def _wrapped(text: str, indent: str, most: int | None = None) -> str:
    """Break text at about 100 characters; what is beyond ``most`` lines is cut."""
    width = _WIDTH - len(indent)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, max_lines=most, placeholder=" …")
    return "\n".join(indent + line for line in lines)
