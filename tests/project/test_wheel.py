"""The built wheel, outside any checkout: examples, templates and the page's parts travel with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bench(wheel, tmp_path_factory):
    """Return a function that runs the installed `bench` in a folder.

    The environment is new and holds the wheel; its dependencies are read from the one that
    runs the tests (as plain folders: its editable install of the checkout is not seen).
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        env = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BENCH_RESULTS")
        }
        return subprocess.run(
            [home / "bin" / "bench", *words], cwd=cwd, env=env, capture_output=True, text=True
        )

    return run


def test_the_wheel_contains_the_tracked_files_and_no_others(wheel):
    packages = subprocess.run(
        ["git", "ls-files", "bench", "analysis", "matrices", "slurm_templates"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tracked = {
        name if name.startswith(("bench/", "analysis/")) else f"bench/shipped/{name}"
        for name in packages.stdout.splitlines()
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tracked


def test_a_study_goes_from_matrix_to_report_in_an_empty_folder(bench, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "cluster: {executor: local, time_limit: 2m}\n"
        "axes: {tasks_per_node: [1, 2]}\n"
        "scaling: [{mode: strong, global_batch: [8]}]\n"
        "workload: {device: cpu, model: mlp, parameters: 20k, steps_per_epoch: 3, epochs: 1, warmup_steps: 3}\n"
        "repeats: 1\n"
    )
    planned = bench("plan", "own.yaml", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    submitted = bench("submit", cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    reported = bench("report", cwd=tmp_path)
    assert (reported.returncode, reported.stdout) == (0, "results/own/report/index.html\n"), reported.stderr
    assert "own" in (tmp_path / reported.stdout.strip()).read_text()


def test_the_shipped_examples_are_found_by_name(bench, tmp_path):
    done = bench("plan", "smoke_cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 5
