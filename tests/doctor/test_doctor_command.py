"""`bench doctor`: text, JSON, exit codes and error messages."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from bench.commands.doctor import run_doctor
from bench.errors import BenchError

FAILED = """\
rank 0 starts
torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients joined.
"""
TEXT = """\
missing-srun  job.err:2
    torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients
    joined.
  Why: Only 1 of 16 processes joined. A batch script runs on the first node only: a program that is
  started without srun (or mpirun) runs there once, and waits for tasks that are never started.
  Do:  Put srun before the command in the batch script, so that all 16 processes start: srun python
  train.py, or srun torchrun ... with --ntasks-per-node=1. If the script uses srun, find out why the
  other processes did not start.

Further causes, which may be consequences of the first:

clients-missing  job.err:2
    torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients
    joined.
  Why: Some ranks did not join the process group: they were never started, died before they joined,
  or use another master address.
  Do:  Compare the numbers of joined and expected ranks with the number of started processes: nodes
  x --ntasks-per-node with srun, nodes x --nproc_per_node with torchrun. Read the logs of the
  missing ranks first. All ranks must use the same MASTER_ADDR and MASTER_PORT.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_text_names_cause_line_reason_and_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.err").write_text(FAILED)
    assert run_doctor([Path("job.err")], json=False) == 1
    assert capsys.readouterr().out == TEXT


def test_the_json_lists_the_first_cause_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.err").write_text(FAILED)
    assert run_doctor([Path("job.err")], json=True) == 1
    content = json.loads(capsys.readouterr().out)
    first = content["causes"][0]
    assert (first["cause"], first["line"], first["path"]) == ("missing-srun", 2, "job.err")
    assert set(first) == {"cause", "severity", "path", "line", "evidence", "explanation", "remedy", "share"}


def test_a_log_of_a_successful_run_shows_no_failure_and_exits_with_zero(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.out").write_text("step 1 loss 2.0\nTraining finished\n")
    assert run_doctor([Path("job.out")], json=False) == 0
    assert capsys.readouterr().out == "The logs show that the job succeeded.\n"


def test_a_log_that_shows_neither_failure_nor_success_exits_with_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.out").write_text("Grad strides do not match bucket view strides.\nstep 1 loss 2.0\n")
    assert run_doctor([Path("job.out")], json=False) == 1
    first, _, rest = capsys.readouterr().out.partition("\n\n")
    assert first == "The logs do not show whether the job failed or succeeded. The most informative lines:"
    assert "Slow, but not a failure:\n\nslow-gradient-strides  job.out:1\n" in rest


def test_an_unknown_failure_lists_the_most_informative_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.err").write_text(
        "FATAL: labels out of range: 17\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    assert run_doctor([Path("job.err")], json=False) == 1
    assert capsys.readouterr().out == (
        "The job failed for an unknown reason. The most informative lines:\n\n"
        "  job.err:1\n    FATAL: labels out of range: 17\n"
        "  job.err:2\n    srun: error: n1: task 0: Exited with exit code 1\n"
    )


def test_standard_input_and_files_are_read_together(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    awkward = Path("a'; echo foo ä.log")
    awkward.write_text("RuntimeError: Tensors must be CUDA and dense\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FAILED.encode())))
    assert run_doctor([awkward, "-"], json=True) == 1
    found = [(cause["cause"], cause["path"]) for cause in json.loads(capsys.readouterr().out)["causes"]]
    assert found[:2] == [("backend-device-mismatch", str(awkward)), ("missing-srun", "-")]


def test_escape_sequences_of_a_log_do_not_reach_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.err").write_bytes(
        b"\x1b]0;title\x07RuntimeError: Tensors must be \x1b[2JCUDA and dense \xff\x9b\x00\n"
    )
    run_doctor([Path("job.err")], json=False)
    printed = capsys.readouterr().out
    assert "RuntimeError: Tensors must be CUDA and dense" in printed
    assert not any(ord(char) < 32 and char != "\n" for char in printed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.err", "gone.err: log does not exist; give a log file, such as slurm-<job>.out"),
        (".", ".: log is a directory; give a log file, such as slurm-<job>.out"),
    ],
)
def test_a_target_that_is_not_a_log_is_an_error_with_a_remedy(folder: Path, name: str, message: str) -> None:
    with pytest.raises(BenchError) as caught:
        run_doctor([Path(name)], json=False)
    assert str(caught.value) == message


def test_a_missing_target_is_an_error_with_a_remedy() -> None:
    with pytest.raises(BenchError) as caught:
        run_doctor([], json=False)
    assert str(caught.value) == "no log to read; give the job's logs, or - for standard input"
