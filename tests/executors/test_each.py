"""Work for each of many runs, in one thread or in several."""

from __future__ import annotations

import threading
import time

import pytest

from bench.executors.base import AT_ONCE, FIRST, each

MANY = [(number,) for number in range(FIRST + 60)]


def test_work_that_does_not_wait_stays_in_its_thread_and_in_order():
    seen = []
    each(lambda number: seen.append((number, threading.get_ident())), MANY)
    assert seen == [(number, threading.get_ident()) for (number,) in MANY]


def test_work_that_waits_is_done_by_several_threads():
    done, threads = set(), set()

    def wait(number: int) -> None:
        for _ in range(5):
            time.sleep(0.001)
        done.add(number)
        threads.add(threading.get_ident())

    each(wait, MANY)
    assert done == {number for (number,) in MANY}
    assert 1 < len(threads) <= AT_ONCE + 1


@pytest.mark.parametrize("slow", [False, True])
def test_the_first_error_ends_it(slow):
    begun = set()

    def fail(number: int) -> None:
        begun.add(number)
        for _ in range(5 if slow else 0):
            time.sleep(0.001)
        if number == FIRST + 1:
            raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        each(fail, MANY)
    assert FIRST + 1 in begun
    assert len(begun) < len(MANY)


def test_nothing_to_do_is_no_error():
    each(print, [])
