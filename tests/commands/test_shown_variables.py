"""Values of variables outside of the documented prefixes are in scripts and plan.json only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.matrix.document import shown_text
from bench.variables import without_users
from tests.commands.command_line import bench

MATRIX = """\
cluster:
  executor: local
  env: {OWN: qzv-1, NCCL_DEBUG: INFO}
axes: {nodes: [1], tasks_per_node: [1], env.WAY: [w1]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
repeats: 1
workload: {device: cpu, command: 'python -c pass {env.OWN}', metrics: none}
"""
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_a_value_without_a_prefix_is_in_no_report_and_no_json(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MATRIX)
    assert bench("run", "m.yaml", cwd=tmp_path, **PATH).returncode == 0
    assert bench("report", "m", cwd=tmp_path).returncode == 0
    study = tmp_path / "results/m"
    holders = {path for path in study.rglob("*") if path.is_file() and b"qzv" in path.read_bytes()}
    (script,) = study.glob("scripts/*")
    assert holders == {script, study / "plan.json", study / "matrix.yaml"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    assert "w1" in (study / "report/index.html").read_text()
    for words in ("plan m.yaml --json", "status m --json", "verify m --json", "compare m m --json"):
        assert "qzv" not in bench(*words.split(), cwd=tmp_path).stdout


def test_the_shown_matrix_lacks_only_values_that_are_not_shown() -> None:
    text = "x: &x {A: 1}\ncluster:\n  env:\n    <<: *x\n    B: |\n      2\n    NCCL_C: 3\n"
    assert shown_text(text) == text.replace("A: 1", "A: ...").replace("|\n      2\n", "...\n")


def test_users_of_urls_are_left_out() -> None:
    assert without_users("a https://u:p/w@h:1/x http://h:1/a@b") == "a https://h:1/x http://h:1/a@b"
