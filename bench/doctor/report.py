"""Print a diagnosis as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from ddp_scaling_bench.text import one_line
from ddp_scaling_bench.units import percent

from .catalogue import FAILURE, SLOW, WARNING
from .diagnosis import Cause, Diagnosis

_WIDTH = 100
_UNKNOWN = "No known cause. This does not show that the job succeeded."


def as_text(
    diagnosis: Diagnosis,
    *,
    completed: bool = False,
    runs: Mapping[str | None, Sequence[str]] | None = None,
) -> str:
    """Format a diagnosis as text in lines of about 100 characters, starting with the first cause.

    If it is known that the run ``completed``, its logs need no cause of a failure. For a study, ``runs`` are
    the failed runs by their first cause, or by None if it is not known.
    """
    failures = [cause for cause in diagnosis.causes if cause.severity == FAILURE]
    slow = [cause for cause in diagnosis.causes if cause.severity == SLOW]
    warned = [cause for cause in diagnosis.causes if cause.severity == WARNING]
    blocks = _failures(failures) if runs is None else [_with_runs(one, runs) for one in failures]
    if failures and runs and runs.get(None):
        unknown = f"No known cause in the logs of {', '.join(runs[None])}: see `bench doctor RUN`."
        blocks.append(_wrapped(unknown, ""))
    if not failures and not completed:
        blocks.append(
            _UNKNOWN + (" The last lines, errors if there are any:" if diagnosis.last_lines else "")
        )
        blocks += [f"  {one_line(at.path)}:{at.line}\n{_evidence(at.text)}" for at in diagnosis.last_lines]
    if warned:
        blocks += ["Changes what the run measures:", *map(_cause, warned)]
    if slow:
        blocks += ["Makes the job slow, but does not end it:", *map(_cause, slow)]
    if completed and not slow:
        blocks.append("No cause of slow steps is known.")
    return "\n\n".join(blocks) + "\n"


def _failures(causes: list[Cause]) -> list[str]:
    further = ["Further causes, which may be consequences of the first:"] if len(causes) > 1 else []
    blocks = [_cause(cause) for cause in causes]
    return blocks[:1] + further + blocks[1:]


def _with_runs(cause: Cause, runs: Mapping[str | None, Sequence[str]]) -> str:
    found = _wrapped(f"Runs: {', '.join(runs.get(cause.cause, ()))}", "  ", max_lines=6)
    return f"{_cause(cause)}\n{found}"


def _cause(cause: Cause) -> str:
    share = f"{percent(cause.share)} of the step  " if cause.share is not None else ""
    path = one_line(cause.path)
    place = path if cause.line is None else f"{path}:{cause.line}"
    why, remedy = _wrapped(f"Why: {cause.explanation}", "  "), _wrapped(f"Do:  {cause.remedy}", "  ")
    lines = (f"{cause.cause}  {share}{place}", _evidence(cause.evidence), why, remedy)
    return "\n".join(filter(None, lines))


def _evidence(text: str) -> str:
    return _wrapped(text, "    ", max_lines=3)


def _wrapped(text: str, indent: str, max_lines: int | None = None) -> str:
    """Wrap text at about 100 characters and shorten it to ``max_lines``."""
    width = _WIDTH - len(indent)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, max_lines=max_lines, placeholder=" …")
    return "\n".join(indent + line for line in lines)
