"""`bench status`, the page and `bench doctor` give one first cause of a failed run, with its own message."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.jobs.contract import Status
from bench.jobs.end import end_of
from bench.study.layout import StudyFolder
from bench.study.ledger import FailureClass, RunState
from bench.study.plan_json import open_study
from bench.study.reasons import ExitCode, JobState
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.measure.failures import (
    FAILURES,
    DataTooSmall,
    Failure,
    HostRank,
    LateCollective,
    LeftRank,
    LossNotFinite,
    RaisedError,
    RankFailed,
)
from tests.analysis.figures import no_figure
from tests.analysis.studies import leave_run
from tests.commands.command_line import bench
from tests.doctor.test_doctor_catalogue import OF_A_SCRIPT, read
from tests.matrices import matrix

FIXTURES = Path(__file__).parent / "fixtures"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
#: What torchrun prints below the errors of its ranks.
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
#: What srun and slurmstepd printed in the runs of tests/freeze.
ENDED = "srun: launch/slurm: _step_signal: Terminating StepId=6.0\nsrun: error: n1: task 0: Terminated\n"
OOM = (
    "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=6.0. Some of your processes may have been "
    "killed by the cgroup out-of-memory handler."
)
LIMIT = "slurmstepd-n1: error: *** STEP 11.0 ON n1 CANCELLED AT 2026-11-28T07:08:34 DUE TO TIME LIMIT ***"
LEFT = LateCollective(timeout_s=60.0, option="timeout", left=(LeftRank(rank=1, host="n2", steps=20),))


@dataclass(frozen=True)
class Case:
    """A failed run: what it left, its first cause (None: none is known) and the message that shows it."""

    cause: str | None
    message: str
    log: str = ""
    exit_code: int | None = 1
    by: str = "exit"
    failure: Failure | None = None
    status: Status | None = None


def error(cause: str, message: str, **others: Failure) -> Case:
    return Case(cause, message, f"{TRACEBACK}{message}\n{CHILD_FAILED}", **others)


def line(cause: str, message: str, log: str = "", exit_code: int = 1) -> Case:
    return Case(cause, message, f"{log}{message}\n{ENDED}", exit_code)


def fixture(name: str) -> Case:
    header, log = read(FIXTURES / f"{name}.txt")
    return Case(header["expect"], header["evidence"], log.decode())


def by_slurm(
    cause: str | None, message: str, failure_class: FailureClass, reason: JobState | ExitCode
) -> Case:
    status = Status(
        job_id="7", state=RunState.FAILED, failure_class=failure_class, reasons=(reason,), exit_code=1
    )
    return Case(cause, message, exit_code=None, status=status)


def ended(state: str, meaning: str) -> JobState:
    return JobState(state=state, meaning=meaning)


CASES = {
    "wrong option": line(
        "program-arguments",
        "train.py: error: unrecognized arguments: --lerning-rate 0.1",
        "usage: train.py [-h] [--lr LR]\n",
        2,
    ),
    "missing file": error(
        "missing-file", "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"
    ),
    "assertion": error("program-error", "AssertionError: labels out of range: 17"),
    "GPU memory": error("oom-gpu", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "raised": error(
        "program-error",
        "RuntimeError: bad sample 4711 in shard 3",
        failure=RaisedError(error="RuntimeError", text="bad sample 4711 in shard 3"),
    ),
    "killed": Case("oom-host", "exitcode : -9 (pid: 5)", "  host : n1\n  exitcode  : -9 (pid: 5)\n"),
    "SIGSEGV": line("segfault", "Fatal Python error: Segmentation fault"),
    "abort": line(
        "aborted", "srun: error: n4: task 3: Aborted", "terminate called without an active exception\n"
    ),
    "host memory": line("oom-host", OOM),
    "Slurm's limit": line("time-limit", LIMIT),
    "set up": line("module-missing", "slurm_script: line 9: module: command not found", exit_code=127),
    "limit": Case("time-limit", "the time limit was reached", exit_code=143, by="limit"),
    "left the loop": Case(
        "nccl-timeout", "1 on n2 left the loop after 20 steps", exit_code=143, by="limit", failure=LEFT
    ),
    "small data": Case(
        "data-too-small",
        "data set smaller than one step: 36 training samples for 4 ranks x 10 = 40",
        failure=DataTooSmall(samples=36, ranks=4, batch=10),
    ),
    "loss": Case(
        "loss-not-finite",
        "the loss became NaN in epoch 2 on rank 1",
        failure=LossNotFinite(epoch=2, ranks=(1,), value="NaN"),
    ),
    "setting": Case(
        None,
        "rank 0 on n1: data folder /data/tokens does not exist",
        failure=RankFailed(text="data folder /data/tokens does not exist", failed=(HostRank(0, "n1"),)),
    ),
    "exit code": Case(None, "exit code 3", exit_code=3),
    "other words": Case(
        None, "exit code 1; job.err:1: FATAL feature store answered 503", "FATAL feature store answered 503\n"
    ),
    "no exit code": Case(None, "the run left no exit code in end.json: it was killed", exit_code=None),
    "lost node": by_slurm(
        "node-fail", "NODE_FAIL: lost a node", FailureClass.NODE_FAILURE, ended("NODE_FAIL", "lost a node")
    ),
    "preempted": by_slurm(
        "preempted", "PREEMPTED: stopped", FailureClass.PREEMPTED, ended("PREEMPTED", "stopped")
    ),
    "Slurm's code": by_slurm(
        None,
        "FAILED: exit code 9 on n1",
        FailureClass.BAD_EXIT,
        ExitCode(exit_code=9, state="FAILED", host="n1"),
    ),
    **{name: fixture(name) for name in ("duplicate-rank-2", "collective-mismatch-11")},
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with one failed run per case, in this order, and its report."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "ends.yaml").write_text(matrix("ends", axes={"tasks_per_node": [2]}, repeats=len(CASES)))
    assert bench("plan", "ends.yaml", cwd=folder).returncode == 0
    study = open_study(StudyFolder(folder / "results/ends"))
    for run, case in zip(sorted(study.runs, key=lambda run: run.repeat), CASES.values(), strict=True):
        left = leave_run(study, run, exit_code=case.exit_code, by=case.by, err=case.log, is_recorded=False)
        if case.failure:
            write_json(left.path / FAILURES.format(0), {"time": 1.5, "findings": [case.failure.as_json()]})
        if case.status:
            end = end_of(left, study.cell_of(run.run_id), case.status)
            study.ledger.append([study.records()[run.run_id].ended(end)])
    with no_figure():
        bench("report", "ends", cwd=folder)
    return folder


def name(case: str) -> str:
    return f"n1x2-gloo-torchrun-b4-r{[*CASES].index(case) + 1}"


def words(*texts: str) -> str:
    return " ".join(" ".join(texts).split())


@pytest.fixture(scope="module")
def status(failures: Path) -> Sequence[str]:
    return bench("status", "ends", cwd=failures).stdout.splitlines()


@pytest.fixture(scope="module")
def reasons(failures: Path) -> dict[str, str]:
    """The reasons of the runs on the page."""
    page = (failures / "results/ends/report/index.html").read_text(encoding="utf-8")
    section = page.partition('class="runs"')[2].partition("</section>")[0]
    rows = (re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", section))
    return {row[0]: html.unescape(row[-1]) for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_status_page_and_doctor_give_the_same_first_cause_and_its_message(
    case: str, failures: Path, status: Sequence[str], reasons: dict[str, str]
) -> None:
    expected, run = CASES[case], name(case)
    found = json.loads(bench("doctor", f"ends/{run}", "--json", cwd=failures).stdout)
    text = bench("doctor", f"ends/{run}", cwd=failures).stdout
    if expected.cause:
        first = found["causes"][0]
        assert first["cause"] == expected.cause
        assert expected.message in words(first["evidence"] or first["explanation"])
        assert not OF_A_SCRIPT.search(first["remedy"])
    else:
        assert found["causes"] == []
        assert "  Do:  Read all of job.err and job.out" in text
    # What all runs have in common stands once above the table.
    (row,) = (line for line in status if line.startswith(f"{run.replace('-gloo-torchrun-b4', '')} "))
    for shown in (words(row), reasons[run]):
        assert f"{expected.cause}: " in shown or not expected.cause
        assert expected.message in shown
    for part in expected.message.split("; job.err:1: "):
        assert part in words(text)
    assert reasons[run].endswith(f"; what to do: bench doctor {run}")
    assert status[-1] == "what to do about failures: bench doctor ends"


def test_doctor_of_the_study_planned_last_shows_each_first_cause_with_its_runs(failures: Path) -> None:
    done = bench("doctor", cwd=failures)
    assert done.returncode == 1
    assert done.stdout == bench("doctor", "ends", cwd=failures).stdout
    for case, expected in CASES.items():
        start = done.stdout.index(f"{expected.cause}  ") if expected.cause else 0
        assert name(case) in done.stdout[start:]
    (limit,) = re.findall(r"^time-limit .*?Runs: (.*?)\n\n", done.stdout, re.DOTALL | re.MULTILINE)
    assert words(limit) == ", ".join(f"{name(case)} (time-limit)" for case in ("Slurm's limit", "limit"))
