"""`make gpu` without a GPU: its checks, its time limits and its table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.matrix.load import load_matrix
from bench.workload.session import parse_arguments
from tests.common import raised, run_program
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


def test_every_required_package_has_a_version_to_bring():
    assert set(gpu_parts.required_packages()) - {"pytest-timeout"} <= set(gpu_parts.versions()) | {"torch"}


def test_an_old_python_is_reported_in_the_first_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.sys, "version_info", (3, 10, 2))
    assert gpu.measure(Namespace(json=tmp_path / "gpu.json", page=tmp_path / "gpu.md"), tmp_path) == 2
    message = f"make gpu: error: {sys.executable} is Python 3.10.2: 3.11 or newer is needed\n"
    assert capsys.readouterr() == ("", message)


def test_the_dependencies_of_the_project_are_required():
    names = gpu_parts.required_packages()
    assert {"torch", "pydantic", "pyyaml", "nvidia-ml-py", "pytest", "pytest-timeout"} <= set(names)
    assert all(name.replace("-", "").isalnum() for name in names)


def no_driver() -> None:
    raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that you have one.")


@pytest.mark.parametrize(
    ("release", "cuda", "available", "expected"),
    [
        ("2.10.0+cu128", "12.8", True, "torch 2.10.0+cu128 is too old: 2.11 or newer is needed"),
        ("2.11.0+cpu", None, False, "torch 2.11.0+cpu was built without CUDA"),
        ("2.11.0", "13.0", False, "no CUDA device is visible: Found no NVIDIA driver on your system."),
        ("2.11.0+cu130", "13.0", True, None),
        ("3.0.1", "14.0", True, None),
    ],
)
def test_an_unfit_machine_is_described_in_one_line(monkeypatch, release, cuda, available, expected):
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert gpu_parts.why_unfit([]) == expected


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


def test_time_that_a_part_leaves_goes_to_the_next_ones(tmp_path):
    results = gpu.run_parts([part("a", WRITES, 100), part("b", WRITES, 50)], tmp_path, began=time.monotonic())
    assert results[0].budget_s == pytest.approx(100, abs=1)
    assert results[1].budget_s > 51, "most of the first part's time was left"


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


def test_a_folder_that_is_not_there_is_reported_before_anything_runs(tmp_path, capsys):
    options = Namespace(json=tmp_path / "no/gpu.json", page=tmp_path / "gpu.md")
    assert gpu.measure(options, tmp_path) == 2
    assert capsys.readouterr().err == (
        f"make gpu: error: {tmp_path}/no/gpu.json: there is no folder {tmp_path}/no\n"
    )


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
CONTENT = {
    "schema": 1,
    "date": "2026-01-02",
    "commit": "abc1234",
    "seconds": 300.0,
    "machine": MACHINE,
    "parts": PARTS,
}

TABLE = """\
| part | result |
|---|---|
| machine | an invented GPU; driver 580.159.04; torch 2.11.0+cu130, NCCL 2.28.9, Python 3.12.3 |
| date | 2026-01-02, abc1234 |
| MFU of the transformer in bf16 (30 s) | matrix product 8,192 x 8,192 in bf16: 700 TFLOP/s; transformer of 350M parameters: 350 TFLOP/s; 50.0% of the matrix product, the peak of 'an invented GPU' is not known |
| ResNet-50 by precision and memory format (44 s) | fp32, contiguous: 793 images/s (MFU 29.0%); bf16, channels_last: 3344 images/s |
| two NCCL ranks on one GPU (40 s) | network Socket; parts of a step in ms: step 260.0, comm_exposed 234.0; all-reduce of 4 KiB in 4.50 ms, 16 MiB in 30.00 ms; compute 350 T, 340 T; exchange 0.5 G, no answer in 30 s |
| overhead of the harness (41 s) | harness / hand-written loop 1.0120 (95 % interval 1.0081 to 1.0159; step of 10.10 ms, 40 pairs); **failed**: the harness adds more than 0.5% |
| study with conditions (70 s) | 2 runs, 4 windows with conditions; sm 1755 to 1980 MHz; power 612 to 612 W |
| tests (180 s) | 9 passed, 1 skipped of 15; **out of time**: it did not end in 175 s |
"""


def test_the_table_shows_every_part_with_its_values_and_reasons():
    assert gpu.table(CONTENT) == TABLE


def test_a_part_without_values_shows_its_reason_only():
    parts = [{**one, "outcome": "failed", "reason": "it broke", "values": {}} for one in PARTS]
    rows = gpu.table({**CONTENT, "parts": parts}).splitlines()[4:]
    assert [row.partition(") | ")[2] for row in rows] == ["**failed**: it broke |"] * len(gpu.PARTS)


def test_the_page_keeps_its_text_and_gets_the_table(tmp_path):
    page = tmp_path / "gpu.md"
    gpu.update_page(page, CONTENT)
    gpu.update_page(page, CONTENT)
    original = gpu.PAGE.read_text()
    before, after = original.split(gpu.BEGIN)[0], original.split(gpu.END)[1]
    assert page.read_text() == f"{before}{gpu.BEGIN}{TABLE}{gpu.END}{after}"


# -- the parts -------------------------------------------------------------------------------------


def test_the_study_for_a_gpu_is_a_valid_matrix(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text(gpu_parts.study_matrix("cuda"))
    matrix, _ = load_matrix(path)
    assert (matrix.workload.device, matrix.cluster.executor, matrix.repeats) == ("cuda", "local", 3)


def test_the_utilisation_follows_from_the_files_of_a_run(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,steps,epoch_time_sec,mfu\n1,10,2.0,0.3\n2,10,1.0,0.6\n3,10,1.2,0.5\n"
    )
    flops = {"per_step_and_rank": 12e12, "mfu_empty_because": None}
    (tmp_path / "env.json").write_text(json.dumps({"parameters": 10, "flops": flops}))
    found = gpu_parts.utilisation(tmp_path, product_flops_per_s=400e12)
    assert found["flops_per_s"] == pytest.approx(100e12)
    assert found["share_of_product"] == pytest.approx(0.25)
    assert found["mfu"] == 0.5


def test_resnet_is_trained_in_every_format_with_options_of_the_workload(tmp_path, monkeypatch):
    def trained(words: list[str], *, cwd: Path) -> None:
        request = parse_arguments(words[3:])
        options = request.options
        request.run_dir.mkdir()
        rate = {"fp32": 800, "tf32": 2300, "bf16": 3300}[options.precision]
        (request.run_dir / "metrics.csv").write_text(
            f"throughput_samples_per_sec,mfu\n{rate},0.25\n{rate},\n"
        )
        seen.append((options.model, options.precision, options.memory_format))

    seen: list[tuple[str, str, str]] = []
    written: list[int] = []
    monkeypatch.setattr(gpu_parts, "run", trained)
    gpu_parts.formats(lambda values: written.append(len(values["configurations"])), tmp_path)
    assert seen == [("resnet50", *one) for one in gpu_parts.FORMATS]
    assert written == [1, 2, 3, 4], "each rate is kept if the part runs out of time"
    last = gpu_parts.image_rates(tmp_path / "bf16-contiguous")
    assert last == {"images_per_s": 3300, "mfu": 0.25}


def test_the_options_of_two_ranks_are_those_of_the_workload(tmp_path):
    request = parse_arguments(["--run-dir", str(tmp_path), *gpu_parts.TWO_RANKS])
    assert (request.options.device, request.backend) == ("cuda", "nccl")


SHOWS = "import os, sys; names = ('RANK', 'LOCAL_RANK', 'NCCL_HOSTID', 'SLURMD_NODENAME', 'WORLD_SIZE');"
SHOWS += "print(*(os.environ[name] for name in names));"


def test_two_ranks_seem_to_be_on_two_hosts(tmp_path, capsys):
    gpu_parts.together([sys.executable, "-c", SHOWS], tmp_path)
    assert capsys.readouterr().out.split("\n")[1:4:2] == ["0 0 host0 host0 2", "1 0 host1 host1 2"]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (
            "print('x\\nDuplicate GPU detected : rank 0'); sys.exit(1)",
            "RefusedError",
            "Duplicate GPU detected : rank 0",
        ),
        ("sys.exit(os.environ['RANK'] == '1')", "PartError", "two ranks ended with 0, 1"),
        ("import time; time.sleep(600)", "PartError", "two ranks did not end in 1 s"),
    ],
)
def test_two_ranks_that_fail_say_why(tmp_path, monkeypatch, program, error, message):
    monkeypatch.setattr(gpu_parts, "_RANKS_S", 60.0 if "sleep" not in program else 1.0)
    assert (
        raised(
            getattr(gpu_parts, error), gpu_parts.together, [sys.executable, "-c", SHOWS + program], tmp_path
        )
        == message
    )


def test_a_gpu_that_takes_no_two_ranks_is_a_result(tmp_path, monkeypatch):
    def refused(folder: Path) -> None:
        raise gpu_parts.RefusedError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60")

    monkeypatch.setattr(gpu_parts, "training_of_two", refused)
    written: list[Any] = []
    gpu_parts.ranks(written.append, tmp_path)
    [refusal] = gpu.ranks_words(written[-1])
    assert refusal.startswith("NCCL refuses two ranks on one GPU: Duplicate GPU detected : rank 0")


def test_a_part_finds_this_checkout_from_any_folder(tmp_path):
    """The part is started alone, as `python benchmarks/gpu_parts.py study FILE FOLDER`."""
    program = (
        "import sys, json, os; sys.path.insert(0, sys.argv[1]); import gpu_parts;"
        "gpu_parts.PARTS = {'shows': lambda write, folder: write({'path': os.environ['PYTHONPATH']})};"
        "sys.exit(gpu_parts.main('shows', 'values.json', 'folder'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", program, str(ROOT / "benchmarks")]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    assert json.loads((tmp_path / "values.json").read_text()) == {"path": str(ROOT)}


def test_every_file_with_tests_for_a_gpu_is_found():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n    pytest.mark.gpu,\n" in path.read_text()
    }
    assert len(marked) >= 2
    assert marked <= set(gpu_parts.gpu_test_files())


TESTS_OF_ALL_KINDS = """\
import pytest

