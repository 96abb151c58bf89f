"""Forty studies: page, proposal, advise, compare, status and JSON agree on validity, states and sizes.

The expected validity and states are those from which each study was made; the expected size is computed from
the numbers in scaling.csv.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.advise import options
from analysis.advise.options import Wait, options_of, rank
from analysis.checks import assessment as assessing
from analysis.checks.assessment import Assessment, assess
from analysis.checks.scaling_table import Verdict, VerdictKind, scaling_table, verdicts
from analysis.compare import comparison
from analysis.compare.comparison import compare_studies
from analysis.compare.text import as_content as comparison_content
from analysis.data.environment import describe_environment
from analysis.data.load import Study, load_study
from analysis.report.page import with_errors
from analysis.report.proposal import proposal_context
from analysis.report.results import Results
from analysis.report.tables import csv_table, runs_csv
from analysis.report.write import write_report
from analysis.stats.attempts import all_attempts
from analysis.stats.columns import ScalingRow
from analysis.stats.measured import measure
from bench.commands.advise import _as_content as advice_content
from bench.commands.report import _print
from bench.commands.status import status_content
from bench.facts import Fact
from bench.matrix.cell import Cell
from bench.study.layout import StudyFolder
from bench.study.ledger import Ledger
from bench.study.plan_json import open_study
from bench.words import heading
from tests.analysis import studies
from tests.analysis.causes.planted import Planted
from tests.analysis.closer_studies import with_probes

GENERATED = 32
_FAILED = ("failed", "a rank was killed", "out-of-memory")


@dataclass
class Made:
    """A study with what was put into it: the errors by cell, the disturbed runs and the states of all runs."""

    path: Path
    cells: list[Cell]
    errors: dict[str, set[str]] = field(default_factory=dict)
    disturbed: set[str] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)
    retried: set[str] = field(default_factory=set)

    def error(self, cell: Cell, code: str) -> None:
        self.errors.setdefault(cell.cell_id, set()).add(code)


def make(path: Path, seed: int) -> Made:
    """Make a study whose cells are invalid, disturbed, failed, missing and retried at random."""
    draw = random.Random(seed)
    series = draw.choice([studies.strong, studies.weak])
    cells = series(sizes=draw.choice([(1, 2, 4), (1, 2, 4, 8)]), per_node=draw.choice([1, 2]))
    if draw.random() < 0.3:
        cells = studies.merged([*cells, *studies.weak(32, sizes=(1, 2, 4))])
    made = Made(path, cells)
    base = {cell.cell_id for cell in cells if cell.world_size == 1}
    crowded = {cell.cell_id for cell in cells if cell.world_size > 1 and draw.random() < 0.2}
    other_threads = {cell.cell_id for cell in cells if cell.world_size > 1 and draw.random() < 0.15}
    fate = {
        cell.cell_id: draw.choices(["completed", *(_FAILED[:1]), "planned"], [8, 1, 1])[0] for cell in cells
    }
    fate |= dict.fromkeys(base, "completed")
    some = {(c.cell_id, r): draw.random() < 0.1 for c in cells for r in (1, 2, 3, 4)}

    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        one = "failed" if some[(cell.cell_id, repeat)] else fate[cell.cell_id]
        made.states[f"{cell.cell_id}-r{repeat}"] = one
        return _FAILED if one == "failed" else (one, "", None)

    def env(cell: Cell) -> dict[str, Any]:
        content = studies.environment(cell, cores=1 if cell.cell_id in crowded else 8)
        return content | ({"threads_per_rank": 3} if cell.cell_id in other_threads else {})

    repeats = draw.choice([2, 3, 4])
    noise, comm_s = draw.choice([0.003, 0.02, 0.2]), draw.choice([5e-4, 4e-3])
    timing = studies.Timing(comm_s=comm_s)
    studies.finished(
        path, cells, state=state, env=env, repeats=repeats, noise=noise, seed=seed, timing=timing
    )
    done = {
        cell.cell_id: [
            run for r in range(1, repeats + 1) if made.states[run := f"{cell.cell_id}-r{r}"] == "completed"
        ]
        for cell in cells
    }
    for cell in cells:
        runs = done[cell.cell_id]
        if not runs:
            continue
        if cell.cell_id in crowded and cell.ranks_per_node[0] > 1:
            made.error(cell, "shared-cores")
        if cell.cell_id in other_threads:
            made.error(cell, "threads-differ")
        if cell.world_size > 1 and draw.random() < 0.1:
            made.error(cell, "unequal-samples")
            for run in runs:
                spoil_samples(path, run)
        if len(runs) > 1 and draw.random() < 0.15:
            made.error(cell, "common-condition")
            disturb(made, runs)
        elif len(runs) > 1 and draw.random() < 0.2:
            disturb(made, runs[:1])
        if draw.random() < 0.15:
            retry(made, runs[-1])
    return made


def spoil_samples(path: Path, run: str) -> None:
    file = path / "runs" / run / "attempt-1" / "ranks.csv"
    frame = pd.read_csv(file)
    frame.loc[frame["rank"] == 1, "samples"] *= 3
    frame.to_csv(file, index=False)
    studies.seal(path)


def disturb(made: Made, runs: list[str]) -> None:
    made.disturbed.update(runs)
    for run in runs:
        file = made.path / "runs" / run / "attempt-1" / "run.json"
        times = {"start": "2026-01-02T03:04:10Z", "end": "2026-01-02T03:04:20Z"}
        one = Fact("foreign-cpu", ("n1",), {**times, "share": 0.25, "limit": 0.05}).as_json()
        file.write_text(json.dumps(json.loads(file.read_text()) | {"disturbed": [one]}))


def retry(made: Made, run: str) -> None:
    """Make attempt 1 of a run a failed one, and its result that of attempt 2."""
    made.retried.add(run)
    first, second = (made.path / "runs" / run / f"attempt-{number}" for number in (1, 2))
    shutil.copytree(first, second)
    for file in first.glob("*.csv"):
        file.unlink()
    for folder, values in (
        (first, {"state": "failed", "reason": _FAILED[1], "failure_class": _FAILED[2]}),
        (second, {"attempt": 2}),
    ):
        content = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(content | values))


def of_the_suite(folder: Path) -> list[Made]:
    """Return studies as other tests make them, all of whose runs completed without errors."""
    planted = Planted({"data": 0.025})
    made = [
        Made(studies.finished(folder / "suite strong"), studies.strong()),
        Made(studies.finished(folder / "suite weak", studies.weak()), studies.weak()),
        Made(studies.finished(folder / "suite one run", studies.strong(), repeats=1), studies.strong()),
        Made(
            studies.finished(folder / "suite axes", studies.over_two_axes(), epochs=1),
            studies.over_two_axes(),
        ),
        Made(studies.finished(folder / "suite exact", studies.strong(), noise=0.0), studies.strong()),
        Made(studies.finished(folder / "suite no ranks", studies.weak(), ranks_files=False), studies.weak()),
        Made(studies.finished(folder / "suite planted", studies.weak(sizes=(1, 4)), timing=planted), []),
        Made(with_probes(studies.finished(folder / "suite probes"), studies.strong()[1:]), studies.strong()),
    ]
    for one in made:
        plan = json.loads((one.path / "plan.json").read_text())
        one.states = {run["run_id"]: "completed" for run in plan["runs"]}
    return made


def write_ledger(made: Made) -> None:
    events: list[dict[str, Any]] = []
    for run, state in made.states.items():
        if state == "planned":
            continue
        for attempt in (1, 2) if run in made.retried else (1,):
            failed = state == "failed" or (run in made.retried and attempt == 1)
            events.append({"event": "submitted", "run_id": run, "attempt": attempt, "job_id": "7"})
            end = {"event": "ended", "run_id": run, "attempt": attempt}
            reasons = dict(zip(("state", "reason", "failure_class"), _FAILED, strict=True))
            end |= reasons if failed else {"state": "completed"}
            end |= {"disturbed": "foreign processes"} if run in made.disturbed and not failed else {}
            events.append(end)
    Ledger(made.path / "ledger.jsonl").append_all(events)


def expected_sizes(table: list[ScalingRow], not_valid: set[str]) -> dict[str, int]:
    """Return the recommended size of each series, from the numbers in scaling.csv."""
    rows = pd.read_csv(io.StringIO(csv_table(table)), keep_default_na=False, na_values=[""])
    sizes = {}
    for series, own in rows.groupby("series"):
        bases = own[own["efficiency"] == 1].sort_values("gpus").to_dict("records")
        good = [
            row["gpus"]
            for row in own.to_dict("records")
            if bases
            and row["gpus"] > bases[0]["gpus"]
            and row["efficiency_low"] >= 0.8
            and min(undisturbed(row), undisturbed(bases[0])) >= 3
            and not {row["cell_id"], bases[0]["cell_id"]} & not_valid
        ]
        if good:
            sizes[str(series)] = max(good)
    return sizes


def undisturbed(row: dict[Any, Any]) -> int:
    """Return the number of runs that count without a disturbance: all if a disturbed run was left out."""
    common = row["n_disturbed"] == row["n"] if row["n_disturbed"] == row["n_disturbed"] else False
    return 0 if common else int(row["n"])


def errors_of(facts: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the errors by cell from facts, or from the findings of `bench report --json`."""
    errors: dict[str, set[str]] = {}
    for fact in facts:
        kind = fact.get("kind") or fact["code"]
        for cell in (fact.get("subject") or fact.get("cells") or []) if fact["severity"] == "error" else ():
            errors.setdefault(cell, set()).add(kind)
    return errors


