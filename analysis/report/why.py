"""The page's section "Why": for each series, the causes of the loss with evidence and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.causes.cells import LOSS, CauseRow, CellDivision
from analysis.causes.divide import WHOLE
from analysis.data.columns import ScalingRow, by_series, part_title
from analysis.data.names import ranks, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.waterfall import MAX_SERIES, waterfall_figure
from analysis.report.results import Results
from analysis.report.words import WORDS
from analysis.text import one_line
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.units import MISSING, clauses, known, percent, short_percent

#: Time outside all timers, loss without a cause, and parts of the step are not listed below this share.
_SMALLEST_REST = 0.005
#: Parts of the step that are lost time at any size.
_LOST = ("data", "other", "transfer", "wait")


class LinksUnknown(Finding, kind="links-unknown"):
    """Links between nodes that were not measured."""

    message = "not measured, because the training has no all-reduce sweep"

    remedy = "`bench preflight` measures them."


class LinkRate(Finding, kind="link-rate"):
    """The fitted rate of the all-reduces; ``ranks_per_node`` is None for one rank per node."""

    gbit_s: float
    ranks_per_node: str | None

    def _message(self) -> str:
        rate = f"the fitted rate of the all-reduces is {self.gbit_s:#.3g} Gbit/s"
        if self.ranks_per_node is None:
            return f"{rate}, on the link of each node"
        return (
            f"{rate}: with {self.ranks_per_node} ranks per node, this is the rate of a node's link if the "
            "ring crosses each node once, otherwise an effective rate"
        )


class BaseLoss(Finding, kind="base-loss"):
    """The loss of the baseline, as a share of its step."""

    share: float

    def _message(self) -> str:
        return f"{short_percent(self.share)} at the baseline"


class LossMayBeZero(Finding, kind="loss-may-be-0"):
    """An interval of the efficiency that contains 1."""

    message = "not certain: the interval of the efficiency contains 1"


@dataclass(frozen=True, kw_only=True)
class PartOfStep:
    """The share of a part of the step, here and at the baseline."""

    part: str
    share: float
    base_share: float

    def __str__(self) -> str:
        share, base = short_percent(self.share), short_percent(self.base_share)
        return f"{part_title(self.part)} {share} ({base} at the baseline)"


class WholeParts(Finding, kind="whole-parts"):
    """The parts of the step that are lost time."""

    parts: tuple[PartOfStep, ...]

    def _message(self) -> str:
        return f"whole parts of the step: {clauses([*map(str, self.parts)])}"


@dataclass(frozen=True)
class WhySection:
    """The causes of the loss of one series at its largest size.

    Attributes:
        heading: the series and the size.
        figures: the waterfall, if the values are valid.
        rows: title, share, evidence and remedy of the whole loss, its causes and the links between nodes.
    """

    heading: str
    figures: list[Drawing]
    rows: list[tuple[str, str, str, str]]


def why_sections(results: Results) -> list[WhySection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order.

    A section describes the largest size with valid values; if a series has none, the largest size.
    """
    divided = [row for row in results.rows if row.place in results.divisions]
    own = by_series(divided)
    last = [
        max(reversed(own[series]), key=lambda row: (not results.error_of(row), row.gpus))
        for series in widest_series(divided, limit=MAX_SERIES)
    ]
    return [_section(row, results, place) for place, row in enumerate(last, 1)]


def _section(row: ScalingRow, results: Results, place: int) -> WhySection:
    label, figures = results.titles.get(row.series, row.series), []
    table = loss_table(row, results)
    if not results.error_of(row):
        figures = [waterfall_figure(results.divisions[row.place], row, name=f"why-{place}", label=label)]
        if row.nodes > 1:
            links = _links(row, results.evidence[row.cell_id][0].ring_bytes_per_s)
            table.append((WORDS["headings"]["links"], MISSING, links.message, links.remedy))
    return WhySection(f"{label}, {ranks(row)}", figures, table)


def _links(row: ScalingRow, ring: float) -> Finding:
    if not known(ring):
        return LinksUnknown()
    several = None if row.gpus_per_node == "1" else row.gpus_per_node
    return LinkRate(gbit_s=ring * 8e-9, ranks_per_node=several)


def loss_table(row: ScalingRow, results: Results) -> list[tuple[str, str, str, str]]:
    """Return title, share, evidence and remedy of the whole loss of a size and of each of its causes.

    The table has no row of the whole loss if the values are not valid.
    """
    own = [one for one in results.causes if (one.series, one.cell_id) == (row.series, row.cell_id)]
    if own and not results.error_of(row):
        own.insert(0, _whole_loss(row, results.divisions))
    return [
        (
            one.title,
            share_text(one),
            one_line(messages(one.evidence), limit=600),
            one.remedy,
        )
        for one in own
        if not one.is_rest or not abs(one.share) < _SMALLEST_REST
    ]


def _whole_loss(row: ScalingRow, divisions: Mapping[int, CellDivision]) -> CauseRow:
    """Return the loss of a size, compared with that of its baseline."""
    division = divisions[row.place]
    relative = row.base and known(row.efficiency) and not row.is_base
    base = divisions.get(row.base.place) if row.base and relative else None
    evidence: list[Finding] = []
    if base and WHOLE not in division.parts:
        evidence.append(BaseLoss(share=base.loss))
    if row.efficiency_low <= 1 <= row.efficiency_high:
        evidence.append(LossMayBeZero())
    here, there = division.parts, base.parts if base else {}
    parts = [
        PartOfStep(part=part, share=here[part], base_share=there[part])
        for part in _LOST
        if part in here and part in there and max(here[part], there[part]) >= _SMALLEST_REST
    ]
    if parts:
        evidence.append(WholeParts(parts=tuple(parts)))
    return CauseRow(LOSS, division.loss, evidence=tuple(evidence))


def share_text(row: CauseRow) -> str:
    """Return the share of a row with its interval."""
    if not known(row.share):
        return "share not certain" if row.timed else MISSING
    if not known(row.share_low):
        return percent(row.share)
    if row.share_high - row.share_low > 1:
        return f"{percent(row.share)} [share not certain]"
    doubtful = "; share not certain" if row.share_low <= 0 <= row.share_high else ""
    return f"{percent(row.share)} [{percent(row.share_low)}, {percent(row.share_high)}{doubtful}]"
