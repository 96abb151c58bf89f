"""What ranks run instead of the plain workload, to know beforehand what must be measured."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from bench.matrix.workload import WorkloadOptions
from bench.measure.environment import device_of
from bench.measure.step_parts import StepTimer, enable_ddp_timing, read_ddp_timing
from bench.workload import mfu
from bench.workload import rank as rank_module
from bench.workload.__main__ import main
from bench.workload.arguments import parse_arguments
from bench.workload.data.feed import SyntheticFeed
from bench.workload.launch import launch_from
from bench.workload.models import DataShape
from bench.workload.task import Task, build_task
from bench.workload.training import Trainer, wrap

NAP_S = 0.04


def rank_of_env() -> int:
    return launch_from(os.environ).rank


def join_group() -> int:
    launch = launch_from(os.environ)
    store = dist.TCPStore(launch.address, launch.port, launch.world_size, is_master=launch.rank == 0)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
    torch.set_num_threads(1)
    return launch.rank


def late_rank(argv: list[str]) -> int:
    """Rank 1 naps before each batch: its data takes long, and rank 0 waits for its gradients."""
    drawn = SyntheticFeed.next

    def slow(self: SyntheticFeed):
        time.sleep(NAP_S)
        return drawn(self)

    if rank_of_env() == 1:
        SyntheticFeed.next = slow
    return main(argv)


def slow_forward(argv: list[str]) -> int:
    """Every forward naps as well."""
    plain = Task.forward

    def slow(self: Task, inputs: torch.Tensor, targets: torch.Tensor):
        time.sleep(NAP_S)
        return plain(self, inputs, targets)

    Task.forward = slow
    return main(argv)


def nan_on_rank_1(argv: list[str]) -> int:
    """Rank 1's inputs turn to NaN from the 15th batch on: after 3 to 9 steps of warm-up and a window."""
    drawn = SyntheticFeed.next
    count = 0

    def broken(self: SyntheticFeed):
        nonlocal count
        count += 1
        inputs, targets = drawn(self)
        return (inputs * float("nan") if count >= 15 else inputs), targets

    if rank_of_env() == 1:
        SyntheticFeed.next = broken
    return main(argv)


def raises_on_rank_1(argv: list[str]) -> int:
    """Rank 1 meets an error that nobody foresaw, in its third batch."""
    drawn = SyntheticFeed.next
    count = 0

    def broken(self: SyntheticFeed):
        nonlocal count
        count += 1
        if count == 3:
            raise ZeroDivisionError("a defect")
        return drawn(self)

    if rank_of_env() == 1:
        SyntheticFeed.next = broken
    return main(argv)


def out_of_memory_on_rank_1(argv: list[str]) -> int:
    """Rank 1 asks for more memory than any machine has, in its third batch."""
    drawn = SyntheticFeed.next
    count = 0

    def broken(self: SyntheticFeed):
        nonlocal count
        count += 1
        if count == 3:
            torch.empty(2**56, dtype=torch.uint8)
        return drawn(self)

    if rank_of_env() == 1:
        SyntheticFeed.next = broken
    return main(argv)


def sleeps_on_rank_1(argv: list[str]) -> int:
    """Rank 1 never comes to its 25th step, after an epoch: its process lives, and does nothing."""
    drawn = SyntheticFeed.next
    count = 0

    def stuck(self: SyntheticFeed):
        nonlocal count
        count += 1
        if count == 25:
            time.sleep(600)
        return drawn(self)

    if rank_of_env() == 1:
        SyntheticFeed.next = stuck
    return main(argv)


def raises_on_rank_0(argv: list[str]) -> int:
    """Rank 0, which serves the store, meets an error that nobody foresaw."""
    drawn = SyntheticFeed.next
    count = 0

    def broken(self: SyntheticFeed):
        nonlocal count
        count += 1
        if count == 3:
            raise ZeroDivisionError("a defect\nof two lines")
        return drawn(self)

    if rank_of_env() == 0:
        SyntheticFeed.next = broken
    return main(argv)


def clock_set_on_rank_1(argv: list[str]) -> int:
    """Rank 1's wall clock, as Python reads it, is set an hour back in the middle of an optimizer step.

    It happens in the first epoch's attribution window: three steps of warm-up (or six, or nine) and five of
    the throughput window come before it, so the step is found by its timer.
    """
    wall = time.time_ns
    stop = StepTimer.stop
    count = shift = 0

    def stops(self: StepTimer):
        nonlocal count, shift
        count += 1
        if count == 3:  # the first does not count anyway
            shift = 3_600_000_000_000
        stop(self)

    if rank_of_env() == 1:
        time.time_ns = lambda: wall() - shift
        StepTimer.stop = stops
    return main(argv)


