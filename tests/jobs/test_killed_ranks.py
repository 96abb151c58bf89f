"""Detection of killed ranks in recorded messages of srun and torchrun."""

import pytest

from bench.jobs.end import Note
from bench.jobs.logs import exited_rank, killed_rank, logged_error, recorded_failures
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.measure.failures import (
    FAILURES,
    LateCollective,
    LostConnection,
    RankFailed,
    write_failures,
)
from ddp_scaling_bench.run_folder import RunFolder

LOST = "bench: error: rank 0: lost the connection to another rank: it ended first, and its own message says why\n"
SRUN = f"""\
{LOST}srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=11.0
slurmstepd-n1: error: *** STEP 11.0 ON n1 CANCELLED AT 2026-11-20T20:42:05 ***
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=11.0
"""
ENDED_BY_SLURM = """\
srun: error: n1: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=12.0
srun: error: n2: tasks 1-3: Killed
"""
N3 = "srun: error: n3: task"
TORCHRUN = """\
E1120 20:42:05.656000 133 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_20:42:05
  host      : n2
  rank      : 1 (local_rank: 0)
  exitcode  : {code} (pid: 135)  ({name})
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 135
"""


@pytest.mark.parametrize(
    ("launcher", "words", "killed", "exited"),
    [
        # After srun has begun to end the others, their ends say nothing.
        ("srun", SRUN, "rank 1 on n2 was killed by SIGKILL", ""),
        ("torchrun", SRUN, "the torchrun agent on n2 was killed by SIGKILL", ""),
        ("srun", ENDED_BY_SLURM, "", "rank 0 on n1 exited with code 1"),
        ("torchrun", ENDED_BY_SLURM, "", "the torchrun agent on n1 exited with code 1"),
        (
            "srun",
            LOST + ENDED_BY_SLURM,
            "ranks 1-3 on n2 were killed by SIGKILL",
            "rank 0 on n1 exited with code 1",
        ),
        ("srun", f"{N3} 7: Segmentation fault (core dumped)\n", "rank 7 on n3 was killed by SIGSEGV", ""),
        ("srun", f"{N3} 7: Terminated\n", "", ""),
        ("srun", f"{N3}s 4-5: Exited with exit code 3\n", "", "ranks 4-5 on n3 exited with code 3"),
        ("torchrun", TORCHRUN.format(code=-9, name="SIGKILL"), "rank 1 on n2 was killed by SIGKILL", ""),
        ("torchrun", TORCHRUN.format(code=-15, name="SIGTERM"), "", ""),
        ("torchrun", TORCHRUN.format(code=1, name=""), "", ""),
        ("srun", "", "", ""),
    ],
)
def test_the_rank_that_was_killed_or_exited_first_is_named(tmp_path, launcher, words, killed, exited):
    folder = RunFolder(tmp_path)
    folder.err.write_text(words)
    if words.startswith(LOST):
        content = {"time": 1.5, "findings": [LostConnection().as_json()]}
        write_json(folder.path / FAILURES.format(0), content)
    found = (killed_rank(folder, launcher), exited_rank(folder, launcher))
    assert tuple(one.message if one else "" for one in found) == (killed, exited)


def test_the_cause_of_a_failure_comes_before_its_effects_then_the_first(tmp_path):
    folder = RunFolder(tmp_path)
    told = [
        (2.0, LostConnection()),
        (4.0, RankFailed(text="no memory")),
        (3.0, RankFailed(text="no data")),
        (1.0, LateCollective(timeout_s=5.0, option="an option")),
        ("earlier", RankFailed(text="no time")),
    ]
    for rank, (moment, found) in enumerate(told):
        write_json(tmp_path / FAILURES.format(rank), {"time": moment, "findings": [found.as_json()]})
    (tmp_path / FAILURES.format("9")).write_text("[")
    folder.err.write_text("bench: error: rank 5: another line\n")
    assert messages(logged_error(folder)) == "no data"


def test_a_rank_writes_only_its_first_failure_and_ignores_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    write_failures([RankFailed(text="first")])
    write_failures([RankFailed(text="second")])
    assert messages(recorded_failures(RunFolder(tmp_path))) == "first"
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path / "missing"))
    write_failures([RankFailed(text="nowhere")])


def test_errors_of_a_rank_take_precedence_over_torchruns(tmp_path):
    torchruns = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    for own, said in (
        ("", "rank 1 on n2 ended with exit code 7"),
        ("ValueError: the loss is nan\n", "ValueError: the loss is nan"),
        ("[rank1]: RuntimeError: boom\nbench: error: no such data\n", "no such data"),
    ):
        (tmp_path / "job.err").write_text(own + torchruns + TORCHRUN.format(code=7, name=""))
        assert messages(logged_error(RunFolder(tmp_path))) == said


def test_the_first_error_is_the_reason_however_much_the_other_ranks_print(tmp_path):
    frames = "frame #0: c10d::TCPStore::get(std::__cxx11::basic_string<char>)\n" * 1000
    others = [f"{frames}bench: error: rank {rank}: the store stopped answering\n" for rank in range(1, 8)]
    first = "bench: error: rank 0: no CUDA device is visible\n"
    (tmp_path / "job.err").write_text(first + "".join(others))
    assert messages(logged_error(RunFolder(tmp_path))) == "rank 0: no CUDA device is visible"
    (tmp_path / "job.err").write_text("step\n" * 300_000 + "bench: error: the loss is NaN\n")
    assert messages(logged_error(RunFolder(tmp_path))) == "the loss is NaN"


def test_a_broken_end_json_is_ignored(tmp_path):
    for text in ("", "{", "[]", "null", '{"exit_code": "3"}', '{"exit_code": true, "time": "soon"}'):
        (tmp_path / "end.json").write_text(text)
        assert Note.read(tmp_path / "end.json") == Note(), text
