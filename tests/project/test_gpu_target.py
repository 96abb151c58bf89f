"""`make gpu` without a GPU: its checks, its time limits and its table."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def run_gpu(*words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.argv", ["gpu.py", *words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(gpu.main())
    return ended.value.code


def test_without_a_gpu_it_refuses_in_one_line_also_for_some_parts(tmp_path, monkeypatch, capfd):
    words = ["formats", "mfu", "--json", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md")]
    code = run_gpu(*words, monkeypatch=monkeypatch)
    refused = capfd.readouterr().err
    assert (code, refused.count("\n")) == (2, 1)
    assert refused.startswith("make gpu: error: ")
    assert list(tmp_path.iterdir()) == []
    assert run_gpu("mfu", "speed", monkeypatch=monkeypatch) == 2
    parts = "there is no part speed; the parts are mfu, formats, overhead, study, tests"
    assert parts in capfd.readouterr().err