def cpu_with_a_peak(argv: list[str]) -> int:
    """A CPU that has a name and a stated peak."""
    plain = device_of
    rank_module.device_of = lambda device, host: replace(plain(device, host), model="a CPU")
    mfu.peaks = lambda: {"a CPU": mfu.Peak({"fp32": 1e12}, "https://example.org")}
    return main(argv)


def naps_in_epochs(argv: list[str]) -> int:
    """Every batch naps, so that a test can act while the run goes on."""
    drawn = SyntheticFeed.next

    def slow(self: SyntheticFeed):
        time.sleep(0.02)
        return drawn(self)

    SyntheticFeed.next = slow
    return main(argv)


def threads_left(argv: list[str]) -> int:
    """Report the Python threads that :func:`main` leaves behind."""
    code = main(argv)
    print(
        "left:", [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    )
    return code


class FixedFeed:
    """Gives batches that were made beforehand."""

    def __init__(self, batches, shape: DataShape) -> None:
        self.shape = shape
        self._batches = iter(batches)

    def next(self):
        return next(self._batches)


def weights_after_a_step(argv: list[str]) -> int:
    """Two micro-batches on two ranks, against one plain step on all samples; rank 0 writes the difference."""
    rank = join_group()
    folder = parse_arguments(argv).run_dir
    options = WorkloadOptions(device="cpu", model="mlp", parameters=20_000, grad_accum=2, learning_rate=0.1)
    shape = DataShape((16,), (), 10)
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn((4, 8, 16), generator=source)
    targets = torch.randint(10, (4, 8), generator=source)

    model = wrap(build_task(options, shape), options)
    mine = [(inputs[2 * rank + micro], targets[2 * rank + micro]) for micro in range(2)]
    Trainer(model, FixedFeed(mine, shape), options).step()

    plain = build_task(options, shape)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in plain.parameters()]
    plain(inputs.flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    pairs = zip(model.module.parameters(), plain.parameters(), before, strict=True)
    found = [(float((a - b).abs().max()), float((b - c).abs().max())) for a, b, c in pairs]
    if rank == 0:
        content = {"error": max(e for e, _ in found), "change": max(c for _, c in found)}
        (folder / "weights.json").write_text(json.dumps(content))
    return 0


def readings(argv: list[str]) -> int:
    """Read DDP's logger at once and, as it is meant to be read, after the next forward.

    Communication is a link of known time: each bucket's future completes in a thread that
    sleeps, so the last bucket is exposed for as long as its thread sleeps after it.
    """
    rank = join_group()
    options = WorkloadOptions(device="cpu", model="mlp", parameters=400_000, bucket_cap_mb=0.4)
    shape = DataShape((784,), (), 10)
    model = wrap(build_task(options, shape), options)
    truth: list[float] = []

    def link(state, bucket):  # DDP compares annotations with types, and these would be strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradients = bucket.buffer()

        def carry() -> None:
            began = time.perf_counter()
            time.sleep(NAP_S if bucket.is_last() else 0.001)
            if bucket.is_last():
                truth.append(time.perf_counter() - began)
            future.set_result(gradients)

        threading.Thread(target=carry).start()
        return future

    model.register_comm_hook(None, link)
    enable_ddp_timing(model)
    inputs, targets = torch.randn(64, 784), torch.randint(10, (64,))
    rows = []
    for _ in range(12):
        loss = model(inputs, targets)
        lagging = {**model._get_ddp_logging_data()}
        if rows:
            rows[-1]["next_forward_compute_s"] = lagging["backward_compute_time"] / 1e9
        began = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - began
        at_once = read_ddp_timing(model)
        rows.append(
            {
                "compute_s": at_once.compute_s,
                "exposed_s": at_once.exposed_s,
                "call_s": took,
                "truth_s": truth[-1],
            }
        )
    with model.no_sync():
        model(inputs, targets).backward()
    frozen = read_ddp_timing(model)
    if rank == 0:
        content = {"rows": rows, "frozen": frozen.compute_s == rows[-1]["compute_s"]}
        Path(parse_arguments(argv).run_dir, "readings.json").write_text(json.dumps(content))
    return 0