def check(made: Made) -> Counter[str]:
    """Check that all views of one study agree; return what the study contains."""
    write_ledger(made)
    planned = open_study(StudyFolder(made.path))
    records = planned.records()
    study = load_study(made.path, records=records)
    frames = measure(study)
    rows = scaling_table(frames)
    environment = describe_environment(study)
    assessment = assess(study, frames, rows, environment)

    assert errors_of([finding.as_json() for finding in assessment.findings]) == made.errors
    kinds = [fact.kind for fact in assessment.findings]
    first = {cell: next(kind for kind in kinds if kind in own) for cell, own in made.errors.items()}
    assert assessment.invalid == first

    status = json.loads(json.dumps(status_content(planned, records)))
    assert {run["run_id"]: run["state"] for run in status["runs"]} == made.states
    assert {run["run_id"] for run in status["runs"] if run["disturbed"]} == made.disturbed
    runs = pd.read_csv(io.StringIO(runs_csv(all_attempts(study, frames.runs))), keep_default_na=False)
    assert dict(zip(runs["run_id"], runs["state"], strict=True)) == made.states
    assert set(runs.loc[runs["disturbed"] != "", "run_id"]) == made.disturbed

    sizes = expected_sizes(rows, set(made.errors))
    judged = verdicts(rows, invalid=assessment.invalid)
    best = {row.series: row.gpus for row in rows if judged[row.place].kind is VerdictKind.USE}
    assert best == sizes
    check_page(rows, assessment, first, judged)
    results = Results(study, frames, rows)
    vars(results).update(environment=environment, assessment=assessment, divisions={}, causes=[])
    context = proposal_context(results)
    size = re.match(r"The requested job size is .*?(\d+) ranks", context["advice"])
    assert bool(size) <= bool(sizes)
    assert size is None or int(size[1]) in sizes.values()
    assert len(sizes) != 1 or size or len({row.series for row in rows}) > 1

    with pytest.MonkeyPatch.context() as patch:
        # To save time, compute the tables once. Advise and compare assess them, each study once.
        assessed: dict[int, Assessment] = {}

        def assess_once(one: Study, *tables: Any) -> Assessment:
            if id(one) not in assessed:
                assessed[id(one)] = assess(one, *tables)
            return assessed[id(one)]

        for module in (options, comparison):
            patch.setattr(module, "assess", assess_once)
            patch.setattr(module, "measure", lambda _: replace(frames, runs=frames.runs.copy()))
        for module in (options, assessing):
            patch.setattr(module, "scaling_table", lambda _: rows)
        patch.setattr(assessing, "describe_environment", lambda _: environment)
        check_advice(study, made, first)
        elsewhere = replace(study, folder=StudyFolder(made.path / "copy"))
        compared = json.loads(json.dumps(comparison_content(compare_studies(study, elsewhere))))
    assert errors_of(compared["validity"]["b"]) == made.errors
    for cell in compared["cells"]:
        assert cell["not_valid_a"] == cell["not_valid_b"] == first.get(cell["cell_a"], "")
        assert ("A and B are not valid: " in cell["remark"]) == (cell["cell_a"] in first)

    kinds = Counter(code for own in made.errors.values() for code in own)
    kinds += Counter({"disturbed": len(made.disturbed), "retried": len(made.retried)})
    return kinds + Counter({"recommended": len(sizes)}) + Counter(made.states.values())


