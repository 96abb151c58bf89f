"""Many small CSV files are read at once, with the same result as pandas."""

import math
from dataclasses import make_dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=40)
@given(
    tables=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.floats(allow_infinity=False)), max_size=4), max_size=6
    ),
    broken=st.sets(st.integers(0, 5)),
)
def test_broken_files_do_not_affect_valid_ones(tmp_path_factory, tables, broken):
    contents = [
        "epoch,rate,host\n" + "".join(f"{epoch},{rate!r},n1\n" for epoch, rate in table) for table in tables
    ]
    for place in broken & set(range(len(contents))):
        contents[place] = contents[place] + "1,not a number,n1\n"
    loaded = read(tmp_path_factory.mktemp("csvs"), *contents)
    assert set(loaded.problems) == broken & set(range(len(contents)))
    for place, table in enumerate(tables):
        rows = loaded.rows[loaded.rows["file"] == place].iloc[: len(table)]
        assert rows["epoch"].to_list() == [float(epoch) for epoch, _ in table]
        for read_rate, (_, rate) in zip(rows["rate"], table, strict=True):
            assert read_rate == rate or (math.isnan(read_rate) and math.isnan(rate))


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
