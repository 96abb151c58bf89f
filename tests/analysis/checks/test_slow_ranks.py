"""Late ranks and slow nodes: detection, sentences and sampling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.checks.slow_ranks import STRAGGLER_COLUMNS, late_nodes, late_nodes_of, stragglers
from analysis.data.load import load_study
from analysis.report.write import write_report
from analysis.stats import measured
from analysis.stats.measured import measure
from bench.study.layout import RANKS_COLUMNS
from tests.analysis.studies import finished, make_cell

STEP_S = 0.1


def ranks_frame(late: dict[int, float], *, ranks: int = 4, epochs: int = 3, run: str = "r1") -> pd.DataFrame:
    """Ranks of one run, two per host; ``late`` gives the extra seconds of backward by rank."""
    latest = max(late.values(), default=0.0)
    rows = []
    for epoch in range(1, epochs + 1):
        for rank in range(ranks):
            more = late.get(rank, 0.0)
            rows.append(
                {
                    "run_id": run,
                    "cell_id": "cell",
                    "epoch": epoch,
                    "rank": rank,
                    "local_rank": rank % 2,
                    "host": f"n{rank // 2 + 1}",
                    "step_time_sec": STEP_S + latest,
                    "data_load_time_sec": 0.01,
                    "forward_time_sec": 0.02,
                    "backward_time_sec": 0.05 + more,
                    "comm_exposed_time_sec": 0.01 + latest - more,
                    "comm_wait_time_sec": latest - more,
                    "optimizer_time_sec": 0.01,
                    "other_time_sec": 0.0,
                }
            )
    return pd.DataFrame(rows)


def test_a_late_rank_is_named_with_host_part_and_share():
    found = stragglers(ranks_frame({3: 0.04}))
    assert tuple(found.columns) == STRAGGLER_COLUMNS
    (row,) = found.to_dict("records")
    assert (row["run_id"], row["rank"], row["host"], row["part"]) == ("r1", 3, "n2", "backward")
    np.testing.assert_allclose([row["excess_sec"], row["share_of_step"]], [0.04, 0.04 / 0.14])
    assert late_nodes_of(found, ["cell"]).texts == [
        "rank 3 on n2 takes 40.0 ms per step longer than the others (29 % of the step, in backward),"
        " in 1 of 1 run of cell"
    ]


def test_a_whole_late_node_is_named():
    found = stragglers(ranks_frame({2: 0.04, 3: 0.04}))
    assert [(row["rank"], row["host"]) for row in found.to_dict("records")] == [(2, "n2"), (3, "n2")]
    assert late_nodes_of(found, ["cell"]).texts == [
        "both ranks on n2 take 40.0 ms per step longer than the others (29 % of the step, in backward),"
        " in 1 of 1 run of cell"
    ]


def test_a_node_is_named_once_however_many_of_its_ranks_and_cells_are_late():
    two = ranks_frame({2: 0.04, 3: 0.04})
    four = ranks_frame({2: 0.06}, ranks=8, run="r2").assign(cell_id="larger")
    four["host"] = [f"n{rank // 4 + 1}" for rank in four["rank"]]
    three = ranks_frame({4: 0.05, 5: 0.05, 6: 0.05}, ranks=8, run="r3").assign(cell_id="other")
    three["host"] = [f"n{rank // 4 + 1}" for rank in three["rank"]]
    found = stragglers(pd.concat([two, four, three]))
    assert late_nodes_of(found, ["cell", "larger", "other"]).texts == [
        "rank 2 on n1 takes 60.0 ms per step longer than the others (38 % of the step, in backward),"
        " in 1 of 1 run of larger",
        "3 of the 4 ranks on n2 take 50.0 ms per step longer than the others (33 % of the step, in backward),"
        " in 1 of 1 run of other, and likewise in 1 more cell",
    ]


def test_equal_ranks_and_small_differences_have_no_straggler():
    assert not len(stragglers(ranks_frame({})))
    assert not len(stragglers(ranks_frame({1: 0.004})))


def test_a_rank_that_was_late_in_one_epoch_only_is_no_straggler():
    frame = pd.concat([ranks_frame({1: 0.04}, epochs=1), ranks_frame({}).query("epoch > 1")])
    assert not len(stragglers(frame))


def test_a_node_is_late_in_more_than_half_of_the_runs():
    quiet, late = ranks_frame({}), {1: 0.04}
    one = pd.concat([quiet.assign(run_id="a"), quiet.assign(run_id="b"), ranks_frame(late, run="c")])
    assert late_nodes_of(stragglers(one), ["cell"] * 3).texts == []
    two = pd.concat([quiet.assign(run_id="a"), ranks_frame(late, run="b"), ranks_frame(late, run="c")])
    (words,) = late_nodes_of(stragglers(two), ["cell"] * 3).texts
    assert words.endswith("in 2 of 3 runs of cell")


def test_without_an_attribution_window_there_are_no_stragglers():
    frame = ranks_frame({1: 0.04}).assign(comm_exposed_time_sec=np.nan)
    assert not len(stragglers(frame))
    assert not len(stragglers(frame.head(0)))


def test_many_late_nodes_are_counted():
    late = dict.fromkeys(range(17, 32), 0.04)
    told = late_nodes_of(stragglers(ranks_frame(late, ranks=32)), ["cell"]).texts
    assert len(told) == 5
    assert told[-1] == "4 more nodes"


def test_the_page_names_stragglers_on_top(tmp_path):
    folder = finished(tmp_path / "study", [make_cell(1, batch=64), make_cell(4, batch=64, per_node=2)])
    study = load_study(folder)
    for cell_id, attempt in zip(study.runs["cell_id"], study.attempts, strict=True):
        rows = ranks_frame({3: 0.04} if "n2" in cell_id else {}).reindex(columns=list(RANKS_COLUMNS))
        rows.to_csv(Path(attempt, "ranks.csv"), index=False)
    study = load_study(folder)
    (words,) = late_nodes(study, measure(study)).texts
    assert words.startswith("rank 3 on n2 takes 40.0 ms per step longer than the others")
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<strong>Straggler nodes.</strong> Rank 3 on n2 takes 40.0 ms per step longer" in page
    assert "The others wait for these ranks; such waiting is not slow communication." in page


def test_of_a_large_study_the_first_repeats_of_every_cell_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MAX_RANKS_FILES", 5)
    ids = [f"{cell}{repeat}" for cell in "ab" for repeat in range(4)]
    runs = pd.DataFrame({"run_id": ids, "cell_id": [name[0] for name in ids], "measured": True})
    runs.loc[0, "measured"] = False
    assert measured.ranks_sample(runs)["run_id"].to_list() == ["a1", "a2", "a3", "b0", "b1"]
    assert len(measured.ranks_sample(runs.head(5))) == 4
