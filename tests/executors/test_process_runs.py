"""Processing of many runs, in one thread or in several."""

from __future__ import annotations

import threading
import time

import pytest

from bench.executors.settlement import THREADS, TRIAL_RUNS, process_runs

MANY = [(number,) for number in range(TRIAL_RUNS + 60)]


def wait() -> None:
    """Give up the processor several times, as operations on a shared file system do."""
    for _ in range(5):
        time.sleep(0.001)


def test_work_that_does_not_wait_stays_in_its_thread_and_in_order():
    seen = []
    process_runs(lambda number: seen.append((number, threading.get_ident())), MANY)
    assert seen == [(number, threading.get_ident()) for (number,) in MANY]


def test_work_that_waits_is_done_by_several_threads():
    done, threads = set(), set()

    def work(number: int) -> None:
        wait()
        done.add(number)
        threads.add(threading.get_ident())

    process_runs(work, MANY)
    assert done == {number for (number,) in MANY}
    assert 1 < len(threads) <= THREADS + 1


@pytest.mark.parametrize("slow", [False, True])
def test_the_first_error_ends_it(slow):
    started = set()

    def fail(number: int) -> None:
        started.add(number)
        if slow:
            wait()
        if number == TRIAL_RUNS + 1:
            raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        process_runs(fail, MANY)
    assert TRIAL_RUNS + 1 in started
    assert len(started) < len(MANY)


def test_an_empty_list_is_no_error():
    process_runs(print, [])
