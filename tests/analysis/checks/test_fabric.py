"""α and β of the fabric from exact, distorted and unusable sweeps."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.checks.fabric import FabricRow, RingFit, SweepRow, fabric_table, fit_ring, ring_time, sweep_rows
from analysis.data.load import load_study
from analysis.report.write import write_report
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis.studies import SIZES, finished, make_cell, seal, write_sweep

ALPHA, BETA = 30e-6, 1 / 12.5e9


def swept(alpha: float = ALPHA, beta: float = BETA, *, ranks: int = 8, noise: float = 0.0, seed: int = 0):
    times = np.array([ring_time(size, ranks, alpha, beta) for size in SIZES])
    return times * np.exp(np.random.default_rng(seed).normal(0, noise, len(SIZES)))


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 4096), latency=st.floats(1e-6, 1e-3), rate=st.floats(1e8, 1e11))
def test_exact_sweeps_return_their_parameters(ranks, latency, rate):
    found = fit_ring(SIZES, swept(latency, 1 / rate, ranks=ranks), ranks=ranks)
    # Both regimes are needed to determine both parameters.
    if isinstance(found, str):
        assert found == "no message is small enough to show the latency"
        assert 2 * (ranks - 1) * latency < 2 * (ranks - 1) / ranks * SIZES[0] / rate
    else:
        assert found.alpha_s == pytest.approx(latency, rel=1e-3)
        assert found.beta_s_per_byte == pytest.approx(1 / rate, rel=1e-3)


def test_buffered_small_messages_do_not_distort_the_rate_of_large_ones():
    ranks, line, buffer = 2, 50e6, 256 * 2**10
    times = [4e-4 + max(size * 0.2, size - buffer) / line for size in SIZES]
    found = fit_ring(SIZES, times, ranks=ranks)
    assert isinstance(found, RingFit), found
    assert 1 / found.beta_s_per_byte == pytest.approx(line, rel=0.03)
    assert found.worst(from_bytes=4_000_000) < 0.15


@pytest.mark.parametrize(
    ("sizes", "times", "ranks", "reason"),
    [
        ([4096, 65536], [1e-4, 2e-4], 2, "2 message sizes; a fit needs 3"),
        (SIZES, [1.0] * len(SIZES), 1, "a single rank does not communicate"),
        ([2**20, 2**22, 2**24], [0.01, 0.04, 0.16], 2, "no message is small enough to show the latency"),
        ([2**20, 2**22, float("nan")], [0.01, float("nan"), 1.0], 2, "1 message sizes; a fit needs 3"),
    ],
)
def test_a_sweep_that_cannot_be_fitted_has_a_reason(sizes, times, ranks, reason):
    assert fit_ring(sizes, times, ranks=ranks) == reason


def test_intervals_over_runs_contain_the_truth_at_about_their_level():
    inside = 0
    for seed in range(100, 200):
        generator = np.random.default_rng(seed)
        # Runs differ from each other by more than their own sizes do.
        factors = np.exp(generator.normal(0, 0.05, (4, 2)))
        rows = [
            SweepRow(f"r{number}", "c", 8, size, 0, 1, seconds, math.nan, math.nan, "queued")
            for number, (alpha, beta) in enumerate(factors)
            for size, seconds in zip(SIZES, swept(ALPHA * alpha, BETA * beta), strict=True)
        ]
        (row,) = fabric_table(rows)
        assert row.n == 4
        inside += row.beta_low <= BETA <= row.beta_high
    assert 89 <= inside <= 99


@pytest.fixture
def study(tmp_path):
    folder = finished(tmp_path / "study", [make_cell(1, batch=64), make_cell(2, batch=64)])
    loaded = load_study(folder)
    for number, attempt in enumerate(run.folder or "" for run in loaded.runs):
        times = zip(SIZES, map(float, swept(ranks=2, seed=number, noise=0.01)), strict=True)
        write_sweep(RunFolder(Path(attempt)), dict(times) if "n2" in attempt else {}, ranks=2)
    return loaded


ENTRY: dict[str, Any] = {"bytes": 4096, "times_s": [[1e-3, 1e-3]] * 3}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps({"schema": 1, "world_size": 2, "all_reduce": {"sizes": 5}}),
        json.dumps({"schema": 1, "world_size": 2, "all_reduce": {"sizes": [{**ENTRY, "buckets": "many"}]}}),
        json.dumps(
            {"schema": 1, "world_size": 2, "all_reduce": {"sizes": [{**ENTRY, "bytes": float("inf")}]}}
        ),
        json.dumps({"schema": 1, "world_size": 2, "all_reduce": {"sizes": [{**ENTRY, "times_s": [[0, 0]]}]}}),
    ],
    ids=["too-deep", "no-list", "no-count", "endless", "in-no-time"],
)
def test_broken_probes_of_one_run_do_not_affect_others(study, text):
    first, *others = [run.folder for run in study.runs if run.folder and "n2" in run.folder]
    Path(first, "probes.json").write_text(text)
    assert len(sweep_rows(study)) == len(others) * len(SIZES)


def test_other_collectives_are_rows_of_the_sweep_and_change_no_fit(study):
    before, fits = sweep_rows(study), fabric_table(sweep_rows(study))
    folders = [run.folder or "" for run in study.runs]
    path = next(Path(one) / "probes.json" for one in folders if "n2" in one)
    content = json.loads(path.read_text())
    own = {"ranks": 4, "method": "queued", "sizes": [{"bytes": 8, "buckets": 3, "times_s": [[1.0, 2.0]]}]}
    path.write_text(json.dumps({**content, "all_gather": own, "reduce_scatter": own}))
    rows = [row for row in sweep_rows(study) if row not in before]
    assert [row[2:] for row in rows] == [
        (4, 8, 3, 1, 2.0, 4.0, 3.0, "queued", name) for name in ("all_gather", "reduce_scatter")
    ]
    assert repr(fabric_table(sweep_rows(study))) == repr(fits)


@pytest.mark.usefixtures("nothing_drawn")
def test_the_report_writes_the_sweeps_and_the_fits(study):
    report = write_report(study.folder.path).page.parent
    fabric = pd.read_csv(report / "fabric.csv")
    assert tuple(fabric.columns) == FabricRow._fields
    (cell,) = [c for c in study.cells if c.startswith("n2")]
    assert list(fabric["cell_id"]) == [cell]
    assert fabric["beta_sec_per_byte"].iloc[0] == pytest.approx(BETA, rel=0.05)
    assert len(pd.read_csv(report / "sweep.csv")) == len(sweep_rows(study))
    for attempt in [run.folder or "" for run in study.runs]:
        (study.folder.path / attempt / "probes.json").unlink()
    seal(study.folder.path)
    write_report(study.folder.path)
    assert not (report / "fabric.csv").exists()
