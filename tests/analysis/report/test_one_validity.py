"""Page, proposal, tables, advise, compare, status and JSON agree on validity, states, values and sizes."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.matrix.cell import Cell
from tests.analysis import studies
from tests.common import edited_csv

FAILED = ("failed", "a rank was killed", "out-of-memory")


@dataclass
class Made:
    """A study with what was put into it: the errors by cell, the disturbed runs and the states of all runs."""

    path: Path
    errors: dict[str, set[str]] = field(default_factory=dict)
    disturbed: set[str] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)


def make(path: Path, *, valid_baseline: bool) -> Made:
    """Make five weak sizes: fine, two with errors, and one of which a run failed, one is missing, one was disturbed."""
    one, two, four, eight, sixteen = studies.weak(sizes=(1, 2, 4, 8, 16), per_node=2)
    made = Made(path)

    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        found = FAILED if (cell is two and repeat == 5) else ("completed", "", None)
        found = ("planned", "", None) if (cell is two and repeat == 6) else found
        made.states[f"{cell.cell_id}-r{repeat}"] = found[0]
        return found

    def env(cell: Cell) -> dict[str, Any]:
        return studies.environment(cell, cores=1 if cell is eight else 8)

    timing = studies.Timing(comm_s=5e-4)
    cells = [one, two, four, eight, sixteen]
    studies.finished(path, cells, state=state, env=env, repeats=6, timing=timing)
    made.errors = {eight.cell_id: {"shared-cores"}, sixteen.cell_id: {"unequal-samples"}}
    for file in path.glob(f"runs/{sixteen.cell_id}-*/attempt-1/ranks.csv"):
        with edited_csv(file) as ranks:
            ranks.loc[ranks["rank"] == 1, "samples"] *= 3
    made.disturbed = {f"{two.cell_id}-r1"}
    if not valid_baseline:
        made.errors[one.cell_id] = {"common-condition"}
        made.disturbed |= {f"{one.cell_id}-r{repeat}" for repeat in range(1, 7)}
    for run in made.disturbed:
        studies.disturb(path, run, "foreign-cpu", "n1", share=0.25, limit=0.05)
    return made


def content(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert (done.exit_code == 1) if words[0] == "report" else (done.exit_code < 2), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def errors_of(facts: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the errors by cell from the findings in a JSON output."""
    errors: dict[str, set[str]] = {}
    for fact in facts:
        kind = fact.get("kind") or fact["code"]
        for cell in (fact.get("subject") or fact.get("cells") or []) if fact["severity"] == "error" else ():
            errors.setdefault(cell, set()).add(kind)
    return errors


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("valid_baseline", [True, False])
def test_all_views_agree(tmp_path: Path, valid_baseline: bool) -> None:
    made = make(tmp_path / "s", valid_baseline=valid_baseline)
    first = {cell: next(iter(own)) for cell, own in made.errors.items()}
    study = str(made.path)
    shutil.copytree(made.path, tmp_path / "t")

    report = content("report", study, "--proposal")
    assert errors_of(report["validity"]) == made.errors
    scaling = pd.read_csv(made.path / "report/scaling.csv").set_index("cell_id")
    assert scaling["verdict"].to_list() == [one["verdict"] for one in report["verdicts"]]
    assert {cell for cell, kind in scaling["verdict"].items() if kind == "not-valid"} >= made.errors.keys()
    runs = pd.read_csv(made.path / "report/runs.csv", keep_default_na=False)
    assert dict(zip(runs["run_id"], runs["state"], strict=True)) == made.states
    assert set(runs.loc[runs["disturbed"] != "", "run_id"]) == made.disturbed

    status = content("status", study)
    assert {run["run_id"]: run["state"] for run in status["runs"]} == made.states
    assert {run["run_id"] for run in status["runs"] if run["disturbed"]} == made.disturbed

    page = (made.path / "report/index.html").read_text(encoding="utf-8")
    proposal = (made.path / "report/proposal.md").read_text(encoding="utf-8").replace("\\", "")
    best = [(one["cell_id"], one["gpus"]) for one in report["recommended"]]
    assert best == ([("n2x2-gloo-srun-b16", 4)] if valid_baseline else [])
    for cell, ranks in best:
        value = scaling.loc[cell, "efficiency"]
        assert re.search(
            rf"<b>use {ranks} ranks \(2 × 2\),[^<]*</b>; efficiency {value:.2f} <span class=whole>\[", page
        )
        assert f"{ranks} ranks on 2 nodes, with an efficiency of {value:.2f} [" in proposal
    assert "error: Ranks share cores" in page
    assert "Not valid: Ranks share cores" in proposal
    assert "Not valid: Unequal samples" in proposal

    advice = content("advise", study, "--samples", "100000", "--epochs", "1", "--wait", "0")
    assert errors_of(advice["validity"]["s"]) == made.errors
    assert {one["cell_id"]: one["not_valid"] for one in advice["options"] if one["not_valid"]} == first
    assert not [one for one in advice["options"] if one["not_valid"] and (one["first"] or one["cheapest"])]
    completed = {one["cell_id"]: one["completed"] for one in advice["options"]}
    assert completed["n1x2-gloo-srun-b16"] == 4

    compared = content("compare", study, str(tmp_path / "t"))
    assert errors_of(compared["validity"]["b"]) == made.errors
    for one in compared["cells"]:
        assert one["not_valid_a"] == one["not_valid_b"] == first.get(one["cell_a"], "")
