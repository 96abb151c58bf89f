"""run.json describes an attempt, and is written once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.errors import UnwritableError
from bench.plan import make_plan, write_plan
from bench.study.ledger import Record, RunState
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.run_json import next_attempt
from tests.matrices import matrix


@pytest.fixture
def study(tmp_path: Path) -> PlannedStudy:
    (tmp_path / "s.yaml").write_text(matrix("s", axes={"tasks_per_node": [1]}))
    return open_study(write_plan(make_plan(tmp_path / "s.yaml"), tmp_path))


def test_an_attempt_is_described_when_its_number_is_claimed(study):
    run = study.runs[0]
    attempt = next_attempt(study, run, Record(run_id=run.run_id))
    attempt.claim(study, interpreter="python")
    content = json.loads(attempt.folder.run_json.read_text())
    assert (content["run_id"], content["attempt"], content["job_name"]) == (
        *(run.run_id, 1),
        attempt.job_name,
    )
    assert content["cell"]["world_size"] == 1
    assert content["interpreter"] == "python"
    assert "state" not in content
    with pytest.raises(UnwritableError, match="File exists"):
        attempt.claim(study)


def test_a_folder_that_the_ledger_does_not_know_is_an_intent(study):
    run = study.runs[0]
    assert study.records()[run.run_id].attempt == 0
    attempt = next_attempt(study, run, study.records()[run.run_id])
    attempt.claim(study, allocation={"pack": 1, "place": 2})
    record = study.records()[run.run_id]
    assert (record.attempt, record.state, record.job_name) == (1, RunState.QUEUED, attempt.job_name)
    assert (record.pack, record.place) == (1, 2)
    attempt.folder.run_json.write_text("{")
    assert study.records()[run.run_id].job_name == attempt.job_name
    assert next_attempt(study, run, record).number == 2


def test_a_refused_attempt_leaves_no_folder_and_its_number_is_used_again(study):
    run = study.runs[0]
    attempt = next_attempt(study, run, Record(run_id=run.run_id))
    attempt.claim(study)
    attempt.release()
    assert not attempt.folder.path.exists()
    refused = Record(run_id=run.run_id, attempt=1, refused=True)
    assert next_attempt(study, run, refused).number == 1
