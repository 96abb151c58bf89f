"""Step times over the step number: few points, and no slow step is lost."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.data.load import Study, load_study
from analysis.report.why import SERIES_COLUMNS, choose_runs, step_series
from tests.analysis import studies

SLOW_S = 9.0


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    """Runs of 3 windows with 400 steps each; step 7 of the second window is slow."""
    path = studies.finished(tmp_path_factory.mktemp("a") / "s", studies.strong(sizes=(1, 2)), repeats=3)
    for file in path.glob("runs/*/attempt-1/steps.csv"):
        rows = [(epoch, step, 0.01 * epoch, 0) for epoch in (1, 2, 3) for step in range(1, 401)]
        frame = pd.DataFrame(rows, columns=["epoch", "step", "step_time_sec", "slowest_rank"])
        frame.loc[(frame["epoch"] == 2) & (frame["step"] == 7), ["step_time_sec", "slowest_rank"]] = SLOW_S, 1
        frame.to_csv(file, index=False)
    studies.seal(path)
    return load_study(path)


def test_a_run_has_few_points_and_keeps_its_slowest_step(study, monkeypatch):
    run_id = study.runs["run_id"].iloc[0]
    found = step_series(study, [run_id])
    assert tuple(found.columns) == SERIES_COLUMNS
    assert len(found) == 200
    assert list(found["number"]) == sorted(found["number"])
    slowest = found.loc[found["step_time_sec"].idxmax()].to_dict()
    assert slowest == {
        "run_id": run_id,
        "cell_id": study.runs["cell_id"].iloc[0],
        "number": 407,
        "epoch": 2,
        "step": 7,
        "step_time_sec": SLOW_S,
        "slowest_rank": 1,
    }
    assert len(step_series(study, list(study.runs["run_id"]))) == 200 * len(study.runs)
    assert list(step_series(study, [])) == list(SERIES_COLUMNS)
    monkeypatch.setattr("analysis.report.why.MAX_POINTS", 5000)
    assert len(step_series(study, [run_id])) == 1200  # every step


def test_runs_of_all_cells_are_chosen_first(study, monkeypatch):
    cells = dict(zip(study.runs["run_id"], study.runs["cell_id"], strict=True))
    assert choose_runs(study.runs) == list(study.runs["run_id"])
    monkeypatch.setattr("analysis.report.why.MAX_RUNS", 2)
    assert sorted(cells[run_id] for run_id in choose_runs(study.runs)) == sorted(set(cells.values()))
