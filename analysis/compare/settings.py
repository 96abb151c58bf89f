"""For each swept setting: which value is faster, by how much, and how sure that is, at each size and overall.

The ratios are those of ``bench compare --by``. Over several cells, the ratio is the geometric mean of theirs:

    ln R = mean of ln R_i,  e = √(Σ e_i²) / k,  degrees of freedom (Σ e_i²)² / Σ (e_i⁴ / f_i)

(Welch and Satterthwaite; the cells are independent). Cells that are not valid are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.checks.assessment import CheckedStudy
from analysis.compare.comparison import Judgement, Verdict, judge, p_not_faster, ratios_of_runs
from analysis.compare.matching import match_within, varying_settings
from analysis.data.columns import grouped
from analysis.decide import probability_text
from analysis.stats.estimate import LogRatios
from analysis.text import plain
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, fraction, fractions, known

#: The columns of the page's table.
HEADINGS = ("Setting", "Ranks", "Throughput", "Verdict")


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A value of a setting compared with another one, at one size or (``gpus`` None) over all sizes.

    ``p`` is the probability that ``value`` is faster; NaN without three runs of each cell.
    """

    setting: str
    value: str
    other: str
    gpus: int | None
    cells: int
    judgement: Judgement
    p: float

    def __str__(self) -> str:
        where = "over all sizes" if self.gpus is None else f"on {count(self.gpus, 'rank')}"
        ratio = f"{self.setting} {self.value}: {self.ratio} the rate of {self.other} {where}"
        return ", ".join(filter(None, (ratio, probability_text(self.p))))

    @property
    def ratio(self) -> str:
        """The ratio of the throughputs with its interval."""
        ends = fractions(self.judgement.low, self.judgement.high)
        return f"{fraction(self.judgement.ratio)} {ends}".strip() + " ×"

    def texts(self) -> tuple[str, ...]:
        """Return the texts of the page's table, with the columns :data:`HEADINGS`."""
        ranks = "all sizes" if self.gpus is None else f"{self.gpus:,}"
        verdict = ", ".join(filter(None, (str(self.judgement.verdict), probability_text(self.p))))
        return f"{self.setting}: {self.value}", ranks, f"{self.ratio} of {self.other}", verdict

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs; unknown ones are None."""
        own = {name: getattr(self, name) for name in ("setting", "value", "other", "gpus", "cells")}
        numbers = {name: plain(getattr(self.judgement, name)) for name in ("ratio", "low", "high")}
        return {**own, **numbers, "p": plain(self.p), "verdict": str(self.judgement.verdict)}


def setting_rows(about: CheckedStudy) -> list[SettingRow]:
    """Return the verdicts on each setting that varies, those over all sizes before those of each size."""
    found: list[tuple[dict[str, Any], LogRatios]] = []
    for setting in varying_settings(about.study):
        found += _of_setting(setting, about)
    if not found:
        return []
    every = LogRatios(*map(np.concatenate, zip(*(ratios for _, ratios in found), strict=True)))
    judged = zip(found, judge(every), (1 - p_not_faster(every)).tolist(), strict=True)
    return [SettingRow(**own, judgement=judgement, p=p) for (own, _), judgement, p in judged]


def _of_setting(setting: str, about: CheckedStudy) -> Iterator[tuple[dict[str, Any], LogRatios]]:
    """Yield the fields of the rows of a setting, each with its ratio."""
    frames = about.frames
    try:
        matchings = match_within(about.study, key=setting)
    except BenchError:  # two cells agree in all other settings
        return
    ranks = {cell.cell_id: int(cell.gpus) for cell in frames.cells}
    for other, value, matching in matchings:
        pairs = [pair for pair in matching.pairs if all(_has_valid_rates(cell, about) for cell in pair)]
        if not pairs:
            continue
        names = {"setting": setting, "value": value, "other": other}
        by_size = grouped(pairs, lambda pair: ranks[pair[0]])
        sizes: list[tuple[int | None, Sequence[tuple[str, str]]]] = [*sorted(by_size.items())]
        for gpus, own in [(None, pairs), *sizes] if len(sizes) > 1 else sizes:
            yield {**names, "gpus": gpus, "cells": len(own)}, _combined(ratios_of_runs(frames, frames, own))


def _has_valid_rates(cell: str, about: CheckedStudy) -> bool:
    """Return whether a cell has throughputs that are valid; a table may have only ratios."""
    rates = [run.throughput_samples_per_sec for run in about.frames.measured_in(cell)]
    return bool(rates) and all(map(known, rates)) and cell not in about.invalid


def _combined(ratios: LogRatios) -> LogRatios:
    """Return the geometric mean of some ratios; its error is unknown if that of any of them is."""
    squares, k = ratios.error**2, len(ratios.error)
    total = float(squares.sum())
    freedom = float(ratios.freedom.min())
    if total > 0:
        freedom = total**2 / float((squares**2 / ratios.freedom).sum())
    return LogRatios(*(np.array([one]) for one in (ratios.centre.mean(), math.sqrt(total) / k, freedom)))


def sentences(rows: Sequence[SettingRow]) -> list[str]:
    """Return a sentence for each value that is faster or slower: over all sizes, and at the largest size.

    A value that is the same everywhere, or of which this is not known, is one sentence.
    """
    found = []
    for own in grouped(rows, lambda row: (row.setting, row.value, row.other)).values():
        overall, largest = own[0], max(own[1:] or own, key=lambda row: row.gpus or 0)
        texts = [str(overall)]
        if largest is not overall and largest.judgement.verdict in (Verdict.FASTER, Verdict.SLOWER):
            texts.append(f"{largest.ratio} on {count(largest.gpus or 0, 'rank')}")
        verdict = overall.judgement.verdict
        found.append("; ".join(texts) if known(overall.p) else f"{texts[0]}: no interval")
        if verdict in (Verdict.SAME, Verdict.UNKNOWN):
            found[-1] += f" ({verdict})"
    return found
