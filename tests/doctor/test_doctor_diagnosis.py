"""Diagnoses of logs: their order, conditions between lines, and any content and length."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.doctor import Diagnosis, diagnose, diagnose_text
from bench.doctor.catalogue import SLOW, WARNING, load
from bench.doctor.diagnosis import HEAD_BYTES, find_warnings
from bench.doctor.report import as_text
from bench.doctor.scan import OVERLAP_BYTES, PIECE_BYTES
from bench.study.reasons import RankStep, StalledRanks
from ddp_scaling_bench.measure.failures import DataTooSmall, LateCollective, RankFailed
from ddp_scaling_bench.run_folder import RunFolder

OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks"
CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.0.4]"
)
CLIENTS = (
    "torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. {} clients joined."
)
WATCHDOG = (
    "[rank{rank}]:[E309 02:11:40 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, "
    "Timeout(ms)=600000) ran for 600031 milliseconds before timing out."
)
LIMIT = "slurmstepd: error: *** JOB 8 ON n2 CANCELLED AT 2025-03-09T02:11:40 DUE TO TIME LIMIT ***"
MODULE = "/var/spool/slurmd/job8/slurm_script: line 9: module: command not found"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/a'"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'


def names(found: Diagnosis) -> list[str]:
    return [cause.cause for cause in found.causes]


def test_the_kinds_of_messages_decide_in_any_order_of_lines() -> None:
    quota = "OSError: [Errno 122] Disk quota exceeded: '/home/user/.cache/x'"
    error = f"{TRACEBACK}my.LabelError: 17"
    lines = [quota, error, CLOSED, LIMIT, MODULE]
    expected = ["disk-quota", "program-error", "secondary-peer-exit", "time-limit", "module-missing"]
    for first in range(len(lines)):
        assert names(diagnose_text("\n".join(lines[first:] + lines[:first]))) == expected
        assert names(diagnose_text("\n".join(lines[first:]))) == expected[first:]


def test_a_recorded_failure_comes_first_unless_another_rank_failed_before() -> None:
    logs, rest = (
        {"job.err": f"{CLOSED}\n{TRACEBACK}my.LabelError: 17"},
        ["program-error", "secondary-peer-exit"],
    )
    failure = DataTooSmall(samples=36, ranks=4, batch=10)
    found = diagnose(logs, failure=failure)
    assert names(found) == ["data-too-small", *rest]
    assert (found.causes[0].explanation, found.causes[0].remedy) == (failure.message, failure.remedy)
    late = LateCollective(timeout_s=5.0, option="an option")
    assert names(diagnose(logs, failure=late)) == [rest[0], "nccl-timeout", rest[1]]
    assert names(diagnose(logs, failure=RankFailed(text="no data"))) == rest


def test_ranks_that_hung_until_the_limit_come_before_how_they_ended() -> None:
    behind = (RankStep(ranks="1", host="n2", step=3, stage="step"),)
    logs = {"job.err": "traceback : Signal 6 (SIGABRT) received by PID 4711\n"}
    for at_limit, first in ((True, "stalled-ranks"), (False, "aborted")):
        hung = StalledRanks(since="03:04:05 UTC", behind=behind, others=4, at_limit=at_limit)
        assert names(diagnose(logs, failure=hung))[0] == first


def test_between_logs_the_times_of_the_lines_decide_if_all_have_one() -> None:
    quota = "2025-03-09T02:11:{s}Z OSError: [Errno 122] Disk quota exceeded"
    gpu = "2025-03-09T02:11:{s}Z torch.OutOfMemoryError: CUDA out of memory."
    assert names(diagnose({"a": quota.format(s=40), "b": gpu.format(s=39)})) == ["oom-gpu", "disk-quota"]
    assert names(diagnose({"a": quota.format(s=38), "b": gpu.format(s=39)})) == ["disk-quota", "oom-gpu"]
    assert names(diagnose({"a": quota.format(s=40), "b": gpu[22:]})) == ["disk-quota", "oom-gpu"]
    # Of different years, the year decides.
    quota, gpu = "OSError: [Errno 122] Disk quota exceeded", "torch.OutOfMemoryError: CUDA out of memory."
    later, earlier = f"2025-01-01 00:00:01 {gpu}", f"2024-12-31 23:59:59 {quota}"
    assert names(diagnose({"a": later, "b": earlier})) == ["disk-quota", "oom-gpu"]
    glog, dated = f"E0101 00:00:01.000000 12 x.py:1] {gpu}", f"2025-01-02 00:00:00 {quota}"
    assert names(diagnose({"a": glog, "b": dated})) == ["oom-gpu", "disk-quota"]
    assert names(diagnose({"a": dated, "b": glog})) == ["oom-gpu", "disk-quota"]


def test_an_exception_that_python_ignores_is_no_cause_and_any_other_of_a_traceback_is_one() -> None:
    for rank in ("", "0: ", "[rank3]: "):
        for where in ("Exception ignored in atexit callback:", "Error in atexit._run_exitfuncs:"):
            lines = [where, *TRACEBACK.splitlines(), MISSING]
            log = "".join(f"{rank}{line}\n" for line in lines)
            assert diagnose_text(log).causes == []
            assert names(diagnose_text(log.replace(where, ""))) == ["missing-file"]
        # Any other exception of a traceback is shown, whatever its name.
        log = "".join(f"{rank}{line}\n" for line in [*TRACEBACK.splitlines(), "my.NoLabel: 17"])
        (cause,) = diagnose_text(log).causes
        assert (cause.cause, cause.line, cause.evidence) == ("program-error", 4, f"{rank}my.NoLabel: 17")
    assert diagnose_text(f"{TRACEBACK}torch.distributed.elastic.ChildFailedError: \n").causes == []


def test_a_hint_counts_only_with_a_message_about_other_processes_or_the_end() -> None:
    hint = "[W] Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback."
    assert diagnose_text(hint).causes == []
    assert names(diagnose_text(f"{hint}\n{CLOSED}")) == ["gloo-wrong-interface", "secondary-peer-exit"]
    ended = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    assert names(diagnose_text(f"{hint}\n{ended}")) == ["gloo-wrong-interface"]


def test_one_client_of_many_means_a_missing_srun_and_several_mean_missing_clients() -> None:
    one = diagnose_text(CLIENTS.format("1/16"))
    assert names(one) == ["missing-srun"]
    assert one.causes[0].explanation.startswith("Only 1 of 16 processes joined.")
    assert one.causes[0].remedy.startswith("Put srun before the command in the batch script")
    several = diagnose_text(CLIENTS.format("12/16"))
    assert names(several) == ["clients-missing"]
    assert several.causes[0].explanation.startswith("12 of 16 ranks joined")
    assert names(diagnose_text(CLIENTS.format("16/4"))) == ["double-launch"]
    assert names(diagnose_text(CLIENTS.format(f"1/{'9' * 6000}"))) == [], "a number that is too long"


def test_ranks_waiting_in_different_operations_are_a_mismatch_and_in_the_same_one_a_time_out() -> None:
    same = [WATCHDOG.format(rank=r, seq=25, op="ALLREDUCE", numel=512) for r in (0, 2, 3)]
    other = [same[0], WATCHDOG.format(rank=1, seq=25, op="BROADCAST", numel=512)]
    later = [same[0], WATCHDOG.format(rank=1, seq=26, op="BROADCAST", numel=512)]
    together = diagnose_text("\n".join([*same, same[0]]))
    assert names(together) == ["nccl-timeout"]
    assert "sequence number 25: ALLREDUCE of 512 elements on ranks 0, 2, 3." in together.causes[0].explanation
    assert names(diagnose_text("\n".join(other))) == ["collective-mismatch", "nccl-timeout"]
    assert names(diagnose_text("\n".join(later))) == ["nccl-timeout"]
    assert names(diagnose({"0": other[0], "1": other[1]})) == ["collective-mismatch", "nccl-timeout"]


def test_without_a_cause_the_last_lines_that_look_like_errors_are_listed() -> None:
    shards = "".join(f"ERROR shard {number} is damaged\nstep {number}\n" for number in range(9))
    reported = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Terminated\n"
    found = diagnose_text(f"{shards}FATAL: labels out of range: 17\n{reported}")
    assert [(line.line, line.text) for line in found.last_lines] == [
        (17, "ERROR shard 8 is damaged"),
        (19, "FATAL: labels out of range: 17"),
        (20, "srun: error: n1: task 0: Exited with exit code 1"),
    ]
    five = [f"ERROR in shard {'abcdefg'[number] * 3}" for number in range(7)]
    assert [line.text for line in diagnose_text("\n".join(five)).last_lines] == five[-5:]


def test_slow_causes_follow_the_failures() -> None:
    slow = "Warning: Grad strides do not match bucket view strides."
    assert [(cause.cause, cause.severity) for cause in diagnose_text(f"{slow}\n{OOM}\n").causes] == [
        ("oom-host", "failure"),
        ("slow-gradient-strides", "slow"),
    ]
    alone = diagnose_text(f"{slow}\nstep 10 loss 2.0\n")
    assert (names(alone), alone.first_failure) == (["slow-gradient-strides"], None)
    assert "No known cause." in as_text(alone)


def test_colours_carriage_returns_and_wide_characters_do_not_hide_a_line() -> None:
    log = "Epoch 1: 10%\rEpoch 1: 20%\r\x1b[31m\x1b[1mRuntimeError: Tensors must be CUDA and dense\x1b[0m\n"
    found = diagnose_text("first\n" + log)
    assert (names(found), found.causes[0].line) == (["backend-device-mismatch"], 2)
    assert found.causes[0].evidence == "RuntimeError: Tensors must be CUDA and dense"
    assert names(diagnose({"utf-16": log.encode("utf-16-le")})) == ["backend-device-mismatch"]


LOGS = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("fixtures/*.txt"))]

mutation = st.tuples(
    st.sampled_from(["cut", "insert", "repeat", "swap"]), st.integers(0, 2**32), st.binary(max_size=40)
)


def mutated(log: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, number, extra in changes:
        at = number % (len(log) + 1)
        until = min(len(log), at + number // 7 % 200)
        if kind == "cut":
            log = log[:at] + log[until:]
        elif kind == "insert":
            log = log[:at] + extra + log[at:]
        elif kind == "repeat":
            log = log[:at] + log[at:until] * 3 + log[at:]
        else:
            log = log[until:] + log[at:until] + log[:at]
    return log


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(mutated, st.sampled_from(LOGS), st.lists(mutation, min_size=1, max_size=6))
    | st.binary(max_size=4000)
)
def test_any_log_has_a_diagnosis(log: bytes) -> None:
    check(diagnose({"log": log}))


def check(found: object) -> None:
    content = found.as_json()  # type: ignore[attr-defined]
    assert list(content) == ["causes", "last_lines"]
    for cause in content["causes"]:
        assert cause["line"] >= 1
        assert cause["explanation"]
        # The placeholders of the catalogue are filled; a mutated log may contain braces itself.
        assert not re.search(r"\{[a-z_]+\}", cause["explanation"])
        assert len(cause["evidence"]) <= 2002


def test_a_line_of_ten_megabytes_is_searched_in_pieces_that_overlap() -> None:
    needle = b"RuntimeError: Tensors must be CUDA and dense"
    for at in (PIECE_BYTES - 20, PIECE_BYTES - OVERLAP_BYTES - 5, 10_000_000 - len(needle)):
        line = b"x" * at + b" " + needle + b" " + b"y" * (10_000_000 - at - len(needle))
        found = diagnose({"log": b"first\n" + line + b"\nlast\n"})
        assert [(cause.cause, cause.line) for cause in found.causes] == [("backend-device-mismatch", 2)]


EXAMPLES = {one.name: one.example for one in load().signatures if one.severity in (SLOW, WARNING)}
STRIDES = EXAMPLES["slow-gradient-strides"]
NOTICE = EXAMPLES["slow-one-thread"].splitlines()[0]
PROGRESS = "epoch 3 step {} loss 2.3412 1234.5 samples/s\n"


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "job.out").write_text(PROGRESS.format(1) + "Training finished\n")
    return RunFolder(tmp_path)


def test_every_warning_of_the_catalogue_is_found(folder):
    for name in EXAMPLES.keys() - {"slow-one-thread"}:
        folder.err.write_text(f"loading\n{EXAMPLES[name]}\n")
        (found,) = find_warnings(folder)
        assert (found.cause, found.path) == (name, "job.err")
        assert found.evidence in [line.strip() for line in folder.err.read_text().splitlines()]


def test_only_the_start_of_a_long_log_is_read(folder):
    text = "".join(map(PROGRESS.format, range(HEAD_BYTES // len(PROGRESS) + 1)))
    folder.err.write_text(f"loading\n{STRIDES}\n{text}")
    assert [(warning.line, warning.evidence) for warning in find_warnings(folder)] == [(2, STRIDES)]
    folder.err.write_text(f"{text}{STRIDES}\n")
    assert find_warnings(folder) == []


RESUMED = ("rank 0: resumed at step 60", "INFO resumed epoch: 4, iter: 100")
RESUMED += ("Resuming from epoch 0, global_step=500",)
NOT_RESUMED = ("Resuming training from snapshot at Epoch 0", "Namespace(resume=None, epoch=5, step=100)")
NOT_RESUMED += ('{"resume": false, "epoch": 5}', "Loaded checkpoint mae_pretrain.pth (epoch 800)")


def test_a_run_that_resumed_is_a_warning_and_another_log_has_none(folder):
    for line in (*RESUMED, *NOT_RESUMED):
        folder.out.write_text(f"{line}\n")
        assert [found.cause for found in find_warnings(folder)] == ["resumed"] * (line in RESUMED), line
        assert diagnose_text(folder.out.read_text()).causes == []


def conditions(folder: Path, *, threads: int, cores: int) -> None:
    ranks = [{"rank": rank, "threads": threads} for rank in range(2)]
    window: dict[str, Any] = {"epoch": 1, "start": "2026-01-01T00:00:00Z", "end": "2026-01-01T00:00:05Z"}
    content = {"schema": 1, "windows": [{**window, "nodes": [], "ranks": ranks}]}
    (folder / "conditions.json").write_text(json.dumps(content))
    env = {"hosts": [{"host": "n1", "ranks": [0, 1], "cores": cores}]}
    (folder / "env.json").write_text(json.dumps(env))


def test_one_thread_per_rank_counts_only_if_cores_are_idle(folder):
    folder.err.write_text(f"{NOTICE}\n")
    assert find_warnings(folder) == []  # without conditions, nobody knows
    for threads, cores, expected in ((1, 8, ["slow-one-thread"]), (1, 3, []), (4, 8, [])):
        conditions(folder.path, threads=threads, cores=cores)
        assert [found.cause for found in find_warnings(folder)] == expected


FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("fixture", "explanation"),
    [
        ("collective-mismatch-11", "_ALLGATHER_BASE on rank 1, REDUCE on rank 0."),
        ("nccl-timeout-first", "The first collective never completed: BROADCAST of 1 elements on rank 2"),
        ("duplicate-rank-1", "Two of the 8 processes have rank 1"),
        ("duplicate-rank-2", "Several of the 4 processes have rank 1, and other ranks were never started"),
        ("no-launcher-getenv", "The program reads WORLD_SIZE, which is not set"),
        ("none-sockets-only", "because NCCL cannot open libibverbs"),
    ],
)
def test_an_explanation_contains_what_the_lines_say(fixture: str, explanation: str) -> None:
    found = diagnose({fixture: FIXTURES / f"{fixture}.txt"})
    assert explanation in found.causes[0].explanation
