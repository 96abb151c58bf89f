"""`bench list`: the studies of a results folder, the newest first."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.study.layout import StudyFolder
from tests.analysis.studies import finished, strong
from tests.commands.command_line import bench


def test_studies_are_listed_with_their_states_the_newest_first(tmp_path: Path) -> None:
    failed, planned = ("failed", "", "out-of-memory"), ("planned", "", None)
    root = tmp_path / "results"
    whole = finished(root / "a study", strong(sizes=(1, 2)))
    (whole / "report").mkdir()
    (whole / "report/index.html").touch()
    ends = {"state": lambda cell, repeat: failed if repeat == 1 else planned}
    finished(root / "fails", strong(sizes=(1,)), **ends)
    finished(root / "damaged", strong(sizes=(1,)))
    StudyFolder(root / "damaged").plan_json.write_text("{")
    for age_s, name in enumerate(("fails", "a study", "damaged")):
        plan = StudyFolder(root / name).plan_json
        os.utime(plan, (1e9 - age_s, 1e9 - age_s))
    done = bench("list", cwd=tmp_path)
    first, second, third = done.stdout.splitlines()[-3:]
    assert (done.returncode, done.stderr) == (0, "")
    assert first.split() == "fails 2001-09-09 0 of 3 runs completed; 1 failed; 2 not started".split()
    assert (
        second.split() == "a study 2001-09-09 6 of 6 runs completed results/a study/report/index.html".split()
    )
    assert third.startswith("damaged")
    listed = json.loads(bench("list", "--json", cwd=tmp_path).stdout)["studies"]
    assert [one["study"] for one in listed] == ["fails", "a study", "damaged"]
    assert listed[0]["states"] == {"failed": 1, "planned": 2}
    assert listed[1] == {
        "study": "a study",
        "planned": "2001-09-09",
        "states": {"completed": 6},
        "problem": None,
        "report": "results/a study/report/index.html",
    }
    assert listed[2]["problem"]


def test_a_folder_without_studies_lists_none(tmp_path: Path) -> None:
    assert json.loads(bench("list", "--json", cwd=tmp_path).stdout) == {"studies": []}
