"""Secrets of a matrix reach the jobs, but no other file of the study and no output of bench."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.study.files import write_json
from tests.commands.command_line import bench
from tests.matrices import BARE, matrix, training

#: Every secret of the matrices below contains this word.
HIDDEN = "qzv"
MATRIX = """\
# a comment with HF_TOKEN=qzv-0
cluster:
  executor: local
  env: {SSHPASS: "q\\x7av-1", GH_PAT: qzv-2, COOKIE: 'qzv''3', NCCL_DEBUG: INFO}
  setup: ["export BEARER=qzv-4"]
axes: {nodes: [1], tasks_per_node: [1], backend: [gloo], env.AUTH_TOKEN: [qzv-5, qzv-6]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
repeats: 1
workload:
  device: cpu
  command: [python3, train.py, --api-key, qzv-7, Pwd=qzv-8]
  metrics: none
"""
TRAIN = """\
import os, sys
names = "SSHPASS GH_PAT COOKIE BEARER AUTH_TOKEN".split()
with open("seen.txt", "a") as file:
    print(*(os.environ[name] for name in names), *sys.argv[1:], file=file)
sys.exit("RuntimeError: no access to https://user:qzv-9@host/x with Pwd=qzv-8, api_key='qzv-7'")
"""


#: Jobs find the interpreter of the tests.
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def leaks(folder: Path) -> list[str]:
    """Return the files below ``folder`` that contain a secret, without scripts and the output of jobs."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "scripts"]
    return [
        str(path)
        for path in paths
        if path.name not in ("job.out", "job.err") and HIDDEN.encode() in path.read_bytes()
    ]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study whose runs have failed with secrets in their last errors."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "m.yaml").write_text(MATRIX, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    ended = bench("run", "m.yaml", cwd=folder, **PATH)
    assert ended.returncode == 1
    assert HIDDEN not in ended.stdout + ended.stderr
    return folder


def test_the_jobs_get_the_secrets_and_the_files_do_not(failed: Path) -> None:
    lines = (failed / "seen.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == [
        f"qzv-1 qzv-2 qzv'3 qzv-4 qzv-{number} --api-key qzv-7 Pwd=qzv-8" for number in (5, 6)
    ]
    assert leaks(failed / "results") == []
    scripts = list((failed / "results/m/scripts").iterdir())
    assert len(scripts) == 2
    assert {path.stat().st_mode & 0o777 for path in scripts} == {0o600}
    assert not any(HIDDEN in path.name for path in failed.rglob("*"))


def test_the_reason_of_a_failure_has_no_password_of_a_url(failed: Path) -> None:
    run = json.loads(bench("status", "m", "--json", cwd=failed).stdout)["runs"][0]
    assert run["reason"] == "RuntimeError: no access to https://***@host/x with Pwd=*** api_key=***"


@pytest.mark.parametrize(
    "words",
    [
        "status m",
        "status m --json",
        "verify m",
        "verify m --json",
        "doctor m",
        "doctor m --json",
        "doctor results/m/runs/{run}/attempt-1/job.err",
        "report m --proposal",
        "advise m --samples 1k",
        "compare m m",
        "submit m --dry-run --retry-failed",
        "submit m --dry-run --retry-failed --json",
        "plan m.yaml --all",
        "plan m.yaml --json",
        "lint results/m/scripts/{script}",
        "plan --token=qzv",
        "verify https://user:qzv@host",
    ],
)
def test_no_command_prints_a_secret(failed: Path, words: str) -> None:
    script = next((failed / "results/m/scripts").iterdir())
    run = next((failed / "results/m/runs").iterdir())
    ended = bench(*words.format(script=script.name, run=run.name).split(), cwd=failed)
    assert HIDDEN not in ended.stdout + ended.stderr
    assert leaks(failed / "results") == []


def test_a_study_with_secrets_is_planned_again_and_its_copy_names_what_is_missing(failed: Path) -> None:
    again = bench("plan", "m.yaml", cwd=failed)
    assert again.returncode == 0
    copy = failed / "results/m/matrix.yaml"
    lines = [4, 5, 6, 11]
    ended = bench("plan", str(copy.relative_to(failed)), cwd=failed)
    assert ended.returncode == 2
    missing = "a copy of a matrix has *** in place of a secret; write the value here"
    for line in lines:
        assert f"results/m/matrix.yaml:{line}: {missing}" in ended.stderr
    # A secret can change, and the script is then written again.
    (failed / "m.yaml").write_text(MATRIX.replace("qzv-2", "qzv-new"), encoding="utf-8")
    assert bench("plan", "m.yaml", cwd=failed).returncode == 0
    script = next((failed / "results/m/scripts").iterdir())
    assert "qzv-new" in script.read_text(encoding="utf-8")
    (failed / "m.yaml").write_text(MATRIX, encoding="utf-8")
    assert bench("plan", "m.yaml", cwd=failed).returncode == 0


def test_a_study_of_an_older_version_keeps_its_secrets_to_itself(failed: Path) -> None:
    """plan.json and run.json of older versions contain secrets; the page and the commands do not show them."""
    folder = failed / "results/m"
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    for cell in plan["cells"]:
        cell["env"]["GH_PAT"] = "qzv-2"
        cell["workload"]["command"] = ["python3", "train.py", "--api-key", "qzv-7", "Pwd=qzv-8"]
    old = failed / "old" / "m"
    shutil.copytree(folder, old)
    write_json(old / "plan.json", plan)
    for path in old.glob("runs/*/*/run.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, {**run, "reason": "cannot read https://user:qzv-9@host, Pwd=qzv-8"})
    (old / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    for words in ("status", "verify", "report"):
        ended = bench(words, "old/m", cwd=failed)
        assert HIDDEN not in ended.stdout + ended.stderr
    assert leaks(old / "report") == []
    # Planned again, nothing of it has changed.
    assert bench("plan", "m.yaml", "--results", "old", cwd=failed).returncode == 0
    assert leaks(old / "report") == []
    assert HIDDEN not in (old / "plan.json").read_text(encoding="utf-8")


def test_scripts_that_everybody_can_read_lose_this_right_with_the_first_secret(tmp_path: Path) -> None:
    plain = MATRIX.replace("qzv-", "x").replace("AUTH_TOKEN", "NCCL_ALGO")
    text = "\n".join(line for line in plain.splitlines() if "env: {" not in line and "setup" not in line)
    text = text.replace("--api-key, x7, Pwd=x8", "--lr, '0.1'").replace("# a comment with HF_TOKEN=x0", "")
    (tmp_path / "m.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    old_mask = os.umask(0o022)
    try:
        assert bench("plan", "m.yaml", cwd=tmp_path).returncode == 0
        scripts = list((tmp_path / "results/m/scripts").iterdir())
        assert {path.stat().st_mode & 0o777 for path in scripts} == {0o644}
        (tmp_path / "m.yaml").write_text(f"{text}\n# GH_PAT=qzv\n", encoding="utf-8")
        assert bench("plan", "m.yaml", cwd=tmp_path).returncode == 0
        assert {path.stat().st_mode & 0o777 for path in scripts} == {0o600}
    finally:
        os.umask(old_mask)


def test_the_built_in_training_gets_the_secrets_of_its_script(tmp_path: Path) -> None:
    seen = tmp_path / "seen.txt"
    setup = ["export HF_TOKEN=qzv-2", f"echo $GH_PAT $HF_TOKEN $AUTH_TOKEN >> {seen}"]
    cluster = {"executor": "local", "env": {"GH_PAT": "qzv-1"}, "setup": setup}
    axes = {"tasks_per_node": [1], "env.AUTH_TOKEN": ["qzv-5", "qzv-6"]}
    workload = training(**BARE | {"steps_per_epoch": 2})
    (tmp_path / "m.yaml").write_text(matrix("m", cluster=cluster, axes=axes, batch=2, workload=workload))
    assert bench("plan", "m.yaml", cwd=tmp_path).returncode == 0
    ended = bench("submit", "m", cwd=tmp_path, **PATH)
    assert ended.returncode == 0, ended.stderr
    lines = set(seen.read_text(encoding="utf-8").splitlines())
    assert lines == {"qzv-1 qzv-2 qzv-5", "qzv-1 qzv-2 qzv-6"}
    assert leaks(tmp_path / "results") == []
