"""The serial fraction of a strong series and its trend, on the page."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.report.page import serial_fraction
from analysis.report.write import write_report
from analysis.stats.columns import ScalingRow
from bench.study.layout import StudyFolder
from tests.analysis import studies
from tests.analysis.points import frames_of_points


def strong(times: dict[int, float], *, repeats: int = 3) -> list[ScalingRow]:
    rows = [
        {"gpus": n, "time": time * (1 + 0.01 * (repeat - 1)), "global_batch": 64}
        for n, time in times.items()
        for repeat in range(repeats)
    ]
    return scaling_table(frames_of_points(pd.DataFrame(rows)))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (
            {n: 0.05 + 0.95 / n for n in (1, 2, 4, 8, 16)},
            "hardly changes: consistent with a fixed serial part",
        ),
        ({1: 1.0, 2: 0.52, 4: 0.31, 8: 0.25}, "grows with the size: additional ranks cause the loss"),
        ({1: 1.0, 2: 0.47, 4: 0.22}, "not above 0: the speedup is at least ideal"),
        ({1: 1.0, 2: 0.5, 4: 0.252}, "not shown by these intervals"),
        ({1: 1.0, 2: 0.6, 4: 0.3, 8: 0.15}, "falls with the size: the smallest sizes have a loss"),
    ],
)
def test_each_trend_of_the_serial_fraction_has_its_words(times, words):
    assert serial_fraction(strong(times))["trend"].startswith(words)
    few = serial_fraction(strong(times, repeats=2))
    assert few["trend"] == "not stated without intervals, which need 3 runs"


def test_the_values_have_their_intervals_and_sizes():
    facts = serial_fraction(strong({n: 0.05 + 0.95 / n for n in (1, 2, 4)}))
    assert facts["serial"] == "0.050 [0.026, 0.074] at 2 and 0.050 [0.041, 0.059] at 4 ranks"


def test_the_page_shows_the_serial_fraction_and_escapes_names(tmp_path, nothing_drawn):
    cells = studies.strong(512, (1, 2, 4, 8, 16), swept={"env.X": "<b onclick=alert(1)>"})
    path = studies.finished(tmp_path / "s", cells)
    text = write_report(path).page.read_text(encoding="utf-8")
    assert '<h2 id="serial">Serial fraction</h2>' in text
    assert "Per doubling" in text
    assert "<b onclick" not in text
    read = pd.read_csv(StudyFolder(path).report / "scaling.csv")
    assert read["incremental_efficiency"].notna().sum() == 4
    assert read["karp_flatt"].notna().sum() == 4
