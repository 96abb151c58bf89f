"""The values that `bench` finds in real studies stay as they are: see README.md in this folder."""

from pathlib import Path

import pytest

from tests.commands.command_line import bench
from tests.freeze.compare import STUDIES, differences, unpack


@pytest.mark.parametrize("study", STUDIES)
def test_a_frozen_study_has_the_expected_values(study: str) -> None:
    assert list(differences(study)) == []


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("study", ["failed", "pack", "patterns"])
def test_plan_ledger_and_runs_are_all_that_the_views_need(tmp_path: Path, study: str) -> None:
    views = []
    for whole in (True, False):
        folder = tmp_path / f"{whole}"
        unpack(study, folder, whole=whole)
        said = [bench(word, study, cwd=folder, BENCH_RESULTS="").stdout for word in ("status", "verify")]
        assert bench("report", f"./{study}", cwd=folder).returncode == 0
        views.append([*said, (folder / study / "report/index.html").read_text(encoding="utf-8")])
        assert (folder / study / "matrix.yaml").exists() is whole
    assert views[0] == views[1]
