"""The validity of a study's numbers: each finding with its cells and values."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from analysis.checks import assessment
from analysis.checks.assessment import CheckedStudy
from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.decide import SlowBaseline, SlowerThanSmaller, decide
from analysis.stats.measured import measure
from analysis.text import message
from bench.cli import app
from bench.matrix.cell import Cell, Resources
from bench.study.layout import StudyFolder
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import SeparateTrainings
from ddp_scaling_bench.units import cut
from tests.analysis import studies
from tests.analysis.studies import write_ranks
from tests.common import change_json, edited_csv

DOCS = Path(__file__).resolve().parents[3] / "docs"


WEAK = ("n1x1-gloo-srun-b16", "n2x1-gloo-srun-b16", "n4x1-gloo-srun-b16")
PATTERN = {"output": {"throughput": r"rate (\S+)"}}


def findings(path: Path) -> dict[str, Finding]:
    """Return the findings of the study in ``path`` by kind."""
    found = CheckedStudy.of(load_study(path)).assessment.findings
    assert len({one.kind for one in found}) == len(found)
    assert all(message(one).endswith(".") for one in found), "a sentence lacks a value"
    return {one.kind: one for one in found}


def every_class_of(base: type[Finding]) -> Iterator[type[Finding]]:
    for one in base.__subclasses__():
        yield one
        yield from every_class_of(one)


def test_every_code_is_documented_with_meaning_and_remedy() -> None:
    section = (DOCS / "analysis.md").read_text().partition("\n## Validity\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| .+ \| (.+) \|$", section, re.M))
    assert assessment.rules()
    own = {
        one.kind for one in every_class_of(Finding) if one.heading and one.__module__.startswith("analysis.")
    }
    assert rows.keys() == own - {"unstable", SlowBaseline.kind, SlowerThanSmaller.kind}
    assert all(rows.values())


def test_a_study_without_problems_has_no_finding_also_with_a_last_partial_batch(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    assert findings(path) == {}
    for metrics in path.glob("runs/*/attempt-1/metrics.csv"):  # env.json has the median of the batches
        with edited_csv(metrics) as frame:
            frame[["samples", "epoch_time_sec"]] *= 0.95
    assert "other-batch" not in findings(path)


class _Reports(studies.StudyBuilder):
    """A study of a command whose throughput grows with the ranks."""

    def epoch(self, cell: Cell, number: int, factor: float) -> dict[str, float]:
        rate = factor * 100 * cell.world_size
        if cell.metrics.get("kind") == "average":
            return {"epoch": number + 1, "throughput_samples_per_sec": rate}
        own = {"epoch": number + 1, "steps": 1, "samples": cell.global_batch}
        return {**own, "throughput_samples_per_sec": rate}


def of_command(path: Path, *, metrics: dict[str, Any], epochs: int = 1) -> Path:
    cells = studies.weak(sizes=(1, 2, 4))
    for cell in cells:
        cell.argv, cell.metrics, cell.planned_epochs = ["python", "t.py", "{per_gpu_batch}"], metrics, None

    written = _Reports(path, cells, epochs=epochs, ranks_files=False).write()
    return studies.print_rates(written, per_node="kind" in metrics)


def few_cores(path: Path) -> Path:
    cells = studies.strong(sizes=(1, 2, 4), per_node=4)
    return studies.finished(path, cells, env=lambda cell: studies.environment(cell, cores=2))


def other_threads(path: Path) -> Path:
    def env(cell: Cell) -> dict[str, Any]:
        return studies.environment(cell) | {"threads_per_rank": 8 // cell.world_size}

    return studies.finished(path, studies.strong(sizes=(1, 2)), env=env)


def other_nodes(path: Path) -> Path:
    """Nodes have 8 cores and 2 threads per rank, but the second one 16 cores and a quota."""

    def env(cell: Cell) -> dict[str, Any]:
        cores = [
            {"node": f"n{node + 1}", "cores": (8, 16)[node], "mask": "0-7", "quota": (None, 1.5)[node]}
            | {"threads_per_rank": [2] * ranks, "ranks": list(range(ranks))}
            for node, ranks in enumerate(cell.ranks_per_node)
        ]
        return studies.environment(cell) | {"cores": cores}

    return studies.finished(path, studies.strong(sizes=(1, 2)), env=env)


def windows_lost(path: Path) -> Path:
    """One run of a cell has a window less than the others."""
    cells = studies.weak(sizes=(1, 2))
    for cell in cells:
        cell.argv, cell.planned_epochs = ["python", "t.py", "{per_gpu_batch}"], None
    studies.finished(path, cells)
    (file,) = path.glob("runs/n2x1-*-r2/attempt-1/metrics.csv")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    studies.seal(path)
    return path


def values_more(path: Path) -> Path:
    """Two runs of a command report a value more than the others."""
    assert findings(of_command(path, metrics=PATTERN, epochs=2)) == {}
    for file in path.glob("runs/n4x1-*-r[12]/attempt-1/job.out"):
        file.write_text(file.read_text() + "rate 400\n")
    return path


def unstable(path: Path) -> Path:
    def env(cell: Cell) -> dict[str, Any]:
        facts = [studies.recorded("not-stable", steps=20)] * 2 * (cell.world_size == 2)
        return studies.environment(cell) | {"facts": facts}

    return studies.finished(path, studies.strong(sizes=(1, 2)), env=env)


def paused(path: Path) -> Path:
    studies.finished(path, studies.strong(sizes=(1, 2)))
    for file in path.glob("runs/n2x1*/attempt-1/ranks.csv"):
        with edited_csv(file) as frame:
            frame["window_time_sec"], frame["paused_time_sec"] = 2.0, 0.0
            alone = (frame["rank"] == 1) & (frame["epoch"] == 2)
            frame.loc[alone, ["window_time_sec", "paused_time_sec"]] = [1.5, 0.5]
        studies.agree_with_ranks(file.parent)
    return path


def not_joined(path: Path) -> Path:
    of_command(path, metrics=PATTERN)
    for file in path.glob("runs/n4x1-*-r[12]/attempt-1/env.json"):
        change_json(file, joined=None)
    return path


def slower_and_slower(path: Path) -> Path:
    studies.finished(path, studies.strong(sizes=(1, 2)), epochs=6, noise=0.0)
    for file in path.glob("runs/n2x1*/attempt-1/metrics.csv"):
        studies.scale_rate(file, [1.0, 1.0, 0.9, 0.9, 0.8, 0.8])
    return path


def noisy(path: Path) -> Path:
    return studies.finished(path, studies.weak(sizes=(1, 2)), noise=0.4)


def planned_apart(path: Path) -> Path:
    cells = [
        *on(studies.strong(), ["small", "small", "large", "large"]),
        *on(studies.weak(batch=5), [None] * 4),
    ]
    return studies.finished(path, cells, state=lambda cell, repeat: ("planned", "", None))


def ran_apart(path: Path) -> Path:
    """One cell ran on two partitions, of which the plan named both."""
    names: list[str] = []

    def env(cell: Cell) -> dict[str, Any]:
        names.append("b" if len(names) == 1 else "a")
        return studies.environment(cell) | {"slurm": {"SLURM_JOB_PARTITION": names[-1]}}

    return studies.finished(path, on(studies.strong(sizes=(1, 2)), ["a,b", "a,b"]), env=env)


def on(cells: Sequence[Cell], partitions: Sequence[str | None]) -> list[Cell]:
    """Return the cells with the requested partitions."""
    pairs = zip(cells, partitions, strict=True)
    return [replace(cell, resources=Resources(partition=name)) for cell, name in pairs]


#: What is planted, the kind of its only finding, its cells, some of its values, and a part of its sentence.
PLANTED: list[tuple[Callable[[Path], Path], str, tuple[str, ...], dict[str, Any], str]] = [
    (
        few_cores, "shared-cores", ("n1x4-gloo-srun-b16",), {"ranks": 4, "threads": 4, "cores": 2},
        "n1x4-gloo-srun-b16 (4 threads of 4 ranks on 2 cores): times of such runs do not show scaling.",
    ),
    (
        other_threads, "threads-differ", ("n2x1-gloo-srun-b32",),
        {"cells": [{"cell": "n2x1-gloo-srun-b32", "threads": [4], "baseline": "n1x1-gloo-srun-b64", "baseline_threads": [8]}]},
        "n2x1-gloo-srun-b32 has 4 per rank, but its baseline n1x1-gloo-srun-b64 has 8.",
    ),
    (
        other_nodes, "unequal-nodes", ("n2x1-gloo-srun-b32",),
        {"facts": [{"fact": "cores_of_node", "nodes": {"8": ["n1"], "16": ["n2"]}}, {"fact": "quota", "nodes": {"none": ["n1"], "1.5": ["n2"]}}]},
        "The nodes differ in cores of the node: 8 (n1) and 16 (n2); quota of cores: none (n1) and 1.5 (n2).",
    ),
    (
        paused, "unequal-windows", ("n2x1-gloo-srun-b32",), {"rank": 1, "other_rank": 0, "seconds": [1.5, 2.0]},
        "rank 1 measured 1.50 s and rank 0 2.00 s (n2x1-gloo-srun-b32): rank 1 stopped its clock, for example",
    ),
    (windows_lost, "value-counts", ("n2x1-gloo-srun-b16",), {"values_per_run": {"n2x1-gloo-srun-b16": [2, 3]}}, "2 or 3"),
    (
        values_more, "value-counts", WEAK,
        {"values_per_run": dict(zip(WEAK, ([2], [2], [2, 3]), strict=True))}, "n4x1-gloo-srun-b16 2 or 3.",
    ),
    (
        unstable, "not-stable", ("n2x1-gloo-srun-b32",), {"runs": 3, "of": 6},
        "In 3 of 6 measured runs (n2x1-gloo-srun-b32), the medians of the step times in the two halves of the "
        "warm-up (without its first 2 steps) differ by more than 10 % on some rank.",
    ),
    (not_joined, "ranks-not-counted", ("n4x1-gloo-srun-b16",), {"runs": 2}, "only the recorder measures this"),
    (slower_and_slower, "drift-in-run", ("n2x1-gloo-srun-b32",), {}, "n2x1-gloo-srun-b32 by -20 %."),
    (noisy, "wide-interval", WEAK[:2], {}, "too wide to tell ideal scaling from an efficiency of 0.8"),
    (
        planned_apart, "spans-partitions", tuple(cell.cell_id for cell in studies.strong()),
        {"places": {"partition small": [1, 2], "partition large": [4, 8]}},
        "1 and 2 on partition small",
    ),
    (
        ran_apart, "spans-partitions", ("n1x1-gloo-srun-b64", "n2x1-gloo-srun-b32"),
        {"places": {"partition a": [1, 2], "partition b": [2]}}, "2 on partition b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "kind", "cells", "values", "sentence"), PLANTED, ids=[one[0].__name__ for one in PLANTED]
)
def test_what_is_planted_is_found_with_its_cells_values_and_sentence(
    tmp_path, plant, kind, cells, values, sentence
):
    found = findings(plant(tmp_path / "s"))[kind]
    assert {*found.subject} == {*cells}
    assert found.values == found.values | values
    assert sentence in message(found)


def test_disturbed_and_overlapping_runs_are_named_with_node_and_time(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    studies.disturb(path, "n2x1-gloo-srun-b32-r2", "foreign-cpu", share=0.25, limit=0.05)
    studies.disturb(path, "n1x1-gloo-srun-b64-r1", "study-run", "n1", jobs=["7"])
    found = findings(path)
    assert list(found) == ["overlap", "disturbed"]
    assert found["overlap"].subject == ("n1x1-gloo-srun-b64",)
    assert message(found["disturbed"]) == (
        "1 of 6 runs, 1 of them left out: n2x1-gloo-srun-b32-r2: CPU time of foreign processes (25 % of the "
        "time of the cores in use, limit 5 %) on n2 from 2026-01-02T03:04:10Z to 2026-01-02T03:04:20Z."
    )
    (entry,) = found["disturbed"].values["runs"]
    assert (entry["run_id"], entry["left_out"]) == ("n2x1-gloo-srun-b32-r2", True)
    assert entry["facts"][0].items() >= {"kind": "foreign-cpu", "subject": ["n2"]}.items()
    study = load_study(path)
    assert {row.gpus: row.n_undisturbed for row in scaling_table(measure(study))} == {1: 2, 2: 2}


def test_a_condition_common_to_all_runs_of_a_cell_is_named_and_leaves_none_out(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    for repeat in (1, 2, 3):
        studies.disturb(path, f"n2x1-gloo-srun-b32-r{repeat}", "foreign-cpu", share=0.25, limit=0.05)
    found = findings(path)
    assert list(found) == ["common-condition"]
    conditions = {"n2x1-gloo-srun-b32": [studies.recorded("foreign-cpu", "n2")]}
    assert found["common-condition"].values["conditions"] == conditions
    studies.disturb(path, "n1x1-gloo-srun-b64-r1", "foreign-cpu", "n1", share=0.5, limit=0.05)
    values = findings(path)["disturbed"].values
    assert [values[name] for name in ("disturbed", "finished", "left_out")] == [1, 6, 1]
    rows = scaling_table(measure(load_study(path)))
    assert [row.n for row in rows] == [2, 3]
    assert decide(rows).best is None, "no undisturbed run supports a recommendation"


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize(("odd", "kind"), [("n1x2", "other-batch"), ("n2x2", "separate-trainings")])
def test_cells_with_another_batch_or_apart_ranks_have_a_throughput_but_no_efficiency(tmp_path, odd, kind):
    path = studies.finished(tmp_path / "results" / "s", studies.weak(sizes=(2, 4), per_node=2))
    apart = SeparateTrainings(by="parameters", spread=0.5).as_json()
    changes = {"other-batch": {"global_batch": 8}, "separate-trainings": {"facts": [apart]}}[kind]
    for env in path.glob("runs/*/attempt-1/env.json"):
        is_odd = env.parts[-3].startswith(odd)
        exchange = {"together": kind == "other-batch" or not is_odd, "by": "parameters"}
        change_json(env, **(changes if is_odd else {}), exchange=exchange)
    lines = CliRunner().invoke(app, ["report", str(path)]).stderr.splitlines()
    (line,) = (line for line in lines if line.endswith(f"[{kind}]"))
    assert line.startswith("error: ")
    expected = {"other-batch": "(measured 8.000, planned ", "separate-trainings": "differ by 50 %"}
    assert f"{odd}-gloo-srun-b16" in line
    assert expected[kind] in line
    report = StudyFolder(path).report
    table, runs = (pd.read_csv(report / name) for name in ("scaling.csv", "runs.csv"))
    assert (table["throughput_samples_per_sec"] > 0).all()
    lacking = table["cell_id"].str.startswith(odd) | (odd == "n1x2")
    assert (table["efficiency"].isna() == lacking).all()
    assert (table["reason"].str.contains("no efficiency: the r", na=False) == lacking).all()
    assert ((table["verdict"] == "not-valid") == lacking).all()
    for one in (table, runs):
        without = one["cell_id"].str.startswith(odd) & (kind == "other-batch")
        assert (one["step_time_sec"].isna() == without).all()
    assert "no efficiency: the r" in unescape((report / "index.html").read_text(encoding="utf-8"))


def slow_study(path: Path, extra_s: float, *, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Path:
    """Write a study with 9 ms of useful time, and ``extra_s`` more on both ranks of n2."""
    study = studies.finished(path, [studies.make_cell(n, batch=64, per_node=2) for n in sizes])
    write_ranks(
        study,
        late=lambda run, rank: extra_s if rank in (2, 3) else 0.0,
        host=lambda rank: f"n{rank // 2 + 1}",
    )
    return study


def test_a_node_can_be_late_and_slow(tmp_path: Path) -> None:
    found = findings(slow_study(tmp_path / "s", 0.005))
    assert list(found) == ["straggler", "slow-node"]
    late, slow = message(found["straggler"]), message(found["slow-node"])
    assert (
        "all 2 ranks on n2 take 5.00 ms per step longer than the others (29.4 % of the step, in backw" in late
    )
    assert "in 3 of 3 runs of n2x2-gloo-srun-b16, and likewise in 1 more cell" in late
    assert "n2 by 50 % in 6 runs" in slow


def test_advice_about_a_slow_node_fits_the_matrix(tmp_path: Path) -> None:
    path = slow_study(tmp_path / "s", 0.0005, sizes=(1, 2, 4))

    def advice() -> Any:
        return findings(path)["slow-node"].values["advice"]

    assert advice() == "advice-few"
    for file in path.glob("runs/n1x2*-r1/attempt-1/ranks.csv"):
        file.write_text(file.read_text().replace("n1", "n3"))
    studies.seal(path)
    assert advice() == "advice-enough"
    change_json(path / "plan.json", nodelist="n[1-3]")
    assert advice() == "advice-named"
    change_json(path / "plan.json", nodelist=None, executor="ssh")
    assert advice() == "advice-named"


@pytest.mark.usefixtures("nothing_drawn")
def test_averages_of_whole_runs_count_with_a_warning_and_without_steps(tmp_path: Path) -> None:
    path = of_command(tmp_path / "results" / "s", metrics={**PATTERN, "kind": "average"})
    found = findings(path)
    assert list(found) == ["average-of-run"]
    assert "up to 4 times per run, and the lowest rate counts." in message(found["average-of-run"])
    assert len(found["average-of-run"].values["reported"]["n4x1-gloo-srun-b16"]) == 3
    runs = studies.runs_frame(measure(load_study(path)).runs)
    assert runs["measured"].all()
    assert runs[["samples", "steps", "window_s", "unit"]].isna().all(axis=None)
    epochs = load_study(path).epochs
    rates = dict(zip(epochs["run_id"], epochs["throughput_samples_per_sec"], strict=True))
    assert dict(zip(runs["run_id"], runs["throughput_samples_per_sec"], strict=True)) == rates
    run = CliRunner().invoke(app, ["report", str(path), "--proposal"])
    shortened = cut(message(found["average-of-run"]), limit=160)
    text = f"Averages with start-up. {shortened} {found['average-of-run'].remedy} [average-of-run]"
    assert (run.exit_code, run.stderr.splitlines()[-1]) == (0, f"warning: {text}")
    report = StudyFolder(path).report
    assert message(found["average-of-run"]) in unescape((report / "index.html").read_text(encoding="utf-8"))
    causes = pd.read_csv(report / "causes.csv")
    assert set(causes["cause"]) == {"not-explained"}
    table = pd.read_csv(report / "scaling.csv")
    assert (table["n"] == 3).all()
    assert ((table["efficiency"] - 1).abs() < 0.05).all()
    assert table[["load_balance", "comm_efficiency", "pop_parallel_efficiency"]].isna().all(axis=None)


def test_steps_that_are_longer_than_their_run_have_the_wrong_unit(tmp_path: Path) -> None:
    path = of_command(tmp_path / "s", metrics=PATTERN)
    assert "longer-than-run" not in findings(path)
    for log in path.glob("runs/n4x1-*-r1/*/job.out"):
        log.write_text("rate 0.01\n" * 3)  # 64 samples take 6,400 s
    found = findings(path)["longer-than-run"]
    assert found.subject == ("n4x1-gloo-srun-b16",)
    assert ": by the reported values, the steps took 5 h 20 min or more in a run of 2 min" in found.message


def test_checks_without_values_are_not_passed(tmp_path: Path) -> None:
    study = load_study(studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), ranks_files=False))
    checks = {check.name: check for check in CheckedStudy.of(study).assessment.checks}
    assert not checks["samples"].passed
    assert checks["samples"].missing
    assert checks["cores"].passed
    missing = {name for name, check in checks.items() if check.missing}
    assert missing == {"together", "disturbances", "samples", "windows", "late-ranks", "drift"}
    assert sum(check.passed for check in checks.values()) == 9
