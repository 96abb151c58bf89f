"""What runs in a job needs the standard library and torch only."""

import json
import os
import sys
from pathlib import Path

from ddp_scaling_bench.run_folder import RunFolder
from tests.common import read_rows, run_program, write_cell
from tests.train.ranks import QUICK, ROOT

BLOCKED = (
    "analysis bench jinja2 numpy pandas psutil pydantic pynvml rich scipy tree_sitter typer yaml".split()
)


def test_the_training_and_the_recorder_measure_without_any_other_package(tmp_path):
    run_alone(tmp_path, "-m", "ddp_scaling_bench.train")
    metrics = read_rows(RunFolder(tmp_path).metrics_csv)
    assert len(metrics) == QUICK["epochs"]
    assert all(float(row["throughput_samples_per_sec"]) > 0 for row in metrics)
    assert json.loads(RunFolder(tmp_path).env.read_text())["joined"]["ranks"] == 1


def test_the_nodes_are_checked_without_any_other_package(tmp_path):
    short = "from ddp_scaling_bench.train import nodecheck\nnodecheck.WINDOW_S = 0.05\nnodecheck.main()"
    run_alone(tmp_path, "-c", short, "rows.csv", "--device", "cpu")
    assert {row["check"] for row in read_rows(tmp_path / "rows.csv")} == {"answered", "compute", "memory"}


def run_alone(folder: Path, *words: str) -> None:
    """Run a program of one rank with a Python that cannot import the blocked packages."""
    write_cell(folder, **QUICK | {"probe_steps": 2, "sweep_time": 1})
    (folder / "path").mkdir()
    blocks = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n"
    (folder / "path/sitecustomize.py").write_text(blocks)
    env = {**os.environ, "PYTHONPATH": f"{folder}/path:{ROOT}", "BENCH_RUN_DIR": str(folder)} | {
        "OMP_NUM_THREADS": "1"
    }
    done = run_program([sys.executable, *words], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
