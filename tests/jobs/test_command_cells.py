"""Execution of commands as cells, on this machine and as jobs of a real Slurm."""

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from bench.jobs.commands import SubmittedCommands
from bench.study.ledger import Record
from bench.study.plan_json import PlannedStudy
from bench.study.verify import verify_run
from ddp_scaling_bench.measure.env_file import changed_script, script_sha256
from ddp_scaling_bench.measure.node_counters import merge_nodes
from ddp_scaling_bench.run_folder import RunFolder
from tests.cluster.containers import wait_for
from tests.commands import command_line
from tests.common import read_rows, run_program
from tests.matrices import command, matrix, planned_study

RATE = {"output": {"throughput": "rate ([0-9]+)"}}
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a function that plans and executes a study of one command in a folder with an awkward name."""

    def study(
        words: str | list[str],
        limit: str = "2m",
        files: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> PlannedStudy:
        root = tmp_path / "it's; a $(folder)"
        root.mkdir()
        monkeypatch.chdir(root)
        for name, text in files.items():
            Path(name).write_text(text)
        cluster = {"executor": "local", "time_limit": limit}
        axes = {"tasks_per_node": [2], "launcher": ["own"]}  # torchrun's agent imports torch
        workload = command(words, **options)
        text = matrix("own", cluster=cluster, axes=axes, batch=8, workload=workload)
        planned = planned_study(Path(), text)
        bench("submit", "own", cwd=root)
        return planned

    return study


def left(study: PlannedStudy) -> RunFolder:
    return study.folder.attempt(study.runs[0].run_id, 1)


def run_json(study: PlannedStudy) -> dict:
    return json.loads(left(study).run_json.read_text())


def record(study: PlannedStudy) -> Record:
    return study.records()[study.runs[0].run_id]


def passes(study: PlannedStudy) -> bool:
    return verify_run(left(study), record(study), study.cell_of(study.runs[0].run_id)).passed


def bench(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command_line.bench(*words, cwd=cwd, BENCH_RESULTS=str(cwd / "results"), OMP_NUM_THREADS="1")


def test_a_command_needs_no_torch_and_gets_its_arguments_literally(study):
    words = ["{run_dir}", "{cell_id}", "a  'b' $HOME", "{{}}"]
    done = study(["bash", "-c", 'printf "%s\\n" "$@" >"$1/words"', "bash", *words])
    assert (str(record(done).state), list(record(done).end.warnings)) == ("completed", [])
    folder = left(done)
    wanted = [str(folder.path.resolve()), "n1x2-gloo-own-b8", "a  'b' $HOME", "{}"]
    assert (folder.path / "words").read_text().splitlines() == wanted
    assert passes(done)


def test_the_node_is_sampled_and_the_log_searched_after_a_command_without_the_recorder(study):
    done = study(["bash", "-c", "sleep 0.3; echo Grad strides do not match bucket view strides."])
    folder = left(done)
    (warning, *_) = record(done).end.warnings
    assert (warning.cause, warning.path, warning.line) == ("slow-gradient-strides", "job.out", 1)
    content = json.loads(folder.conditions.read_text())
    (window,) = content["windows"]
    assert (window["epoch"], window["ranks"]) == (None, [])
    start, end = (datetime.fromisoformat(window[name]) for name in ("start", "end"))
    assert (end - start).total_seconds() >= 0.3
    (node,) = window["nodes"]
    assert node["node"] == socket.gethostname()
    assert node["foreign_cpu_s"] >= 0
    assert [path.name for path in folder.path.glob("conditions*")] == ["conditions.json"]
    # A node that cannot be sampled is stated, and does not fail the run.
    (folder.path / "conditions.err").write_text("Traceback\nNo module named bench\n\n")
    merge_nodes(folder)
    shown = json.loads(folder.conditions.read_text())
    assert shown == {"schema": 1, "windows": [], "not_sampled_because": "No module named bench"}


def test_a_command_without_the_recorder_has_an_environment_and_its_script(study):
    words = ["python", "train.py", "{run_dir}"]
    done = study(words, metrics=RATE, files={"train.py": "print('rate 8')\n"})
    run, env = run_json(done), json.loads(left(done).env.read_text())
    assert run["command"]["words"] == words
    assert (run["command"]["script"], env["script_sha256"]) == ("train.py", run["command"]["script_sha256"])
    (host,) = env["hosts"]
    assert (host["host"], host["ranks_here"]) == (socket.gethostname(), 2)
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert (env["threads_per_rank"], env["env"]["OMP_NUM_THREADS"]) == (1, "1")
    assert (env["python"], env["torch"]) == (platform.python_version(), version("torch"))
    assert (env["joined"], env["backend"], env["transport"]) == (None, None, None)
    assert not list(left(done).path.glob("conditions-*"))
    verification = verify_run(left(done), record(done), done.cell_of(done.runs[0].run_id))
    outcomes = {check.name: check.outcome for check in verification.checks}
    assert (outcomes["script"], outcomes["nodes"], outcomes["joined"]) == ("ok", "ok", "not measured")


NO_SPEED = "no line of job.out or job.err matches the pattern of throughput, 'speed (.*)'"
NO_SPEED += "; correct it: workload.metrics.output, or --pattern for logs"


@pytest.mark.parametrize(
    ("words", "metrics", "reason"),
    [
        (["bash", "-c", 'echo "ValueError: planted" >&2; exit 3'], "none", "ValueError: planted"),
        (["echo", "hello"], {"output": {"throughput": "speed (.*)"}}, NO_SPEED),
    ],
)
def test_a_command_that_fails_or_does_not_print_its_metrics_has_failed(study, words, metrics, reason):
    done = study(words, metrics=metrics)
    assert (str(record(done).state), record(done).reason) == ("failed", reason)
    assert not passes(done)


def test_the_time_limit_ends_every_process_of_a_command(study):
    words = "rank 0 on n1: rank 1 on n2 did not reach step 3"
    script = f"trap 'echo \"bench: error: {words}\" >&2' TERM; sleep 4242 & echo ready; wait; sleep 4242"
    done = study(["bash", "-c", script], limit="10s")
    assert record(done).reason == f"the time limit was reached; {words}"
    assert record(done).failure_class == "time-limit"
    assert left(done).out.read_text() == "ready\n"
    assert left(done).conditions.exists(), "the node is sampled after the command"
    wait_for(
        lambda: ["sleep", "4242"] not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])],
        what="the end of all processes",
    )


@pytest.mark.slow
def test_an_unchanged_script_and_one_with_added_lines_end_in_the_same_report(tmp_path, nothing_drawn):
    for name in ("train_ddp.py", "train_gpt.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    quick = {
        "ddp": ("--epochs 4", "--epochs 1 --samples 1600"),
        "gpt": ("{grad_accum}", "{grad_accum} --max_iters 9"),
    }
    reports = {}
    for name, (old, new) in quick.items():
        text = (EXAMPLES / f"{name}.yaml").read_text()
        assert old in text
        text = text.replace(old, new).replace(
            "steps_per_epoch: 30", "steps_per_epoch: 10\n  sweep_time: 0\n  probe_steps: 0"
        )
        # One rank, for gpt without torchrun's agent: each process imports torch.
        ranks = {"ddp": "[1]", "gpt": "[1], launcher: [own]"}[name]
        text = text.replace("repeats: 3", "repeats: 1").replace("[1, 2]", ranks)
        (tmp_path / f"{name}.yaml").write_text(text)
        done = bench("run", f"{name}.yaml", cwd=tmp_path)
        assert command_line.is_reported(done), done.stdout + done.stderr
        (reports[name],) = read_rows(tmp_path / "results" / f"own_{name}" / "report" / "scaling.csv")
    assert list(reports["ddp"]) == list(reports["gpt"])
    for row in reports.values():
        assert (row["state"], row["n"], row["gpus"]) == ("completed", "1", "1")
        assert float(row["throughput_samples_per_sec"]) > 0
    assert float(reports["ddp"]["comm_efficiency"]) > 0
    assert reports["gpt"]["comm_efficiency"] == ""  # what the script does not tell is not known


MATRIX = """\
study: own
cluster: {{executor: local, time_limit: 1m}}
axes: {{tasks_per_node: [1, 2], launcher: [{launcher}]}}
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
        is_own = command.startswith(("torchrun", "accelerate"))
        return planned_study(Path(), MATRIX.format(command=command, launcher="own" if is_own else "torchrun"))

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
        ("null", ""),  # the built-in training
        ("torchrun -m pkg.train train.py", ""),
        ("accelerate launch --config_file image.sif train.py", "train.py"),
        ("numactl -m 0 python train.py", "train.py"),
        ("./python3 train.py", "train.py"),
        ("[./missing.py, '{run_dir}']", ""),
        ("apptainer exec image.sif train.py", "train.py"),
    ],
)
def test_the_script_is_the_first_word_that_is_a_file(planned, command, script):
    shutil.copy("train.py", "python3")
    with open("image.sif", "wb") as image:  # of gigabytes
        image.truncate(2**24 + 1)
    found = described(planned(command))
    sha256 = hashlib.sha256(Path("train.py").read_bytes()).hexdigest()
    assert (found["script"], found["script_sha256"]) == (script, sha256 if script else None)


def test_the_words_the_commit_and_changes_of_the_script_are_recorded(planned):
    study = planned("python train.py --batch {per_gpu_batch} --out {run_dir}")

    def state() -> tuple[str | None, bool | None]:
        found = described(study)
        return found["git_commit"], found["git_dirty"]

    assert described(study)["words"] == ["python", "train.py", "--batch", "8", "--out", "{run_dir}"]
    assert state() == (None, None)
    git("init", "-q")
    assert state() == (None, None)
    git("add", "train.py")
    git("commit", "-qm", "a")
    git("tag", "-am", "a", "v1")
    commit = git("rev-parse", "HEAD")
    assert state() == (commit, False)
    run = {"command": described(study)}
    assert changed_script(run, script_sha256(run, ".")) is None
    Path("train.py").write_text("print('changed')\n")
    assert state() == (commit, True)
    assert str(changed_script(run, script_sha256(run, "."))) == (
        "script-changed: train.py has changed since the submission: its SHA-256 was "
        f"{run['command']['script_sha256'][:12]}, and was {script_sha256(run, '.')[:12]} when the run started"
    )
    assert changed_script({}, None) is changed_script(run, None) is None
