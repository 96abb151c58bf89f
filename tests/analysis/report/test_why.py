"""The section "Why" of the page: waterfall and causes with evidence and remedy."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from analysis.causes.cells import CauseRow, CellDivision
from analysis.report.figures.all_figures import all_names
from analysis.report.figures.waterfall import waterfall_figure
from analysis.report.write import write_report
from tests.analysis.causes.planted import plant
from tests.analysis.figures import texts


@pytest.mark.usefixtures("nothing_drawn")
def test_the_section_names_the_cause_with_its_share_evidence_and_remedy(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", {"data": 0.025}, noise=0.0)
    page = write_report(path).page.read_text(encoding="utf-8")
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", page.partition('id="why"')[2])).split())
    assert (
        "whole loss 20 % 0 % at the baseline; whole parts of the step: data loading 20 % (0 % at the baseline)"
        in text
    )
    assert (
        "data loading 20 % [20 %, 20 %] loading data takes 25.0 ms per step (20 %); present in 3 of 3 runs"
        in text
    )
    assert "(values of n4x1-gloo-srun-b16-r1) Use more workers" in text
    links = (
        "links between nodes – not measured, because the training has no all-reduce sweep `bench preflight`"
    )
    assert links in text
    assert "From the ideal to the measured step, 4 ranks" in text
    causes = pd.read_csv(path / "report" / "causes.csv")
    cell = causes[causes["cell_id"] == "n4x1-gloo-srun-b16"]
    assert cell["cause"].to_list() == ["data-loading", "other", "not-explained"]
    assert cell["share"].sum() == pytest.approx(0.2, abs=1e-6)
    figures = {file.stem for file in (path / "report" / "figures").iterdir()}
    assert {"why-1"} <= figures <= set(all_names())


def test_the_bars_of_the_waterfall_lead_from_the_ideal_to_the_measured_step() -> None:
    shares = [("data-loading", 0.3), ("not-explained", -0.05), ("other", 0.001)]
    rows = [CauseRow(name, share, share, share) for name, share in shares]
    row: Any = SimpleNamespace(cell_id="c", step_time_sec=0.1, gpus=4)
    drawing = waterfall_figure(CellDivision(rows, {}, {}), row, name="why-1", label="weak")
    names = ["ideal step", "data loading", "not explained", "measured step"]
    assert [text for text in texts(drawing) if text in names] == names
    values = ["74.9 ms, 75 %", "30.0 ms, 30 %", "-5 %", "100 ms, 100 %"]
    assert [text for text in texts(drawing) if text.endswith("%")] == values
