"""The scaling laws on the page: chosen or refused, in words, with parameters and a prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.checks.fabric import fabrics
from analysis.checks.scaling_table import scaling_table
from analysis.data.load import Study, load_study
from analysis.report.page import LawSection, law_sections, serial_fraction
from analysis.report.write import write_report
from analysis.stats.measured import Frames, measure
from bench.study.layout import StudyFolder
from tests.analysis import studies
from tests.analysis.points import frames_of_points


def views(frames: Frames) -> list[LawSection]:
    return law_sections(scaling_table(frames), frames, labels={}, invalid={})


def strong(times: dict[int, float], *, repeats: int = 3) -> Frames:
    rows = [
        {"gpus": n, "time": time * (1 + 0.01 * (repeat - 1)), "global_batch": 64}
        for n, time in times.items()
        for repeat in range(repeats)
    ]
    return frames_of_points(pd.DataFrame(rows))


def test_a_fitted_series_has_its_law_its_parameters_and_a_prediction() -> None:
    (view,) = views(strong({n: 0.05 + 0.95 / n for n in (1, 2, 4, 8, 16)}))
    facts = dict(view.facts)
    assert facts["Serial fraction (Karp and Flatt)"] == (
        "0.050 [0.026, 0.074] at 2, 0.050 [0.041, 0.059] at 4, 0.050 [0.046, 0.054] at 8 and "
        "0.050 [0.047, 0.053] at 16 ranks"
    )
    assert facts["Its trend"] == "hardly changes: consistent with a fixed serial part"
    assert facts["Chosen law"] == "Amdahl: lowest AICc over 15 runs"
    assert [row[0] for row in view.parameters] == ["T₁", "s"]
    assert view.parameters[1][1].startswith("0.050")
    (prediction,) = view.predictions
    assert prediction[0] == "32"
    assert float(prediction[2]) == pytest.approx(1 / (32 * (0.05 + 0.95 / 32)), abs=0.002)
    verdicts = {row[0]: row[4] for row in view.laws}
    assert verdicts["Amdahl"] == "chosen"
    (view,) = views(strong({1: 1.0, 2: 0.45, 4: 0.2, 8: 0.09, 16: 0.04}))
    verdicts = {row[0]: row[4] for row in view.laws}
    assert (verdicts["Power law"], verdicts["Amdahl"]) == ("chosen", "refused: s is at its bound of 0")


def test_a_short_series_has_the_refusal_and_the_trend() -> None:
    (view,) = views(strong({1: 1.0, 2: 0.52, 4: 0.31, 8: 0.25}))
    facts = dict(view.facts)
    assert facts["Its trend"].startswith("grows with the size: additional ranks cause the loss")
    assert facts["No law, because"] == (
        "4 sizes measured, and a law needs 5 or more: with fewer sizes, many laws fit equally well; measure 1 more size"
    )
    assert (view.parameters, view.laws, view.predictions) == ([], [], [])


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({1: 1.0, 2: 0.47, 4: 0.22}, "not above 0: the speedup is at least ideal"),
        ({1: 1.0, 2: 0.5, 4: 0.252}, "not shown by these intervals"),
        ({1: 1.0, 2: 0.6, 4: 0.3, 8: 0.15}, "falls with the size: the smallest sizes have a loss"),
    ],
)
def test_other_trends_of_the_serial_fraction_have_their_words(times: dict[int, float], words: str) -> None:
    assert serial_fraction(scaling_table(strong(times)))["trend"].startswith(words)
    few = serial_fraction(scaling_table(strong(times, repeats=2)))
    assert few["trend"] == "not stated without intervals, which need 3 runs"


def test_without_a_batch_there_are_no_seconds_but_an_efficiency() -> None:
    frames = strong({n: 0.05 + 0.95 / n for n in (1, 2, 4, 8, 16)})
    rows = [replace(row, step_time_sec=float("nan")) for row in scaling_table(frames)]
    (view,) = law_sections(rows, frames, labels={}, invalid={})
    assert [row[0] for row in view.parameters] == ["s"]
    assert view.predictions[0][1] == "–"
    assert float(view.predictions[0][2]) > 0


def test_a_baseline_without_ddp_has_no_prediction_and_the_reason(tmp_path: Path) -> None:
    alone = studies.make_cell(1, batch=512, swept={"ddp": False}, name="plain")
    alone.workload["strategy"] = "none"
    cells = [alone, *studies.strong(512, (1, 2, 4, 8, 16))]
    frames = measure(load_study(studies.finished(tmp_path / "s", cells)))
    (view,) = law_sections(scaling_table(frames, baseline="no-ddp"), frames, labels={}, invalid={})
    assert view.predictions == []
    why = "the baseline is 1x1 (1 rank) without DDP: choose one with DDP (--baseline)"
    assert view.facts[-1] == ("No prediction, because", why)
    (view,) = law_sections(scaling_table(frames, baseline="2"), frames, labels={}, invalid={})
    assert [row[0] for row in view.predictions] == ["32"]


def with_sweep(path: Path, **group: int) -> Study:
    """Give every run over ranks a probes.json whose times follow a ring of known constants."""
    study = load_study(path)
    for attempt, cell in zip(study.attempts, study.runs["cell_id"], strict=True):
        ranks = int(study.cells.set_index("cell_id").at[cell, "gpus"])
        sizes = [
            {"bytes": size, "buckets": buckets, "times_s": [[_ring(size, ranks)] * ranks] * 3}
            for size, buckets in ((4096, 0), (65_536, 0), (1_048_576, 4), (25_000_000, 1))
        ]
        content = {"schema": 1, "world_size": ranks, "all_reduce": {"sizes": sizes, **group}}
        (Path(str(attempt)) / "probes.json").write_text(json.dumps(content))
    studies.seal(path)
    return study


def _ring(size: int, ranks: int) -> float:
    return 2 * (ranks - 1) * 1e-5 + 2 * (ranks - 1) / ranks * size * 1e-9 if ranks > 1 else 0.0


def test_the_probes_of_the_largest_size_give_the_communication_model(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(512, (1, 2, 4, 8, 16)))
    study = with_sweep(path)
    frames = measure(study)
    rows = scaling_table(frames)
    (fabric,) = fabrics(study, rows).values()
    assert (fabric.alpha_s, fabric.beta_s_per_byte) == pytest.approx((1e-5, 1e-9), rel=0.05)
    assert fabric.buckets == 5
    assert fabric.payload_bytes == 4 * 1_048_576 + 25_000_000
    (view,) = law_sections(rows, frames, labels={}, fabrics=fabrics(study, rows), invalid={})
    assert "Communication model" in {row[0] for row in view.laws}
    assert fabrics(with_sweep(path, ranks=3), rows) == {}, "these all-reduces are not those of all ranks"


def test_the_page_shows_laws_increments_and_escapes_names(tmp_path: Path, nothing_drawn: None) -> None:
    cells = studies.strong(512, (1, 2, 4, 8, 16), swept={"env.X": "<b onclick=alert(1)>"})
    path = studies.finished(tmp_path / "s", cells)
    text = write_report(path).page.read_text(encoding="utf-8")
    assert '<h2 id="laws">Scaling laws</h2>' in text
    assert "Predicted at twice the largest size" in text
    assert "Per doubling" in text
    assert "<b onclick" not in text
    read = pd.read_csv(StudyFolder(path).report / "scaling.csv")
    assert read["incremental_efficiency"].notna().sum() == 4
    assert read["karp_flatt"].notna().sum() == 4
