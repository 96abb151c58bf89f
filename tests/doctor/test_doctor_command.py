"""`bench doctor`: text, JSON, exit codes and error messages."""

import io
import json
import sys
from pathlib import Path

import pytest

from bench.commands.doctor import run_doctor
from bench.errors import BenchError
from tests.common import raised

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
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_text_names_cause_line_reason_and_remedy(folder, capsys):
    Path("job.err").write_text(FAILED)
    assert run_doctor([Path("job.err")], json=False) == 1
    assert capsys.readouterr().out == TEXT


def test_a_log_without_a_known_cause_exits_with_three(folder, capsys):
    Path("job.out").write_text("step 1 loss 2.0\nTraining finished\n")
    assert run_doctor([Path("job.out")], json=False) == 3
    assert capsys.readouterr().out == (
        "No known cause. This does not show that the job succeeded. The last lines, errors if there are any:\n\n"
        "  job.out:1\n    step 1 loss 2.0\n\n  job.out:2\n    Training finished\n"
    )


def test_standard_input_and_files_are_read_together(folder, capsys, monkeypatch):
    awkward = Path("a'; echo foo ä.log")
    awkward.write_text("RuntimeError: Tensors must be CUDA and dense\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FAILED.encode())))
    assert run_doctor([awkward, "-"], json=True) == 1
    found = [(cause["cause"], cause["path"]) for cause in json.loads(capsys.readouterr().out)["causes"]]
    assert found[:2] == [("backend-device-mismatch", str(awkward)), ("missing-srun", "-")]


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("message", ["RuntimeError: Tensors must be CUDA and dense", "no known ERROR"])
def test_control_characters_of_a_log_and_its_name_do_not_reach_the_terminal(folder, capsys, message, json):
    hostile = "\x1b]0;title\x07\x1b[2J\x1b[31m\x9b5m\u202e\u2066\u200b\x85\x00\r"
    log = Path("job\x1b[2J\u202e.err")
    log.write_text(f"{hostile}{message}{hostile} \udcff\n", errors="surrogateescape")
    run_doctor([log], json=json)
    printed = capsys.readouterr().out
    assert message in printed
    assert all(char.isprintable() or char == "\n" for char in printed)


def test_a_line_break_in_a_name_is_printed_as_a_space(folder, capsys):
    Path("job\nfake-cause  x:1.err").write_text(FAILED)
    run_doctor([Path("job\nfake-cause  x:1.err")], json=False)
    assert capsys.readouterr().out.startswith("missing-srun  job fake-cause  x:1.err:2\n")
    with pytest.raises(BenchError, match=r"^gone for ever: log does not exist; give a log file"):
        run_doctor([Path("gone\nfor ever")], json=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.err", "gone.err: log does not exist; give a log file, such as slurm-<job>.out"),
        (".", ".: log is a directory; give a log file, such as slurm-<job>.out"),
    ],
)
def test_a_target_that_is_not_a_log_is_an_error_with_a_remedy(folder, name, message):
    assert raised(BenchError, run_doctor, [Path(name)], json=False) == message
