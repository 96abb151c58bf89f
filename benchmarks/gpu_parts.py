"""The parts of ``make gpu``, each in its own process; see gpu.py.

    python benchmarks/gpu_parts.py machine|mfu|formats|study|tests FILE FOLDER

A part writes its values to FILE as soon as it knows them, so that they are kept if the part runs out of
time. Its exit code is 1 if it failed; the last line of its output then says why. FOLDER is for its files.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TRAINING = (sys.executable, "-m", "ddp_scaling_bench.train")
Values = dict[str, Any]
Write = Callable[[Values], None]

#: The modules of packages whose module has another name.
MODULES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}
TEST_PACKAGES = ("pytest", "pytest-timeout")
#: The oldest torch with which the measurements on a GPU are compared.
OLDEST_TORCH = (2, 11)

#: The matrix product of which the rate is measured: n x n times n x n in bf16, on random numbers.
PRODUCT_SIZE = 8192
_PRODUCTS, _BLOCKS = 10, 5
#: A transformer whose step takes tens of milliseconds on an H100.
TRANSFORMER = {"model": "transformer", "parameters": 350 * 10**6, "seq_len": 1024, "precision": "bf16"}
_TRANSFORMER_BATCH = 8

#: ResNet-50 as torch trains it by default, and as users train it on such a GPU.
FORMATS = (
    ("fp32", "contiguous"),
    ("bf16", "channels_last"),
    ("tf32", "channels_last"),
    ("bf16", "contiguous"),
)
_IMAGES = 64
_WITHOUT_PROBES: Values = {"steps_per_epoch": 30, "probe_steps": 0, "sweep_time": 0}
TRAINING_OF_IMAGES: Values = {"model": "resnet50", "epochs": 2, "attribution_steps": 3, "val_steps": 0}
TRAINING_OF_IMAGES |= _WITHOUT_PROBES

STUDY = """\
study: gpu
cluster: {{executor: local, time_limit: 2m}}
axes: {{nodes: [1], {per_node}: [1], backend: [{backend}], precision: [bf16]}}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
workload: {{device: {device}, model: transformer, parameters: {parameters}, seq_len: {seq_len},
           steps_per_epoch: 30, epochs: 2, probe_steps: 2, sweep_time: 0}}
repeats: 3
"""


class PartError(Exception):
    """A part failed; the message says why in one line."""


# -- machine ---------------------------------------------------------------------------------------


def required_packages() -> dict[str, str]:
    """Return the packages that the parts need, with their releases: of the project, its extras and tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [text for name in ("report", "train", "gpu") for text in project["optional-dependencies"][name]]
    written = [*project["dependencies"], *extras, *TEST_PACKAGES]
    return {re.split("[<>=~]", text)[0].strip(): text for text in written}


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that cannot be imported, each with its missing dependency, if any."""
    found = []
    for name in names:
        module = MODULES.get(name, name.replace("-", "_"))
        try:
            importlib.import_module(module)
        except ImportError as error:
            lacks = error.name if error.name and error.name.partition(".")[0] != module else None
            found.append(f"{name} (which lacks {lacks})" if lacks else name)
    return found


def why_unfit(missing: Sequence[str]) -> str | None:
    """Return why this Python and machine cannot run the GPU's parts, in one line; None if they can."""
    if missing:
        return f"{sys.executable} lacks {', '.join(missing)}: name another PYTHON or PYTHONPATH"
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old: 2.11 or newer is needed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if torch.cuda.is_available():
        return None
    reason = "the driver lists none"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"no CUDA device is visible: {reason}"


