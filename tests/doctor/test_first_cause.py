"""`bench status`, the page and `bench doctor` give one first cause of a failed run, with its own message."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.jobs.contract import Status
from bench.jobs.end import end_of
from bench.study.found import read_findings
from bench.study.layout import StudyFolder
from bench.study.ledger import FailureClass, RunState
from bench.study.plan_json import open_study
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.measure.failures import FAILURES
from tests.analysis.figures import no_figure
from tests.analysis.studies import leave_run
from tests.commands.command_line import bench
from tests.doctor.test_doctor_catalogue import OF_A_SCRIPT
from tests.matrices import matrix


@dataclass(frozen=True)
class Case:
    """A failed run: what it left, its first cause (None: none is known) and the message that shows it."""

    cause: str | None
    message: str
    log: str = ""
    exit_code: int | None = 1
    by: str = "exit"
    failure: dict[str, Any] | None = None
    status: dict[str, Any] | None = None


CASES = {
    name: Case(**values)
    for name, values in yaml.safe_load(Path(__file__).with_name("failed_runs.yaml").read_text()).items()
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
            write_json(left.path / FAILURES.format(0), {"time": 1.5, "findings": [case.failure]})
        if case.status:
            (reason,) = read_findings([case.status["reason"]])
            failure_class = FailureClass(case.status["failure_class"])
            told = {"state": RunState.FAILED, "failure_class": failure_class, "exit_code": 1}
            end = end_of(left, study.cell_of(run.run_id), Status(job_id="7", reasons=(reason,), **told))
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
    section = re.sub(r"<wbr>|</?span[^>]*>", "", section).replace("\N{NO-BREAK SPACE}", " ")
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
        assert "  Do:  Change what the reason says." in text
    # What all runs have in common stands once above the table.
    (row,) = (line for line in status if line.startswith(f"{run.replace('-gloo-torchrun-b4', '')} "))
    for shown in (words(row), reasons[run]):
        assert f"{expected.cause}: " in shown or not expected.cause
        assert expected.message in shown
    for part in expected.message.split("; job.err:1: "):
        assert part in words(text)
    assert reasons[run].endswith(f"; what to do: bench doctor ends/{run}")
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
