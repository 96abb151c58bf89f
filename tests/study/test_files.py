"""Files of a study are written whole, and other kinds of files are not read."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UnwritableError
from bench.plan import make_plan, write_plan
from bench.study.files import read_json, read_object, read_table, write_json
from bench.study.ledger import Record, RunState
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.run_json import next_attempt
from tests.matrices import matrix


@given(old=st.text(max_size=5000), new=st.text(max_size=5000))
def test_rewritten_content_is_read_back_whatever_its_length(tmp_path_factory, old, new):
    path = tmp_path_factory.mktemp("layout") / "env.json"
    for text in (old, new):
        write_json(path, {"text": text})
    assert read_json(path) == {"text": new}
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_keeps_its_content(tmp_path):
    path = tmp_path / "env.json"
    write_json(path, {"state": 1})
    with pytest.raises(TypeError):
        write_json(path, {"state": {1}})
    with pytest.raises(UnwritableError):
        write_json(tmp_path / "gone" / "env.json", {})
    assert read_json(path) == {"state": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "is missing"),
        ("fifo", "cannot be read: It is not a regular file"),
        ("device", "cannot be read: It is not a regular file"),
        ("folder", "cannot be read: Is a directory"),
        ("sparse", "cannot be read: it is larger than 1 GiB"),
        (b"", "is not valid JSON"),
        (b'{"state": "com', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_has_a_problem_in_words(tmp_path, kind, problem):
    path = tmp_path / "run.json"
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    assert read_object(path) == (None, problem)
    assert read_json(path) is None
    if not isinstance(kind, bytes):
        assert read_table(path) == ([], [])


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
