"""The detection of late and silent ranks from the states of all ranks."""

from __future__ import annotations

import threading
import time

from bench.record.failures import State, describe_stall, find_stall, line_of

HOSTS = ["n1", "n1", "n2"]


def state(
    steps: int,
    collectives: int | None = None,
    where: str = "train.py:7 in main: x()",
    *,
    paused: bool = False,
    counting: bool = True,
) -> State:
    return State(1, steps, collectives, where, paused, counting)


def description(states: dict[int, State]) -> str:
    return describe_stall(find_stall(states, 3), states, HOSTS, idle_s=44.6)


def test_a_rank_that_called_fewer_collectives_is_behind():
    states = {0: state(12, 41), 1: state(12, 41), 2: state(12, 40, "train.py:38 in main: time.sleep(600)")}
    assert description(states) == (
        "no progress for 45 s: rank 2 on n2 (at train.py:38 in main: time.sleep(600)) did not reach a"
        " collective of step 13"
    )


def test_steps_are_compared_if_collectives_are_unknown_or_equal():
    for collectives in (None, 40):
        states = {0: state(12, collectives), 1: state(11, collectives), 2: state(12, collectives)}
        assert description(states) == (
            "no progress for 45 s: rank 1 on n1 (at train.py:7 in main: x()) did not reach step 13"
        )


def test_no_step_is_named_after_the_recording():
    states = {rank: state(12, 40 if rank == 1 else 41, counting=False) for rank in range(3)}
    assert description(states).endswith(" did not reach a collective of a step after the last recorded step")


def test_a_pause_and_a_moving_rank_are_described():
    states = {0: state(12, 41), 1: state(12, 40, paused=True), 2: state(12, 40, "")}
    assert description(states) == (
        "no progress for 45 s: rank 1 on n1 (in recorder.pause(), at train.py:7 in main: x()),"
        " rank 2 on n2 (making progress) did not reach a collective of step 13"
    )


def test_silent_ranks_are_named():
    states = {1: state(12, 41)}
    assert find_stall(states, 3).late == [0, 2]
    assert description(states) == (
        "no progress for 45 s: no report from rank 0 on n1, rank 2 on n2: stuck in C code,"
        " stopped or killed, or the host was lost"
    )


def test_no_rank_is_blamed_if_all_are_at_the_same_place():
    states = {rank: state(12, 41) for rank in range(3)}
    assert find_stall(states, 3).late == []
    assert description(states) == (
        "no progress for 45 s, and no rank is behind another: rank 0 on n1 (at train.py:7 in main: x())"
    )


def test_a_message_names_eight_ranks_at_most():
    states = {0: state(1, 2), **{rank: state(1, 1, "x.py:1 in f") for rank in range(1, 11)}}
    text = describe_stall(find_stall(states, 11), states, [], idle_s=30)
    assert text.startswith("no progress for 30 s: rank 1 (at x.py:1 in f), rank 2 (")
    assert text.endswith("rank 8 (at x.py:1 in f) and 2 more did not reach a collective of step 2")


def test_the_line_is_the_users_although_it_calls_a_library():
    ready, leave = threading.Event(), threading.Event()

    def waits() -> None:
        ready.set()
        leave.wait()  # within the standard library

    thread = threading.Thread(target=waits)
    thread.start()
    assert ready.wait(10)
    deadline = time.monotonic() + 60
    while "leave.wait()" not in (line := line_of(thread.ident or 0)):
        assert time.monotonic() < deadline, line
        time.sleep(0.01)
    leave.set()
    thread.join()
    file, _, rest = line.partition(":")
    assert (file, rest.partition(" ")[2]) == (
        "test_stall.py",
        "in waits: leave.wait() # within the standard library",
    )
    assert line_of(-1) == ""
