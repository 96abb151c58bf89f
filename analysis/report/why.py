"""The page's section "Why": for a size of each series, the causes of its loss with evidence and remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from analysis.causes.cells import LOSS, CauseRow
from analysis.causes.divide import WHOLE
from analysis.data.columns import ScalingRow
from analysis.data.names import ranks
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.waterfall import explained_sizes
from analysis.report.results import Results
from analysis.text import one_line
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import MISSING, clauses, known, percent, short_percent

#: A loss without a cause is not listed below this share.
_SMALLEST_REST = 0.005


class WhySection(NamedTuple):
    """The causes of the loss of one size of a series.

    Attributes:
        heading: the series and the size.
        figure: the waterfall, if the values are valid.
        rows: title, share, evidence and remedy of the whole loss and of its causes.
    """

    heading: str
    figure: Drawing | None
    rows: list[tuple[str, str, str, str]]


def why_sections(results: Results, drawings: Iterable[Drawing]) -> list[WhySection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order."""
    figures = {drawing.name: drawing for drawing in drawings}
    return [
        WhySection(
            f"{results.titles.get(row.series, row.series)}, {ranks(row)}",
            figures.get(f"why-{place}"),
            _loss_table(row, results),
        )
        for place, row in enumerate(explained_sizes(results), 1)
    ]


def _loss_table(row: ScalingRow, results: Results) -> list[tuple[str, str, str, str]]:
    """Return the rows of a section; there is no row of the whole loss if the values are not valid."""
    own = [one for one in results.causes if (one.series, one.cell_id) == (row.series, row.cell_id)]
    rows = [
        (one.title, share_text(one), one_line(messages(one.evidence), limit=600), one.remedy)
        for one in own
        if not one.is_rest or not abs(one.share) < _SMALLEST_REST
    ]
    if own and not results.error_of(row):
        whole = CauseRow(LOSS, results.divisions[row.place].loss)
        rows.insert(0, (whole.title, share_text(whole), _compared(row, results), whole.remedy))
    return rows


def _compared(row: ScalingRow, results: Results) -> str:
    """Compare the whole loss of a size with that of its baseline, and with 0."""
    base = results.divisions.get(row.base.place) if row.base and not row.is_base else None
    texts = []
    if base and WHOLE not in results.divisions[row.place].parts:
        texts.append(f"{short_percent(base.loss)} at the baseline")
    if row.efficiency_low <= 1 <= row.efficiency_high:
        texts.append("not certain: the interval of the efficiency contains 1")
    return clauses(texts)


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
