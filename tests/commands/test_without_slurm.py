"""Studies for Slurm on a machine without Slurm, without a configuration, or without a controller."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.jobs.engine import Callbacks, Engine
from bench.jobs.slurm.client import SlurmMissingError, SlurmUnavailableError
from bench.jobs.submission import Submission
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


def test_without_slurm_or_a_configuration_a_submission_stops_at_once_with_exit_code_2(planned):
    for options in ([], ["--pack", "--wait"]):
        done = bench("submit", *options, cwd=planned)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"error: squeue: command not found; {HINT}"
    add_commands(planned, UNCONFIGURED)
    for options in ([], ["--pack", "--wait"]):
        done = bench("submit", *options, cwd=planned)
        said = f"error: squeue: Could not establish a configuration source; {HINT}"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)


@pytest.fixture
def submitted(planned: Path) -> Path:
    """Record a job of the planned study, as on the machine where it was submitted."""
    ledger = open_study(StudyFolder(planned / "results/elsewhere")).ledger
    run = "n1x1-gloo-srun-b4-r1"
    ledger.append([Record(run_id=run, attempt=1, state=RunState.QUEUED, job_name="name", job_id="7")])
    return planned


def test_a_submitted_study_is_shown_and_reported_with_the_last_known_states(submitted, nothing_drawn):
    done = bench("status", "--watch", cwd=submitted)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "1 queued")
    assert done.stderr.splitlines() == [
        "Slurm is unreachable: these are the last known states",
        f"error: squeue: command not found; {HINT}",
    ]
    done = bench("report", cwd=submitted)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "results/elsewhere/report/index.html")
    assert done.stderr.splitlines()[0] == (
        "results/elsewhere: the states of unfinished runs are not updated: squeue: command not found"
    )


def test_a_submission_waits_for_the_controller(planned, monkeypatch):
    add_commands(planned, REFUSED)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr("bench.jobs.submission.time", clock)
    done = bench("submit", "--wait", cwd=planned)
    assert done.returncode == 130
    *_, waits, stopped = done.stderr.splitlines()
    assert waits.endswith("Unable to contact slurm controller (connect failure): waiting for Slurm")
    assert stopped == "stopped"


def test_a_configuration_that_disappears_is_waited_for_and_a_missing_command_is_not(submitted, monkeypatch):
    """On a cluster whose controller provides the configuration, it is missing while the controller is down."""
    study = open_study(StudyFolder(submitted / "results/elsewhere"))
    unconfigured = SlurmMissingError("squeue", "Could not establish a configuration source")
    absent = SlurmUnavailableError("squeue", "connect failure", remedy="wait")
    no_command = SlurmMissingError("squeue", "command not found")
    records = study.records()
    answers = iter([unconfigured, records, unconfigured, absent, absent, records, no_command])

    def poll(engine: Engine) -> dict[str, Record]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    said: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr(Engine, "poll", poll)
    monkeypatch.setattr("bench.jobs.submission.time.sleep", slept.append)
    submission = Submission(Engine(study), Callbacks(on_message=said.append))
    with pytest.raises(SlurmMissingError):
        submission.records(wait=True)
    submission.records(wait=True)
    assert (said, slept) == ([], [])
    submission.records(wait=True)
    assert (len(said), slept) == (2, [3, 3, 3])
    with pytest.raises(SlurmMissingError):
        submission.records(wait=True)
