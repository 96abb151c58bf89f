"""What reaches the ranks of a command: variables of `cluster.env_from`, which nothing holds, names, and modules."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.figures import no_figure
from tests.commands.command_line import bench, is_reported
from tests.common import run_program, write_cell
from tests.jobs.slurm_studies import add_modules, plan_study, submitted
from tests.matrices import BARE, command, matrix, slurm, training
from tests.train.ranks import ROOT

VALUE = "qzv it's"
#: Each rank says whether it has the value; none prints it. It notes the words of all processes, as in ps, and the
#: variables of a rank. It imports a module beside it.
RANK = f"""\
import os, pathlib, subprocess, sys
import neighbour
words = subprocess.run(["ps", "-eo", "args"], capture_output=True).stdout
passed = os.environ.get("HF_TOKEN", "") == chr(113) + {VALUE[1:]!r}
name = f"rank-{{os.environ.get('RANK') or os.environ['NODE_RANK']}}"
names = "BENCH_GLOBAL_BATCH LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE".split()
print("rate", neighbour.RATE)
given = [f"{{name}}={{os.environ.get(name)}}" for name in names]
pathlib.Path(sys.argv[1], name).write_text(" ".join([f"{{passed}} {{b'q' + b'zv' in words}}", *given]))
"""
RATE = {"output": {"throughput": "rate ([0-9]+)"}}
#: Jobs find the interpreter of the tests.
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def text_of(folder: Path, cluster: dict[str, Any], **axes: Any) -> str:
    (folder / "rank.py").write_text(RANK)
    (folder / "neighbour.py").write_text("RATE = 8\n")
    words = ["python", f"{folder}/rank.py", "{run_dir}"]
    own = {**cluster, "env_from": ["HF_TOKEN"]}
    return matrix("passed", cluster=own, axes=axes, batch=2, workload=command(words, metrics=RATE))


def check(folder: Path, *, ranks: int) -> list[str]:
    """Check that all ranks had the value, and that it is in no file of the study and in no report.

    Return the names of each rank.
    """
    answers = [path.read_text().split(" ", 2) for path in sorted(folder.glob("runs/*/*/rank-*"))]
    assert [one[:2] for one in answers] == [["True", "False"]] * ranks
    with no_figure():
        assert is_reported(bench("report", str(folder), cwd=folder))
    assert [path for path in folder.rglob("*") if path.is_file() and b"qzv" in path.read_bytes()] == []
    return [names for *_, names in answers]


@pytest.mark.parametrize(("launcher", "nodes", "pack"), [("srun", 2, False), ("torchrun", 1, True)])
def test_the_ranks_of_a_job_get_variables_names_and_their_modules(cluster, tmp_path, launcher, nodes, pack):
    section = slurm(time_limit="5m")
    text = text_of(tmp_path, section, nodes=[nodes], tasks_per_node=[2], launcher=[launcher])
    add_modules(tmp_path)  # which neither bench nor torchrun's agent imports
    # A site can keep variables from jobs.
    own = {"HF_TOKEN": VALUE, "SBATCH_EXPORT": "NONE", "PYTHONPATH": f".:{ROOT}"}
    study = plan_study(tmp_path, text, {**cluster.environment, **own})
    with contextlib.chdir(tmp_path), submitted(study, "--wait", *["--pack"] * pack):
        assert check(study.folder, ranks=2 * nodes) == [
            f"BENCH_GLOBAL_BATCH={4 * nodes} LOCAL_RANK={rank % 2} LOCAL_WORLD_SIZE=2 RANK={rank} "
            f"WORLD_SIZE={2 * nodes}"
            for rank in range(2 * nodes)
        ]
        ((run_id, _),) = study.status().items()
        env, conditions = (
            json.loads(file.read_text())
            for file in (study.attempt(run_id).env, study.attempt(run_id).conditions)
        )
        (window,) = conditions["windows"]
        assert [host["ranks_here"] for host in env["hosts"]] == [2] * nodes
        assert [host["host"] for host in env["hosts"]] == [node["node"] for node in window["nodes"]]
        verified = study.bench("verify", "STUDY", "--strict")
    lines = {f"1 of 1 runs: {what} not measured" for what in ("joined", "trains together")}
    lines.add("0 of 1 runs pass; 1 measured in part, without a failed check")
    assert (verified.returncode, lines - {*verified.stdout.splitlines()}) == (3, set())


def test_a_variable_reaches_the_ranks_on_this_machine_and_is_required_only_at_submit(tmp_path):
    section = {"executor": "local", "time_limit": "2m"}
    (tmp_path / "passed.yaml").write_text(text_of(tmp_path, section, launcher=["own"]))
    assert bench("plan", "passed.yaml", cwd=tmp_path).returncode == 0
    ended = bench("submit", "passed", cwd=tmp_path, **PATH)
    assert ended.returncode == 2
    assert "HF_TOKEN of cluster.env_from: not set in this shell" in ended.stderr
    assert not (tmp_path / "results/passed/runs").exists()
    ended = bench("submit", "passed", cwd=tmp_path, HF_TOKEN=VALUE, **PATH)
    assert ended.returncode == 0, ended.stderr
    assert "qzv" not in ended.stdout + ended.stderr
    check(tmp_path / "results/passed", ranks=1)


def test_a_variable_reaches_the_ranks_on_hosts(running_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_SSH", f"ssh -F {running_cluster.start_sshd()}")
    monkeypatch.chdir(tmp_path)
    section = {"executor": "ssh", "hosts": ["n1", "n2"], "time_limit": "5m"}
    text = text_of(tmp_path, section, nodes=[2], tasks_per_node=[1], launcher=["own"])
    study = plan_study(tmp_path, text, {"HF_TOKEN": VALUE})
    ended = study.bench("submit", "STUDY")
    assert ended.returncode == 0, ended.stderr
    check(study.folder, ranks=2)


#: Modules of the standard library that every program needs, but the start of Python itself does not.
STANDARD = ("json.py", "typing.py", "pathlib.py", "re.py", "numpy/__init__.py")
#: Values of PYTHONPATH that put the current folder on the import path; {} is this folder.
PATHS = ["{}:", ":/nowhere"]
#: A command with the recorder, between two imports of its own module `bench`.
RECORDED = """\
import bench, torch
from ddp_scaling_bench import Recorder
import bench.deeper
assert bench.OWN == bench.deeper.OWN == "the user's"
model = torch.nn.Linear(4, 4)
with Recorder(model, warmup_steps=3, steps_per_epoch=4, attribution_steps=2, epochs=1) as recorder:
    for batch in recorder.batches([torch.randn(4, 4)] * 12):
        with recorder.step():
            model(batch).sum().backward()
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    add_modules(tmp_path)
    return tmp_path


