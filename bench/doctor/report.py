"""Print a diagnosis as text."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_scaling_bench.text import one_line
from ddp_scaling_bench.units import cut, percent

from .catalogue import FAILURE, SLOW, WARNING
from .diagnosis import Cause, Diagnosis

#: The most characters of an excerpt of a log, and of the names of runs.
_LONGEST_EXCERPT, _LONGEST_LIST = 280, 600
_UNKNOWN = "No known cause. This does not show that the job succeeded."
#: What to do about a failed run of which no line is known.
_SEARCH = (
    "Change what the reason says. If it is not clear, read all of job.err and job.out in the run's folder. "
    "A program that says nothing may exit without a message (sys.exit(3)): call its command by hand."
)


def as_text(diagnosis: Diagnosis, *, completed: bool = False, failed: bool = False) -> str:
    """Format a diagnosis as text, starting with the first cause; a terminal breaks its long lines.

    If it is known that the run ``completed``, its logs need no cause of a failure. If it ``failed``, the
    first of the last lines is the reason in the ledger.
    """
    failures = [cause for cause in diagnosis.causes if cause.severity == FAILURE]
    blocks = _failures(failures)
    if not failures and not completed:
        blocks = _unknown(diagnosis, failed=failed)
    return "\n\n".join(blocks + _others(diagnosis.causes, completed=completed)) + "\n"


def study_as_text(
    failures: Sequence[tuple[Diagnosis, Sequence[str]]], others: Sequence[Cause], *, completed: bool
) -> str:
    """Format the different failures of a study, each with its runs, and the causes that ended no run."""
    blocks = []
    for found, runs in failures:
        first = found.first_failure
        *above, last = [_cause(first)] if first else _unknown(found, failed=True)
        named = "  " + cut(f"Runs: {', '.join(runs)}", limit=_LONGEST_LIST)
        blocks += [*above, f"{last}\n{named}"]
    return "\n\n".join(blocks + _others(others, completed=completed)) + "\n"


def _unknown(diagnosis: Diagnosis, *, failed: bool) -> list[str]:
    lines = [f"  {one_line(at.path)}:{at.line}\n{_evidence(at.text)}" for at in diagnosis.last_lines]
    if failed:
        heading = "No known cause. The reason of the end, and the last lines:"
        return [heading, *lines, *[f"  Do:  {_SEARCH}"] * diagnosis.has_folder]
    what = "The last lines, errors if there are any:" if lines else "The logs are empty."
    return [f"{_UNKNOWN} {what}", *lines]


def _others(causes: Sequence[Cause], *, completed: bool) -> list[str]:
    slow = [_cause(cause) for cause in causes if cause.severity == SLOW]
    warned = [_cause(cause) for cause in causes if cause.severity == WARNING]
    blocks = ["Changes what the run measures:", *warned] if warned else []
    blocks += ["Makes the job slow, but does not end it:", *slow] if slow else []
    return blocks + ["No cause of slow steps is known."] * (completed and not slow)


def _failures(causes: list[Cause]) -> list[str]:
    further = ["Further causes, which may be consequences of the first:"] if len(causes) > 1 else []
    blocks = [_cause(cause) for cause in causes]
    return blocks[:1] + further + blocks[1:]


def _cause(cause: Cause) -> str:
    share = f"{percent(cause.share)} of the step  " if cause.share is not None else ""
    path = one_line(cause.path)
    place = path if cause.line is None else f"{path}:{cause.line}"
    why, remedy = (
        f"  {name} {' '.join(text.split())}"
        for name, text in (("Why:", cause.explanation), ("Do: ", cause.remedy))
    )
    lines = (f"{cause.cause}  {share}{place}", _evidence(cause.evidence), why, remedy)
    return "\n".join(filter(None, lines))


def _evidence(text: str) -> str:
    return f"    {cut(' '.join(text.split()), limit=_LONGEST_EXCERPT)}"
