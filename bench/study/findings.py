"""Recorded findings about runs of a study: what disturbed them, and the values that their commands report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddp_scaling_bench.finding import Recorded, Severity
from ddp_scaling_bench.units import count, join_names, names, short_name, short_percent

#: Number of names in a list that are written in full.
_MOST = 10

# -- disturbances -----------------------------------------------------------------------


class Disturbance(Recorded):
    """The base of all disturbances of a run; the subject is the node.

    ``start`` and ``end`` enclose the disturbed time. Without values, a disturbance says only its kind.
    """

    start: str | None = None
    end: str | None = None

    def _with_place(self, text: str) -> str:
        on = f" on {names(self.subject)}" if self.subject else ""
        return f"{text}{on}" + (f" from {self.start} to {self.end}" if self.start and self.end else "")


class _OtherJobs(Disturbance):
    """``jobs`` are ids; ``more_jobs`` is the number of jobs that they leave out."""

    jobs: tuple[str, ...] = ()
    more_jobs: int = 0

    @property
    def _jobs(self) -> str:
        more = f" and {count(self.more_jobs, 'more job')}" if self.more_jobs else ""
        return f" (job {join_names([*map(short_name, self.jobs)], most=_MOST)}{more})" if self.jobs else ""


class StudyRun(_OtherJobs, kind="study-run"):
    """Another run of the study used the node at the same time."""

    def _message(self) -> str:
        return self._with_place(f"another run of the study{self._jobs}")


class ForeignJob(_OtherJobs, kind="foreign-job"):
    """A job that is not of the study used the node at the same time."""

    def _message(self) -> str:
        return self._with_place(f"a job that is not of the study{self._jobs}")


class ForeignCpu(Disturbance, kind="foreign-cpu"):
    """Processes outside of the job used the cores.

    ``share`` is their CPU time as a fraction of the time of the cores in use, and ``limit`` its limit.
    """

    share: float | None = None
    limit: float | None = None

    def _message(self) -> str:
        share = ""
        if self.share is not None:
            limit = f", limit {short_percent(self.limit)}" if self.limit is not None else ""
            share = f" ({short_percent(self.share)} of the time of the cores in use{limit})"
        return self._with_place(f"CPU time of foreign processes{share}")


class GpuSlowdown(Disturbance, kind="gpu-slowdown"):
    """A GPU's hardware or temperature lowered its clocks; ``slowdowns`` are NVML's names of the reasons."""

    slowdowns: tuple[str, ...] = ()

    def _message(self) -> str:
        reasons = join_names([*map(short_name, self.slowdowns)], most=_MOST)
        text = "a slowdown of the GPU by its hardware or temperature"
        return self._with_place(f"{text} ({reasons})" if reasons else text)


class LinkErrors(Disturbance, kind="link-errors"):
    """The link of the node had errors; ``errors`` is their number."""

    errors: int | float | None = None

    def _message(self) -> str:
        errors = "" if self.errors is None else f" ({self.errors:g})"
        return self._with_place(f"CRC or symbol errors of the link{errors}")


def by_reason(disturbances: Iterable[Disturbance]) -> list[Disturbance]:
    """Return one disturbance without values for each kind, with all its nodes."""
    nodes: dict[type[Disturbance], dict[str, None]] = {}
    for one in disturbances:
        nodes.setdefault(type(one), {}).update(dict.fromkeys(one.subject))
    return [kind(subject=tuple(hosts)) for kind, hosts in nodes.items()]


# -- values of a command ----------------------------------------------------------------


class AverageOfRun(Recorded, kind="average-of-run"):
    """A command reports one average of the whole run; several ranks can report their own.

    ``reported`` is the number of values in ``source``, from ``lowest`` to ``highest``.
    """

    heading = "Averages with start-up"
    remedy = "Train longer, or let the command report values of single steps."
    severity: Severity = "info"

    quantity: str
    source: str
    reported: int
    lowest: float
    highest: float

    def _message(self) -> str:
        average = f"{self.quantity} is one average of the whole run, including start-up"
        if self.reported < 2:
            return average
        return f"{average}; {self.source} contains it {self.reported} times, and the lowest rate counts"


class ValuesLeftOut(Recorded, kind="values-left-out"):
    """The values of a quantity cannot be assigned to the rows of a run.

    Attributes:
        matched: number of the values in ``source``.
        lines: number of lines that contain them, if a line contains several.
        other: the quantity of the rows, with its number of values.
        rows, rows_without: number of rows, and of those in which the quantity is empty.
        lowest, highest: the values differ, but the run has only one average.
    """

    heading = "Values left out"
    verified = True

    quantity: str
    source: str
    matched: int
    lines: int | None = None
    other: str = ""
    other_matched: int = 0
    rows: int = 0
    rows_without: int = 0
    lowest: float | None = None
    highest: float | None = None

    def _message(self) -> str:
        occurs = f"{self.quantity} occurs {count(self.matched, 'time')} in {self.source}"
        if self.other:
            lines = f" (in {count(self.lines, 'line')})" if self.lines else ""
            return (
                f"{occurs}{lines} and {self.other} {count(self.other_matched, 'time')}, so it is empty in "
                f"{self.rows_without} of {count(self.rows, 'row')}. Let {self.quantity} occur once with each "
                f"{self.other}, in the same line or record"
            )
        none = f"so the run has no {self.quantity}"
        if self.lowest is None or self.highest is None:
            return f"{occurs}, {none}. Check its pattern or column"
        differ = f"with different values ({self.lowest:.6g} to {self.highest:.6g})"
        return f"{occurs} {differ}, {none}. Let one rank report it, once"


class RepeatedMatches(Recorded, kind="repeated-matches"):
    """The pattern of a quantity matches several times in a line; ``lines`` is the number of all lines."""

    heading = "Pattern matches several times"
    verified = True

    quantity: str
    source: str
    matched: int
    lines: int

    def _message(self) -> str:
        return (
            f"{self.quantity} occurs {count(self.matched, 'time')} in {self.source} (in "
            f"{count(self.lines, 'line')}); each counts as a value of its own. Let its pattern match once in "
            "a line"
        )


@dataclass(frozen=True)
class LineForm:
    """A form of lines, with ``#`` for numbers: their count, and the number of the first line."""

    form: str
    count: int
    first: int


