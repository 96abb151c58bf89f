"""The table of strategies: on the page, and of `bench compare --by strategy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.report.write import write_report
from bench.cli import app
from tests.analysis import studies
from tests.analysis.studies import Timing


@pytest.fixture
def study(tmp_path: Path) -> Path:
    cells = [
        cell for name in ("fsdp", "ddp") for cell in studies.weak(sizes=(1, 2), swept={"strategy": name})
    ]
    for cell in cells:
        cell.workload["strategy"] = cell.swept["strategy"]
    return studies.finished(tmp_path / "s", cells, repeats=3, noise=0.0, timing=Timing(comm_s=0.01))


def test_strategies_of_a_size_are_beside_each_other_and_compared_with_ddp(study):
    for metrics in study.glob("runs/n2x1*fsdp*/attempt-1/metrics.csv"):
        studies.scale_rate(metrics, 0.5)
    words = ["compare", str(study), "--by", "strategy"]  # the base is ddp, not the first value
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 1, "fsdp is slower on two ranks"
    rows = json.loads(done.stdout)["strategies"]
    assert [(row["gpus"], row["strategy"]) for row in rows] == [
        (gpus, name) for gpus in (1, 2) for name in ("ddp", "fsdp")
    ]
    assert [row["ratio"] for row in rows] == [None, pytest.approx(1), None, pytest.approx(0.5)]
    # Each strategy has its own baseline, so half the speed on two ranks is half the efficiency.
    assert rows[3]["efficiency"] == pytest.approx(rows[2]["efficiency"] / 2)
    assert rows[2]["exposed_sec"] > 0
    advise = ["advise", str(study), "--samples", "1000", "--no-queue", "--json"]
    assert json.loads(CliRunner().invoke(app, advise).stdout)["strategies"] == {"s": rows}
    write_report(study)
    page = (study / "report/index.html").read_text()
    section = page.partition('<section aria-labelledby="strategies">')[2].partition("</section>")[0]
    assert section.count("<tr>") == 5
    assert "0.500 [0.500, 0.500]" in section
    assert section.count("Exposed (ms)") == section.count("Exposed: end (ms)") == 1
    assert "0.500 [0.500, 0.500]" in CliRunner().invoke(app, words).stdout
