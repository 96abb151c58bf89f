"""`make gpu` without a GPU: its checks, its time limits and its table."""

import importlib.util
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
