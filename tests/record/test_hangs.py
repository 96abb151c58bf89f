"""Collectives that hang, and processes that are asked to end: a reason, and every whole window on disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.record import loops
from tests.workload.conftest import ROOT, Finished, Started, torchrun_env

WAITS = re.compile(r"bench: warning: nothing has moved for \d+ s: (.*)\n")
REASON = re.compile(r"bench: error: rank 0 on \S+: nothing has moved for \d+ s: (.*)\n")


@pytest.fixture
def start(server, tmp_path):
    """Return a function that starts two ranks of the loop that hangs."""

    def start(what: str) -> Started:
        return server.start(tmp_path / "run", [what], torchrun_env(2), "tests.record.loops:hangs")

    return start


def wait_for(text: str, started: Started, file: str = "0.out") -> None:
    until = time.monotonic() + 60
    while text not in (started.folder / file).read_text():
        assert time.monotonic() < until, f"{file} never said {text!r}"
        time.sleep(0.1)


def end(started: Started, *numbers: int) -> Finished:
    for pid, number in zip(started.pids, numbers, strict=True):
        os.kill(pid, number)
    return started.finish()


def epochs(done: Finished) -> list[tuple[str, bool]]:
    """Return each epoch that is on disk, and whether its steps were split."""
    return [(row["epoch"], bool(row["forward_time_sec"])) for row in done.table("metrics")]


def without_place(words: str) -> str:
    """Return a message without the host's name and the line's number."""
    return re.sub(r"(rank \d) on [^\s,:]+", r"\1", re.sub(r"loops\.py:\d+", "loops.py", words))


def test_a_rank_that_does_not_come_is_named_and_whole_windows_are_written(start):
    started = start("600")
    wait_for("nothing has moved", started)
    done = end(started, signal.SIGTERM, signal.SIGTERM)
    words = (
        "rank 1 (at loops.py in misbehave: time.sleep(float(what))) did not come to a collective of step 22"
    )
    (warned,) = WAITS.findall(done.out[0])
    (reason,) = REASON.findall(done.err[0])
    assert (without_place(warned), without_place(reason)) == (words, words)
    assert "bench: error" not in done.err[1], "one rank says it"
    assert done.codes == [-signal.SIGTERM] * 2
    assert epochs(done) == [("1", True), ("2", False)], "the second attribution had not ended"
    assert any(warned in one for one in done.env["warnings"])


def test_a_rank_that_is_slow_is_warned_about_and_the_training_goes_on(start):
    done = start("6").finish().succeeded()
    assert "did not come to a collective of step 22" in WAITS.findall(done.out[0])[0]
    assert "bench: error" not in "".join(done.err)
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


def test_a_pause_is_nothing_to_warn_about(start):
    done = start("pause").finish().succeeded()
    assert not [words for words in WAITS.findall(done.out[0]) if "recorder.pause()" in words]
    assert "bench: error" not in "".join(done.err)


def test_a_rank_that_says_nothing_more_is_named(start):
    started = start("stop")
    wait_for("nothing is heard", started)
    done = end(started, signal.SIGTERM, signal.SIGKILL)
    words = "nothing is heard from rank 1: stuck in C code, stopped or killed, or its host was lost?"
    assert without_place(REASON.findall(done.err[0])[0]) == words
    assert [epoch for epoch, _ in epochs(done)] == ["1", "2"]


def test_a_handler_of_the_users_decides_what_sigterm_means(start):
    started = start("own handler")
    wait_for("waiting", started)
    done = end(started, signal.SIGTERM, signal.SIGTERM).succeeded()
    assert ["saved" in out for out in done.out] == [True, True]
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


def test_children_end_by_themselves_and_the_end_leaves_the_process_as_it_was(run_ranks):
    done = run_ranks(target="tests.record.loops:has_a_child", environments=[{}]).succeeded()
    assert f"child ended with -{int(signal.SIGTERM)}\n" in done.out[0]
    assert "handler SIG_DFL, wakeup -1\n['MainThread']\n" in done.out[0]
    assert len(epochs(done)) == loops.LENGTHS["epochs"]


SCRIPT = """\
import datetime, sys, time
import torch, torch.distributed as dist
from bench.record import Recorder

dist.init_process_group("gloo")
limit = datetime.timedelta(seconds=float(sys.argv[2]))
dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
recorder = Recorder(model)
for number in range(100):
    with recorder.step(samples=1):
        loss = model(torch.ones(1, 4)).sum()
        if number == 20 and dist.get_rank() == 1:
            exec(sys.argv[1])
        loss.backward()
"""


@pytest.fixture
def end_badly(tmp_path) -> Callable[..., list[str]]:
    """Return a function that runs the script on two ranks until rank 0 has ended.

    It returns what each wrote to standard error.
    """

    def end_badly(deed: str, *, timeout_s: int) -> list[str]:
        script = Path(tmp_path / "train.py")
        script.write_text(SCRIPT)
        lengths = {"BENCH_WARMUP_STEPS": "3", "BENCH_STEPS_PER_EPOCH": "5", "BENCH_ATTRIBUTION_STEPS": "3"}
        shared = {**os.environ, **lengths, "PYTHONPATH": str(ROOT), "BENCH_RUN_DIR": str(tmp_path)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), deed, str(timeout_s)],
                env={**shared, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **rank},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in torchrun_env(2)
        ]
        first = ranks[0].communicate(timeout=100)[1]
        ranks[1].terminate()
        return [first, ranks[1].communicate(timeout=100)[1]]

    return end_badly


def said(err: str) -> list[str]:
    return [without_place(one) for one in re.findall("bench: error: (.*)", err)]


def test_where_the_end_comes_without_a_word_the_reason_is_said_shortly_before(run_ranks):
    done = run_ranks(target="tests.record.loops:has_a_deadline").succeeded()
    found = re.findall(r"(stalled True|overdue): nothing has moved for (\d+) s: (rank 1.*)\n", done.out[0])
    assert [what for what, _, _ in found] == ["stalled True", "overdue"]
    assert [int(seconds) >= 4 for _, seconds, _ in found] == [False, True]
    assert without_place(found[1][2]).startswith(
        "rank 1 (at loops.py in has_a_deadline: time.sleep(7)) did not"
    )


def test_sigterm_ends_the_process_though_nobody_listens_any_more(run_ranks):
    done = run_ranks(target="tests.record.loops:loses_the_wakeup", environments=[{}])
    assert done.codes == [-signal.SIGTERM]
    assert epochs(done) == [("1", False)]


def test_many_signals_after_a_sigterm_that_was_outlived_do_not_break_the_end(run_ranks):
    done = run_ranks(target="tests.record.loops:outlives_sigterm", environments=[{}]).succeeded()
    assert "going on\n" in done.out[0]
    assert "saved\n" in done.out[0]


@pytest.mark.slow
def test_a_rank_that_raises_says_so_and_the_other_says_who_it_was(end_badly, tmp_path):
    first, second = end_badly("raise ValueError('planted')", timeout_s=90)
    assert said(second) == ["rank 1: ValueError: planted; see the traceback above"]
    assert said(first) == [
        "rank 0: lost the connection to another rank: rank 1 failed first: ValueError: planted"
    ]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2"]


@pytest.mark.slow
def test_the_time_out_of_a_collective_names_who_did_not_come(end_badly):
    first, _ = end_badly("time.sleep(600)", timeout_s=5)
    assert said(first) == [
        "rank 0: a collective did not complete in 5 s: rank 1 did not come; find out where it hangs, or raise"
        " the time-out of init_process_group"
    ]
    assert "Timed out" in first
