"""The description of a command at its submission: script, SHA-256 and git commit."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from bench.jobs.commands import SubmittedCommands
from bench.plan import make_plan, write_plan
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.run_json import changed_script, script_sha256
from bench.words import sentence
from tests.common import run_program

MATRIX = """\
study: own
cluster: {{executor: local, time_limit: 1m}}
axes: {{tasks_per_node: [1, 2]}}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
workload:
  device: cpu
  metrics: none
  command: {command}
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return a function that plans a study of a command in a folder with train.py."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('hello')\n")

    def plan(command: str) -> PlannedStudy:
        Path("own.yaml").write_text(MATRIX.format(command=command))
        return open_study(write_plan(make_plan(Path("own.yaml")), Path("results")))

    return plan


def described(study: PlannedStudy) -> dict:
    cell = next(iter(study.cells.values()))
    return SubmittedCommands(study).describe(cell)["command"]


def git(*words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return run_program(["git", *options, *words], check=True).stdout.strip()


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python -u train.py --batch {per_gpu_batch}", "train.py"),
        ("[bash, -c, 'python \"$1\"', bash, ./train.py]", "./train.py"),
        ("python -m http.server train.py", ""),
        ("torchrun -m pkg.train train.py", ""),
        ("numactl -m 0 python train.py", "train.py"),
        ("./python3 train.py", "train.py"),
        ("[missing.py, '{run_dir}']", ""),
        ("apptainer exec image.sif train.py", "train.py"),
    ],
)
def test_the_script_is_the_first_word_that_is_a_file(planned, command, script):
    shutil.copy("train.py", "python3")
    with open("image.sif", "wb") as image:  # of gigabytes
        image.truncate(20 * 2**20)
    found = described(planned(command))
    sha256 = hashlib.sha256(Path("train.py").read_bytes()).hexdigest()
    assert (found["script"], found["script_sha256"]) == (script, sha256 if script else None)


def test_words_contain_the_values_of_the_cell(planned):
    found = described(planned("python train.py --batch {per_gpu_batch} --out {run_dir}"))
    assert found["words"] == ["python", "train.py", "--batch", "8", "--out", "{run_dir}"]


def test_the_commit_and_changes_of_tracked_files_are_recorded(planned):
    study = planned("python train.py")
    assert (described(study)["git_commit"], described(study)["git_dirty"]) == (None, None)
    git("init", "-q")
    assert (described(study)["git_commit"], described(study)["git_dirty"]) == (None, None)
    git("add", "train.py")
    git("commit", "-qm", "a")
    git("tag", "-am", "a", "v1")
    commit = git("rev-parse", "HEAD")
    assert (described(study)["git_commit"], described(study)["git_dirty"]) == (commit, False)
    Path("train.py").write_text("print('changed')\n")
    assert described(study)["git_dirty"] is True


def test_a_script_that_changed_after_the_submission_is_named(planned):
    run = {"command": described(planned("python train.py"))}
    assert changed_script(run, script_sha256(run, ".")) is None
    Path("train.py").write_text("print('changed')\n")
    assert sentence(changed_script(run, script_sha256(run, "."))) == (
        "script-changed: train.py has changed since the submission: its SHA-256 was "
        f"{run['command']['script_sha256'][:12]}, and was {script_sha256(run, '.')[:12]} when the run started"
    )
    assert changed_script({}, None) is changed_script(run, None) is None
