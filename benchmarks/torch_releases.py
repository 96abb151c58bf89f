"""Run the tests of the measurement with other releases of torch and Python; print a table.

    python benchmarks/torch_releases.py [RELEASE ...]

For each combination in COMBINATIONS, the script installs the project into a virtual environment, and runs

- tests/train, tests/record and tests/measure, without those that need a GPU or the test cluster;
- `bench run smoke_cpu`;
- a study on the test cluster, whose jobs activate the environment, under srun and torchrun on two nodes.

The environments are kept in the user's cache ($XDG_CACHE_HOME/ddp-scaling-bench/torch-releases, about 6 GB
each with CUDA). pip's settings determine the index, and whether the builds are for CPU or CUDA. Every part
has a time limit, so a part that hangs is a failure. docs/measuring.md has the table. The exit code is 1 if
any part failed. If a Python is not installed, its row has no results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import missing

ROOT = Path(__file__).resolve().parents[1]

#: Python and torch: the oldest supported release, three in between and the newest; then the other Pythons.
COMBINATIONS = [
    ("3.11", "2.4.1"),
    ("3.11", "2.7.1"),
    ("3.11", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.15.0"),
    ("3.12", "2.15.0"),
    ("3.13", "2.15.0"),
]
FOLDERS = ("tests/train", "tests/record", "tests/measure")
#: Packages that the tests need in addition to the project.
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "lightning")
#: Packages for which some releases of torch need other versions than those in constraints.txt.
FREE = ("torch", "sympy", "fsspec", "setuptools", "typing_extensions", "filelock", "networkx")
#: Time limits in seconds, for a busy machine: installation, one test, all tests, smoke_cpu, cluster.
INSTALL_S, TEST_S, TESTS_S, SMOKE_S, CLUSTER_S = 1800, 300, 3600, 1800, 900
COLUMNS = ("torch", "Python", "date", "tests", "`bench run smoke_cpu`", "test cluster")

MATRIX = """\
study: release
cluster:
  executor: slurm
  partition: l40s
  account: users
  cpus_per_task: 1
  time_limit: 10m
  setup: ["source '{environment}/bin/activate'"]
  env: {{GLOO_SOCKET_IFNAME: eth0}}
axes: {{nodes: [2], tasks_per_node: [1], backend: [gloo], launcher: [srun, torchrun]}}
scaling: [{{mode: weak, per_gpu_batch: [2]}}]
workload: {{device: cpu, model: mlp, parameters: 100k, steps_per_epoch: 3, epochs: 1, warmup_steps: 3,
           attribution_steps: 2, val_steps: 0, probe_steps: 2, sweep_max_mb: 0.1}}
repeats: 1
"""


@dataclass(frozen=True)
class Result:
    """The outcome of one part, in a few words."""

    passed: bool
    words: str


@dataclass(frozen=True)
class Row:
    """A row of the table, and whether everything in it passed."""

    cells: tuple[str, ...]
    passed: bool


class FailedError(Exception):
    """A command failed or took too long."""


def run(
    words: Sequence[str | Path],
    log: Path,
    *,
    limit_s: float,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its output, which is also written to ``log``.

    Raises:
        FailedError: the exit code is not 0, or the time limit was exceeded. Remaining processes are killed.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            ["nice", *map(str, words)],
            cwd=cwd,
            env={**clean_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise FailedError(f"hangs (limit {limit_s:g} s)") from None
        finally:
            kill_group(process)
    text = log.read_text(errors="replace")
    if code < 0:
        raise FailedError(f"ended by {signal.Signals(-code).name}")
    if code:
        raise FailedError(last_line(text) or f"exit code {code}")
    return text


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and the processes that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables of another Python, and with the default site settings.

    With PYTHONDONTWRITEBYTECODE, each process would compile torch again, for about 12 s of CPU time.
    """
    removed = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "BENCH_SITE": "", "PYTHONUNBUFFERED": "1"}


def last_line(text: str) -> str:
    """Return the last line of ``text`` that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def cache_folder() -> Path:
    """Return the folder of the environments, outside of the project."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ddp-scaling-bench/torch-releases"


def find_python(version: str) -> str | None:
    """Return an interpreter of a minor version such as 3.12, from PATH; None if there is none."""
    candidate = shutil.which(f"python{version}")
    program = f"import sys, venv, ensurepip; assert sys.version.startswith('{version}.')"
    words = [str(candidate), "-c", program]
    is_usable = (
        candidate and not subprocess.run(words, capture_output=True, env=clean_environment()).returncode
    )
    return candidate if is_usable else None


