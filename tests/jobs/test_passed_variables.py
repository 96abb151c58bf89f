"""Variables of `cluster.env_from` reach every rank, and nothing holds their values."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bed import Cluster
from tests.commands.command_line import bench
from tests.jobs.slurm_studies import plan_study, submitted
from tests.matrices import command, matrix, slurm

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
    assert bench("report", str(folder), cwd=folder).returncode == 0
    assert [path for path in folder.rglob("*") if path.is_file() and b"qzv" in path.read_bytes()] == []


@pytest.mark.parametrize(("launcher", "pack"), [("srun", False), ("torchrun", True)])
def test_a_variable_reaches_the_ranks_of_a_job(
    cluster: Cluster, tmp_path: Path, launcher: str, pack: bool
) -> None:
    section = slurm(time_limit="5m")
    text = text_of(tmp_path, section, nodes=[2], tasks_per_node=[2], launcher=[launcher])
    # A site can keep variables from jobs.
    environment = {**cluster.environment, "HF_TOKEN": VALUE, "SBATCH_EXPORT": "NONE"}
    study = plan_study(tmp_path, text, environment)
    with submitted(study, "--wait", *["--pack"] * pack):
        check(study.folder, ranks=4)


def test_a_variable_reaches_the_ranks_on_this_machine_and_is_required_only_at_submit(tmp_path: Path) -> None:
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


def test_a_variable_reaches_the_ranks_on_hosts(
    running_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_SSH", f"ssh -F {running_cluster.start_sshd()}")
    monkeypatch.chdir(tmp_path)
    section = {"executor": "ssh", "hosts": ["n1", "n2"], "time_limit": "5m"}
    study = plan_study(
        tmp_path, text_of(tmp_path, section, nodes=[2], tasks_per_node=[2]), {"HF_TOKEN": VALUE}
    )
    ended = study.bench("submit", "STUDY")
    assert ended.returncode == 0, ended.stderr
    check(study.folder, ranks=4)
