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
#: One rank trains, and then checks its node: to import torch takes most of the time.
PROGRAM = """\
import sys
from ddp_scaling_bench.train.__main__ import main
assert main() == 0
from ddp_scaling_bench.train import nodecheck
sys.argv = ["nodecheck", "rows.csv", "--device", "cpu"]
nodecheck.WINDOW_S = 0.05
nodecheck.main()
"""


def test_the_training_and_the_check_of_nodes_measure_without_any_other_package(tmp_path: Path) -> None:
    write_cell(tmp_path, **QUICK | {"probe_steps": 2, "sweep_time": 1})
    (tmp_path / "path").mkdir()
    blocks = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n"
    (tmp_path / "path/sitecustomize.py").write_text(blocks)
    own = {"PYTHONPATH": f"{tmp_path}/path:{ROOT}", "BENCH_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, "-c", PROGRAM], cwd=tmp_path, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    metrics = read_rows(RunFolder(tmp_path).metrics_csv)
    assert len(metrics) == QUICK["epochs"]
    assert all(float(row["throughput_samples_per_sec"]) > 0 for row in metrics)
    assert json.loads(RunFolder(tmp_path).env.read_text())["joined"]["ranks"] == 1
    assert {row["check"] for row in read_rows(tmp_path / "rows.csv")} == {"answered", "compute", "memory"}
