"""conditions.json, as runs of the built-in workload and of the recorder leave it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_scaling_bench.measure.conditions import cpu_wait_s, window_conditions
from ddp_scaling_bench.measure.results import is_stable
from tests.train.ranks import Finished

NODE_KEYS = ["node", "foreign_cpu_s", "throttled_s", "freq_mhz", "net"]
RANK_KEYS = [
    *("rank", "threads", "collectives", "recompilations", "compile_s"),
    *("allocator_retries", "cpu_wait_s", "sync_passes", "clocks"),
]


def conditions_of(done: Finished) -> list[dict[str, Any]]:
    content = json.loads((done.folder / "conditions.json").read_text(encoding="utf-8"))
    assert list(content) == ["schema", "windows"]
    assert content["schema"] == 1
    for window in content["windows"]:
        assert list(window) == ["epoch", "start", "end", "nodes", "ranks"]
        assert all(list(node) == NODE_KEYS for node in window["nodes"])
        assert all(list(rank) == RANK_KEYS for rank in window["ranks"])
    return content["windows"]


def check_wire_bytes(done: Finished) -> None:
    """Check the wire bytes of two ranks; other programs use the loopback interface, too."""
    assert done.env["wire_bytes"] == {"counted_empty_because": None, "predicted_empty_because": None}
    for row in done.table("metrics"):
        assert float(row["wire_bytes_predicted_per_step"]) == 2 * done.env["gradient_bytes"]
        assert float(row["wire_bytes_per_step"]) > 2 * done.env["gradient_bytes"]


def test_a_thread_that_shares_its_core_waits_for_it():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, used = cpu_wait_s(), time.thread_time()
        while time.thread_time() - used < 0.5:
            pass
        waited = cpu_wait_s() - before
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)
    assert waited > 0


def test_without_scheduler_statistics_the_wait_is_not_measured(tmp_path: Path):
    zeros = tmp_path / "schedstat"
    zeros.write_text("0 0 0\n")
    assert (cpu_wait_s(zeros), cpu_wait_s(tmp_path / "missing")) == (None, None)
    zeros.write_text("5000 2500000000 7\n")
    assert cpu_wait_s(zeros) == 2.5


def test_the_windows_of_all_ranks_are_combined():
    def part(start: str, end: str, node: str | None) -> dict[str, Any]:
        return {"start": start, "end": end, "node": node and {"node": node}, "rank": {"threads": 8}}

    parts = [part("T1", "T5", "n1"), part("T2", "T7", "n2"), part("T0", "T6", None)]
    assert window_conditions(3, parts) == {
        "epoch": 3,
        "start": "T0",
        "end": "T7",
        "nodes": [{"node": "n1"}, {"node": "n2"}],
        "ranks": [{"rank": rank, "threads": 8} for rank in range(3)],
    }
    assert window_conditions(3, [parts[0], None]) is None


# The first two steps never count.
START_S = [9.0, 5.0]


@pytest.mark.parametrize(
    ("step_s", "prepares", "stable"),
    [
        ([1.0, 1.05], False, True),
        ([1.0, 1.2], False, False),
        ([1.0, 1.0, 3.0], False, False),
        ([1.0, 1.0, 3.0], True, True),  # the final step contains the writing of files
        ([1.0, 1.2, 1.2], True, False),
        ([1.0, 3.0], True, False),  # without the final step, a single one would remain
        ([1.0], False, False),
    ],
)
def test_the_halves_after_two_steps_agree_within_a_tenth(step_s, prepares, stable):
    assert is_stable(START_S + step_s, prepares=prepares) is stable
