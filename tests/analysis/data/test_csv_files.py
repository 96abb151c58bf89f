"""Many small CSV files are read at once, with the same result as pandas."""

import math
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from analysis.data import csv_files as csvs
from analysis.data.csv_files import read_csvs

Row = make_dataclass("Row", [("epoch", "float"), ("rate", "float"), ("host", "str")])


def read(folder: Path, *contents: str | bytes) -> csvs.Loaded:
    paths = []
    for number, content in enumerate(contents):
        path = folder / str(number) / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    return read_csvs(paths, Row)


def test_broken_files_do_not_affect_valid_ones(tmp_path):
    good, broken = "epoch,rate,host\n0,0.1,n1\n1,1e-9,n2\n", "epoch,rate,host\n0,2.5,n1\n1,not a number,n1\n"
    loaded = read(tmp_path, good, broken, "epoch,rate,host\n", good)
    assert set(loaded.problems) == {1}
    assert loaded.rows["file"].to_list() == [0, 0, 1, 1, 3, 3]
    assert loaded.rows["rate"].to_list() == pytest.approx([0.1, 1e-9, 2.5, math.nan, 0.1, 1e-9], nan_ok=True)


@pytest.mark.parametrize(
    ("content", "rates", "problem"),
    [
        (
            "epoch,rate,host\n0,1.5,a\n1,2.",
            [1.5],
            "metrics.csv: the last line is incomplete and was left out",
        ),
        ("epoch,rate,host\n0,1.5,a\n1\n", [1.5], "metrics.csv: line 3 has 1 values instead of 3"),
        ("epoch,rate,host\n0,fast,a\n", [math.nan], "metrics.csv: line 2: rate 'fast' is not a number"),
        ("epoch,rate\n0,1.5\n", [1.5], "metrics.csv: lacks the column host"),
        ("a;b;c\n", [], "metrics.csv: the header 'a;b;c' is that of another table"),
        ("", [], "metrics.csv: the file is empty"),
        (
            "epo",
            [],
            "metrics.csv: the last line is incomplete and was left out; the header '' is that of another table",
        ),
        (b"\xff\xfe\x00epoch", [], None),
        ("rate,host,epoch\n1.5,a,0\n", [1.5], None),
        ("\ufeffepoch,rate,host\r\n0,1.5,a\r\n", [1.5], None),
        ('epoch,rate,host\n0,1.5,"n1,\nn2"\n', [1.5], None),
        ("epoch,rate,host\n", [], None),
    ],
)
def test_a_file_in_another_form_is_parsed_row_by_row(tmp_path, content, rates, problem):
    loaded = read(tmp_path, content)
    assert loaded.rows["rate"].to_list() == pytest.approx(rates, nan_ok=True)
    if problem is not None:
        assert loaded.problems == {0: problem}
    assert list(loaded.rows.dtypes.astype(str)) == ["int64", "float64", "float64", "str"]