def test_passes():
    assert True

def test_fails():
    assert 1 > 2, "one is not\\nenough"

@pytest.mark.skip(reason="no second GPU")
def test_is_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError("cannot be set up")

def test_cannot_start(broken):
    pass
"""


def test_the_outcome_of_each_test_is_written_at_once(tmp_path):
    (tmp_path / "test_kinds.py").write_text(TESTS_OF_ALL_KINDS)
    program = (
        "import json, pytest, sys; sys.path.insert(0, 'benchmarks'); import gpu_parts;"
        "pytest.main(['-q', '-p', 'no:cacheprovider', '-c', '/dev/null', sys.argv[1]],"
        " plugins=[gpu_parts.Outcomes(lambda values: print('WRITTEN', json.dumps(values)))])"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "test_kinds.py")]
    done = run_program(words, cwd=ROOT)
    written = [
        json.loads(line.partition("WRITTEN ")[2]) for line in done.stdout.splitlines() if "WRITTEN " in line
    ]
    assert [len(values["tests"]) for values in written] == [0, 1, 2, 3, 4]
    last = written[-1]
    assert (last["planned"], last["passed"], last["failed"], last["skipped"]) == (4, 1, 2, 1)
    assert [(one["test"], one["outcome"], one["reason"]) for one in last["tests"]] == [
        ("test_kinds.py::test_passes", "passed", None),
        ("test_kinds.py::test_fails", "failed", "AssertionError: one is not"),
        ("test_kinds.py::test_is_skipped", "skipped", "Skipped: no second GPU"),
        ("test_kinds.py::test_cannot_start", "failed", "ValueError: cannot be set up"),
    ]
