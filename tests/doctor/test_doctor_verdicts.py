"""The order of causes, diagnoses from several logs, conditions between lines, and other verdicts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bench.doctor import Diagnosis, diagnose, diagnose_text
from bench.doctor.report import as_text

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


def names(found: Diagnosis) -> list[str]:
    return [cause.cause for cause in found.causes]


def test_a_cause_comes_before_its_consequence_in_any_order_of_lines() -> None:
    assert names(diagnose_text(f"{CLOSED}\n{OOM}\n")) == ["oom-host", "secondary-peer-exit"]
    assert names(diagnose_text(f"{OOM}\n{CLOSED}\n")) == ["oom-host", "secondary-peer-exit"]


@pytest.mark.parametrize("rank", ["", "0: ", "[3]:"])
@pytest.mark.parametrize("where", ["in atexit callback:", "while calling atexit callback"])
def test_an_exception_that_python_ignores_is_no_failure(rank: str, where: str) -> None:
    lines = [
        "Training finished",
        f"Exception ignored {where} <function update_table at 0x7f17a15bb2e0>",
        "Traceback (most recent call last):",
        '  File "table.py", line 105, in put',
        "    os.replace(path + '.tmp', path)",
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/user/table.tmp'",
    ]
    log = "".join(f"{rank}{line}\n" for line in lines)
    assert diagnose_text(log).verdict == "ok"
    assert diagnose_text(log.replace("Exception ignored", "")).failed


def test_advice_and_a_lost_heartbeat_name_no_cause_of_their_own() -> None:
    advice = "If you get `CUDA error: invalid device function` errors, the above might be the cause"
    assert diagnose_text(f"{advice}\nTraining finished\n").verdict == "ok"
    heartbeat = "The node 'n1_42_0' has failed to send a keep-alive heartbeat to the rendezvous '7' "
    heartbeat += "due to an error of type RendezvousTimeoutError."
    assert names(diagnose_text(heartbeat)) == ["secondary-peer-exit"]


def test_a_port_in_use_on_one_node_comes_before_the_time_outs_of_the_others() -> None:
    found = diagnose(
        {
            "node2.log": "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms "
            "while trying to connect to (node1, 17211).\n",
            "node1.log": "starting\nOSError: [Errno 98] Address already in use\n",
        }
    )
    assert [(cause.cause, cause.path, cause.line) for cause in found.causes] == [
        ("port-in-use", "node1.log", 2),
        ("rendezvous-timeout", "node2.log", 1),
    ]


def test_of_two_root_causes_the_earlier_line_comes_first() -> None:
    quota = "OSError: [Errno 122] Disk quota exceeded: '/home/user/.cache/x'"
    gpu = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert names(diagnose_text(f"{quota}\n{gpu}\n")) == ["disk-quota", "oom-gpu"]
    assert names(diagnose_text(f"{gpu}\n{quota}\n")) == ["oom-gpu", "disk-quota"]


def test_between_logs_the_times_of_the_lines_decide() -> None:
    quota = "2025-03-09T02:11:{s}Z OSError: [Errno 122] Disk quota exceeded"
    gpu = "2025-03-09T02:11:{s}Z torch.OutOfMemoryError: CUDA out of memory."
    assert names(diagnose({"a": quota.format(s=40), "b": gpu.format(s=39)})) == ["oom-gpu", "disk-quota"]
    assert names(diagnose({"a": quota.format(s=38), "b": gpu.format(s=39)})) == ["disk-quota", "oom-gpu"]


def test_one_client_of_many_means_a_missing_srun_and_several_mean_missing_clients() -> None:
    one = diagnose_text(CLIENTS.format("1/16"))
    assert names(one) == ["missing-srun", "clients-missing"]
    assert one.causes[0].explanation.startswith("Only 1 of 16 processes joined.")
    assert one.causes[0].remedy.startswith("Put srun before the command in the batch script, so that all 16")
    several = diagnose_text(CLIENTS.format("12/16"))
    assert names(several) == ["clients-missing"]
    assert several.causes[0].explanation.startswith("12 of 16 ranks joined")
    assert names(diagnose_text(CLIENTS.format("16/4"))) == ["double-launch"]


def test_a_line_counts_once_even_if_it_is_long_or_matched_twice() -> None:
    member = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4"
    assert names(diagnose_text(f"{' ' * 7500}{member}{' ' * 5000}\n")) == ["missing-srun"]
    assert names(diagnose_text(f"{member}\n{member}\n")) == ["task-gpu-mismatch", "missing-srun"]
    noise = "".join(f"torchrun: initializing distributed {i}\n" for i in range(2000))
    assert "lightning-under-torchrun" not in names(diagnose_text(f"{noise}{member}\n"))


def test_missing_clients_are_a_consequence_where_a_rank_could_not_import() -> None:
    found = diagnose_text(
        f"[node2] ModuleNotFoundError: No module named 'yaml'\n[node1] {CLIENTS.format('4/8')}\n"
    )
    assert names(found) == ["wrong-python-env", "clients-missing"]


def test_ranks_waiting_in_different_operations_are_a_mismatch_and_in_the_same_one_a_time_out() -> None:
    same = [WATCHDOG.format(rank=r, seq=25, op="ALLREDUCE", numel=512) for r in (0, 1)]
    other = [same[0], WATCHDOG.format(rank=1, seq=25, op="BROADCAST", numel=512)]
    later = [same[0], WATCHDOG.format(rank=1, seq=26, op="BROADCAST", numel=512)]
    assert names(diagnose_text("\n".join(same))) == ["nccl-timeout"]
    assert names(diagnose_text("\n".join(other))) == ["collective-mismatch", "nccl-timeout"]
    assert names(diagnose_text("\n".join(later))) == ["nccl-timeout"]
    assert names(diagnose({"0": other[0], "1": other[1]})) == ["collective-mismatch", "nccl-timeout"]


def test_an_unknown_error_of_the_program_is_reported_instead_of_its_consequences() -> None:
    found = diagnose_text(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 9, in <module>\n'
        "[rank1]: mypackage.NoSuchLabel: 17\n"
        f"[rank0]: {CLOSED}\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    assert (found.verdict, found.causes) == ("unknown", [])
    assert [(line.line, line.text) for line in found.telling_lines] == [
        (3, "[rank1]: mypackage.NoSuchLabel: 17"),
        (6, "srun: error: n1: task 0: Exited with exit code 1"),
    ]


def test_a_symptom_after_an_error_of_the_program_names_that_error_too() -> None:
    timeout = WATCHDOG.format(rank=0, seq=25, op="ALLREDUCE", numel=512)
    found = diagnose_text(f"[rank1]: ValueError: labels out of range: 17\n{timeout}\n")
    assert names(found) == ["program-error", "nccl-timeout"]
    assert found.causes[0].evidence == "[rank1]: ValueError: labels out of range: 17"


def test_an_illegal_memory_access_is_not_called_out_of_memory() -> None:
    found = diagnose_text("RuntimeError: CUDA error: an illegal memory access was encountered\n")
    assert names(found) == ["gpu-illegal-access"]


def test_warnings_of_retries_are_dropped_if_the_training_continues() -> None:
    warning = (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:17211 "
        "(errno: 111 - Connection refused)."
    )
    alone = diagnose_text(warning)
    assert (alone.verdict, names(alone)) == ("harmless", ["harmless-retry"])
    went_on = diagnose_text(f"{warning}\nepoch 0 step 10 loss 2.31\n")
    assert (went_on.verdict, went_on.failed, went_on.causes) == ("unknown", False, [])
    finished = diagnose_text(f"{warning}\nepoch 0 step 10 loss 2.31\nTraining finished\n")
    assert (finished.verdict, finished.causes, finished.telling_lines) == ("ok", [], [])
    elsewhere = diagnose(
        {"rank1.log": warning, "rank0.log": "epoch 0 step 10 loss 2.31\nTraining finished\n"}
    )
    assert (elsewhere.verdict, elsewhere.causes) == ("ok", [])


def test_a_log_with_success_has_no_cause_even_with_connection_resets_at_the_exit() -> None:
    reset = (
        "[W309 02:11 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=5): Connection reset by peer"
    )
    log = f"ERROR: could not reach the dashboard\nstep 10 loss 2.0\nTraining finished in 31 s\n{reset}\n"
    assert diagnose_text(log).verdict == "ok"


def test_a_memory_kill_after_the_success_message_is_still_a_cause() -> None:
    assert names(diagnose_text(f"Training finished\n{OOM}\n")) == ["oom-host"]


def test_a_rank_that_succeeded_does_not_hide_one_that_failed() -> None:
    assert names(diagnose({"rank0.log": "Training finished\n", "rank1.log": OOM})) == ["oom-host"]


def test_common_harmless_messages_have_no_cause() -> None:
    noise = """\
