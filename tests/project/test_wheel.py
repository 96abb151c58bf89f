"""The built wheel, outside any checkout: examples, templates and the page's parts travel with it."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.extras import EXTRAS
from tests.commands.command_line import is_reported
from tests.common import run_program
from tests.matrices import command, matrix

ROOT = Path(__file__).resolve().parents[2]


def without_checkout() -> dict[str, str]:
    """Return the environment variables of a user."""
    return {name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH", "BENCH_RESULTS"}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run_program([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT])
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def new_environment(folder: Path) -> tuple[Path, Path]:
    """Create an environment without packages; return its Python and the folder for packages."""
    venv.create(folder, with_pip=False)
    return folder / "bin/python", Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


@pytest.fixture(scope="module")
def bench(wheel, tmp_path_factory):
    """Return a function that runs the installed `bench` in a folder.

    The environment is new and holds the wheel; its dependencies are read from the one that
    runs the tests (as plain folders: its editable install of the checkout is not seen).
    """
    python, site = new_environment(tmp_path_factory.mktemp("environment"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run(words, check=True)

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return run_program([python.with_name("bench"), *words], cwd=cwd, env=without_checkout())

    return run


def requirements(name: str, *, extra: str = "") -> set[str]:
    """Return the packages that a package requires, directly or not."""
    found: set[str] = set()
    for text in metadata.requires(name) or []:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            found |= {one.name} | requirements(one.name)
    return found


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel and its dependencies without extras."""
    python, site = new_environment(tmp_path_factory.mktemp("light"))
    zipfile.ZipFile(wheel).extractall(site)
    (info,) = site.glob("ddp_scaling_bench-*.dist-info")
    required = [Requirement(text) for text in metadata.Distribution.at(info).requires or []]
    names = {one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})}
    for name in names.union(*map(requirements, names)):
        files = metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    return python


#: Runs commands in one process, and prints their exit codes and streams, and the packages that were imported.
DRIVER = """\
import json, sys
from typer.testing import CliRunner
from ddp_scaling_bench.__main__ import _import_own
_import_own("bench")
from bench.cli import app
done = [CliRunner().invoke(app, words) for words in json.load(sys.stdin)]
heavy = sorted({"numpy", "pandas", "scipy", "torch"} & set(sys.modules))
print(json.dumps([heavy, [[one.exit_code, one.stdout, one.stderr] for one in done]]))
"""


def test_without_extras_studies_are_planned_and_the_other_commands_name_the_extra(light, tmp_path):
    (tmp_path / "gpus.yaml").write_text(
        "cluster: {partition: gpu}\naxes: {gpus_per_node: [1, 2]}\nscaling: [{mode: weak, per_gpu_batch: [8]}]\n"
    )
    (tmp_path / "job.err").write_text("RuntimeError: CUDA out of memory\n")
    script = "results/gpus/scripts/n1x1-nccl-srun-b8.sbatch"
    fine = [
        "plan gpus.yaml",
        "submit gpus --dry-run",
        "status gpus",
        "cancel gpus",
        "schema",
        "plan smoke_cpu",
    ]
    fine.append(f"lint {script}")
    needs = [
        "report gpus",
        "report table.csv",
        "compare gpus gpus",
        "advise gpus --samples 10",
        "run gpus.yaml",
    ]
    others = ["doctor job.err", "verify gpus", "doctor gpus", "submit smoke_cpu"]
    done = run_program(
        [light, "-c", DRIVER],
        cwd=tmp_path,
        env=without_checkout(),
        input=json.dumps([line.split() for line in (*fine, *needs, *others)]),
    )
    assert done.returncode == 0, done.stderr
    heavy, results = json.loads(done.stdout)
    assert heavy == []
    assert [code for code, _, _ in results] == [0] * len(fine) + [2] * len(needs) + [1, 1, 2, 2]
    errors = dict(zip((*fine, *needs, *others), (error for _, _, error in results), strict=True))
    absent = "numpy, pandas, pyarrow, scipy, matplotlib, which are not installed; install the extra: "
    for line in needs:
        extra = "pip install 'ddp-scaling-bench[report]'"
        assert errors[line] == f"error: bench {line.split()[0]} needs {absent}{extra}\n"
    assert errors["doctor gpus"] == (
        f"error: bench doctor, to find causes of slow steps, needs {absent}"
        "pip install 'ddp-scaling-bench[report]'\n"
    )
    assert errors["submit smoke_cpu"].splitlines()[-1] == (
        f"error: the built-in training needs numpy and torch, which {light} does not find; "
        "run pip install 'ddp-scaling-bench[train]', or activate an environment with PyTorch in cluster.setup"
    )
    assert not (tmp_path / "results" / "smoke_cpu" / "runs").exists()


def test_the_extras_contain_the_packages_that_commands_look_for():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, names in EXTRAS.items():
        assert [Requirement(text).name for text in declared[extra]] == list(names)


def test_the_wheel_contains_the_tracked_files_and_no_others(wheel):
    packages = run_program(
        ["git", "ls-files", "ddp_scaling_bench", "bench", "analysis", "matrices", "slurm_templates"],
        cwd=ROOT,
        check=True,
    )
    tracked = {
        name if name.startswith(("ddp_scaling_bench/", "bench/", "analysis/")) else f"bench/shipped/{name}"
        for name in packages.stdout.splitlines()
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tracked


def test_a_study_goes_from_matrix_to_report_in_an_empty_folder(bench, tmp_path):
    """What runs in a job is a package that `bench` makes of its own files; test_closed.py trains with them."""
    axes = {"tasks_per_node": [1], "launcher": ["own"]}
    metrics = {"output": {"throughput": r"rate (\S+)"}}
    workload = command(["bash", "-c", "printf 'rate %s\\n' 5 6"], metrics=metrics)
    (tmp_path / "own.yaml").write_text(matrix("own", axes=axes, workload=workload))
    done = bench("run", "own.yaml", cwd=tmp_path)
    assert is_reported(done), done.stderr
    assert "study own: 1 completed\n" in done.stderr
    page = done.stdout.splitlines()[0]
    assert page == "results/own/report/index.html"
    assert "own" in (tmp_path / page).read_text()
