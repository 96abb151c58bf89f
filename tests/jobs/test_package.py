"""What runs in a job is one file: jobs whose Python has torch, but no installation of bench."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bench.matrix.cell import Cell
from bench.package import ensure_package, package_name, write_package
from bench.study.layout import StudyFolder
from bench.study.plan_json import PlannedStudy
from ddp_scaling_bench.errors import BenchError
from tests.cluster.bed import Cluster
from tests.commands import command_line

#: A user's program; its folder also has files with the names of packages that bench and torch import.
PROGRAM = """\
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from ddp_scaling_bench import Recorder


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(160, 16), torch.zeros(160, dtype=torch.long))
    loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn")
    with Recorder(model=model, optimizer=optimizer) as recorder:
        for inputs, targets in recorder.batches(loader):
            with recorder.step():
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main()
"""
MATRIX = """\
cluster:
  {{executor: slurm, partition: l40s, account: users, cpus_per_task: 1, time_limit: 10m, exclusive: true,
   setup: ["unset PYTHONPATH", "source '{environment}/bin/activate'"], env: {{GLOO_SOCKET_IFNAME: eth0}}}}
axes: {axes}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
workload: {workload}
repeats: 1
"""
AXES = "{nodes: [1], tasks_per_node: [1], backend: [gloo], launcher: [%s]}"
LENGTHS = "device: cpu, steps_per_epoch: 4, epochs: 1, warmup_steps: 3"
SMALL = "model: mlp, parameters: 100k, attribution_steps: 0, val_steps: 0, probe_steps: 0"


@pytest.fixture
def plain_torch(tmp_path: Path) -> Path:
    """An environment with torch and what torch needs, but neither bench nor its dependencies."""
    environment, links = tmp_path / "environment", tmp_path / "links"
    words = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(words, check=True, timeout=120)
    links.mkdir()
    names = (
        "torch torchgen functorch numpy numpy.libs sympy mpmath networkx jinja2 markupsafe filelock fsspec"
    )
    site = Path(torch.__file__).parents[1]
    for name in (*names.split(), "typing_extensions.py", "setuptools"):
        if (site / name).exists():
            (links / name).symlink_to(site / name)
    next(environment.glob("lib/python*/site-packages")).joinpath("torch.pth").write_text(f"{links}\n")
    return environment


@pytest.mark.parametrize(
    ("launcher", "workload"),
    [
        ("torchrun", f"{{{LENGTHS}, command: 'python train.py {{per_gpu_batch}}'}}"),
        ("srun", f"{{{LENGTHS}, {SMALL}}}"),
    ],
    ids=["recorder", "built-in"],
)
def test_a_job_needs_torch_only(cluster: Cluster, tmp_path, plain_torch, launcher, workload):
    axes, is_built_in = AXES % launcher, launcher == "srun"
    (tmp_path / "m.yaml").write_text(MATRIX.format(environment=plain_torch, axes=axes, workload=workload))
    (tmp_path / "train.py").write_text(PROGRAM)
    for name in ("bench", "analysis", "torch" if is_built_in else "json5"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    for words in (("plan", "m.yaml"), ("submit", "m", "--wait"), ("verify", "m")):
        done = command_line.bench(*words, cwd=tmp_path, **cluster.environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert " of 1 runs pass" in done.stdout
    assert "FAIL" not in done.stdout
    (env,) = tmp_path.glob("results/m/runs/*/attempt-1/env.json")
    assert json.loads(env.read_text())["package"] == package_name()
    if is_built_in:
        # By hand, without a run's folder: the script finds the file beside itself.
        script = next((tmp_path / "results/m/scripts").glob("n*srun*.sbatch"))
        words = ["sbatch", "--wait", "--output=hand.out", "--error=hand.err", str(script)]
        environment = {**os.environ, **cluster.environment}
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, (tmp_path / "hand.err").read_text()
        assert "package" not in (tmp_path / "hand.err").read_text()


def test_the_file_has_what_runs_in_a_job_and_is_never_replaced(tmp_path):
    write_package(tmp_path / "package")
    path = tmp_path / "package" / package_name()
    names = zipfile.ZipFile(path).namelist()
    assert {name.split("/")[0] for name in names} == {"ddp_scaling_bench"}
    assert {"ddp_scaling_bench/__init__.py", "ddp_scaling_bench/train/peaks.csv"} <= set(names)
    path.write_text("as it was")
    write_package(tmp_path / "package")
    assert path.read_text() == "as it was"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_lost_file_is_written_again_only_by_the_version_that_planned_it(tmp_path):
    def study(name: str) -> PlannedStudy:
        cells: dict[str, Cell] = {}
        return PlannedStudy(StudyFolder(tmp_path), {"package": name}, cells, [])

    ensure_package(study(package_name()))
    assert (tmp_path / "package" / package_name()).is_file()
    with pytest.raises(BenchError, match=r"another content; plan the study again"):
        ensure_package(study("ddp_scaling_bench-0123456789abcdef.zip"))