def check_page(
    rows: list[ScalingRow], assessment: Assessment, first: dict[str, str], judged: dict[int, Verdict]
) -> None:
    """Check the reasons in the table of the page, and that a verdict says if values are not valid."""
    for row in with_errors(rows, assessment.invalid):
        kind = first.get(row.cell_id) or first.get(row.base.cell_id if row.base else "", "")
        assert row.reason.startswith(f"error: {heading(kind)}") == bool(kind)
        verdict = judged[row.place]
        assert (verdict.kind is VerdictKind.NOT_VALID) == bool(kind and row.n)
        assert verdict.reason == kind or not row.n
        assert (verdict.kind is VerdictKind.NO_RESULT) == (not row.n)


def check_advice(study: Study, made: Made, first: dict[str, str]) -> None:
    table, notes, validity = options_of({"s": study}, samples=100_000, epochs=1)
    waits = dict.fromkeys((option.layout for option in table), Wait(0.0, "given"))
    advice = rank(table, waits, samples=100_000, epochs=1, notes=notes, validity=validity)
    content = json.loads(json.dumps(advice_content(advice)))
    assert errors_of(content["validity"]["s"]) == made.errors
    measured = [option for option in content["options"] if option["kind"] == "measured"]
    assert {o["cell_id"]: o["not_valid"] for o in measured if o["not_valid"]} == first
    assert not [o for o in measured if o["not_valid"] and (o["first"] or o["cheapest"] or o["safest"])]
    completed = Counter(run.rpartition("-r")[0] for run, state in made.states.items() if state == "completed")
    assert all(option["completed"] == completed[option["cell_id"]] for option in measured)


