"""results/index.html: all studies of a folder, from what their reports left."""

from __future__ import annotations

import os
import re
import shutil
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from analysis.report.index import index_context
from analysis.report.write import write_report
from bench.matrix.cell import Cell
from bench.study.layout import StudyFolder
from tests.analysis.studies import finished, merged, strong, weak

HOSTILE = "a\"><script>alert(1)</script> ' %2f #? é"


def rows(root: Path) -> dict[str, tuple[str, str, str]]:
    """Return the state, the problem and the recommended sizes of each study."""
    return {
        one["name"]: (one["state"], one["problem"], ", ".join(size for _, size in one["sizes"]))
        for one in index_context(root)["studies"]
    }


@pytest.fixture
def healthy(tmp_path: Path, nothing_drawn: None) -> Path:
    path = finished(tmp_path / "healthy", merged([*strong(512), *weak(32, sizes=(1, 2))]))
    write_report(path)
    return path


def test_each_report_writes_the_list_of_all_studies_newest_first(healthy: Path) -> None:
    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        return ("failed", "", "out-of-memory") if repeat == 1 else ("planned", "", None)

    finished(healthy.parent / "without-report", strong(sizes=(1,)), repeats=3, state=state)
    old = StudyFolder(healthy).plan_json.stat().st_mtime - 100
    os.utime(StudyFolder(healthy).plan_json, (old, old))
    (healthy.parent / "no-study").mkdir()
    write_report(healthy, results_folder=healthy.parent)
    assert rows(healthy.parent) == {
        "without-report": ("0 of 3 runs completed; 1 failed; 2 not started", "", ""),
        "healthy": ("18 of 18 runs completed", "", "8 ranks (8 × 1), 2 ranks (2 × 1)"),
    }
    page = (healthy.parent / "index.html").read_text()
    assert page.index("without-report") < page.index('href="healthy/report/index.html"')
    assert "<script" not in page
    (points,) = re.findall(r'<polyline points="([^"]+)"', page)
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights == sorted(heights)
    assert len(heights) == 4
    assert re.search(
        r"<title>Efficiency, Strong scaling, batch 512: 1.00 at 1 rank, 0.\d\d at 2 ranks,", page
    )


def test_a_damaged_study_is_a_row_that_says_so_and_a_later_run_makes_a_report_older(healthy: Path) -> None:
    for name in ("damaged-plan", "damaged-file", "changed"):
        shutil.copytree(healthy, healthy.parent / name)
    StudyFolder(healthy.parent / "damaged-plan").plan_json.write_text("{")
    (healthy.parent / "damaged-file/report/index.json").write_text('{"states": 3}')
    StudyFolder(healthy.parent / "changed").ledger.touch()
    later = (healthy.parent / "changed/report/index.json").stat().st_mtime + 100
    os.utime(StudyFolder(healthy.parent / "changed").ledger, (later, later))
    found = rows(healthy.parent)
    assert found["damaged-plan"][1].startswith("damaged: ")
    assert found["damaged-file"] == ("18 of 18 runs completed", "report/index.json is damaged.", "")
    assert found["changed"][1] == "The report is older than the last run."
    assert found["changed"][2] == found["healthy"][2] != ""


def test_a_private_report_does_not_stop_the_list(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    shutil.copytree(healthy, healthy.parent / "private")
    is_file = Path.is_file
    monkeypatch.setattr(
        Path, "is_file", lambda own: (refuse if "private/report" in str(own) else is_file)(own)
    )
    found = rows(healthy.parent)
    assert found["private"][1] == "not readable: Permission denied"
    assert found["healthy"][1] == ""


def test_names_of_folders_stay_texts_and_links_lead_to_them(healthy: Path) -> None:
    (healthy.parent / HOSTILE.replace("/", "")).mkdir()
    hostile = healthy.rename(healthy.parent / HOSTILE.replace("/", "") / HOSTILE.replace("/", ""))
    write_report(hostile, results_folder=hostile.parent)
    page = (hostile.parent / "index.html").read_text()
    assert "<script" not in page
    (link,) = re.findall(r'<a href="([^"]+)"', page)
    assert (hostile.parent / unquote(unescape(link))).is_file()


def test_a_page_of_somebody_else_and_a_read_only_study_stay_as_they_are(
    healthy: Path, tmp_path: Path
) -> None:
    index = healthy.parent / "index.html"
    index.write_text("<p>mine</p>")
    said: list[str] = []
    write_report(healthy, results_folder=healthy.parent, progress=said.append)
    assert index.read_text() == "<p>mine</p>"
    assert f"{index} was not written by bench and is not replaced" in said
    index.unlink()
    write_report(healthy, results_folder=healthy.parent, output=tmp_path / "elsewhere")
    write_report(healthy, results_folder=tmp_path / "results")
    assert not index.exists()
