"""What runs in a job is one file: jobs whose Python has torch, but no installation of bench."""

import json
import zipfile

import pytest

from bench.matrix.cell import Cell
from bench.package import ensure_package, package_name, write_package
from bench.study.layout import StudyFolder
from bench.study.plan_json import PlannedStudy
from ddp_scaling_bench.errors import BenchError
from tests.cluster.bed import Cluster
from tests.commands import command_line
from tests.matrices import command, matrix, slurm

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

ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_job_with_the_recorder_needs_torch_only(cluster: Cluster, tmp_path, plain_torch):
    """tests/jobs/test_launchers.py executes the built-in training in this environment."""
    (tmp_path / "train.py").write_text(PROGRAM)
    for name in ("bench", "analysis", "json5"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    text = matrix(
        "m",
        cluster=slurm(exclusive=True, time_limit="10m", setup=["unset PYTHONPATH", plain_torch], env=ETH0),
        axes={"nodes": [1], "tasks_per_node": [1], "backend": ["gloo"], "launcher": ["torchrun"]},
        workload=command("python train.py {per_gpu_batch}", metrics="recorder", steps_per_epoch=4, epochs=1),
        batch=8,
    )
    (tmp_path / "m.yaml").write_text(text)
    for words in (("plan", "m.yaml"), ("submit", "m", "--wait"), ("verify", "m")):
        done = command_line.bench(*words, cwd=tmp_path, **cluster.environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert " of 1 runs pass" in done.stdout
    assert "FAIL" not in done.stdout
    (env,) = tmp_path.glob("results/m/runs/*/attempt-1/env.json")
    assert json.loads(env.read_text())["package"] == package_name()


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
