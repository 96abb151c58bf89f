"""The scaling table as CSV, Markdown and LaTeX: complete, and safe whatever it holds."""

import io
import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import PUBLISHED, ScalingRow, columns_of
from analysis.data.load import load_study
from analysis.report.tables import (
    cell_columns,
    cell_rows,
    csv_table,
    latex,
    latex_table,
    markdown_table,
    page_columns,
    text_table,
)
from ddp_scaling_bench.units import MISSING, number, percent
from tests.analysis import studies

HOSTILE = "<script>alert(1)</script> | `x` $y$ \\input{/etc/passwd} 100% & #1 _a_ ^b^ ~c~ {d}\n[e]"


def hostile_table(path: Path) -> list[ScalingRow]:
    failed = {8: ("failed", HOSTILE, None)}
    return scaling_table(
        load_study(studies.finished(path / "s", state=lambda cell, _: failed.get(cell.world_size)))
    )


def test_csv_holds_the_promised_columns_and_empty_cells_for_what_was_not_measured(tmp_path: Path) -> None:
    table = hostile_table(tmp_path)
    text = csv_table(table)
    assert text.splitlines()[0] == ",".join(PUBLISHED)
    read = pd.read_csv(io.StringIO(text), dtype={"gpus_per_node": str}, keep_default_na=False)
    failed = read[read["gpus"] == 8].iloc[0]
    for name in PUBLISHED[12:26]:
        assert failed[name] == "", name
    assert failed["n"] == 0
    assert failed["state"] == "failed"
    again = pd.read_csv(io.StringIO(text))
    assert again["efficiency"].to_list() == pytest.approx(
        [row.efficiency for row in table], rel=1e-11, nan_ok=True
    )
    assert "nan" not in text


class OnGpus(studies.StudyBuilder):
    """A study whose runs on several ranks have readings of GPUs, and of a validation."""

    def epoch(self, cell: Any, number: int, factor: float) -> dict[str, float]:
        row = super().epoch(cell, number, factor)
        further = {"mfu": 0.25, "gpu_util_avg": 90, "energy_joules": 7.5 * self.steps, "val_loss": 2 - number}
        return row | further if cell.world_size > 1 else row


def test_mfu_utilisation_energy_and_validation_loss_of_the_cells_are_shown_on_request(tmp_path: Path) -> None:
    path = OnGpus(tmp_path / "s", studies.strong(sizes=(1, 2)), epochs=2).write()
    table = scaling_table(load_study(path))
    names = ["MFU", "GPU (%)", "Energy (J)", "Validation loss"]
    chosen = page_columns(table)
    columns = cell_columns(chosen)
    places = [place for place, column in enumerate(columns) if column["name"] in names]
    assert [columns[place]["level"] for place in places] == ["further"] * 4
    one, two = cell_rows(table, chosen)
    assert len(one) == len(columns)
    assert [one[place] for place in places] == [MISSING] * 4
    assert [two[place] for place in places] == ["0.250", "90.0", "7.500", "1.000"]
    assert page_columns(table[:1]).keys() & {"mfu", "gpu_util"} == set(), "no value in any row"


def test_markdown_has_one_line_per_row_and_escapes_what_would_be_markup(tmp_path: Path) -> None:
    table = hostile_table(tmp_path)
    text = markdown_table(text_table(table, {}), table)
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| Nodes | Ranks | Samples/s | Speedup | Efficiency | Runs |"
    assert rows[-1] == "| 8 | 8 | – | – | – | 0 |"
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [7] * 4
    assert re.search(r"(?<!\\)<script", text) is None
    assert r"\<script\>alert(1)\</script\>" in text
    assert "baseline N0: 1 rank on 1 node" in text
    assert "no run counted: 3 failed" in text


def test_latex_is_a_tabular_with_nothing_unescaped_and_a_long_table_runs_over_pages(tmp_path: Path) -> None:
    table = hostile_table(tmp_path)
    assert r"\endhead" in latex_table(text_table(table * 11, {})).partition(r"\begin{longtable}")[2]
    text = latex_table(text_table(table, {}))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    assert all(row.count("&") == 5 for row in body.strip().splitlines())
    assert r"\input" not in text
    assert latex(r"\&%$#_{}~^") == r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"
    assert latex("--nodes") == "-{}-nodes"
    assert latex("[a] 2 × 4 – µs ± ≥ é 漢") == r"{[}a{]} 2 $\times$ 4 -- $\mu$s $\pm$ $\ge$ é ?"


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_no_text_can_leave_its_latex_cell(text: str) -> None:
    escaped = latex(text)
    bare = re.sub(r"\\(text\w+|dots)\{\}|\\[&%$#_{}]|\$\\(times|mu|pm|ge)\$|\{[\[\]]\}|-\{\}", "", escaped)
    assert not set(bare) & set("\\&%$#_{}~^[]\n\r")


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_no_text_can_leave_its_markdown_cell(text: str) -> None:
    values = {
        name: text if kind is str else 0
        for name, kind in get_type_hints(ScalingRow).items()
        if name in columns_of(ScalingRow)
    }
    one, other = ScalingRow(**values), ScalingRow(**values | {"series": "other"})
    lines = markdown_table(text_table([one, other], {"other": text}), [one]).splitlines()
    bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines if line.startswith("|")]
    assert {*bars} == {6}
    assert re.search(r"(?<!\\)(?:\\\\)*<", "".join(lines)) is None


def test_numbers_have_four_digits_and_commas_from_ten_thousand() -> None:
    texts = {1234.5: "1234", 12345.6: "12,350", 9999.9: "10,000", 0.99999: "1.000", 0.012345: "0.01235"}
    texts |= {0.0: "0", -2.5: "-2.500", 1e-9: "1.000e-09", math.nan: "–", math.inf: "–"}
    assert {value: number(value) for value in texts} == texts
    assert (number(None), percent(-0.001)) == ("–", "0 %")