n1:41:42 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file
n1:41:42 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
NCCL version 2.21.5+cuda12.4
W0309 02:01:11.012000 3012 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.
errors: 0, failed requests: 0
"""
    found = diagnose_text(noise)
    assert (found.verdict, found.failed, found.causes) == ("unknown", False, [])
    assert diagnose_text(f"{noise}Training finished\n").verdict == "ok"


def test_a_log_without_evidence_of_success_is_unknown_with_its_last_lines() -> None:
    found = diagnose_text("loading data\n\nepoch 1 step 10 loss 2.0\nepoch 1 step 20 loss 1.9\n\n")
    assert (found.verdict, found.failed) == ("unknown", False)
    assert [(line.line, line.text) for line in found.telling_lines] == [
        (1, "loading data"),
        (3, "epoch 1 step 10 loss 2.0"),
        (4, "epoch 1 step 20 loss 1.9"),
    ]
    assert (diagnose_text("").verdict, diagnose_text("").telling_lines) == ("unknown", [])


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
        "mypackage.trainer.NoSuchShardError: shard 7",
        "OddlyNamedFailureError: 3",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGUSR2: 12>.",
        "mpirun noticed that process rank 3 with PID 4433 on node n042 exited on signal 6 (Aborted).",
        "[launch.py:351:main] Process 4433 exits with return code = 1",
        "train.py exited with code 3",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ],
)
def test_a_last_line_that_shows_a_failure_is_never_called_success(line: str) -> None:
    for before in ("", "epoch 1 step 10 loss 2.0\n", "Training finished\n"):
        found = diagnose_text(f"{before}{line}\n")
        assert (found.verdict, found.failed) == ("unknown", True)
        assert line in [telling.text for telling in found.telling_lines]


def test_a_success_message_that_a_script_prints_after_a_failed_program_is_not_believed() -> None:
    assert diagnose_text(f"step 10 loss 2.0\n{OOM}\nJob finished\n").verdict == "cause"
    exited = "srun: error: n1: task 0: Exited with exit code 1"
    assert diagnose_text(f"step 10 loss 2.0\n{exited}\nJob finished\n").verdict == "unknown"


def test_a_logged_error_far_from_the_end_shows_no_failure_but_is_listed() -> None:
    error = "dashboard: ERROR cannot reach the server, will try again"
    rest = "".join(f"wrote shard {name}\n" for name in "abcdefghij")
    found = diagnose_text(f"{error}\n{rest}")
    assert (found.verdict, found.failed) == ("unknown", False)
    assert [line.text for line in found.telling_lines] == [error]
    assert diagnose_text(f"{rest}{error}\n").failed


@pytest.mark.parametrize(
    "lines",
    [
        "epoch 1 train_error: 0.31 val_error: 0.35\nval_error: 0.2",
        "epoch 1 TrainError: 0.31 loss 1.2\nTestError: 0.2",
        "Test error: 3.2%\nword error: 12 %\nERROR: 0.2\nerror: nan",
        "suite a FAILED: 0 PASSED: 31\nmean error: 1e-3, timeouts 0",
    ],
)
def test_a_metric_that_is_called_an_error_shows_no_failure(lines: str) -> None:
    found = diagnose_text(f"{lines}\n")
    assert (found.verdict, found.failed) == ("unknown", False)
    assert diagnose_text(f"{lines}\nTraining finished\n").verdict == "ok"


@pytest.mark.parametrize(
    "line",
    [
        "KeyError: 17",
        "ValueError: 3 samples",
        "ERROR: 2 ranks are missing",
        "pytest: 3 FAILED",
        "error: no data",
    ],
)
def test_an_error_with_a_number_is_no_metric(line: str) -> None:
    assert diagnose_text(f"Training finished\n{line}\n").failed


CAUGHT = 'Traceback (most recent call last):\n  File "a.py", line 3, in get\n    get()\n'


@pytest.mark.parametrize(
    "lines",
    [
        f"{CAUGHT}ConnectionResetError: [Errno 104] Connection reset by peer\nERROR no shard, retrying (1/3)",
        f"{CAUGHT}ModuleNotFoundError: No module named 'apex'\napex not installed, using torch instead",
        f"{CAUGHT}torch.OutOfMemoryError: CUDA out of memory.\nfalling back to batch size 8",
        "WARNING data: OSError: [Errno 5] in a.jpg, skipping",
    ],
)
def test_an_exception_that_the_program_handles_is_no_failure(lines: str) -> None:
    alone = diagnose_text(f"{lines}\n")
    assert (alone.verdict, alone.failed) == ("unknown", False)
    assert diagnose_text(f"{lines}\nstep 10 loss 2.0\nTraining finished\n").verdict == "ok"
    # The last attempt may have failed without a message, and the script went on.
    assert diagnose_text(f"{lines}\nJob finished\n").verdict == "unknown"
    assert diagnose_text(f"{lines}\n{CAUGHT}my.GivenUp: no shard\n").failed


@pytest.mark.parametrize(
    "line", ["no shard, giving up after retrying", "continuing without it is not possible"]
)
def test_an_exception_is_not_handled_by_a_message_that_the_program_gives_up(line: str) -> None:
    assert names(diagnose_text(f"{CAUGHT}KeyError: 'shard'\n{line}\n")) == ["program-error"]


def test_success_after_an_unexplained_failure_is_doubtful() -> None:
    # The output of a program is delayed: lines that it wrote before its exception can follow the exception.
    raised = f"{CAUGHT}my.SaveError: no folder\nstep 10 loss 2.0\nTraining finished\n"
    exited = "srun: error: n1: task 1: Exited with exit code 1\nJob finished successfully\n"
    restarted = f"{CAUGHT}OSError: stale file handle in shard 3\nrank 0 finished training\nexit code: 0\n"
    alive = f"step 10 loss 2.0\n{CAUGHT}my.ShardError: 3\nstep 20 loss 1.9\nstep 30 loss 1.8\n"
    for log, line in ((raised, 4), (exited, 1), (restarted, 4), (alive, 5)):
        found = diagnose_text(log)
        assert (found.verdict, found.failed, found.causes) == ("unknown", False, [])
        assert [telling.line for telling in found.telling_lines] == [line]


@pytest.mark.parametrize(
    "line",
    [
        "/var/spool/slurmd/job7/slurm_script: line 9: 577 Killed                  python monitor.py",
        "srun: error: n1: task 0: Terminated",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2025-03-09T02:11:40 ***",
    ],
)
def test_a_process_that_ends_after_the_training_proves_nothing(line: str) -> None:
    found = diagnose_text(f"step 10 loss 2.0\nTraining finished\n{line}\n")
    assert (found.verdict, found.failed) == ("unknown", False)
    assert [telling.text for telling in found.telling_lines] == [line]
    assert diagnose_text(f"step 10 loss 2.0\n{line}\n").failed
    timed_out = "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2025-03-09T02:11:40 DUE TO TIME LIMIT ***"
    assert names(diagnose_text(f"Training finished\n{line}\n{timed_out}\n"))[0] == "time-limit"


@pytest.mark.parametrize(
    "line",
    ["Failed to save the model: no such attribute", "Unable to write out.pt", "Could not write out.pt"],
)
def test_what_failed_after_the_success_message_makes_it_doubtful(line: str) -> None:
    assert diagnose_text(f"Training finished\n{line}\n").verdict == "unknown"
    assert diagnose_text(f"{line}\nstep 10 loss 2.0\nTraining finished\n").verdict == "ok"
    assert diagnose_text(f"Training finished\n{line}, ignored\n").verdict == "ok"


def test_the_success_of_another_job_that_still_runs_is_no_success() -> None:
    show = "JobState=RUNNING Reason=None\n   Requeue=1 Restarts=0 ExitCode=0:0\ndata is loaded\n"
    assert diagnose_text(show).verdict == "unknown"
    assert diagnose_text(show.replace("RUNNING", "COMPLETED")).verdict == "ok"


@pytest.mark.parametrize(
    ("near_miss", "cause"),
    [
        ("loss is nan, skipping this batch", "loss-not-finite"),
        (
            "7b60:104:104 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>\n7b60:104:104 [0] NCCL WARN NET/OFI x",
            "all",
        ),
        (
            "n1:1:1 NCCL INFO Bootstrap : Using lo:127.0.0.1<0>\nn1:1:1 NCCL INFO comm 0x1 rank 0 nranks 1 - Init COMPLETE\nn1:1:1 NCCL WARN proxy",
            "all",
        ),
        ("cp: cannot stat 'a.pt': No such file or directory\nstep 10 loss 2.0", "missing-file"),
        ("fork: retry: Resource temporarily unavailable\nstep 10 loss 2.0", "too-many-processes"),
        ("srun: error: n1: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed", "oom-host"),
        (
            "srun: error: n1: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Terminated",
            "cancelled",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/triton/labels.csv'",
            "compile-cache-race",
        ),
        ("srun: error: n1: task 0: Aborted\nmy.BadLabelError: 9", "aborted"),
    ],
)
def test_near_misses_have_no_such_cause(near_miss: str, cause: str) -> None:
    found = names(diagnose_text(f"{near_miss}\n"))
    assert not found if cause == "all" else cause not in found


def test_a_download_that_completed_successfully_is_no_evidence_of_success() -> None:
    assert diagnose_text("Download completed successfully\n").verdict == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "0 of 4 ranks completed successfully",
        "3/4 runs finished successfully, 1 failed",
        "Training finished unsuccessfully",
        "Training completed with errors",
        "Training finished. Errors: 3",
        '{"finished successfully": false}',
        "All tasks finished except 3",
        "preparation exit code: 0\ntraining exit code: 1",
    ],
)
def test_a_partial_success_is_no_success(line: str) -> None:
    assert diagnose_text(f"step 10 loss 2.0\n{line}\n").verdict == "unknown"


@pytest.mark.parametrize(
    "line", ["Training finished with 0 errors", "4 runs finished successfully, 0 failed", "exit code: 0"]
)
def test_a_success_with_no_errors_is_a_success(line: str) -> None:
    assert diagnose_text(f"step 10 loss 2.0\n{line}\n").verdict == "ok"


def test_slow_causes_follow_the_failures_and_leave_the_verdict_unchanged() -> None:
    slow = "Warning: Grad strides do not match bucket view strides."
    failed = diagnose_text(f"{slow}\n{OOM}\n")
    assert [(cause.cause, cause.severity) for cause in failed.causes] == [
        ("oom-host", "failure"),
        ("slow-gradient-strides", "slow"),
    ]
    finished = diagnose_text(f"{slow}\nstep 10 loss 2.0\nTraining finished\n")
    assert (finished.verdict, names(finished)) == ("ok", ["slow-gradient-strides"])
    alone = diagnose_text(f"{slow}\nstep 10 loss 2.0\n")
    assert (alone.verdict, alone.failed, names(alone)) == ("unknown", False, ["slow-gradient-strides"])


def test_a_message_wrapped_over_lines_is_matched() -> None:
    found = diagnose_text(
        "srun: error: Unable to create step for job 12: Invalid generic\n    resource (gres) specification\n"
    )
    assert (names(found), found.causes[0].line) == (["invalid-gres"], 1)


def test_colours_carriage_returns_and_wide_characters_do_not_hide_a_line() -> None:
    log = "Epoch 1: 10%\rEpoch 1: 20%\r\x1b[31m\x1b[1mRuntimeError: Tensors must be CUDA and dense\x1b[0m\n"
    found = diagnose_text("first\n" + log)
    assert (names(found), found.causes[0].line) == (["backend-device-mismatch"], 2)
    assert found.causes[0].evidence == "RuntimeError: Tensors must be CUDA and dense"
    assert names(diagnose({"utf-16": log.encode("utf-16-le")})) == ["backend-device-mismatch"]


def test_a_log_may_be_a_path_an_open_file_lines_or_text(tmp_path: Path) -> None:
    path = tmp_path / "job 'ä'; echo.err"
    path.write_text(f"start\n{OOM}\n")
    with path.open("rb") as binary, path.open() as text:
        logs = {
            "path": path,
            "binary": binary,
            "text": text,
            "lines": ["start\n", OOM],
            "bare": iter(["start", OOM]),
        }
        for name, source in logs.items():
            found = diagnose({name: source})
            assert [(cause.cause, cause.path, cause.line) for cause in found.causes] == [
                ("oom-host", name, 2)
            ]
    assert names(diagnose({"whole": io.BytesIO(OOM.encode()).getvalue()})) == ["oom-host"]


def test_the_json_has_the_promised_keys() -> None:
    content = diagnose_text(f"{OOM}\n").as_json()
    assert list(content) == ["verdict", "failed", "causes", "telling_lines"]
    keys = ["cause", "severity", "path", "line", "evidence", "explanation", "remedy", "share"]
    assert list(content["causes"][0]) == keys
    assert content["causes"][0]["evidence"] == OOM


CRASH = 'Traceback (most recent call last):\n  File "tile.py", line 40, in <module>\n    cut()\n'
ORDINARY = "tile 7 written\ntile 8 written\ntile 9 written\nmap has 9 tiles\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (f"{CRASH}KeyError: 'legend'\n{ORDINARY}", "program-error"),
        (f"{CRASH}my.LegendError: blue\n{ORDINARY}", None),
        (f"job.sh: line 3: mamba: command not found\n{ORDINARY}", "wrong-python-env"),
        (f"job.sh: line 8:   311 Killed                  ./warm_up\n{ORDINARY}", "oom-host"),
        (f"ERROR tile 4 is damaged\nERROR tile 6 is damaged\n{ORDINARY}", None),
        ("tile 4: worker exited with code -11, restarting it\ntile 4 written\n", None),
        ("ls: cannot access '/data/old': No such file or directory\nmap written to /data/map.tif\n", None),
        ("KeyboardInterrupt: 50 tiles as configured\nmap written to /data/map.tif\n", None),
        ("job.sh: line 5: 77 Killed   ( while true; do\n    free -g >> mem; done )\n", None),
    ],
)
def test_a_failure_with_ordinary_output_below_it_is_only_a_possible_failure(
    log: str, cause: str | None
) -> None:
    found = diagnose_text(f"reading tiles\n{log}")
    assert (found.verdict, found.failed, names(found)) == ("unknown", False, [cause] if cause else [])
    if cause:
        assert "If the job failed, the cause may be:" in as_text(found)
        assert found.of_failed_job().verdict == "cause"


@pytest.mark.parametrize(
    "log",
    [
        f"{CRASH}KeyError: 'legend'\ntile 7 written\nMon Nov 23 15:33:37 UTC 2026\n",
        f"{ORDINARY}{CRASH}KeyError: 'legend'\n",
        f"{CRASH}KeyError: 'legend'\n{ORDINARY}srun: error: n7: task 1: Exited with exit code 1\n",
        f"my.ChildFailedError:\n{CRASH}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        + ORDINARY,
        f"{CRASH}KeyError: 'legend'\n[rank1]:   frame one\n  File a\nplease report\n#0 a\n",
        "ERROR tile 4 is damaged\ngiving up\n",
        "job.sh: line 8:   311 Killed                  python cut.py\n",
        "tile 4: worker exited with code -11, restarting it\nfatal: worker cannot start\n",
    ],
)
def test_a_failure_at_the_end_or_of_the_whole_job_is_a_failure(log: str) -> None:
    assert diagnose_text(f"reading tiles\n{log}").failed


@pytest.mark.parametrize("line", ["exit status: 3", "cut.py: return code = 2", "exit 4"])
def test_a_non_zero_exit_code_above_other_lines_disproves_success(line: str) -> None:
    found = diagnose_text(
        f"reading tiles\nno tile found\n{line}\nleft on Friday\nJob finished successfully\n"
    )
    assert (found.verdict, found.failed) == ("unknown", True)
    assert [telling.text for telling in found.telling_lines] == [line]
    later = diagnose_text(f"{line}\ncutting again\nexit status: 0\nJob finished successfully\n")
    assert (later.verdict, later.failed) == ("unknown", False)
    assert diagnose_text("exit status: 0\nJob finished successfully\n").verdict == "ok"


def test_a_job_that_hung_after_a_failure_shows_this_failure_with_the_time_limit() -> None:
    limit = "slurmstepd: error: *** JOB 8 ON n2 CANCELLED AT 2025-03-09T02:11:40 DUE TO TIME LIMIT ***"
    mesh = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused, remote="
    log = f"[rank1]: RuntimeError: broken sensor\n{mesh}[10.7.0.2]:7578\n{limit}\n"
    found = diagnose_text(log)
    assert names(found) == ["time-limit", "gloo-wrong-interface"]
    assert [line.text for line in found.telling_lines] == ["[rank1]: RuntimeError: broken sensor"]
    assert names(diagnose_text(f"{mesh}[10.7.0.2]:7578\n")) == ["gloo-wrong-interface"]


def test_a_progress_bar_without_a_label_is_progress_from_its_second_state_on() -> None:
    early = "PermissionError: [Errno 13] Permission denied: '/checkpoints'\n"
    limit = "slurmstepd: error: *** JOB 8 ON n2 CANCELLED AT 2025-03-09T02:11:40 DUE TO TIME LIMIT ***\n"
    bar = "  4%|▍         | 2/50 [21:02<8:25:01, 631.29s/it]"
    assert names(diagnose_text(f"{early}{bar}\n{limit}")) == ["time-limit"]
    start = "  0%|          | 0/50 [00:00<?, ?it/s]"
    for near_miss in (start, f"Loading shards: {bar}"):
        assert names(diagnose_text(f"{early}{near_miss}\n{limit}")) == ["permission-denied", "time-limit"]


def test_a_failure_ranks_above_messages_of_the_shell_that_the_script_survived() -> None:
    conda = "CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'.\n"
    missing = "/var/spool/slurmd/job8/slurm_script: line 9: module: command not found\n"
    python = "/var/spool/slurmd/job8/slurm_script: line 10: python: command not found\n"
    test = "/var/spool/slurmd/job8/slurm_script: line 29: [: =: unary operator expected\n"
    limit = "slurmstepd: error: *** JOB 8 ON n2 CANCELLED AT 2025-03-09T02:11:40 DUE TO TIME LIMIT ***\n"
    shapes = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 256x10)\n"
    assert names(diagnose_text(conda + limit)) == ["time-limit", "wrong-python-env"]
    assert names(diagnose_text(python + shapes)) == ["program-error", "command-not-found"]
    assert names(diagnose_text(test + shapes)) == ["program-error", "undefined-variable"]
    assert names(diagnose_text(shapes + python)) == ["command-not-found", "program-error"]
    # A command that did not start can be the reason for waiting, and a missing package that of a module.
    assert names(diagnose_text(python + limit)) == ["command-not-found", "time-limit"]
    lacks = "ModuleNotFoundError: No module named 'torch'\n"
    assert names(diagnose_text(missing + lacks)) == ["module-missing", "wrong-python-env"]


def test_an_exception_that_led_to_another_is_not_the_error_of_the_program() -> None:
    log = """Traceback (most recent call last):
  File "record_writer.py", line 47, in directory_check
    factory = FACTORIES[prefix]
