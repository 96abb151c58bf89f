"""Variables of `cluster.env_from` reach every rank, and nothing holds their values."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from bench.study.verify import verify_run
from tests.commands.command_line import bench
from tests.common import run_program
from tests.jobs.slurm_studies import plan_study, submitted
from tests.matrices import BARE, command, matrix, slurm, training

VALUE = "qzv it's"
#: Each rank says whether it has the value; none prints it. It notes the words of all processes, as in ps.
RANK = f"""\
import os, pathlib, subprocess, sys
words = subprocess.run(["ps", "-eo", "args"], capture_output=True).stdout
passed = os.environ.get("HF_TOKEN", "") == chr(113) + {VALUE[1:]!r}
name = f"rank-{{os.environ['RANK']}}"
pathlib.Path(sys.argv[1], name).write_text(f"{{passed}} {{b'q' + b'zv' in words}}")
"""
#: Jobs find the interpreter of the tests.
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def text_of(folder: Path, cluster: dict[str, Any], **axes: Any) -> str:
    (folder / "rank.py").write_text(RANK)
    words = ["python", f"{folder}/rank.py", "{run_dir}"]
    own = {**cluster, "env_from": ["HF_TOKEN"]}
    return matrix("passed", cluster=own, axes=axes, batch=2, workload=command(words))


def check(folder: Path, *, ranks: int) -> None:
    """Check that all ranks had the value, and that it is in no file of the study and in no report."""
    answers = [path.read_text() for path in folder.glob("runs/*/*/rank-*")]
    assert answers == ["True False"] * ranks
    assert bench("report", str(folder), cwd=folder).returncode == 1, "no run has a throughput"
    assert [path for path in folder.rglob("*") if path.is_file() and b"qzv" in path.read_bytes()] == []


@pytest.mark.parametrize(("launcher", "pack"), [("srun", False), ("torchrun", True)])
def test_a_variable_reaches_the_ranks_of_a_job(cluster, tmp_path, launcher, pack):
    section = slurm(time_limit="5m")
    text = text_of(tmp_path, section, nodes=[2], tasks_per_node=[2], launcher=[launcher])
    # A site can keep variables from jobs.
    environment = {**cluster.environment, "HF_TOKEN": VALUE, "SBATCH_EXPORT": "NONE"}
    study = plan_study(tmp_path, text, environment)
    with submitted(study, "--wait", *["--pack"] * pack):
        check(study.folder, ranks=4)


def test_a_variable_reaches_the_ranks_on_this_machine_and_is_required_only_at_submit(tmp_path):
    section = {"executor": "local", "time_limit": "2m"}
    (tmp_path / "passed.yaml").write_text(text_of(tmp_path, section, tasks_per_node=[2]))
    assert bench("plan", "passed.yaml", cwd=tmp_path).returncode == 0
    ended = bench("submit", "passed", cwd=tmp_path, **PATH)
    assert ended.returncode == 2
    assert "HF_TOKEN of cluster.env_from: not set in this shell" in ended.stderr
    assert not (tmp_path / "results/passed/runs").exists()
    ended = bench("submit", "passed", cwd=tmp_path, HF_TOKEN=VALUE, **PATH)
    assert ended.returncode == 0, ended.stderr
    assert "qzv" not in ended.stdout + ended.stderr
    check(tmp_path / "results/passed", ranks=2)


def test_a_variable_reaches_the_ranks_on_hosts(running_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_SSH", f"ssh -F {running_cluster.start_sshd()}")
    monkeypatch.chdir(tmp_path)
    section = {"executor": "ssh", "hosts": ["n1", "n2"], "time_limit": "5m"}
    study = plan_study(
        tmp_path, text_of(tmp_path, section, nodes=[2], tasks_per_node=[2]), {"HF_TOKEN": VALUE}
    )
    ended = study.bench("submit", "STUDY")
    assert ended.returncode == 0, ended.stderr
    check(study.folder, ranks=4)


#: Modules with the names of bench's own, and of packages that it uses.
NAMES = ("bench.py", "analysis/__init__.py", "torch_helpers.py", "psutil.py", "yaml.py", "rich/__init__.py")
#: Modules of the standard library that every program needs, but the start of Python itself does not.
STANDARD = ("json.py", "typing.py", "pathlib.py", "re.py", "numpy/__init__.py")
#: Values of PYTHONPATH that put the current folder on the import path; {} is this folder.
PATHS = ["{}:", ":/nowhere"]
SHORT = BARE | {"steps_per_epoch": 2}
BUILT_IN = training(**SHORT)
COMMAND = command("python plain.py", metrics={"output": {"step_time": "took ([0-9.]+)"}})
RECORDED = command("python recorded.py", **SHORT, metrics="recorder")
#: A command that imports its neighbour.
PLAIN = """\
import neighbour, torch.distributed as dist
dist.init_process_group("gloo")
for number in range(4):
    if dist.get_rank() == 0:
        print(f"took {neighbour.SECONDS}")
