"""Studies for Slurm on a machine without Slurm, without a configuration, or without a controller."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench.commands.waiting import Patience
from bench.errors import UnavailableError
from bench.jobs.slurm.client import SlurmMissingError, SlurmUnavailableError
from bench.study.layout import StudyFolder
from bench.study.ledger import Record, RunState
from bench.study.plan_json import open_study
from tests.commands.command_line import bench
from tests.matrices import matrix

HINT = "run this on a login node (perhaps after `module load slurm`), or set cluster.executor: local"
#: The output of Slurm 20.11.4, 22.05.8, 24.11.5 and 26.05.5 on a machine without a configuration.
UNCONFIGURED = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
REFUSED = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plan a study in a folder; PATH contains only its subfolder ``bin``."""
    text = matrix(
        "elsewhere",
        cluster={"partition": "gpu", "time_limit": "5m"},
        axes={"nodes": [1], "tasks_per_node": [1]},
    )
    (tmp_path / "elsewhere.yaml").write_text(text)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    done = bench("plan", "elsewhere.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def add_commands(folder: Path, message: str) -> None:
    """Add commands of Slurm that fail with ``message`` on standard error."""
    program = f"#!{sys.executable}\nimport sys\nsys.stderr.write({message!r})\nsys.exit(1)\n"
    for name in ("sbatch", "squeue"):
        (folder / "bin" / name).touch(mode=0o755)
        (folder / "bin" / name).write_text(program)


WAYS = [[], ["--wait"], ["--pack", "--wait"], ["--wait", "--patience", "2h"]]


@pytest.mark.parametrize("options", WAYS, ids=" ".join)
def test_without_slurm_or_a_configuration_a_submission_stops_at_once_with_exit_code_2(planned, options):
    done = bench("submit", *options, cwd=planned)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (f"error: squeue: command not found; {HINT}")
    add_commands(planned, UNCONFIGURED)
    done = bench("submit", *options, cwd=planned)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Could not establish a configuration source; {HINT}"


@pytest.fixture
def submitted(planned: Path) -> Path:
    """Record a job of the planned study, as on the machine where it was submitted."""
    ledger = open_study(StudyFolder(planned / "results/elsewhere")).ledger
    run = "n1x1-gloo-srun-b4-r1"
    record = Record(run_id=run, attempt=1, state=RunState.QUEUED, job_name="name", job_id="7")
    ledger.append([record])
    return planned


def test_status_of_a_submitted_study_shows_the_last_known_states(submitted):
    done = bench("status", "--watch", cwd=submitted)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "1 queued"
    assert done.stderr.splitlines() == [
        "Slurm is unreachable: these are the last known states",
        f"error: squeue: command not found; {HINT}",
    ]


def test_a_submitted_study_is_reported_with_its_last_known_states(submitted, nothing_drawn):
    done = bench("report", cwd=submitted)
    assert (done.returncode, done.stdout) == (0, "results/elsewhere/report/index.html\n")
    assert done.stderr.splitlines()[0] == (
        "results/elsewhere: the states of unfinished runs are not updated: squeue: command not found"
    )


@pytest.mark.parametrize("words", [["submit", "--wait"], ["run", "elsewhere.yaml"]])
def test_the_wait_for_a_controller_ends_after_patience(planned, words):
    add_commands(planned, REFUSED)
    began = time.monotonic()
    done = bench(*words, "--patience", "1s", cwd=planned)
    assert time.monotonic() - began >= 1
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "connect failure" in line]
    assert lines[0].endswith("Unable to contact slurm controller (connect failure): waiting for Slurm")
    assert lines[1].endswith(
        "(waited for 1 s, see --patience); repeat the command when Slurm responds again "
        "(scontrol ping); nothing is lost"
    )


def test_a_wrong_duration_and_patience_without_wait_are_errors(planned):
    done = bench("submit", "--wait", "--patience", "ten minutes", cwd=planned)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --patience ten minutes: 'ten minutes' is not a duration such as 20m, 1h30m, 45s, or Slurm's "
        "[days-]hours:minutes:seconds\n",
    )
    done = bench("submit", "--patience", "10m", cwd=planned)
    assert (done.returncode, done.stderr) == (2, "error: --patience requires --wait; add --wait\n")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace time.sleep by a list of the times, which advance time.monotonic."""
    times: list[float] = []
    monkeypatch.setattr("bench.commands.waiting.time.sleep", times.append)
    monkeypatch.setattr("bench.commands.waiting.time.monotonic", lambda: sum(times))
    return times


def test_each_outage_has_the_full_time(slept):
    patience, absent = Patience(10), SlurmUnavailableError("squeue", "connect failure", remedy="wait")
    for _ in range(2):
        for _ in range(4):
            patience.wait(absent)
        patience.answered()
    assert slept == [3, 3, 3, 1] * 2
    for _ in range(4):
        patience.wait(absent)
    with pytest.raises(UnavailableError, match=r"connect failure \(waited for 10 s, see --patience\); wait"):
        patience.wait(absent)


def test_a_configuration_that_disappears_is_waited_for_and_a_missing_command_is_not(slept):
    """On a cluster whose controller provides the configuration, it is missing while the controller is down."""
    unconfigured = SlurmMissingError("squeue", "Could not establish a configuration source")
    patience = Patience()
    with pytest.raises(SlurmMissingError):
        patience.wait(unconfigured)
    patience.answered()
    patience.wait(unconfigured)
    assert slept == [3]
    with pytest.raises(SlurmMissingError):
        patience.wait(SlurmMissingError("squeue", "command not found"))
