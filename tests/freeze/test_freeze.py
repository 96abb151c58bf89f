"""The values that `bench` finds in real studies stay as they are: see README.md in this folder."""

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.analysis.test_targets import moments, t_interval
from tests.common import read_rows
from tests.freeze.compare import STUDIES, Answer, Tables, actual, differences

#: Limits around the values of the frozen studies, so that targets are met, missed and open.
LIMITS = {
    "efficiency": (0.3, 0.75, 0.9, 0.97),
    "throughput_per_gpu": (20.0, 115.0, 1000.0, 30_000.0),
    "step_time_sec": (0.003, 0.0685, 0.13, 1.0),
    "memory_gib": (0.05, 0.3127, 0.5, 40.0),
}


class Reported(NamedTuple):
    """A frozen study, the folder of its report, the tables of `bench`, and the report's JSON."""

    study: str
    folder: Path
    tables: Tables
    said: Answer


@pytest.fixture(scope="module", params=STUDIES)
def reported(request: pytest.FixtureRequest) -> Iterator[Reported]:
    study = request.param
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        lines = [f"- {name}: {limit}" for name, limits in LIMITS.items() for limit in limits]
        (folder / "targets.yaml").write_text("\n".join(lines))
        tables, said = actual(study, folder, "--targets", "targets.yaml")
        report = folder / study / "report"
        yield Reported(study, report if report.exists() else folder / f"{study}-report", tables, said)


def test_a_frozen_study_has_the_expected_values(reported: Reported) -> None:
    assert list(differences(reported.study, reported.tables)) == []


def expected(
    name: str, row: dict[str, str], base: dict[str, str] | None, rates: dict, used: dict, bad: set[str]
) -> tuple[float, float] | None:
    """Return the interval of a value, from the published tables and scipy; None if it cannot be judged."""
    own, size = rates[row["cell_id"]], int(row["gpus"])
    if row["cell_id"] in bad or (name == "efficiency" and row["verdict"] == "not-valid"):
        return None
    if name == "memory_gib":
        memory = used[row["cell_id"]]
        return (max(memory) / 2**30,) * 2 if len(memory) >= 3 else None
    if len(own) < 3:
        return None
    mean, error2 = moments(own)
    point = 1 / (math.fsum(1 / rate for rate in own) / len(own))
    low, high = t_interval(mean, math.sqrt(error2), len(own) - 1)
    low, high = min(low, point), max(high, point)
    if name == "throughput_per_gpu":
        return low / size, high / size
    batch = float(row["global_batch"] or "nan")
    if name == "step_time_sec":
        return (batch / high, batch / low) if row["step_time_sec"] else None
    if base is None or len(rates[base["cell_id"]]) < 3 or not row["efficiency"]:
        return None
    other, other2 = moments(rates[base["cell_id"]])
    freedom = (error2 + other2) ** 2 / (
        error2**2 / (len(own) - 1) + other2**2 / (len(rates[base["cell_id"]]) - 1) or 1
    )
    ends = t_interval(mean - other, math.sqrt(error2 + other2), freedom)
    scale = int(base["gpus"]) / size if row["mode"] == "strong" else float(base["global_batch"]) / batch
    value = float(row["efficiency"])
    low, high = min(scale * ends[0], value), max(scale * ends[1], value)
    assert (low, high) == pytest.approx((float(row["efficiency_low"]), float(row["efficiency_high"])))
    return low, high


def is_base(row: dict[str, str]) -> bool:
    """Return whether a row is the baseline of its series: E = 1 has no interval."""
    return row["efficiency"] == "1" and not row["efficiency_low"]


def test_the_verdicts_on_targets_are_those_of_a_second_implementation(reported):
    rates, used = defaultdict(list), defaultdict(list)
    for run in read_rows(reported.folder / "runs.csv"):
        counts = run["latest"] == "True" and run["state"] == "completed" and "left out" not in run["reason"]
        if counts and run["throughput_samples_per_sec"]:
            rates[run["cell_id"]].append(float(run["throughput_samples_per_sec"]))
            place = f"runs/{run['run_id']}/attempt-{run['attempt']}/metrics.csv"
            if (metrics := reported.folder.parent / place).exists():
                memory = [float(one["peak_mem_bytes"] or "nan") for one in read_rows(metrics)]
                used[run["cell_id"]] += [max(known)] if (known := [x for x in memory if x == x]) else []
    scaling = {(row["series"], row["cell_id"]): row for row in read_rows(reported.folder / "scaling.csv")}
    bad = {cell for one in reported.said["validity"] if one["severity"] == "error" for cell in one["cells"]}
    judgements = [row for row in reported.said["targets"] if row["cell_id"]]
    assert len(judgements) == 16 * len(scaling) - 4 * sum(map(is_base, scaling.values()))
    names = dict(zip(("efficiency", "throughput", "step time", "memory"), LIMITS, strict=True))
    for judgement in judgements:
        (name,) = (name for words, name in names.items() if judgement["target"].startswith(words))
        row, limit = scaling[judgement["series"], judgement["cell_id"]], judgement["limit"]
        of_series = [one for one in scaling.values() if one["series"] == row["series"]]
        ends = expected(name, row, next(filter(is_base, of_series), None), rates, used, bad)
        verdict = "cannot tell"
        if ends:
            meets = [
                end >= limit if name in ("efficiency", "throughput_per_gpu") else end <= limit for end in ends
            ]
            verdict = "met" if all(meets) else "missed" if not any(meets) else "cannot tell"
        elif name == "memory_gib" and row["cell_id"] not in bad:
            is_above = max(used[row["cell_id"]], default=0) / 2**30 > limit
            verdict = "missed" if is_above else verdict
        assert judgement["verdict"] == verdict, (judgement, ends)
        assert bool(judgement["reason"]) == (ends is None and verdict != "missed")
