"""The validity of a study's numbers: each finding with its cells and values."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from analysis.checks.assessment import assess
from analysis.checks.scaling_table import scaling_table
from analysis.checks.validity import invalid_cells, validity
from analysis.data.environment import describe_environment
from analysis.data.load import load_study
from analysis.decide import decide
from analysis.stats.measured import measure
from analysis.text import heading, message
from bench.cli import app
from bench.matrix.cell import Cell, Resources
from bench.study.layout import StudyFolder
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import SeparateTrainings
from tests.analysis import studies
from tests.analysis.studies import write_ranks
from tests.common import change_json, edited_csv

DOCS = Path(__file__).resolve().parents[3] / "docs"


OTHER = studies.recorded("model-not-called")


def findings(path: Path) -> dict[str, Finding]:
    """Return the findings of the study in ``path`` by kind."""
    study = load_study(path)
    frames = measure(study)
    found = validity(study, frames, scaling_table(frames), describe_environment(study))
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
    own = {
        one.kind for one in every_class_of(Finding) if one.heading and one.__module__.startswith("analysis.")
    }
    assert rows.keys() == own - {"baseline-outlier", "superlinear", "recovery", "unstable"}
    assert all(rows.values())


def test_a_study_without_problems_has_no_finding(tmp_path: Path) -> None:
    assert findings(studies.finished(tmp_path / "s")) == {}


def test_ranks_that_outnumber_the_cores_of_a_host_share_them(tmp_path: Path) -> None:
    cells = studies.strong(sizes=(1, 2, 4), per_node=4)
    path = studies.finished(tmp_path / "s", cells, env=lambda cell: studies.environment(cell, cores=2))
    found = findings(path)["shared-cores"]
    assert (
        message(found)
        == "n1x4-gloo-srun-b16 (4 threads of 4 ranks on 2 cores): times of such runs do not show scaling."
    )
    assert found.subject == ("n1x4-gloo-srun-b16",)
    most = {"ranks": 4, "threads": 4, "cores": 2}
    assert found.values == {**most, "crowds": {"n1x4-gloo-srun-b16": {"hosts": ["n1"], **most}}}


def test_threads_that_differ_from_the_baseline_are_named(tmp_path: Path) -> None:
    def env(cell: Any) -> dict[str, Any]:
        return studies.environment(cell) | {"threads_per_rank": 8 // cell.world_size}

    found = findings(studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)), env=env))
    assert list(found) == ["threads-differ"]
    base = {"baseline": "n1x1-gloo-srun-b64", "baseline_threads": [8]}
    assert found["threads-differ"].values["cells"] == [
        {"cell": "n2x1-gloo-srun-b32", "threads": [4], **base},
        {"cell": "n4x1-gloo-srun-b16", "threads": [2], **base},
    ]


def cores_of(cell: Any, **changes: Any) -> list[dict[str, Any]]:
    """Return the value of ``cores`` in env.json, of nodes with 8 cores and 2 threads per rank."""
    return [
        {
            "node": f"n{node + 1}",
            "cores": 8,
            "mask": "0-7",
            "quota": None,
            "threads_per_rank": [2] * ranks,
            "ranks": list(range(ranks)),
        }
        | (changes if node == 1 else {})
        for node, ranks in enumerate(cell.ranks_per_node)
    ]


def test_nodes_with_other_cores_or_quotas_are_named(tmp_path: Path) -> None:
    def env(cell: Any) -> dict[str, Any]:
        return studies.environment(cell) | {"cores": cores_of(cell, cores=16, quota=1.5)}

    found = findings(studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), env=env))
    assert message(found["unequal-nodes"]) == (
        "The nodes differ in cores of the node: 8 (n1) and 16 (n2); quota of cores: none (n1) and 1.5 (n2)."
    )
    assert found["unequal-nodes"].values["facts"] == [
        {"cores_of_node": {"8": ["n1"], "16": ["n2"]}},
        {"quota": {"none": ["n1"], "1.5": ["n2"]}},
    ]


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
    assert [values[name] for name in ("disturbed", "finished", "left_out", "common")] == [4, 6, 1, 3]
    rows = scaling_table(measure(load_study(path)))
    assert [row.n for row in rows] == [2, 3]
    assert decide(rows).best is None, "no undisturbed run supports a recommendation"


def test_a_rank_that_paused_alone_is_named(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    for file in path.glob("runs/n2x1*/attempt-1/ranks.csv"):
        with edited_csv(file) as frame:
            frame["window_time_sec"], frame["paused_time_sec"] = 2.0, 0.0
            paused = (frame["rank"] == 1) & (frame["epoch"] == 2)
            frame.loc[paused, ["window_time_sec", "paused_time_sec"]] = [1.5, 0.5]
        studies.agree_with_ranks(file.parent)
    found = findings(path)["unequal-windows"]
    assert heading(found) == "A rank paused alone"
    assert message(found) == (
        "For the same steps, rank 1 measured 1.50 s and rank 0 2.00 s "
        "(n2x1-gloo-srun-b32): rank 1 stopped its clock, for example to evaluate or write a checkpoint, and the "
        "others waited for it."
    )
    assert found.remedy.startswith("Pause all ranks: call the recorder's pause() on each rank")
    runs = [f"n2x1-gloo-srun-b32-r{repeat}" for repeat in (1, 2, 3)]
    assert found.values == {"rank": 1, "other_rank": 0, "seconds": [1.5, 2.0], "runs": runs}


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("kind", ["other-batch", "separate-trainings"])
@pytest.mark.parametrize("odd", ["n1x2", "n2x2"])
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


def test_a_last_partial_batch_is_no_other_batch(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    for metrics in path.glob("runs/*/attempt-1/metrics.csv"):  # env.json has the median of the batches
        with edited_csv(metrics) as frame:
            frame[["samples", "epoch_time_sec"]] *= 0.95
    assert "other-batch" not in findings(path)


def test_runs_of_a_cell_with_different_numbers_of_windows_are_named(tmp_path: Path) -> None:
    cells = studies.weak(sizes=(1, 2))
    for cell in cells:
        cell.argv, cell.planned_epochs = ["python", "t.py", "{per_gpu_batch}"], None
    path = studies.finished(tmp_path / "s", cells)
    (file,) = path.glob("runs/n2x1-*-r2/attempt-1/metrics.csv")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    studies.seal(path)
    (found,) = findings(path).values()
    assert (found.kind, found.values) == ("value-counts", {"values_per_run": {"n2x1-gloo-srun-b16": [2, 3]}})


def test_runs_that_were_not_stable_are_counted(tmp_path: Path) -> None:
    def env(cell: Any) -> dict[str, Any]:
        facts = [studies.recorded("not-stable", steps=20)] * 2 * (cell.world_size == 2)
        return studies.environment(cell) | {"facts": facts}

    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), env=env)
    found = findings(path)["not-stable"]
    assert message(found) == (
        "In 3 of 6 runs of the study (n2x1-gloo-srun-b32), the medians of the step times in the two halves of the warm-up "
        "(without its first 2 steps) differ by more than 10 % on some rank."
    )
    assert found.values == {"runs": 3, "of": 6}


def slow_study(path: Path, extra_s: float, *, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Path:
    """Write a study with 9 ms of useful time, and ``extra_s`` more on both ranks of n2."""
    study = studies.finished(path, [studies.make_cell(n, batch=64, per_node=2) for n in sizes])
    write_ranks(
        study,
        late=lambda run, rank: extra_s if rank in (2, 3) else 0.0,
        host=lambda rank: f"n{rank // 2 + 1}",
    )
    return study


def test_a_node_that_is_late_and_slow_is_reported_once_with_both_facts(tmp_path: Path) -> None:
    found = findings(slow_study(tmp_path / "s", 0.005))
    assert list(found) == ["straggler"]
    assert message(found["straggler"]) == (
        "On average, all 2 ranks on n2 take 5.00 ms per step longer than the others (29.4 % of the step, in backward), in 3 of "
        "3 runs of n2x2-gloo-srun-b16, and likewise in 1 more cell. The others wait for these ranks; such "
        "waiting is not slow communication. Slower than the other nodes of the same runs: n2 by 50 % in 6 "
        "runs. Have this node checked. Leave it out (exclude) only if 4 other nodes remain for the largest cell."
    )
    assert found["straggler"].values["excess"]["n2"] == pytest.approx(0.5, abs=0.1)


def test_a_node_that_is_slow_but_not_late_is_a_finding_of_its_own(tmp_path: Path) -> None:
    found = findings(slow_study(tmp_path / "s", 0.0005))
    assert list(found) == ["slow-node"]
    assert (found["slow-node"].values["hosts"], found["slow-node"].values["slow"][0]["runs"]) == (1, 6)


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


def on(cells: Sequence[Cell], partitions: Sequence[str | None], **resources: Any) -> list[Cell]:
    """Return the cells with the requested partitions."""
    pairs = zip(cells, partitions, strict=True)
    return [replace(cell, resources=Resources(partition=name, **resources)) for cell, name in pairs]


def test_a_series_that_is_planned_on_several_partitions_is_a_warning(tmp_path: Path) -> None:
    cells = [
        *on(studies.strong(), ["small", "small", "large", "large"]),
        *on(studies.weak(batch=5), [None] * 4),
    ]
    path = studies.finished(tmp_path / "s", cells, state=lambda cell, repeat: ("planned", "", None))
    found = findings(path)["spans-partitions"]
    places = [("partition small", [1, 2]), ("partition large", [4, 8])]
    assert [(one["place"], one["sizes"]) for one in found.values["places"]] == places
    assert found.subject == tuple(cell.cell_id for cell in cells[:4])
    assert "1 and 2 on partition small" in found.message


def test_what_ran_counts_more_than_the_plan_and_one_cell_can_span_partitions(tmp_path: Path) -> None:
    cells = on(studies.strong(sizes=(1, 2)), ["a,b", "a,b"])

    def env(cell: Cell) -> dict[str, Any]:
        names.append("b" if len(names) == 1 else "a")
        found = studies.environment(cell)
        return {**found, "slurm": {"SLURM_JOB_PARTITION": names[-1]}}

    names: list[str] = []
    found = findings(studies.finished(tmp_path / "s", cells, env=env))["spans-partitions"]
    places = {one["place"]: one["sizes"] for one in found.values["places"]}
    assert places == {"partition a": [1, 2], "partition b": [2]}
    same = on(studies.strong(sizes=(1, 2)), ["a", "b"])  # planned anew after the runs
    assert "spans-partitions" not in findings(studies.finished(tmp_path / "t", same))


class _Reports(studies.StudyBuilder):
    """A study of a command whose throughput grows with the ranks."""

    def epoch(self, cell: Cell, number: int, factor: float) -> dict[str, float]:
        rate = factor * 100 * cell.world_size
        if cell.metrics.get("kind") == "average":
            return {"epoch": number + 1, "throughput_samples_per_sec": rate}
        own = {"epoch": number + 1, "steps": 1, "samples": cell.global_batch}
        return {**own, "throughput_samples_per_sec": rate}


def _of_command(path: Path, *, metrics: dict[str, Any], epochs: int = 1) -> Path:
    cells = studies.weak(sizes=(1, 2, 4))
    for cell in cells:
        cell.argv, cell.metrics, cell.planned_epochs = ["python", "t.py", "{per_gpu_batch}"], metrics, None

    written = _Reports(path, cells, epochs=epochs, ranks_files=False).write()
    return studies.print_rates(written, per_node="kind" in metrics)


_PATTERN = {"output": {"throughput": r"rate (\S+)"}}


def test_runs_whose_ranks_no_recorder_counted_are_named(tmp_path: Path) -> None:
    path = _of_command(tmp_path / "s", metrics=_PATTERN)
    for file in path.glob("runs/n4x1-*-r[12]/attempt-1/env.json"):
        change_json(file, joined=None)
    (found,) = findings(path).values()
    assert (found.kind, found.subject, found.values) == (
        "ranks-not-counted", ("n4x1-gloo-srun-b16",), {"runs": 2, "not_compared": ["n4x1-gloo-srun-b16"]},
    )  # fmt: skip
    assert "started, nor whether they train together: only the recorder" in message(found)
    rows = scaling_table(measure(load_study(path)))
    unknown = "not measured whether the ranks train together"
    assert [row.reason for row in rows] == ["", unknown, unknown]


@pytest.mark.usefixtures("nothing_drawn")
def test_averages_of_whole_runs_count_with_a_warning_and_without_steps(tmp_path: Path) -> None:
    path = _of_command(tmp_path / "results" / "s", metrics={**_PATTERN, "kind": "average"})
    found = findings(path)
    assert list(found) == ["average-of-run"]
    assert message(found["average-of-run"]) == (
        "The throughput of n1x1-gloo-srun-b16, n2x1-gloo-srun-b16 and n4x1-gloo-srun-b16 is one average of the "
        "whole run, including start-up, and evaluation if the command counts it. The efficiency and the time "
        "per step, which is the global batch of the plan divided by the throughput, are therefore those of whole "
        "runs. The commands report it up to 4 times per run, and the lowest rate "
        "counts."
    )
    assert len(found["average-of-run"].values["reported"]["n4x1-gloo-srun-b16"]) == 3
    runs = measure(load_study(path)).runs
    assert runs["measured"].all()
    assert runs[["samples", "steps", "window_s", "unit"]].isna().all(axis=None)
    epochs = load_study(path).epochs
    rates = dict(zip(epochs["run_id"], epochs["throughput_samples_per_sec"], strict=True))
    assert dict(zip(runs["run_id"], runs["throughput_samples_per_sec"], strict=True)) == rates
    run = CliRunner().invoke(app, ["report", str(path), "--proposal"])
    text = f"Averages with start-up. {message(found['average-of-run'])} {found['average-of-run'].remedy} [average-of-run]"
    assert (run.exit_code, run.stderr.splitlines()[-1]) == (0, f"warning: {text}")
    report = StudyFolder(path).report
    assert message(found["average-of-run"]) in unescape((report / "index.html").read_text(encoding="utf-8"))
    proposal = (report / "proposal.md").read_text(encoding="utf-8")
    assert (
        "as an average over the whole run with its start-up; if several ranks did so, the lowest rate counts"
        in proposal
    )
    assert "queue waits and work outside the reported rate" in proposal
    causes = pd.read_csv(report / "causes.csv")
    assert set(causes["cause"]) == {"not-explained"}
    table = pd.read_csv(report / "scaling.csv")
    assert (table["n"] == 3).all()
    assert ((table["efficiency"] - 1).abs() < 0.05).all()
    assert table[["load_balance", "comm_efficiency", "pop_parallel_efficiency"]].isna().all(axis=None)


def test_different_numbers_of_values_are_named_with_their_cells(tmp_path: Path) -> None:
    path = _of_command(tmp_path / "s", metrics=_PATTERN, epochs=2)
    assert findings(path) == {}
    for file in path.glob("runs/n4x1-*-r[12]/attempt-1/job.out"):
        file.write_text(file.read_text() + "rate 400\n")
    found = findings(path)
    assert list(found) == ["value-counts"]
    counts = {"n1x1-gloo-srun-b16": [2], "n2x1-gloo-srun-b16": [2], "n4x1-gloo-srun-b16": [2, 3]}
    assert found["value-counts"].values == {"values_per_run": counts}


def test_a_throughput_that_changes_within_the_runs_is_named(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), epochs=6, noise=0.0)
    for file in path.glob("runs/n2x1*/attempt-1/metrics.csv"):
        studies.scale_rate(file, [1.0, 1.0, 0.9, 0.9, 0.8, 0.8])
    found = findings(path)
    assert list(found) == ["drift-in-run"]
    assert found["drift-in-run"].subject == ("n2x1-gloo-srun-b32",)
    assert found["drift-in-run"].values["change"]["n2x1-gloo-srun-b32"] == pytest.approx(-0.2)


def test_wide_intervals_are_named_and_never_recommended(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.weak(sizes=(1, 2)), noise=0.4)
    found = findings(path)["wide-interval"]
    assert (found.severity, sorted(found.subject)) == (
        "warning",
        ["n1x1-gloo-srun-b16", "n2x1-gloo-srun-b16"],
    )
    low, high = found.values["intervals"]["n2x1-gloo-srun-b16"]["efficiency"]
    assert high / low > 1.25**2
    assert "too wide to tell ideal scaling from an efficiency of 0.8" in message(found)
    assert invalid_cells(list(findings(path).values())) == {}


def test_checks_without_values_are_not_passed(tmp_path: Path) -> None:
    study = load_study(studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), ranks_files=False))
    checks = {check.name: check for check in assess(study).checks}
    assert not checks["samples"].passed
    assert checks["samples"].missing
    assert checks["cores"].passed
    missing = {name for name, check in checks.items() if check.missing}
    assert missing == {"together", "disturbances", "samples", "windows", "late-ranks", "drift"}
    assert sum(check.passed for check in checks.values()) == 9
