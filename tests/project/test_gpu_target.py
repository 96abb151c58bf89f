"""`make gpu` without a GPU: its checks, its time limits and its table."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.matrix.load import load_matrix
from tests.common import run_program
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
    assert reason.startswith(
        f"{sys.executable} lacks not-there-1, needs_another (which lacks not_there_at_all), not_there_2: name"
        " another PYTHON, or run on a machine with a network `pip download "
    )
    assert reason.endswith("`, copy the folder site here, and `PYTHONPATH=site make gpu`")
    assert "\n" not in reason


def test_the_command_that_brings_packages_has_our_versions_and_the_tags_of_that_machine(monkeypatch):
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=12))
    monkeypatch.setattr(gpu_parts.platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setattr(gpu_parts.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(
        gpu_parts, "versions", lambda: {"pydantic": "2.1", "pydantic-core": "2.2", "pyyaml": "6"}
    )
    missing = ["pydantic (which lacks pydantic_core)", "pyyaml", "unheard_of"]
    assert gpu_parts.how_to_bring(missing) == (
        "pip download -d wheels --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_aarch64"
        " --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 pydantic==2.1 pydantic-core==2.2"
        ' pyyaml==6 unheard-of && for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done'
    )


def test_an_old_python_is_reported_in_the_first_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.sys, "version_info", (3, 10, 2))
    assert gpu.measure(Namespace(json=tmp_path / "gpu.json", page=tmp_path / "gpu.md"), tmp_path) == 2
    message = f"make gpu: error: {sys.executable} is Python 3.10.2: 3.11 or newer is needed\n"
    assert capsys.readouterr() == ("", message)


def test_make_uses_the_given_python_and_sets_nothing_up():
    # These tests may themselves run under make, which passes its options on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "gpu", "PYTHON=/x/python"]
    done = run_program(command, cwd=ROOT, env=environment, check=True)
    assert done.stdout.strip() == "/x/python benchmarks/gpu.py"


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
    hung = gpu.run_part(part("hangs", HANGS), tmp_path, limit_s=20)
    assert [(one.name, one.outcome, one.reason, one.values) for one in [*results, hung]] == [
        ("fails", "failed", "the reason", {}),
        ("dies", "failed", "it ended with signal SIGKILL and no output", {}),
        ("works", "passed", None, {"rate": 7}),
        ("hangs", "out of time", "it did not end in 20 s", {"rate": 7}),
    ]
    assert hung.seconds > 19
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


MACHINE = {
    "unfit": None,
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "driver": "580.159.04",
    "gpus": ["an invented GPU"],
}


@pytest.mark.parametrize(("program", "code"), [(WRITES, 0), (f"{WRITES}; sys.exit('a reason')", 1)])
def test_the_files_are_written_whether_or_not_a_part_failed(tmp_path, monkeypatch, program, code):
    monkeypatch.setattr(gpu, "TITLES", {"one": "part one"})
    monkeypatch.setattr(gpu, "WORDS", {"one": lambda values: [f"rate {values['rate']}"]})
    found, values, page = run(tmp_path, monkeypatch, json.dumps(MACHINE), part("one", program))
    assert found == code
    content = json.loads(values.read_text())
    assert content["machine"]["torch"] == "2.11.0+cu130"
    assert [(one["outcome"], one["reason"]) for one in content["parts"]] == [
        ("failed", "a reason") if code else ("passed", None)
    ]
    assert "an invented GPU; driver 580.159.04; torch 2.11.0+cu130, NCCL 2.28.9" in page.read_text()


# -- the table -------------------------------------------------------------------------------------

CLOCKS = {"sm_mhz": 1755, "power_w": 612.3, "temperature_c": None}


def ended(
    name: str, seconds: float, outcome: str = "passed", reason: str | None = None, **values: Any
) -> Any:
    return {"name": name, "outcome": outcome, "seconds": seconds, "reason": reason, "values": values}


#: Invented values.
PARTS = [
    ended(
        *("mfu", 30.4),
        product_size=8192,
        product_flops_per_s=700e12,
        parameters=350_000_000,
        step_s=0.05,
        flops_per_s=350e12,
        mfu=None,
        mfu_empty_because="the peak of 'an invented GPU' is not known",
        share_of_product=0.5,
    ),
    ended(
        *("formats", 44.0),
        batch=64,
        configurations=[
            {"precision": "fp32", "memory_format": "contiguous", "images_per_s": 793.2, "mfu": 0.29},
            {"precision": "bf16", "memory_format": "channels_last", "images_per_s": 3344, "mfu": None},
        ],
    ),
    ended(
        *("ranks", 40.0),
        transport={"network": "Socket"},
        parts_s={"step": 0.26, "comm_exposed": 0.234},
        sweep=[[4096, 0.0045], [16 * 2**20, 0.03]],
        no_sweep=None,
        nodecheck={"compute": [3.5e14, 3.4e14], "exchange": [0.5e9, "no answer in 30 s"]},
    ),
    ended(
        *("overhead", 41.0, "failed", "the harness adds more than 0.5%"),
        ratio=1.012,
        ratio_low=1.0081,
        ratio_high=1.0159,
        hand_written_step_s=0.0101,
        pairs=40,
    ),
    ended(
        *("study", 70.0),
        runs=[
            {"conditions": 2, "clocks": [{"before": CLOCKS, "loaded": CLOCKS | {"sm_mhz": mhz}}]}
            for mhz in (1755, 1980)
        ],
    ),
    ended(
        *("tests", 180.0, "out of time", "it did not end in 175 s"), planned=15, passed=9, failed=0, skipped=1
    ),
]


# -- the parts -------------------------------------------------------------------------------------


def test_the_study_for_a_gpu_is_a_valid_matrix(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text(gpu_parts.study_matrix("cuda"))
    matrix, _ = load_matrix(path)
    assert (matrix.workload.device, matrix.cluster.executor, matrix.repeats) == ("cuda", "local", 3)


SHOWS = "import os, sys; names = ('RANK', 'LOCAL_RANK', 'NCCL_HOSTID', 'SLURMD_NODENAME', 'WORLD_SIZE');"
SHOWS += "print(*(os.environ[name] for name in names));"


def test_every_file_with_tests_for_a_gpu_is_found():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n    pytest.mark.gpu,\n" in path.read_text()
    }
    assert len(marked) >= 2
    assert marked <= set(gpu_parts.gpu_test_files())
