"""Preflights on a real cluster: `bench preflight`, and `bench submit --preflight`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bed import Cluster
from tests.commands import command_line
from tests.common import write_program
from tests.jobs.slurm_studies import MEASURE, Study
from tests.matrices import matrix, slurm

#: Stands in for the measurement: waits for a file, if one is named, and writes that n2 is unfit.
STAND_IN = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --partition=l40s
#SBATCH --account=users
#SBATCH --mem=100M
%s
echo '{"nodes": [{"node": "n2", "fit": false, "check": "memory", "value": 8e9, "median": 1e10, "checks": [{"check":
"memory", "fit": false, "value": 8e9, "median": 1e10, "unit": "B/s"}]}], "links": [], "exclude": ["n2"],
"threshold": 0.9, "pairs": 0, "job_id": "'$SLURM_JOB_ID'"}' >"$1/result.json.new"
mv "$1/result.json.new" "$1/result.json"
"""
#: The measurement with shorter windows, which cost CPU time on all nodes; the test needs no precise rates.
SHORT = """\
#!/bin/bash
shift 4  # -P -m ddp_scaling_bench.start preflight
exec %s -c 'import runpy; from bench.preflight import checks, program
checks.WINDOW_S = 0.2
program._EXCHANGE_S = 0.05
runpy.run_module("bench.preflight", run_name="__main__", alter_sys=True)' "$@"
"""


def with_stand_in(study: Study, *, before: str = "") -> Study:
    (study.folder / "scripts/preflight.sbatch").write_text(STAND_IN % before)
    return study


def states(study: Study) -> dict[str, tuple[str, str]]:
    return {run_id: (str(record["state"]), record["reason"]) for run_id, record in study.status().items()}


def preflight_jobs(cluster: Cluster) -> list[str]:
    names = cluster.run(["squeue", "-h", "-o%j", "--states=all"]).stdout.split()
    return [name for name in names if name.startswith("preflight.")]


@pytest.fixture
def four(cluster: Cluster, scripted: Callable[..., Study]) -> Study:
    """Return a study with runs on 1 and on 4 nodes, of which n2 is said to be unfit."""
    study = with_stand_in(scripted(MEASURE, name="four", nodes=(1, 4)))
    script = study.folder / "scripts/n4x1-gloo-srun-b1.sbatch"
    script.write_text(script.read_text().replace("#SBATCH", "#SBATCH --nodes=4\n#SBATCH", 1))
    return study


@pytest.mark.parametrize("pack", [[], ["--pack"]], ids=["jobs", "pack"])
def test_unfit_nodes_are_excluded_and_runs_that_need_them_stay_planned(cluster, four, pack):
    done = four.bench("submit", "STUDY", "--preflight", "--wait", *pack)
    assert done.returncode == 0, done.stderr
    assert "n2 is unfit: memory 8 GB/s (80 % of the median, 10 GB/s)\n" in done.stderr
    reason = "needs 4 nodes, but too few are fit (unfit: n2)"
    assert states(four) == {
        "n1x1-gloo-srun-b1-r1": ("completed", ""),
        "n4x1-gloo-srun-b1-r1": ("planned", reason),
    }
    assert four.run_json("n1x1-gloo-srun-b1-r1")["unfit_nodes"] == ["n2"]
    job = four.run_json("n1x1-gloo-srun-b1-r1")["job_id"]
    assert "ExcNodeList=n2" in cluster.run(["scontrol", "show", "job", job]).stdout
    assert f"n4x1-gloo-srun-b1-r1  planned                  {reason}" in four.bench("status", "STUDY").stdout


def test_a_later_submission_excludes_the_unfit_nodes_as_well(four):
    four.bench("submit", "STUDY", "--preflight", "--only", "nodes=4")
    done = four.bench("submit", "STUDY")
    assert "unfit nodes are excluded: n2\n" in done.stderr
    assert four.jobs_per_run() == {"n1x1-gloo-srun-b1-r1": 1}


def test_after_a_kill_the_next_call_waits_for_the_same_preflight(cluster, scripted, tmp_path):
    go, before = tmp_path / "go", len(preflight_jobs(cluster))
    study = with_stand_in(
        scripted(MEASURE, name="killed"), before=f"while [ ! -e '{go}' ]; do sleep 0.2; done"
    )
    with study.start("submit", "STUDY", "--preflight") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("preflight: job ")
        process.kill()
    go.touch()
    done = study.bench("submit", "STUDY", "--preflight", "--wait")
    assert done.returncode == 0, done.stderr
    assert "of an earlier `bench preflight` has no result yet: waiting for it\n" in done.stderr
    assert len(preflight_jobs(cluster)) - before == 1
    assert study.jobs_per_run() == {"n1x1-gloo-srun-b1-r1": 1}


def test_a_preflight_that_fails_submits_nothing_and_says_why(four):
    (four.folder / "scripts/preflight.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --mem=100M\necho 'bench: error: rank 0 cannot serve the store' >&2; exit 1\n"
    )
    done = four.bench("submit", "STUDY", "--preflight")
    assert done.returncode == 2
    assert "could not check the nodes: rank 0 cannot serve the store; see " in done.stderr
    assert not four.jobs_per_run()


def bench_preflight(folder: Path, cluster: Cluster, *words: str, **options: Any) -> Any:
    axes = {"nodes": [3], "tasks_per_node": [1], "backend": ["gloo"]}
    (folder / "nodes.yaml").write_text(matrix("nodes", cluster=slurm(exclude="n4", **options), axes=axes))
    return command_line.bench("preflight", "nodes.yaml", *words, cwd=folder, **cluster.environment)


def test_a_job_that_does_not_start_in_time_is_cancelled(cluster, tmp_path):
    with cluster.occupied():
        done = bench_preflight(tmp_path, cluster, "--timeout", "1s")
    assert done.returncode == 2
    assert "did not start within 1 s: " in done.stderr
    assert "CANCELLED" in cluster.run(["squeue", "-h", "-o%T %j", "--states=all"]).stdout


def test_slurm_says_why_it_refuses_the_job(cluster, tmp_path):
    done = bench_preflight(tmp_path, cluster, "--nodes", "3", constraint="nonsense")
    assert done.returncode == 2
    assert "Slurm does not accept the preflight's job on 3 nodes: " in done.stderr


def test_a_node_with_a_slow_link_is_found(cluster, tmp_path):
    """The only test with real measurements. Other checks may fail on a busy machine, this one cannot pass."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    write_program(python, SHORT % shlex.quote(sys.executable))
    cluster.link("80mbit", nodes=["n3"])
    try:
        done = bench_preflight(tmp_path, cluster, "--json", setup=[f"PATH={python.parent}:$PATH"])
    finally:
        cluster.link(None)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [node["node"] for node in found["nodes"]] == ["n1", "n2", "n3"]  # n4 is excluded
    checks = {node["node"]: {check["check"]: check for check in node["checks"]} for node in found["nodes"]}
    assert {name: of["exchange"]["fit"] for name, of in checks.items()} == {
        "n1": True,
        "n2": True,
        "n3": False,
    }
    assert 0.7 * 10e6 < checks["n3"]["exchange"]["value"] < 1.2 * 10e6
    assert all(of[check]["value"] > 0 for of in checks.values() for check in ("matrix-product", "memory"))
    assert "n3" in found["exclude"]
    assert found["pairs"] == 3
    measured = json.loads((tmp_path / found["folder"] / "measured.json").read_text())
    assert measured["hosts"] == ["n1", "n2", "n3"]