def install(python: str, release: str, folder: Path) -> Path:
    """Create or update the environment in ``folder`` and return its folder of programs."""
    programs = folder / "environment/bin"
    if not (programs / "python").exists():
        run([python, "-m", "venv", programs.parent], folder / "venv.log", limit_s=INSTALL_S)
    constraints = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if line.split("==")[0] not in FREE) + "\n")
    words: list[str | Path] = ["-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    words += ["--constraint", constraints]
    words += [f"torch=={release}", *TEST_PACKAGES, "--editable", f"{ROOT}[report,train]"]
    run([programs / "python", *words], folder / "install.log", limit_s=INSTALL_S)
    return programs


def run_tests(programs: Path, folder: Path) -> Result:
    """Run the tests and return pytest's summary."""
    words = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", "-m", "not gpu and not cluster", *FOLDERS]
    log, error = folder / "tests.log", ""
    try:
        run([programs / "python", "-m", "pytest", *words], log, limit_s=TESTS_S)
    except FailedError as failed:
        error = str(failed)
    # Python may print warnings after pytest's last line.
    counts = re.findall(r"^=* ?(\d[^=\n]*?)(?:, \d+ deselected)? in \d\S*s\b", log.read_text(), re.M)
    return Result(not error, counts[-1] if counts else error)


def run_smoke(programs: Path, folder: Path) -> Result:
    """Run the example study of this machine and verify its runs."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try:
            run([programs / "bench", "run", "smoke_cpu"], folder / "smoke.log", limit_s=SMOKE_S, cwd=scratch)
        except FailedError as error:
            return Result(False, str(error))
        return verified(programs, folder / "smoke-verify.log", scratch)


def run_on_cluster(programs: Path, folder: Path, release: str) -> Result:
    """Run the study on a test cluster, and check that its ranks used the environment's torch."""
    if lacking := missing():
        return Result(True, f"not run: {lacking}")
    with own_cluster() as (cluster, scratch):
        (scratch / "release.yaml").write_text(MATRIX.format(environment=programs.parent))
        environment = {**cluster.environment, "PATH": f"{programs}:{os.environ['PATH']}"}
        log = folder / "cluster.log"
        try:
            for words in (["plan", "release.yaml"], ["submit", "--wait"]):
                command = [programs / "bench", *words]
                run(command, log, limit_s=CLUSTER_S, cwd=scratch, environment=environment)
        except FailedError as error:
            return Result(False, str(error))
        used = {json.loads(path.read_text())["torch"].split("+")[0] for path in scratch.rglob("env.json")}
        if used != {release}:
            return Result(False, f"the ranks used torch {', '.join(sorted(used)) or 'of an unknown version'}")
        return verified(programs, folder / "cluster-verify.log", scratch, environment)


def verified(
    programs: Path, log: Path, scratch: Path, environment: Mapping[str, str] | None = None
) -> Result:
    """Return the summary of ``bench verify``."""
    try:
        text = run([programs / "bench", "verify"], log, limit_s=TEST_S, cwd=scratch, environment=environment)
    except FailedError as error:
        return Result(False, str(error))
    return Result(True, last_line(text))


def measure(python: str, release: str) -> Row:
    """Return the row of one combination; its logs are kept beside its environment."""
    folder = cache_folder() / f"python{python}-torch{release}"
    folder.mkdir(parents=True, exist_ok=True)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    interpreter = find_python(python)
    if interpreter is None:
        return Row((release, python, date, "no such Python here", "", ""), True)
    try:
        programs = install(interpreter, release, folder)
    except FailedError as error:
        return Row((release, python, date, f"cannot be installed: {error}", "", ""), False)
    version = run([programs / "python", "-V"], folder / "version.log", limit_s=TEST_S).split()[1]
    results = []
    for part in (
        lambda: run_tests(programs, folder),
        lambda: run_smoke(programs, folder),
        lambda: run_on_cluster(programs, folder, release),
    ):
        began = time.monotonic()
        results.append(part())
        print(f"  {results[-1].words} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    cells = (release, version, date, *(result.words for result in results))
    return Row(cells, all(result.passed for result in results))


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    """Measure the combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="releases of torch (default: all)")
    options = parser.parse_args()
    wanted = [
        (python, release)
        for python, release in COMBINATIONS
        if not options.releases or release in options.releases
    ]
    if not wanted:
        parser.error("no such combination; see COMBINATIONS")
    rows = []
    for python, release in wanted:
        print(f"torch {release}, Python {python}", file=sys.stderr, flush=True)
        rows.append(measure(python, release))
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), *(line(row.cells) for row in rows), sep="", end="")
    return int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