def test_all_views_agree_on_forty_studies(tmp_path: Path) -> None:
    made = [*of_the_suite(tmp_path), *(make(tmp_path / f"made {seed}", seed) for seed in range(GENERATED))]
    assert len(made) == 40
    contents: Counter[str] = Counter()
    for one in made:
        contents += check(one)
    for name in ("shared-cores", "threads-differ", "unequal-samples", "common-condition", "disturbed"):
        assert contents[name] >= 3, name
    for name, least in (("retried", 3), ("failed", 10), ("planned", 10), ("recommended", 5)):
        assert contents[name] >= least, name


@pytest.mark.usefixtures("nothing_drawn")
def test_the_report_and_its_json_have_the_same_validity_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = studies.weak(per_node=2)
    crowded = {cells[-1].cell_id}
    path = studies.finished(
        tmp_path / "s",
        cells,
        env=lambda cell: studies.environment(cell, cores=1 if cell.cell_id in crowded else 8),
        timing=studies.Timing(comm_s=5e-4),
    )
    written = write_report(path, proposal=True)
    _print(written, study="s", as_json=True)
    content = json.loads(capsys.readouterr().out)
    assert errors_of(content["validity"]) == {cells[-1].cell_id: {"shared-cores"}}
    text = written.page.read_text(encoding="utf-8")
    proposal = (written.page.parent / "proposal.md").read_text(encoding="utf-8")
    (best,) = content["recommended"]
    assert f"<dt>Use</dt><dd>{best['gpus']} ranks (" in text
    of_size = [one for one in content["verdicts"] if one["cell_id"] == best["cell_id"]]
    assert [(one["verdict"], one["more_runs"], one["reason"]) for one in of_size] == [("use", None, "")]
    table = pd.read_csv(written.page.parent / "scaling.csv")
    assert table["verdict"].to_list() == [one["verdict"] for one in content["verdicts"]]
    assert f"{best['gpus']} ranks on " in proposal
    assert "error: Ranks share cores" in text
    assert "Not valid: Ranks share cores" in proposal