dist.barrier()
dist.destroy_process_group()
"""
#: A command with the recorder, between two imports of its own module `bench`.
RECORDED_SCRIPT = """\
import bench, neighbour, torch, torch.distributed as dist
from ddp_scaling_bench import Recorder
import bench.deeper
assert bench.OWN == bench.deeper.OWN == "the user's"
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Recorder(model) as recorder:
    for batch in recorder.batches([torch.randn(4, 4)] * 12):
        with recorder.step():
            model(batch).sum().backward()
            optimizer.step()
dist.destroy_process_group()
"""


def add_modules(folder: Path, names: Iterable[str]) -> None:
    """Write modules that end the process that imports them."""
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise SystemExit('the module {name} of the user was imported')\n")


@pytest.fixture
def folder(tmp_path) -> Path:
    add_modules(tmp_path, NAMES)
    (tmp_path / "neighbour.py").write_text("SECONDS = 0.5\n")
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path


def run(folder: Path, *words: str, path: str = ".", **env: str) -> subprocess.CompletedProcess[str]:
    """Execute Python with ``words`` in ``folder``; PYTHONPATH is ``path``."""
    environment = {**os.environ, "PYTHONPATH": path.format(folder), "COLUMNS": "200", **env}
    command = [sys.executable, *words]
    return run_program(command, cwd=folder, env=environment)


def study(folder: Path, name: str, workload: dict[str, Any], **sections: Any) -> None:
    usual = {"axes": {"tasks_per_node": [2], "launcher": ["torchrun"]}}
    (folder / f"{name}.yaml").write_text(matrix(name, workload=workload, **usual | sections))


def execute(folder: Path, name: str, *more: str, path: str = ".", **env: str) -> None:
    for words in (["plan", f"{name}.yaml"], ["submit", name, *more]):
        done = run(folder, "-m", "ddp_scaling_bench", *words, path=path, **env)
        assert done.returncode == 0, done.stdout + done.stderr


def assert_completed(folder: Path, name: str, *, runs: int) -> None:
    planned = open_study(StudyFolder(folder / "results" / name))
    records = planned.records()
    assert len(records) == runs
    for run_id, record in records.items():
        attempt = planned.run_folder(record)
        verdict = verify_run(attempt, record, planned.cell_of(run_id))
        assert verdict.failures == [], attempt.err.read_text()


@pytest.mark.parametrize("path", PATHS)
def test_no_program_of_a_job_imports_a_module_of_the_users_folder(folder, path):
    add_modules(folder, STANDARD)
    module = "train.network_interface"
    program = f"import runpy; runpy.run_module('ddp_scaling_bench.{module}')"
    assert "of the user was imported" in run(folder, "-c", program, path=path).stderr
    done = run(folder, "-P", "-m", "ddp_scaling_bench.start", module, "localhost", path=path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", [".", PATHS[1]])
def test_the_agent_of_torchrun_imports_no_module_of_the_users_folder(folder, path):
    # The python of a command that bench does not measure may lack bench.
    study(folder, "agent", command("sleep 2", metrics="none"))
    execute(folder, "agent", path=path)
    assert_completed(folder, "agent", runs=1)


def test_the_command_line_imports_no_module_of_the_users_folder(folder):
    add_modules(folder, STANDARD)
    study(folder, "own", BUILT_IN)
    done = run(folder, "-m", "ddp_scaling_bench", "plan", "own.yaml", "--json")
    assert (done.returncode, json.loads(done.stdout)["runs"]) == (0, 1), done.stderr
    (folder / "bench.py").unlink()
    assert run(folder, "-m", "bench", "plan", "own.yaml").returncode == 0


def test_the_recorder_works_beside_a_module_of_the_user_named_bench(folder):
    for name in NAMES:  # in a user's own process, the user's modules come first
        (folder / name).unlink()
    (folder / "bench").mkdir()
    for name in ("__init__", "deeper"):
        (folder / f"bench/{name}.py").write_text('OWN = "the user\'s"\n')
    (folder / "recorded.py").write_text(RECORDED_SCRIPT)
    study(folder, "recorded", RECORDED)
    execute(folder, "recorded")
    assert_completed(folder, "recorded", runs=1)


@pytest.mark.cluster
def test_jobs_work_in_such_a_folder_with_srun_and_torchrun(folder, cluster):
    for name, workload, nodes, launcher in (
        ("built-in", BUILT_IN, 1, "srun"),
        ("command", COMMAND, 2, "torchrun"),
    ):
        axes = {"nodes": [nodes], "tasks_per_node": [1], "launcher": [launcher]}
        study(folder, name, workload, cluster=slurm(exclusive=False), axes=axes)
        execute(folder, name, "--wait", **cluster.environment)
        assert_completed(folder, name, runs=1)
