"""`bench doctor` as it is called: text, JSON, exit codes, and words instead of tracebacks."""

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
  Why: 1 of 16 processes came to the store. A batch script runs on the first node alone: a program
  that is started without srun (or mpirun) exists once, and waits for tasks that nobody starts.
  Do:  Put srun before the command in the batch script, so that all 16 processes start: srun python
  train.py, or srun torchrun ... with --ntasks-per-node=1. If srun is there, look for what kept the
  others from starting.

Also seen; look at the first cause first, these may follow from it:

clients-missing  job.err:2
    torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients
    joined.
  Why: The store waited for all ranks, and some did not come: they were never started, died before
  they joined, or look for the master elsewhere.
  Do:  Compare the two numbers with what srun started (nodes x --ntasks-per-node, or nodes x
  --nproc_per_node), and read the logs of the missing ranks for why they did not start or died
  first; all must use one MASTER_ADDR and MASTER_PORT.
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
    assert set(first) == {"cause", "path", "line", "evidence", "explanation", "remedy"}


def test_a_log_that_ended_well_says_so_and_exits_with_zero(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.out").write_text("step 1 loss 2.0\nTraining finished\n")
    assert run_doctor([Path("job.out")], json=False) == 0
    assert capsys.readouterr().out == "Nothing in it shows a failure.\n"


def test_what_is_unknown_shows_the_most_telling_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.err").write_text(
        "ValueError: labels out of range: 17\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    assert run_doctor([Path("job.err")], json=False) == 1
    assert capsys.readouterr().out == (
        "Unknown: the job failed, and no known cause shows. The most telling lines:\n\n"
        "  job.err:1\n    ValueError: labels out of range: 17\n"
        "  job.err:2\n    srun: error: n1: task 0: Exited with exit code 1\n"
    )


def test_standard_input_is_read_beside_files(
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
def test_what_is_no_log_is_said_in_words(folder: Path, name: str, message: str) -> None:
    with pytest.raises(BenchError) as caught:
        run_doctor([Path(name)], json=False)
    assert str(caught.value) == message


def test_no_log_at_all_is_said_in_words() -> None:
    with pytest.raises(BenchError) as caught:
        run_doctor([], json=False)
    assert str(caught.value) == "no log to read; name the job's logs, or - for standard input"
