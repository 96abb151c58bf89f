"""`make gpu` without a GPU: its checks, its time limits and its table."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from bench.matrix.load import load_matrix

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


def test_all_parts_fit_into_eight_minutes():
    assert gpu.MACHINE.budget_s + sum(one.budget_s for one in gpu.PARTS) <= 8 * 60 - 10


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


def test_without_a_gpu_it_refuses_in_one_line_also_for_some_parts(tmp_path):
    words = ["formats", "mfu", "--json", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md")]
    refused = run_gpu(*words)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("make gpu: error: ")
    assert list(tmp_path.iterdir()) == []
    unknown = run_gpu("mfu", "speed")
    assert unknown.returncode == 2
    assert (
        "there is no part speed; the parts are mfu, formats, ranks, overhead, study, tests" in unknown.stderr
    )


def run_gpu(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "benchmarks/gpu.py")
    return subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True)


def test_one_command_downloads_the_wheels_of_all_packages_but_torch():
    words = shlex.split(run_gpu("--wheels").stdout)
    assert words[:4] == ["python3", "-m", "pip", "download"]
    wanted = [text for name, text in gpu_parts.required_packages().items() if name != "torch"]
    assert words[-len(wanted) :] == wanted
    assert "nvidia-ml-py>=12" in wanted
