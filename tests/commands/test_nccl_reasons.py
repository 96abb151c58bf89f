"""NCCL's own error in the reason of a failed run, for recorded errors and errors from public issues.

The first lines of a file in ``nccl_errors/`` name its source and the text that the reason must contain.
"""

import html
import json
from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from bench.jobs.contract import Status
from bench.jobs.end import end_of
from bench.study.layout import StudyFolder
from bench.study.ledger import FailureClass, RunState
from bench.study.plan_json import open_study
from bench.study.reasons import ExitCode
from ddp_scaling_bench.finding import messages, with_remedies
from ddp_scaling_bench.measure.nccl_errors import logged_nccl_errors
from ddp_scaling_bench.measure.peers import raised, symptom_of
from ddp_scaling_bench.measure.torch_internals import Symptom
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.failures import failure_from
from tests.analysis.studies import leave_run, make_cell
from tests.commands.command_line import bench
from tests.matrices import matrix

FILES = sorted(Path(__file__).parent.glob("nccl_errors/*.txt"))


def read(path: Path) -> tuple[str, str]:
    """Return NCCL's last error, and the log."""
    source, last, log = path.read_text(encoding="utf-8").split("\n", 2)
    assert source.startswith("# source: ")
    return last.removeprefix("# last error: "), log


def words(text: str) -> str:
    """The text without the line breaks of its output."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """A study in which one run failed with each of the errors, and the error of each run."""
    root = tmp_path_factory.mktemp("errors")
    text = matrix("errors", axes={"tasks_per_node": [1]}, repeats=len(FILES))
    (root / "errors.yaml").write_text(text)
    assert bench("plan", "errors.yaml", cwd=root).returncode == 0
    study = open_study(StudyFolder(root / "results/errors"))
    runs = {}
    for run, path in zip(study.runs, FILES, strict=True):
        leave_run(study, run, exit_code=1, err=read(path)[1])
        runs[run.run_id] = path
    return root, runs


def test_status_and_the_page_contain_nccls_last_error(errors, nothing_drawn):
    root, runs = errors
    listed = json.loads(bench("status", "--json", cwd=root).stdout)["runs"]
    table = words(bench("status", cwd=root, COLUMNS="4000").stdout)
    assert bench("report", cwd=root).returncode == 1, "no run has a throughput"
    page = html.unescape((root / "results/errors/report/index.html").read_text(encoding="utf-8"))
    assert {run["run_id"] for run in listed} == set(runs)
    for run in listed:
        last, _ = read(runs[run["run_id"]])
        assert last in run["reason"]
        assert last in page
        assert words(last)[:100] in table


@pytest.mark.parametrize(
    "path", [path for path in FILES if "watchdog" not in path.name], ids=lambda p: p.stem
)
def test_the_line_of_an_exception_contains_nccls_last_error(path):
    last, log = read(path)
    message = (
        log[log.find("NCCL error in") :] if "NCCL error in" in log else log.split("DistBackendError: ")[1]
    )
    line = raised(DistBackendError(message)).message
    assert line.startswith("DistBackendError: ")
    assert last in line
    assert len(line.splitlines()) == 1
    assert (
        last in with_remedies([failure_from(DistBackendError(message), timeout_s=60)])
        or "without-id" in path.name
    )


def nccl(kind: str, last: str) -> DistBackendError:
    return DistBackendError(
        f"NCCL error in: x.cpp:1, a, NCCL version 2.28.9\n{kind}: b.\nLast error:\n{last}"
    )


LINES = str(nccl("ncclSystemError", "Net : Connect to 10.0.0.1<4> failed : Connection refused")).splitlines()


@pytest.mark.parametrize(
    "lines",
    [
        [line for line in LINES for _ in range(2)],
        [f"{rank}: [rank{rank}]: {line}" for line in LINES for rank in (1, 0)],
        [f"\x1b[31m[rank0]: {line}\x1b[0m" for line in LINES],
        [f"{line}\r" for line in LINES],
    ],
    ids=["two ranks at once", "ranks with names", "colours", "line ends of Windows"],
)
def test_the_lines_of_an_error_are_found_in_a_log(lines):
    assert str(logged_nccl_errors(lines)[0]) == (
        "NCCL 2.28.9: Net : Connect to 10.0.0.1<4> failed : Connection refused"
    )


def test_only_lost_connections_of_nccl_are_symptoms_of_another_ranks_end():
    lost = nccl("ncclRemoteError", "socketProgress: Connection closed by remote peer n1<34818>")
    assert symptom_of(lost) is Symptom.LOST
    assert with_remedies([failure_from(lost, timeout_s=9)]) == (
        "lost the connection to another rank: it ended first, see its own message;"
        " NCCL 2.28.9: socketProgress: Connection closed by remote peer n1<34818>"
    )
    late = nccl("ncclSystemError", "socketPollConnect: Connect to 10.0.0.1<4> failed : Connection timed out")
    assert symptom_of(late) is None, "no collective was late"
    assert raised(late).message.endswith("Connect to 10.0.0.1<4> failed : Connection timed out")


def test_slurms_reason_of_an_aborted_rank_contains_the_watchdogs_error(tmp_path):
    _, log = read(FILES[0].with_name("recorded-watchdog-timeout.txt"))
    folder = RunFolder(tmp_path)
    folder.err.write_text(f"{log}\nsrun: error: n1: task 0: Aborted (core dumped)\n")
    failed = {"state": RunState.FAILED, "failure_class": FailureClass.BAD_EXIT, "exit_code": 1}
    status = Status(job_id="7", reasons=(ExitCode(exit_code=1),), **failed)
    found = messages(end_of(folder, make_cell(2, batch=4), status).reasons)
    assert found.startswith(
        "rank 0 on n1 was killed by SIGABRT; NCCL: rank 0: Watchdog caught collective operat"
    )
    assert found.endswith(" ran for 6036 milliseconds before timing out; exit code 1")


def test_doctor_of_a_run_reads_the_log_to_which_nccl_was_diverted(errors):
    """Source of the warnings: https://github.com/pytorch/ci-infra/pull/490."""
    root, runs = errors
    run_id = next(iter(runs))
    folder = RunFolder(root / f"results/errors/runs/{run_id}/attempt-1")
    kept = folder.err.read_text(encoding="utf-8")
    folder.err.write_text("srun: error: n1: task 1: Exited with exit code 1\n")
    log = folder.path / "nccl.log"
    log.write_text(
        "n1:7:9 [0] NCCL INFO Using network Socket\n\n"
        "[2026-04-22 21:34:20] n1:7:9 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory"
        " segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)\n"
    )
    try:
        found = json.loads(bench("doctor", run_id, "--json", cwd=root).stdout)["causes"][0]
        assert (Path(found["path"]).name, found["line"]) == ("nccl.log", 3)
        assert "No space left on device (28)" in found["evidence"]
    finally:
        folder.err.write_text(kept, encoding="utf-8")
        log.unlink()
