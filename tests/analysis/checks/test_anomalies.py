"""Anomalies are described; noise is not reported."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.checks.anomalies import anomalies
from analysis.checks.scaling_table import scaling_table
from analysis.checks.slow_ranks import late_nodes, slow_nodes, slow_nodes_of
from analysis.data.load import load_study
from analysis.report.write import write_report
from analysis.stats.measured import Frames, measure
from bench.study.layout import StudyFolder
from tests.analysis import studies
from tests.analysis.closer_studies import write_ranks
from tests.analysis.points import frames_of_points


def points(rates: dict[int, list[float]], *, batch: int = 64) -> Frames:
    """Return a strong series with the given throughputs by size."""
    rows = [{"gpus": size, "throughput": rate} for size, own in rates.items() for rate in own]
    return frames_of_points(pd.DataFrame(rows).assign(global_batch=batch))


def headings_and_texts(frames: Frames, **options: Any) -> dict[str, str]:
    return {one.heading: one.words for one in anomalies(scaling_table(frames), frames, **options)}


def around(value: float, spread: float = 0.01) -> list[float]:
    return [value * (1 + step * spread) for step in (-1, 0, 1, 0.5)]


def test_a_normal_study_has_no_anomaly() -> None:
    assert headings_and_texts(points({1: around(100), 2: around(195), 4: around(370), 8: around(690)})) == {}


def test_an_efficiency_above_1_is_reported_if_its_interval_is_clear_of_1() -> None:
    found = headings_and_texts(points({1: around(100), 2: around(240)}))
    assert found["Efficiency above 1"] == (
        "1.200 at 2 ranks (the interval excludes 1). Either the baseline is slower than it should be (fewer "
        "threads, another node, a slow first run), or the smaller share of the work fits into a faster memory."
    )
    assert headings_and_texts(points({1: around(100, 0.2), 2: around(204, 0.2)})).keys() == {
        "Runs of a cell differ"
    }
    assert (
        "no interval: fewer than 3 runs"
        in headings_and_texts(points({1: [100], 2: [240]}))["Efficiency above 1"]
    )


def test_sizes_below_a_selected_baseline_are_no_anomaly() -> None:
    frames = points({1: around(100), 2: around(180), 4: around(300)})
    assert anomalies(scaling_table(frames, baseline="4"), frames) == []


def test_a_lower_efficiency_between_two_sizes_is_reported() -> None:
    found = headings_and_texts(points({1: around(100), 2: around(120), 4: around(370)}))
    assert found["Efficiency falls, then rises again"].startswith("1.000, 0.600, 0.925 at 1, 2, 4 ranks. ")


def test_runs_that_differ_widely_are_reported_with_their_cell() -> None:
    found = headings_and_texts(points({1: [100, 101, 99], 2: [150, 200, 250]}))
    assert found["Runs of a cell differ"].startswith("points-1x2-b32.0 by 26 % (standard deviation")


def test_an_outlier_in_the_baseline_is_reported() -> None:
    found = headings_and_texts(points({1: [100, 100.1, 99.9, 100.2, 99.8, 60], 2: around(190)}))
    assert found["Baseline with an outlier"] == (
        "points-1x1-b64.0: 1 run far from the baseline's other runs. This affects every efficiency relative "
        "to this baseline: run the baseline again."
    )


def timed(change_per_hour: float, *, seed: int = 3, noise: float = 0.005) -> Frames:
    """Return two cells whose runs alternate over ten hours, with a trend."""
    draw = np.random.default_rng(seed)
    hours = np.arange(20) / 2
    sizes = np.tile([1, 2], 10)
    rates = 100 * sizes * np.exp(change_per_hour * hours + draw.normal(0, noise, 20))
    frames = frames_of_points(pd.DataFrame({"gpus": sizes, "throughput": rates, "global_batch": 64}))
    start = pd.Timestamp("2026-01-02T03:00:00Z")
    frames.runs["started_at"] = start + pd.to_timedelta(hours, unit="h")
    return frames


def test_a_drift_over_the_study_is_reported_with_its_interval() -> None:
    words = headings_and_texts(timed(-0.01))["Drift"]
    assert words.startswith("The throughput of repeats of the same cell falls by ")
    assert "over the 9.5 h of the study (p = " in words
    low, high = (float(text.strip(" %")) for text in words.partition("[")[2].partition("]")[0].split(","))
    assert low < 100 * (1 - np.exp(-0.095)) < high
    assert "rises by" in headings_and_texts(timed(0.01))["Drift"]


def test_noise_is_rarely_called_a_drift() -> None:
    rows = scaling_table(timed(0.0))
    found = [anomalies(rows, timed(0.0, seed=seed, noise=0.02)) for seed in range(60)]
    assert sum(one.heading == "Drift" for study in found for one in study) <= 3


def rank_rows(slow: dict[str, float], *, runs: int = 4, noise: float = 0.01, seed: int = 2) -> pd.DataFrame:
    """Return rows of ranks.csv of runs on four hosts; ``slow`` gives a factor by host."""
    draw = np.random.default_rng(seed)
    rows = [
        {
            "run_id": f"r{run}",
            "host": host,
            "forward_time_sec": 0.1 * slow.get(host, 1.0) * float(np.exp(draw.normal(0, noise))),
            "backward_time_sec": 0.2 * slow.get(host, 1.0),
        }
        for run in range(runs)
        for host in ("n1", "n2", "n3", "n4")
        for _ in range(2)
    ]
    ranks = pd.DataFrame(rows)
    step_s = ranks["forward_time_sec"] + ranks["backward_time_sec"]
    return ranks.assign(step_time_sec=step_s + 0.1, comm_exposed_time_sec=0.1)


def test_a_node_that_is_slow_in_several_runs_is_named() -> None:
    found = headings_and_texts(
        points({1: around(100), 2: around(190)}), slow=slow_nodes_of(rank_rows({"n3": 1.2}))
    )
    assert found["Slow node"].startswith(
        "The useful time is longer than that of the other nodes of the same runs: n3 by 20 % in 4 runs. "
    )
    table = slow_nodes_of(rank_rows({"n3": 1.2, "n1": 1.1}))
    assert table["host"].to_list() == ["n3", "n1"]
    assert table["excess"].iloc[0] == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_equal_nodes_and_a_single_run_have_no_slow_node(runs: int) -> None:
    assert len(slow_nodes_of(rank_rows({}, runs=runs))) == 0
    assert len(slow_nodes_of(rank_rows({"n2": 1.5}, runs=1))) == 0


def test_a_host_alone_in_its_runs_is_not_slow() -> None:
    rows = rank_rows({})
    assert len(slow_nodes_of(rows[rows["host"] == "n1"])) == 0
    assert len(slow_nodes_of(rows.iloc[:0])) == 0


def test_the_page_names_a_slow_node_and_nothing_is_dropped(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(64, (1, 2, 4)))
    for file in StudyFolder(path).runs.glob("*/attempt-1/ranks.csv"):
        frame = pd.read_csv(file)
        frame.loc[frame["host"] == "n2", "forward_time_sec"] *= 1.5
        frame["step_time_sec"], frame["comm_exposed_time_sec"] = frame["forward_time_sec"], 0.0
        frame.to_csv(file, index=False)
    study = load_study(path)
    frames = measure(study)
    rows = scaling_table(frames)
    found = anomalies(rows, frames, slow=slow_nodes(study, frames))
    assert [one.heading for one in found] == ["Slow node"]
    assert "n2 by 50 % in 6 runs" in found[0].words
    assert (rows["n"] == 3).all()


def study_with_late_ranks(path: Path, extra_s: float) -> Path:
    """Write a study with 9 ms of useful time, and ``extra_s`` more on both ranks of n2."""
    study = studies.finished(path, [studies.make_cell(n, batch=64, per_node=2) for n in (1, 2, 4)])
    late = {2, 3}
    write_ranks(
        study, late=lambda run, rank: extra_s if rank in late else 0.0, host=lambda rank: f"n{rank // 2 + 1}"
    )
    return study


def test_a_node_that_is_late_and_slow_is_reported_once_with_both_facts(tmp_path: Path) -> None:
    path = study_with_late_ranks(tmp_path / "s", 0.005)
    page = unescape(write_report(path).read_text(encoding="utf-8"))
    assert (
        "<strong>Straggler nodes.</strong> Both ranks on n2 take 5.00 ms per step longer than the others (29 % of "
        "the step, in backward), in 3 of 3 runs of n2x2-gloo-srun-b16. The others wait for these "
        "ranks; such waiting is not slow communication. The useful time of a slow node is longer than that of the "
        "other nodes of the same runs: n2 by 50 % in 3 runs. Every step waits for such a node: exclude it (--exclude) or have it checked.</div>"
    ) in page
    assert "Slow node" not in page


def test_a_node_that_is_slow_but_not_late_is_an_anomaly(tmp_path: Path) -> None:
    study = load_study(study_with_late_ranks(tmp_path / "s", 0.0005))
    frames = measure(study)
    assert late_nodes(study, frames).texts == []
    assert headings_and_texts(frames, slow=slow_nodes(study, frames)) == {
        "Slow node": "The useful time is longer than that of the other nodes of the same runs: n2 by 5 % in 3 runs. "
        "Every step waits for such a node: exclude it (--exclude) or have it checked."
    }
