"""`make gpu` without a GPU: its checks, its time limits and its table."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.matrix.load import load_matrix
from tests.workload.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gpu = benchmark("gpu")
gpu_parts = benchmark("gpu_parts")


# -- what is needed --------------------------------------------------------------------------------


def test_all_missing_packages_are_named_at_once(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import not_there_at_all.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["json", "not-there-1", "pyyaml", "needs_another", "not_there_2"]
    missing = gpu_parts.missing_packages(names)
    assert missing == ["not-there-1", "needs_another (which lacks not_there_at_all)", "not_there_2"]
    reason = gpu_parts.why_unfit(missing)
    assert reason == (
        f"{sys.executable} lacks not-there-1, needs_another (which lacks not_there_at_all), not_there_2: name"
        " another PYTHON or PYTHONPATH"
    )


# -- running the parts -----------------------------------------------------------------------------


def part(name: str, program: str, budget_s: float = 120.0):
    return gpu.Part(name, f"part {name}", budget_s, (sys.executable, "-c", program, "{file}", "{folder}"))


WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'rate': 7}))"
#: Writes its values, starts a child, and ends neither after SIGTERM nor at all.
HANGS = f"""{WRITES}
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])
open(sys.argv[2] + '.pid', 'w').write(str(child.pid))
while True:
    time.sleep(1)
"""


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)


def test_a_part_that_fails_or_hangs_is_reported_and_the_others_run(tmp_path, capsys, short_grace):
    parts = [
        part("fails", "import sys; print('first'); print('the reason', file=sys.stderr); sys.exit(1)"),
        part("dies", "import os; os.kill(os.getpid(), 9)"),
        part("works", WRITES),
    ]
    results = gpu.run_parts(parts, tmp_path, began=time.monotonic())
    hung = gpu.run_part(part("hangs", HANGS), tmp_path, limit_s=8)
    assert [(one.name, one.outcome, one.reason, one.values) for one in [*results, hung]] == [
        ("fails", "failed", "the reason", {}),
        ("dies", "failed", "it ended with signal SIGKILL and no output", {}),
        ("works", "passed", None, {"rate": 7}),
        ("hangs", "out of time", "it did not end in 8 s", {"rate": 7}),
    ]
    stat = Path("/proc", (tmp_path / "hangs.pid").read_text(), "stat")
    wait_for(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "the end of the part's child")
    out = capsys.readouterr().out
    assert "part fails ...\n  failed in " in out
    assert "  | first\n  | the reason\n" in out


def test_all_parts_fit_into_eight_minutes():
    assert gpu.MACHINE.budget_s + sum(one.budget_s for one in gpu.PARTS) <= 8 * 60 - 10


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, *parts: Any) -> tuple[int, Path, Path]:
    """Run the driver with these parts; return its exit code and its files."""
    monkeypatch.setattr(
        gpu, "MACHINE", part("machine", f"import sys; open(sys.argv[1], 'w').write({machine!r})")
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    options = Namespace(json=tmp_path / "gpu.json", page=tmp_path / "gpu.md")
    (tmp_path / "parts").mkdir()
    return gpu.measure(options, tmp_path / "parts"), options.json, options.page


def test_without_a_gpu_there_is_one_line_and_no_file(tmp_path, monkeypatch, capsys):
    machine = json.dumps({"unfit": "no CUDA device is visible: no driver"})
    code, *files = run(tmp_path, monkeypatch, machine, part("never", "assert False"))
    assert code == 2
    assert capsys.readouterr() == ("", "make gpu: error: no CUDA device is visible: no driver\n")
    assert not any(file.exists() for file in files)


# -- the table -------------------------------------------------------------------------------------


# -- the parts -------------------------------------------------------------------------------------


def test_the_study_for_a_gpu_is_a_valid_matrix(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text(gpu_parts.study_matrix("cuda"))
    matrix, _ = load_matrix(path)
    assert (matrix.workload.device, matrix.cluster.executor, matrix.repeats) == ("cuda", "local", 3)


def test_every_file_with_tests_for_a_gpu_is_found():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n    pytest.mark.gpu,\n" in path.read_text()
    }
    assert len(marked) >= 2
    assert marked <= set(gpu_parts.gpu_test_files())
