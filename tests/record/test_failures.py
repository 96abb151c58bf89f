"""Training that a signal or an exception ends: complete windows are on disk, and the cause is printed."""

import os
import re
import signal
import time

from tests.common import write_cell
from tests.record import loops
from tests.train.ranks import torchrun_env


def errors(err: str) -> list[str]:
    """Return the causes that were printed, without the hosts' names."""
    return [re.sub(r"(rank \d) on [^\s,:]+", r"\1", one) for one in re.findall("bench: error: (.*)", err)]


def test_a_signal_ends_the_process_as_without_the_recorder_and_earlier_windows_are_on_disk(run_program):
    done = run_program("tests.record.loops:gets_sigterm", environments=[{}])
    assert done.codes == [-signal.SIGTERM]
    assert "handler SIG_DFL, wakeup -1, threads ['MainThread']\n" in done.out[0]
    assert [row["epoch"] for row in done.table("metrics")] == ["1"]


def test_a_time_out_names_the_late_rank(server, tmp_path):
    started = server.start(tmp_path / "run", torchrun_env(2), "tests.record.loops:times_out")
    until = time.monotonic() + loops.DEADLINE_S
    output = started.folder / "0.err"
    while (
        not output.exists() or "bench: error" not in output.read_text()
    ):  # it is created when the rank starts
        assert time.monotonic() < until, "rank 0 never printed the cause"
        time.sleep(0.05)
    os.kill(started.pids[1], signal.SIGTERM)
    done = started.finish()
    assert errors(done.err[0]) == [
        "rank 0: a collective did not complete in 5 s: rank 1 did not reach the collective; find out why, or raise"
        " the time-out of init_process_group"
    ]
    assert "Timed out" in done.err[0]


SCRIPT = """\
import torch, torch.distributed as dist
from ddp_scaling_bench.record import Recorder

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


def test_a_rank_that_raises_is_named_by_the_other_one(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    write_cell(tmp_path, ranks=2, warmup_steps=3, steps_per_epoch=5, attribution_steps=3)
    environments = [rank | {"BENCH_RUN_DIR": str(tmp_path)} for rank in torchrun_env(2)]
    done = server.start(tmp_path, environments, "script", [str(script)]).finish()
    assert done.codes == [1, 1]
    first, second = done.err
    assert "Traceback (most recent call last)" in second.partition("bench: error")[0]
    assert errors(second) == ["rank 1: ValueError: planted; see the traceback above"]
    assert errors(first) == [
        "rank 0: lost the connection to another rank: rank 1 failed first: ValueError: planted"
    ]
    assert [row["epoch"] for row in done.table("metrics")] == ["1", "2"]
