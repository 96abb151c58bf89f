"""Collectives that hang, and processes that get SIGTERM: a cause is printed, complete windows are saved."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.record import loops
from tests.workload.conftest import ROOT, Finished, Started, torchrun_env

WAITS = re.compile(r"bench: warning: no progress for \d+ s: (.*)\n")
REASON = re.compile(r"bench: error: rank 0 on \S+: no progress for \d+ s: (.*)\n")


@pytest.fixture
def start(server, tmp_path):
    """Return a function that starts two ranks of the loop that hangs."""

    def start(action: str, target: str = "hangs") -> Started:
        return server.start(tmp_path / "run", [action], torchrun_env(2), f"tests.record.loops:{target}")

    return start


def wait_for(text: str, started: Started, file: str = "0.out") -> None:
    path = started.folder / file
    until = time.monotonic() + loops.DEADLINE_S
    while not path.exists() or text not in path.read_text():  # it is created when the rank starts
        assert time.monotonic() < until, f"{file} never contained {text!r}"
        time.sleep(0.05)


def end(started: Started, *numbers: int) -> Finished:
    for pid, number in zip(started.pids, numbers, strict=True):
        os.kill(pid, number)
    return started.finish()


def epochs(done: Finished) -> list[tuple[str, bool]]:
    """Return each epoch on disk, and whether its steps were split."""
    return [(row["epoch"], bool(row["forward_time_sec"])) for row in done.table("metrics")]


def without_place(message: str) -> str:
    """Return a message without the host's name and the line's number."""
    return re.sub(r"(rank \d) on [^\s,:]+", r"\1", re.sub(r"loops\.py:\d+", "loops.py", message))


def errors(err: str) -> list[str]:
    return [without_place(one) for one in re.findall("bench: error: (.*)", err)]


def test_a_late_rank_is_named_and_complete_windows_are_written(start):
    started = start("600")
    wait_for("no progress", started)
    done = end(started, signal.SIGTERM, signal.SIGTERM)
    message = (
        "rank 1 (at loops.py in misbehave: time.sleep(float(action))) did not reach a collective of step 22"
    )
    (warned,) = WAITS.findall(done.out[0])
    (reason,) = REASON.findall(done.err[0])
    assert (without_place(warned), without_place(reason)) == (message, message)
    assert "bench: error" not in done.err[1], "only one rank prints it"
    # Rank 0 ends by the signal, or by the connection that rank 1 lost, if that comes first.
    assert done.codes[1] == -signal.SIGTERM
    assert done.codes[0] in (-signal.SIGTERM, 1)
    assert epochs(done) == [("1", True), ("2", False)], "the second attribution had not ended"
    assert any(warned in one for one in done.env["warnings"])


def test_a_slow_rank_causes_a_warning_and_the_training_continues(start):
    done = start("slow").finish().succeeded()
    assert "did not reach a collective of step 22" in WAITS.findall(done.out[0])[0]
    assert "bench: error" not in "".join(done.err)
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


def test_a_pause_causes_no_warning(start):
    done = start("pause").finish().succeeded()
    assert "stalled, surprising: False" in done.out[0], "the stall was examined"
    assert not [message for message in WAITS.findall(done.out[0]) if "recorder.pause()" in message]
    assert "bench: error" not in "".join(done.err)


def test_a_silent_rank_is_named(start):
    started = start("stop")
    wait_for("no report from", started)
    done = end(started, signal.SIGTERM, signal.SIGKILL)
    message = "no report from rank 1: stuck in C code, stopped or killed, or the host was lost"
    assert without_place(REASON.findall(done.err[0])[0]) == message
    assert [epoch for epoch, _ in epochs(done)] == ["1", "2"]


def test_a_handler_of_the_users_decides_the_effect_of_sigterm(start):
    started = start("own handler")
    wait_for("waiting", started)
    wait_for("waiting", started, "1.out")
    done = end(started, signal.SIGTERM, signal.SIGTERM).succeeded()
    assert ["saved" in out for out in done.out] == [True, True]
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


def test_children_end_by_sigterm_and_close_restores_the_process(run_ranks):
    done = run_ranks(target="tests.record.loops:has_a_child", environments=[{}]).succeeded()
    assert f"child ended with -{int(signal.SIGTERM)}\n" in done.out[0]
    assert "handler SIG_DFL, wakeup -1\n['MainThread']\n" in done.out[0]
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


def test_the_cause_is_printed_shortly_before_an_end_without_a_message(run_ranks):
    done = run_ranks(target="tests.record.loops:has_a_deadline").succeeded()
    found = re.findall(r"(stalled True|overdue): no progress for (\d+) s: (rank 1.*)\n", done.out[0])
    assert [kind for kind, _, _ in found] == ["stalled True", "overdue"]
    assert int(found[0][1]) < int(found[1][1])
    assert int(found[1][1]) >= 4
    assert without_place(found[1][2]).startswith(
        "rank 1 (at loops.py in wait_until: time.sleep(0.05)) did not reach a collective"
    )


def test_sigterm_ends_the_process_although_no_thread_listens(run_ranks):
    done = run_ranks(target="tests.record.loops:loses_the_wakeup", environments=[{}])
    assert done.codes == [-signal.SIGTERM]
    assert epochs(done) == [("1", False)]


def test_many_signals_after_a_survived_sigterm_do_not_break_the_end(run_ranks):
    done = run_ranks(target="tests.record.loops:outlives_sigterm", environments=[{}]).succeeded()
    assert "going on\n" in done.out[0]
    assert "saved\n" in done.out[0]


def test_a_time_out_names_the_late_rank(start):
    started = start("", "times_out")
    wait_for("bench: error", started, "0.err")
    done = end_second(started)
    assert errors(done.err[0]) == [
        "rank 0: a collective did not complete in 5 s: rank 1 did not reach the collective; find out why, or raise"
        " the time-out of init_process_group"
    ]
    assert "Timed out" in done.err[0]


def end_second(started: Started) -> Finished:
    os.kill(started.pids[1], signal.SIGTERM)
    return started.finish()


SCRIPT = """\
import torch, torch.distributed as dist
from bench.record import Recorder

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
recorder = Recorder(model)
for number in range(100):
    with recorder.step(samples=1):
        loss = model(torch.ones(1, 4)).sum()
        if number == 20 and dist.get_rank() == 1:
            raise ValueError("planted")
        loss.backward()
"""


@pytest.mark.slow
def test_a_rank_that_raises_is_named_by_the_other_one(tmp_path):
    script = Path(tmp_path / "train.py")
    script.write_text(SCRIPT)
    lengths = {"BENCH_WARMUP_STEPS": "3", "BENCH_STEPS_PER_EPOCH": "5", "BENCH_ATTRIBUTION_STEPS": "3"}
    shared = {**os.environ, **lengths, "PYTHONPATH": str(ROOT), "BENCH_RUN_DIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**shared, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in torchrun_env(2)
    ]
    first, second = (rank.communicate(timeout=loops.DEADLINE_S)[1] for rank in ranks)
    assert errors(second) == ["rank 1: ValueError: planted; see the traceback above"]
    assert errors(first) == [
        "rank 0: lost the connection to another rank: rank 1 failed first: ValueError: planted"
    ]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2"]
