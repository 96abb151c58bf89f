"""Every command shows the same state, failure class and attempts of a run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.measure.failures import FAILURES, DataTooSmall
from tests.analysis.figures import no_figure
from tests.analysis.studies import leave_run
from tests.commands.command_line import answer, bench, is_reported
from tests.common import read_rows
from tests.matrices import matrix

OOM_HOST = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
)
OOM_GPU = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB
"""
#: What torchrun prints.
KILLED = "  host      : n1\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 5)\n"
#: The exit code, the cause of the end (`by` in end.json) and job.err of an attempt; its state and class.
COMPLETED = 0, "exit", "", ("completed", "")
#: A completed run whose folder is deleted.
DELETED = 0, "exit", "", ("failed", "bad-exit")
TIME_LIMIT = 143, "limit", "", ("failed", "time-limit")
HOST_MEMORY = 1, "exit", f"{OOM_HOST}\n{KILLED}", ("failed", "killed")
GPU_MEMORY = 1, "exit", OOM_GPU, ("failed", "out-of-memory")
EXIT = 3, "exit", "nothing known\n", ("failed", "bad-exit")
CANCELLED = 143, "term", "", ("cancelled", "cancelled")

#: The attempts of each run, by ranks and repeat.
ATTEMPTS = {
    (1, 1): [COMPLETED],
    (1, 2): [COMPLETED],
    (1, 3): [HOST_MEMORY, COMPLETED],
    (1, 4): [EXIT],
    (1, 5): [DELETED],
    (1, 6): [],
    (2, 1): [TIME_LIMIT],
    (2, 2): [EXIT, HOST_MEMORY],
    (2, 3): [GPU_MEMORY],
    (2, 4): [CANCELLED],
    (2, 5): [COMPLETED],
    (2, 6): [CANCELLED, TIME_LIMIT, COMPLETED],
}
EXPECTED = {key: [end for *_, end in attempts] for key, attempts in ATTEMPTS.items()}
#: The folder of this run is deleted.
MISSING = (1, 5)


def run_name(ranks: int, repeat: int) -> str:
    return f"n1x{ranks}-gloo-torchrun-b4-r{repeat}"


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> Path:
    """A study with runs of all ends."""
    folder: Path = tmp_path_factory.mktemp("ends")
    (folder / "ends.yaml").write_text(matrix("ends", repeats=6))
    assert bench("plan", "ends.yaml", cwd=folder).returncode == 0
    study = open_study(StudyFolder(folder / "results/ends"))
    runs = {run.run_id: run for run in study.runs}
    for key, attempts in ATTEMPTS.items():
        for exit_code, by, log, _ in attempts:
            leave_run(study, runs[run_name(*key)], exit_code=exit_code, by=by, err=log)
    shutil.rmtree(study.folder.runs / run_name(*MISSING))
    with no_figure():
        done = bench("report", "ends", cwd=folder)
    assert is_reported(done), done.stderr
    return folder


def last_ends() -> dict[str, tuple[str, str]]:
    return {run_name(*key): (ends or [("planned", "")])[-1] for key, ends in EXPECTED.items()}


def all_ends() -> dict[tuple[str, int], tuple[str, str]]:
    """Return the ends of all attempts by run and attempt; those of runs that have not started with 0."""
    found = {}
    for key, ends in EXPECTED.items():
        numbered = enumerate(ends, 1) if ends else [(0, ("planned", ""))]
        found |= {(run_name(*key), number): end for number, end in numbered}
    return found


def rows_of_runs(folder: Path) -> list[dict[str, str]]:
    return read_rows(folder / "results/ends/report/runs.csv")


def test_status_verify_and_doctor_show_the_same_state_and_class(studied):
    status = answer("status", cwd=studied)["runs"]
    assert {run["run_id"]: (run["state"], run["failure_class"] or "") for run in status} == last_ends()
    verify = answer("verify", cwd=studied)["runs"]
    assert {run["run_id"]: (run["state"], run["failure_class"] or "") for run in verify} == last_ends()
    failed = {run: end for run, end in last_ends().items() if end[0] == "failed"}
    doctor = answer("doctor", "ends", cwd=studied)["runs"]
    assert {run["run_id"]: (run["state"], run["failure_class"]) for run in doctor} == failed
    for run, end in failed.items():
        one = answer("doctor", f"ends/{run}", cwd=studied)
        assert (one["state"], one["failure_class"]) == end


def test_every_attempt_is_a_row_of_runs_csv_and_of_the_page(studied):
    rows = rows_of_runs(studied)
    ends = {(row["run_id"], int(row["attempt"] or 0)): (row["state"], row["failure_class"]) for row in rows}
    assert len(ends) == len(rows)
    assert ends == all_ends()
    latest = {row["run_id"]: (row["state"], row["failure_class"]) for row in rows if row["latest"] == "True"}
    assert latest == last_ends()
    page = (studied / "results/ends/report/index.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    shown = {}
    for cell, shared, rest, attempt, state, failure_class, *_ in data["runs"]:
        name = data["texts"][cell][:shared] + rest
        shown[name, attempt] = (data["texts"][state], data["texts"][failure_class])
    assert shown == all_ends()
    listed = dict(rows_of_page(page))
    not_counted = {key for key, (state, _) in all_ends().items() if state != "completed"}
    assert set(listed) == not_counted | {(run_name(*MISSING), 1)}
    for key, (state, failure_class, counted, lost) in listed.items():
        assert (state, failure_class.replace("–", ""), counted) == (*all_ends()[key], "no")
        assert lost == ("0.100" if key[1] else "–")
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    assert facts["Failed attempts"] == "8 of 15"
    assert facts["Node-hours of attempts that do not count"] == "1.00 of 1.50"


def rows_of_page(page: str) -> Iterator[tuple[tuple[str, int], tuple[str, str, str, str]]]:
    section = page.partition('class="runs"')[2].partition("</section>")[0]
    for row in re.findall(r"<tr><td.*?</tr>", section):
        run, attempt, state, failure_class, counted, lost, _ = re.findall(r"<td[^>]*>(.*?)</td>", row)
        yield (run, int(attempt.replace("–", "0"))), (state, failure_class, counted, lost)


def test_the_doctor_knows_the_end_of_a_run_whose_submission_was_killed(tmp_path):
    (tmp_path / "ends.yaml").write_text(matrix("ends", axes={"tasks_per_node": [1]}))
    assert bench("plan", "ends.yaml", cwd=tmp_path).returncode == 0
    study = open_study(StudyFolder(tmp_path / "results/ends"))
    (run,) = study.runs
    folder = leave_run(study, run, exit_code=None, err="step 3\n", is_recorded=False)
    failure = DataTooSmall(samples=36, ranks=4, batch=10)
    write_json(folder.path / FAILURES.format(0), {"time": 1.5, "findings": [failure.as_json()]})
    for target in ("ends", f"ends/{run.run_id}"):
        found = answer("doctor", target, cwd=tmp_path)
        (end,) = found.get("runs", [found])
        assert (end["run_id"], end["state"], end["failure_class"]) == (run.run_id, "failed", "killed")
        (cause,) = found["causes"]
        assert (cause["cause"], cause["remedy"]) == ("data-too-small", failure.remedy)
    (shown,) = answer("status", cwd=tmp_path)["runs"]
    assert (shown["state"], shown["failure_class"], shown["cause"]) == ("failed", "killed", "data-too-small")