class LineForms(Recorded, kind="line-forms"):
    """The forms of the lines of ``source`` that a quantity's pattern matches and that count.

    ``first`` and ``last`` are the first and the last value. ``rank`` is the only rank that counts.
    """

    heading = "Lines that count"
    verified = True
    severity: Severity = "info"

    quantity: str
    source: str
    forms: tuple[LineForm, ...]
    first: str
    last: str
    rank: int | None = None

    @property
    def identity(self) -> str:
        """The forms, without counts: runs of other lengths have the same."""
        return f"{self.kind} {self.severity} {self.quantity} {sorted(one.form for one in self.forms)}"

    def _message(self) -> str:
        shown = "; ".join(f"{one.count} x {one.form!r} from line {one.first} on" for one in self.forms)
        of_rank = f", rank {self.rank}" if self.rank is not None else ""
        where = f"{self.source}{of_rank} (first {self.first}, last {self.last})"
        return f"{self.quantity} is read from {where}: {shown}"

    def _remedy(self) -> str:
        return "Let the pattern match one form." if self.severity == "warning" else ""


class LinesLeftOut(Recorded, kind="lines-left-out"):
    """Matched lines that do not count, for a reason such as ``evaluation`` or ``zero``."""

    heading = "Lines that do not count"
    verified = True

    quantity: str
    source: str
    why: str
    lines: tuple[int, ...]
    example: str = ""

    @property
    def identity(self) -> str:
        """The quantity and the reason, without lines."""
        return f"{self.kind} {self.quantity} {self.why}"

    def _message(self) -> str:
        where = f"{count(len(self.lines), 'line')} of {self.source} (from line {self.lines[0]})"
        example = f", such as {self.example!r}" if self.example else ""
        do = "does" if len(self.lines) == 1 else "do"
        return f"{self.quantity}: {where} {do} not count: {self.why}{example}"
