"""The page's section "Why": for each series, the causes of the loss with evidence and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.causes.cells import CauseRow, CellDivision
from analysis.causes.divide import WHOLE
from analysis.causes.evidence import fact
from analysis.data.names import ranks, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.waterfall import MAX_SERIES, waterfall_figure
from analysis.report.results import Results
from analysis.report.words import WORDS
from analysis.stats.columns import ScalingRow, by_series
from analysis.text import one_line
from bench.facts import Fact
from bench.units import MISSING, known, percent
from bench.words import about, remedy, sentences, words

#: Time outside all timers, loss without a cause, and parts of the step are not listed below this share.
_SMALLEST_REST = 0.005
#: Parts of the step that are lost time at any size.
_LOST = ("data", "other", "transfer", "wait")


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
            table.append((WORDS["headings"]["links"], MISSING, words(links), remedy(links)))
    return WhySection(f"{label}, {ranks(row)}", figures, table)


def _links(row: ScalingRow, ring: float) -> Fact:
    if not known(ring):
        return fact("links-unknown")
    several = None if row.gpus_per_node == "1" else row.gpus_per_node
    return fact("link-rate", gbit_s=ring * 8e-9, ranks_per_node=several)


def loss_table(row: ScalingRow, results: Results) -> list[tuple[str, str, str, str]]:
    """Return title, share, evidence and remedy of the whole loss of a size and of each of its causes.

    The table has no row of the whole loss if the values are not valid.
    """
    own = [one for one in results.causes if (one.series, one.cell_id) == (row.series, row.cell_id)]
    if own and not results.error_of(row):
        own.insert(0, _whole_loss(row, results.divisions))
    return [
        (
            about(one.causes, "title"),
            share_text(one),
            one_line(sentences(one.evidence), limit=600),
            about(one.causes, "remedy"),
        )
        for one in own
        if not one.is_rest or not abs(one.share) < _SMALLEST_REST
    ]


def _whole_loss(row: ScalingRow, divisions: Mapping[int, CellDivision]) -> CauseRow:
    """Return the loss of a size, compared with that of its baseline."""
    division = divisions[row.place]
    relative = row.base and known(row.efficiency) and not row.is_base
    base = divisions.get(row.base.place) if row.base and relative else None
    evidence = []
    if base and WHOLE not in division.ideal:
        evidence.append(fact("base-loss", share=base.loss))
    if row.efficiency_low <= 1 <= row.efficiency_high:
        evidence.append(fact("loss-may-be-0"))
    here, there = division.parts, base.parts if base else {}
    parts = [
        {"part": part, "share": here[part], "base_share": there[part]}
        for part in _LOST
        if part in here and part in there and max(here[part], there[part]) >= _SMALLEST_REST
    ]
    if parts:
        evidence.append(fact("whole-parts", parts=parts))
    return CauseRow("loss", division.loss, evidence=tuple(evidence))


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