def machine(write: Write, folder: Path) -> None:
    """Describe the machine, or say why it cannot run the parts."""
    missing = missing_packages(required_packages())
    reason = why_unfit(missing)
    if reason is not None:
        write({"unfit": reason})
        return
    import torch

    from ddp_scaling_bench.measure.environment import nccl_version
    from ddp_scaling_bench.measure.nvml import open_gpu

    gpu = open_gpu(0)
    write(
        {
            "unfit": None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
            "cores": len(os.sched_getaffinity(0)),
            "driver": gpu and gpu.library.nvmlSystemGetDriverVersion(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        }
    )


# -- MFU -------------------------------------------------------------------------------------------


def mfu(write: Write, folder: Path) -> None:
    """Train a transformer in bf16 between two measurements of a matrix product."""
    before = product_rate()
    values: Values = {"product_size": PRODUCT_SIZE, "product_flops_per_s": before}
    write(values)
    write_nccl_cell(folder, batch=_TRANSFORMER_BATCH, epochs=3, **TRANSFORMER, **_WITHOUT_PROBES)
    run(TRAINING, cwd=folder, BENCH_RUN_DIR=str(folder))
    values["product_flops_per_s"] = max(before, product_rate())
    write(values | utilisation(folder, values["product_flops_per_s"]))


def product_rate() -> float:
    """Return the best rate of a block of matrix products in bf16 (FLOP/s)."""
    import torch

    size = PRODUCT_SIZE
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    for _ in range(_PRODUCTS):
        torch.mm(left, right, out=out)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(_BLOCKS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=out)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    del left, right, out
    torch.cuda.empty_cache()  # the training gets the memory
    return float(2 * size**3 * _PRODUCTS / min(seconds))


def utilisation(folder: Path, product_flops_per_s: float) -> Values:
    """Return the shares of the stated peak and of the matrix product's rate, from the files of the run."""
    rows, env = read_table(folder / "metrics.csv"), read_json(folder / "env.json")
    flops = env["flops"]["per_step_and_rank"]
    step_s = median(float(row["epoch_time_sec"]) / int(row["steps"]) for row in rows)
    stated = [float(row["mfu"]) for row in rows if row["mfu"]]
    return {
        "parameters": env["parameters"],
        "step_s": step_s,
        "flops_per_s": flops / step_s,
        "mfu": median(stated) if stated else None,
        "mfu_empty_because": env["flops"]["mfu_empty_because"],
        "share_of_product": flops / step_s / product_flops_per_s,
        **usage(folder),
    }


def usage(folder: Path) -> Values:
    """Return how busy a run's GPU and host were, as medians over its windows; None if it is not known.

    ``launch_share`` is the share of a step in which the host launches it: 1 if the host is the limit.
    """
    rows, ranks = read_table(folder / "metrics.csv"), read_table(folder / "ranks.csv")
    found: dict[str, list[float]] = {
        name: [float(row[name]) for row in rows if row[name]] for name in ("gpu_util_avg", "energy_joules")
    }
    powers = [(row["energy_joules"], row["epoch_time_sec"]) for row in rows if row["energy_joules"]]
    found["power_w"] = [float(joules) / float(seconds) for joules, seconds in powers]
    steps = [(float(row["window_time_sec"]) / float(row["steps"]), row["launch_time_sec"]) for row in ranks]
    found["launch_share"] = [float(launch_s) / step_s for step_s, launch_s in steps if launch_s]
    return {name: median(values) if values else None for name, values in found.items()}


# -- ResNet-50 -------------------------------------------------------------------------------------


def formats(write: Write, folder: Path) -> None:
    """Train ResNet-50 with each precision and memory format of :data:`FORMATS`."""
    found: list[Values] = []
    for precision, memory_format in FORMATS:
        own = folder / f"{precision}-{memory_format}"
        own.mkdir()
        layout = {"precision": precision, "memory_format": memory_format}
        write_nccl_cell(own, batch=_IMAGES, **TRAINING_OF_IMAGES, **layout)
        run(TRAINING, cwd=folder, BENCH_RUN_DIR=str(own))
        found.append({**layout, **image_rates(own)})
        write({"batch": _IMAGES, "configurations": found})


def image_rates(folder: Path) -> Values:
    """Return the images/s and the MFU of a run; the MFU is None if the GPU's peak is not known."""
    rows = read_table(folder / "metrics.csv")
    stated = [float(row["mfu"]) for row in rows if row["mfu"]]
    return {
        "images_per_s": median(float(row["throughput_samples_per_sec"]) for row in rows),
        "mfu": median(stated) if stated else None,
        **usage(folder),
    }


# -- study -----------------------------------------------------------------------------------------


def study_matrix(device: str) -> str:
    """Return the matrix of the study; on ``cpu``, a small one."""
    if device == "cuda":
        return STUDY.format(
            device=device, per_node="gpus_per_node", backend="nccl", parameters="50M", seq_len=512
        )
    return STUDY.format(
        device=device, per_node="tasks_per_node", backend="gloo", parameters="10k", seq_len=16
    )


def study(write: Write, folder: Path, device: str = "cuda") -> None:
    """Plan, run, verify and report a study, and read its conditions."""
    (folder / "gpu.yaml").write_text(study_matrix(device), encoding="utf-8")
    bench = [sys.executable, "-m", "bench"]
    run([*bench, "plan", "gpu.yaml"], cwd=folder)
    run([*bench, "submit", "gpu"], cwd=folder)
    verified = json.loads(run([*bench, "verify", "gpu", "--json"], cwd=folder))
    folders = [folder / one["folder"] for one in verified["runs"]]
    status = json.loads(run([*bench, "status", "gpu", "--json"], cwd=folder))
    disturbed = {one["run_id"]: one["disturbed"] for one in status["runs"]}
    values: Values = {"runs": [summary(one) | {"disturbed": disturbed[one.parent.name]} for one in folders]}
    write(values)
    report = json.loads(run([*bench, "report", "gpu", "--json"], cwd=folder))
    values["validity"] = report.get("validity")
    write(values)
    unread = [one["run"] for one in values["runs"] if not one["conditions"]]
    if unread:
        raise PartError(f"{len(unread)} of {len(folders)} runs have no conditions: {unread[0]}")
    if device == "cuda" and not all(one["clocks"] for one in values["runs"]):
        raise PartError("conditions.json contains no clocks of the GPU")


def summary(folder: Path) -> Values:
    """Return the throughput of a run and the conditions under which it was measured."""
    rows = read_table(folder / "metrics.csv")
    windows = read_windows(folder)
    ranks = [rank for window in windows for rank in window["ranks"]]
    return {
        "run": folder.parent.name,
        "throughput_samples_per_sec": median(float(row["throughput_samples_per_sec"]) for row in rows),
        "conditions": len(windows),
        "clocks": [rank["clocks"] for rank in ranks if rank["clocks"]],
        **usage(folder),
    }


def read_windows(folder: Path) -> list[Values]:
    """Return the windows of a run's conditions.json; empty if the run has none."""
    with suppress(FileNotFoundError):
        return list(read_json(folder / "conditions.json")["windows"])
    return []


# -- tests -----------------------------------------------------------------------------------------


def gpu_test_files() -> list[str]:
    """Return the files with tests marked ``gpu``; other files, which need further packages, are not run."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text("utf-8")]


class Outcomes:
    """A plugin of pytest that writes the outcome of each test as soon as it is known."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.tests: list[Values] = []
        self._planned: int | None = None

    def pytest_collection_finish(self, session: Any) -> None:
        """Count the tests."""
        self._planned = len(session.items)
        self._write_all()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the outcome of a test: its call, or a set-up or tear-down that did not pass."""
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else report.longrepr[-1] if report.skipped else report.longreprtext
        reason = None if report.passed else str(text).strip().partition("\n")[0]
        name = report.nodeid.rpartition("/")[2]
        self.tests.append(
            {"test": name, "outcome": report.outcome, "seconds": round(report.duration, 1), "reason": reason}
        )
        self._write_all()

    def _write_all(self) -> None:
        count = {
            kind: sum(one["outcome"] == kind for one in self.tests)
            for kind in ("passed", "failed", "skipped")
        }
        self._write({"planned": self._planned, **count, "tests": self.tests})


def tests(write: Write, folder: Path) -> None:
    """Run every test marked ``gpu``."""
    # Plugins of other projects, which the given Python may have, could change how tests run.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    import pytest

    outcomes = Outcomes(write)
    words = ["-m", "gpu", "-p", "pytest_timeout", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    # A test that hangs must not use up the time of all tests. The given Python may print other warnings.
    words += ["--timeout=90", "-W", "default", "--tb=short", "-rN"]
    code = pytest.main([*words, *gpu_test_files()], plugins=[outcomes])
    failed = [one for one in outcomes.tests if one["outcome"] == "failed"]
    for one in failed:
        print(f"{one['test']}: {one['reason']}", flush=True)
    if code:
        first = failed[0]["test"] if failed else f"pytest ended with {int(code)}"
        raise PartError(f"{len(failed)} of {len(outcomes.tests)} tests failed; the first: {first}")
    if all(one["outcome"] == "skipped" for one in outcomes.tests):
        raise PartError(f"all tests were skipped: {outcomes.tests[0]['reason']}")


# -- common ----------------------------------------------------------------------------------------


def write_nccl_cell(folder: Path, **values: Any) -> None:
    """Write the cell.json of a training on GPUs."""
    from tests.common import write_cell  # it needs pytest

    write_cell(folder, backend="nccl", device="cuda", **values)


def run(words: Sequence[str], *, cwd: Path, **env: str) -> str:
    """Run a command with additional environment variables, show its output, and return its standard output.

    Raises:
        PartError: the command failed.
    """
    print(f"$ {' '.join(words)}", flush=True)
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if done.returncode or "--json" not in words:
        print(done.stdout, flush=True)
    if done.returncode:
        name = " ".join(words[2:4])  # without the interpreter and -m
        raise PartError(f"{name} ended with exit code {done.returncode}")
    return done.stdout


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def writer(path: Path) -> Write:
    """Return a function that writes its argument to ``path`` as JSON, in place of the earlier content."""

    def write(values: Mapping[str, Any]) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.replace(path)

    return write


PARTS: dict[str, Callable[[Write, Path], None]] = {
    "machine": machine,
    "mfu": mfu,
    "formats": formats,
    "study": study,
    "tests": tests,
}


def main(name: str, file: str, folder: str) -> int:
    """Run one part."""
    # The programs that a part starts in its folder also find this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        PARTS[name](writer(Path(file)), Path(folder).resolve())
    except PartError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