KeyError: 'runs/Jan26'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "record_writer.py", line 51, in directory_check
    os.makedirs(path)
FileExistsError: [Errno 17] File exists: 'runs/Jan26'
"""
    cause = diagnose_text(log).causes[0]
    assert (cause.cause, cause.evidence) == (
        "program-error",
        "FileExistsError: [Errno 17] File exists: 'runs/Jan26'",
    )
    megatron = (
        " 4: [rank4]: AssertionError: OptimizerParamScheduler: class input value 5 and checkpointvalue 6\n"
    )
    assert names(diagnose_text(megatron)) == ["program-error"]


def test_a_program_of_a_missing_module_is_no_stray_command() -> None:
    missing = "job.sh: line 2: module: command not found\n"
    assert names(diagnose_text(f"{missing}job.sh: line 4: gmx_mpi: command not found\n")) == [
        "module-missing"
    ]
    stray = f"{missing}job.sh: line 4: --ntomp: command not found\n"
    assert names(diagnose_text(stray)) == ["module-missing", "stray-command"]
    assert names(diagnose_text("job.sh: line 4: gmx_mpi: command not found\n")) == ["stray-command"]


@pytest.mark.parametrize(
    "line",
    [
        "job.sh: line 4: module: command not found",
        "cut: /lib64/libm.so.6: version `GLIBC_2.29' not found (required by cut)",
        "cp: cannot stat '/data/map.tif': No such file or directory",
        "ERROR no sensor is connected",
        "Failed to save the map: the disk is gone",
    ],
)
def test_a_success_message_directly_below_an_error_is_doubtful(line: str) -> None:
    found = diagnose_text(f"{line}\nFri Nov 20 09:00:00 2026\nJob finished successfully\n")
    assert (found.verdict, found.failed) == ("unknown", False)
    assert line in [telling.text for telling in found.telling_lines]
    assert diagnose_text(f"{line}\ntile 9 written\nJob finished successfully\n").verdict == "ok"


@pytest.mark.parametrize(
    "log",
    [
        # The message above the traceback says that the program goes on, also above chained tracebacks.
        f"2026-11-20 09:00:00 ERROR bad tile 4, skipped\n{CRASH}KeyError: 'legend'\nmap written to /data/map.tif\n",
        f"reading failed, retrying in 1 s\n{CRASH}OSError: closed\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{CRASH}KeyError: 'legend'\nmap written to /data/map.tif\n",
        f"ERROR:job:tile 4 could not be cut\n{CRASH}KeyError: 'legend'\nINFO:job:map written\n",
        "Task exception was never retrieved\nfuture: <Task finished name='Task-2' coro=<f() done>>\n"
        f"{CRASH}TimeoutError: peer\nmap written\n",
        "try 1 failed with status 1\nserver is up\n",
        "2026-11-20 | CRITICAL | dashboard switched off\n2026-11-20 | INFO | map written\n",
        "test_big XFAIL (CUDA out of memory on small GPUs)\nmap written to /data/map.tif\n",
        # A message quoted from another log, and a job that Slurm started again.
        f"old.log:slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n{ORDINARY}",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-03-09T02:11:40 DUE TO PREEMPTION ***\n"
        f"{ORDINARY}sheet 1 printed\n",
        # The script goes on after a step.
        f"srun: error: n3: task 0: Exited with exit code 2\n{ORDINARY}sheet 1 printed\n",
        # Lines that only look like errors are ordinary output.
        "make: *** [all] Error 2 (ignored)\nERROR tile 4 is damaged\nbuild succeeded. 0 error(s)\n",
        "ERROR tile 4 is damaged\ncc -Werror=format -c error_list.c\n",
        "simulation 3: FAILED to converge\nsimulation 3: error: 1.2e-3\n",
    ],
)
def test_a_program_that_goes_on_after_an_error_has_not_failed(log: str) -> None:
    found = diagnose_text(f"reading tiles\n{log}")
    assert (found.verdict, found.failed) == ("unknown", False)


@pytest.mark.parametrize(
    "log",
    [
        f"2026-11-20 09:00:00 ERROR bad tile 4, skipped\n{CRASH}KeyError: 'legend'\n",
        f"bad tile 4, skipped\ntile 5 read\n{CRASH}KeyError: 'legend'\nmap of 4 tiles\n",
        "old.log:map written\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nleft on Friday\n",
        f"srun: error: n3: task 0: Exited with exit code 2\n{ORDINARY}",
        f"{CRASH}KeyError: 'legend'\nwandb: Synced 5 files\nwandb: loss 0.3\nwandb: Run history:\n",
        f"{CRASH}KeyError: 'legend'\nCPU Utilized: 00:01:00\nMemory: 4 GB\nJob ID: 7\nElapsed: 3 s\n",
        "Error in eval(predvars, data, env) : object 'y' not found\nExecution halted\n",
        f"ERROR:job:tile 4 could not be cut\n{CRASH}KeyError: 'legend'\n",
        f"INFO:job:tile 4 is cut\n{CRASH}KeyError: 'legend'\nINFO:job:map written\n",
        "curl: (7) Failed to connect to 10.7.0.2 port 9\n",
        "try 1 failed with status 1\ntry 2 failed with status 1\n",
        "2026-11-20 | INFO | map read\n2026-11-20 | CRITICAL | the license ended\n",
        "waiting for the other nodes\nlauncher exited with 124\n",
    ],
)
def test_a_job_that_wrote_no_further_output_has_failed(log: str) -> None:
    assert diagnose_text(f"reading tiles\n{log}").failed


@pytest.mark.parametrize(
    "summary",
    [
        "============ 7 passed, 1 skipped, 1 xfailed, 1 warning in 3.58s ============",
        "7 passed, 1 skipped, 1 xfailed, 1 warning in 3.58s",
        "Ran 4 tests in 0.412s\n\nOK (expected failures=1)",
        "100% tests passed, 0 tests failed out of 12",
    ],
)
def test_a_summary_of_tests_that_passed_is_success(summary: str) -> None:
    log = f"test_io XFAIL - PytorchStreamReader failed reading zip archive\n{summary}\n"
    assert diagnose_text(log).verdict == "ok"
    assert diagnose_text(f"{log}KeyError: 'legend'\n").failed
    failed = summary.replace("7 passed", "1 failed, 7 passed").replace("OK (", "FAILED (failures=1, ")
    assert (
        diagnose_text(log.replace(summary, failed.replace("0 tests failed", "1 tests failed"))).verdict
        != "ok"
    )


@pytest.mark.parametrize("code", ["143", "-15", "130"])
def test_a_helper_that_a_signal_ended_leaves_the_success_open(code: str) -> None:
    line = f"monitor stopped (exit code {code})"
    for log in (f"{line}\nJob finished successfully\n", f"Job finished successfully\n{line}\n"):
        found = diagnose_text(f"step 2 loss 0.7\n{log}")
        assert (found.verdict, found.failed) == ("unknown", False)
        assert [telling.text for telling in found.telling_lines] == [line]
    assert diagnose_text(f"step 2 loss 0.7\n{line}\n").failed


@pytest.mark.parametrize(
    "below",
    [
        "Starting stage 2\n",
        "[INFO] loading the second map\n",
        "second map: loading\n",
        "two maps\ntorchrun --nproc_per_node 8 cut.py\n",
        "tiles: 10%|#         | 10/100 [00:01<00:09,  9.91it/s]\n",
        ORDINARY * 2,
    ],
)
def test_work_below_a_message_of_success_is_not_known_to_have_succeeded(below: str) -> None:
    assert diagnose_text(f"Training finished\n{below}").verdict == "unknown"
    assert diagnose_text(f"Training finished\n{below}Training finished\n").verdict == "ok"
    assert diagnose_text(f"Training finished\n{ORDINARY}").verdict == "ok"
    assert diagnose_text("Training finished\nbest map: 0.9\nCleaning up temporary files\n").verdict == "ok"


def test_an_exception_at_the_exit_is_no_failure() -> None:
    log = f"Training finished\nError in atexit._run_exitfuncs:\n{CRASH}BrokenPipeError: [Errno 32] Broken pipe\n"
    assert diagnose_text(log).verdict == "ok"
    # The last lines are matched twice, and the second time without the line above the traceback.
    frames = "".join(f'  File "a.py", line {number}, in x\n' for number in range(6))
    ignored = "Exception ignored in: <function x>\nTraceback (most recent call last):\n"
    assert diagnose_text(f"Training finished\n{ignored}{frames}AssertionError: child\n").verdict == "ok"


@pytest.mark.parametrize(
    "line",
    [
        "gzip: stdin: unexpected end of file",
        "tar: Unexpected EOF in archive",
        "xz: data.tar.xz: Unexpected end of input",
    ],
)
def test_an_archive_that_ends_early_is_a_corrupt_file(line: str) -> None:
    log = f"unpacking\n{line}\ntar: Child returned status 1\ntar: Error is not recoverable: exiting now\n"
    assert names(diagnose_text(log)) == ["corrupt-checkpoint"]


def test_a_rank_in_brackets_without_a_colon_precedes_an_exception() -> None:
    assert names(diagnose_text("[rank2] KeyError: 'n02119789'\n")) == ["program-error"]


@pytest.mark.parametrize(
    "line",
    [
        "BEGIN failed--compilation aborted at cut.pl line 3.",
        "Finished 10 maps: 7 good, 3 failed",
        "Cut: legend not found",
    ],
)
def test_a_success_that_a_script_reports_directly_below_words_about_a_failure_is_open(line: str) -> None:
    assert diagnose_text(f"{line}\nJob completed\n").verdict == "unknown"
    assert diagnose_text(f"{line}\ntile 9 written\nJob completed\n").verdict == "ok"
    assert diagnose_text(f"{line}\ntile 9 written\nexit code: 0\n").verdict == "ok"
    assert diagnose_text("10 maps, 0 failed\nJob completed\n").verdict == "ok"


def test_training_below_a_message_of_success_is_not_known_to_have_succeeded() -> None:
    steps = "epoch 0 step 10 loss 2.0\nepoch 0 step 20 loss 1.9\n"
    assert diagnose_text(f"stage one done, exit code 0\n{steps}").verdict == "unknown"
    assert diagnose_text(f"{steps}stage one done, exit code 0\n").verdict == "ok"
    debug = "0: [I1123 14:14:43.908 TCPStoreLibUvBackend.cpp:1316] [c10d - debug] UV live handle type 12\n"
    assert diagnose_text(f"exit code: 0\n{debug * 9}").verdict == "ok"


def test_an_exception_within_a_message_of_the_program_is_only_possibly_a_failure() -> None:
    line = "probe of 32 GiB -> torch.OutOfMemoryError: CUDA out of memory."
    found = diagnose_text(f"probe of 16 GiB\n{line}\nlargest block is 16 GiB\n")
    assert (found.verdict, found.failed, names(found)) == ("unknown", False, ["oom-gpu"])
    assert diagnose_text(f"probe of 16 GiB\n{line}\n").failed
    assert diagnose_text("torch.OutOfMemoryError: CUDA out of memory.\nlargest block is 16 GiB\n").failed


def test_a_warning_about_another_process_below_other_output_shows_no_failure() -> None:
    warning = (
        '[W309 02:11 ProcessGroupNCCL.cpp:1662] Failed to check the "should dump" flag on TCPStore, with '
    )
    warning += "error: Broken pipe\n"
    found = diagnose_text(f"all maps are written\n{warning}")
    assert (found.verdict, found.failed, names(found)) == ("unknown", False, ["secondary-peer-exit"])
    assert diagnose_text(warning).failed
    assert diagnose_text(f"all maps are written\n{warning}srun: error: n1: task 0: Aborted\n").failed


def test_a_full_disk_is_no_corrupt_checkpoint_and_the_error_of_another_language_no_full_gpu() -> None:
    full = 'SafetensorError: Error while serializing: IoError(Os { message: "No space left on device" })'
    assert "corrupt-checkpoint" not in names(diagnose_text(f"safetensors_rust.{full}\n"))
    assert "oom-gpu" not in names(diagnose_text("ERROR: LoadError: OutOfMemoryError()\n"))


def test_an_exit_code_directly_below_an_error_is_doubtful() -> None:
    # The exit code of "python cut.py | tee log" is that of tee.
    log = "python: command not found\nexit code: 0\nJob finished successfully\n"
    assert diagnose_text(log).verdict == "unknown"
    assert diagnose_text(log.replace("exit", "tile 9 written\nexit")).verdict == "ok"


def test_a_step_that_ended_is_no_failure_if_the_script_goes_on() -> None:
    step = "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2025-03-09T02:11:40 ***\n"
    for line in (step, "srun: error: n1: task 0: Terminated\n"):
        assert not diagnose_text(f"reading tiles\n{line}map printed\n").failed
        assert diagnose_text(f"reading tiles\n{line}srun returned 124\n").failed


def test_a_bar_that_has_not_begun_is_no_progress() -> None:
    error = "RuntimeError: Error(s) in loading state_dict for Net:\n"
    bar = "Epoch 0:   0%|          | 0/100 [00:00<?, ?it/s]\n"
    assert names(diagnose_text(error + bar)) == ["checkpoint-mismatch"]
    went_on = diagnose_text(error + bar.replace("  0%", " 10%").replace(" 0/", " 10/"))
    assert (went_on.verdict, went_on.causes) == ("unknown", [])


def test_a_program_that_ended_early_by_its_own_decision_has_not_aborted() -> None:
    found = diagnose_text("Aborted early: converged after 31 of 100 steps\nmean 0.3\n")
    assert not found.failed
    assert diagnose_text("31 steps\nAborted (core dumped)\n").failed
    assert diagnose_text("31 steps\nAborted\n").failed


def test_a_worker_that_could_not_be_started_has_no_corrupt_file() -> None:
    log = f"AttributeError: Can't pickle local object 'cut'\n{CRASH.replace('cut', 'spawn_main')}"
    assert names(diagnose_text(f"{log}EOFError: Ran out of input\n")) == ["program-error"]
    assert names(diagnose_text(f"{CRASH}EOFError: Ran out of input\n")) == ["corrupt-checkpoint"]


def test_a_rank_that_crashed_advertised_no_wrong_address() -> None:
    error = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    mesh = (
        "Gloo connectFullMesh failed with [gloo/pair.cc:152] Connection refused, remote=[127.0.0.1]:16281\n"
    )
    assert names(diagnose_text(error + mesh)) == ["gpu-illegal-access"]
    assert names(diagnose_text(mesh)) == ["gloo-wrong-interface"]


def test_an_abort_that_python_reports_is_an_abort() -> None:
    log = 'Fatal Python error: Aborted\n\nCurrent thread 0x07f3 (most recent call first):\n  File "a.py", line 3\n'
    assert names(diagnose_text(log)) == ["aborted"]


def test_a_step_that_is_cancelled_after_the_training_counted_to_its_end_is_no_failure() -> None:
    end = "slurmstepd-n1: error: *** STEP 16.0 ON n1 CANCELLED AT 2026-03-09T02:11:40 ***\n"
    end += "srun: error: n1: task 0: Killed\n"
    found = diagnose_text(f"iteration 1499/1500: loss = 3e-04\niteration 1500/1500: loss = 2e-04\n{end}")
    assert (found.verdict, found.failed) == ("unknown", False)
    found = diagnose_text(f"iteration 1498/1500: loss = 3e-04\niteration 1499/1500: loss = 2e-04\n{end}")
    assert (found.failed, names(found)) == (True, ["cancelled"])
    log = "Epoch 2 | Batch 30 | Loss 1.5\nFinished.\n"
    assert diagnose({"job.out": log, "job.err": end}).failed is False
    assert diagnose({"job.out": log.replace("Finished.\n", ""), "job.err": end}).failed is True
    ssh = "ssh: Could not resolve hostname login01: Temporary failure in name resolution\n"
    assert diagnose_text(log + ssh).failed is False
    assert (diagnose_text(ssh).failed, names(diagnose_text(ssh))) == (True, ["hostname-unreachable"])


def test_a_message_of_the_shell_beside_a_log_with_success_is_no_failure() -> None:
    missing = "/var/spool/slurmd/job8/slurm_script: line 7: nvidia-smi: command not found\n"
    log = "epoch 6/6: loss=0.2\nTraining completed\n"
    assert diagnose({"job.out": log, "job.err": missing}).failed is False
    assert diagnose({"job.out": "epoch 6/6: loss=0.2\n", "job.err": missing}).failed is True
    broken = "ModuleNotFoundError: No module named 'torch'\n"
    assert diagnose({"job.out": log, "job.err": broken}).failed is True


@pytest.mark.parametrize(
    "prefix", ["W1123 18:16:18.416000 207 torch/dynamic_rendezvous.py:1298] ", "WARNING:torch:"]
)
def test_a_rendezvous_that_is_already_closed_at_the_end_is_no_failure(prefix: str) -> None:
    line = "The node 'n2_207_0' has failed to shutdown the rendezvous '13' due to an error of type "
    line += "RendezvousConnectionError.\n"
    assert diagnose_text(f"epoch 3/3 loss 0.1\nsaved model.pt\n{prefix}{line}").failed is False


def test_a_failed_step_that_the_script_repeats_is_no_failure() -> None:
    first = """array task 1 of job 5 (max 2) on n2
srun: error: n2: task 0: Exited with exit code 5
OSError: [Errno 116] Stale file handle: /data/fold1.h5
try 1 of fold 1 failed, once more
"""
    second = """Epoch 1/2 loss 2.1060 acc 0.2949 1896 samples/s
Epoch 2/2 loss 1.5692 acc 0.6006 2122 samples/s
Training finished: 2 epochs, model saved to last.pt
fold 1 finished
"""
    assert diagnose_text(first + second).failed is False
    assert diagnose_text(first).failed is True


def test_an_environment_variable_is_no_error_of_the_driver() -> None:
    line = "_CUDA_COMPAT_STATUS=System has unsupported display driver / cuda driver combination"
    assert diagnose_text(f"{line}\nepoch 1 loss 2.1\n").causes == []
    assert names(diagnose_text("RuntimeError: " + line.partition("=")[2])) == ["driver-too-old"]


def test_the_status_that_a_program_logs_shows_success() -> None:
    assert diagnose_text("trainer: run ended with status=SUCCESS error=None exit_code=0\n").verdict == "ok"
    assert diagnose_text("trainer: run ended with status=FAILED exit_code=1\n").verdict != "ok"