def run(folder: Path, *words: str, path: str = ".", **env: str) -> subprocess.CompletedProcess[str]:
    """Execute Python with ``words`` in ``folder``; PYTHONPATH is ``path``."""
    environment = {**os.environ, "PYTHONPATH": path.format(folder), "COLUMNS": "200", **env}
    command = [sys.executable, *words]
    return run_program(command, cwd=folder, env=environment)


@pytest.mark.parametrize("path", PATHS)
def test_no_program_of_a_job_imports_a_module_of_the_users_folder(folder, path):
    add_modules(folder, STANDARD)
    module = "train.network_interface"
    program = f"import runpy; runpy.run_module('ddp_scaling_bench.{module}')"
    assert "of the user was imported" in run(folder, "-c", program, path=path).stderr
    done = run(folder, "-P", "-m", "ddp_scaling_bench.start", module, "localhost", path=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_line_imports_no_module_of_the_users_folder(folder):
    add_modules(folder, STANDARD)
    (folder / "own.yaml").write_text(matrix("own", axes={"tasks_per_node": [2]}, workload=training(**BARE)))
    done = run(folder, "-m", "ddp_scaling_bench", "plan", "own.yaml", "--json")
    assert (done.returncode, json.loads(done.stdout)["runs"]) == (0, 1), done.stderr
    (folder / "bench.py").unlink()
    assert run(folder, "-m", "bench", "plan", "own.yaml").returncode == 0


def test_the_recorder_works_beside_a_module_of_the_user_named_bench(server, tmp_path):
    (tmp_path / "bench").mkdir()
    for name in ("__init__", "deeper"):
        (tmp_path / f"bench/{name}.py").write_text('OWN = "the user\'s"\n')
    script = tmp_path / "recorded.py"
    script.write_text(RECORDED)
    write_cell(tmp_path, warmup_steps=3, steps_per_epoch=4, attribution_steps=2, epochs=1)
    done = server.start(tmp_path, [{"BENCH_RUN_DIR": str(tmp_path)}], "script", [str(script)]).finish()
    assert [row["steps"] for row in done.succeeded().table("metrics")] == ["4"]
