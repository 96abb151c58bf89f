"""Measure the time that the recorder adds to a step of a training loop, in its throughput window.

Blocks of steps alternate in random order: the bare loop twice, and the loop with the recorder. Each round has
these three blocks with and without gradient accumulation. The result is the median difference to the bare
blocks of the same round, per step, with its 95 % interval. The difference of the bare blocks is the control.

    python benchmarks/recorder.py [--device cpu|cuda] [--width 1024] [--batch 32] [--rounds 80] [--steps 20]
                                  [--json FILE]

One rank trains in DDP, because the recorder exchanges nothing between ranks within a window. Both loops sum
the loss. On a CPU, blocks are measured in CPU time, which other processes disturb less. Only the time of an
empty step contains waits. On a GPU, choose a size for which the GPU is always busy, such as ``--width 8192
--batch 1024``.

The script exits with 1 if a whole interval is above 0.1 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_scaling_bench import Recorder
from ddp_scaling_bench.measure.heartbeat import DATA, LOOP, STEP, Heartbeat
from ddp_scaling_bench.measure.launch import Launch

#: The recorder may add this much to a step; costs are also shown as a share of a step of ``STEP_US``.
LIMIT_US, STEP_US = 100, 20_000
FEATURES, CLASSES = 784, 10
#: Micro-batches per step, by the name of the result.
PASSES = {"one batch": 1, "four micro-batches": 4}
BLOCKS = ("bare", "recorded", "bare again")


class Loop:
    """A training loop that can run with and without the recorder."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        self._device, self._batch, width = torch.device(given.device), given.batch, given.width
        self._clock = time.process_time if given.device == "cpu" else time.perf_counter
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self._model = DistributedDataParallel(
            nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(self._device)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._loss_sum = torch.zeros((), device=self._device)
        # One endless window: its start and end are outside of all blocks.
        self.recorder = Recorder(
            self._model, run_dir=folder, warmup_steps=10, steps_per_epoch=10**7, attribution_steps=0
        )

    def seconds(self, block: str, steps: int, passes: int) -> float:
        """Run a block of steps and return its duration; a step has ``passes`` micro-batches."""
        run = self._recorded if block == "recorded" else self._bare
        self._synchronize()
        began = self._clock()
        run(self._batches(steps * passes, self._batch // passes), passes)
        self._synchronize()
        return self._clock() - began

    def _bare(self, batches: Iterable[tuple[Tensor, Tensor]], passes: int) -> None:
        for number, batch in enumerate(batches, start=1):
            self._loss_sum += self._train(*batch, update=number % passes == 0).detach()

    def _recorded(self, batches: Iterable[tuple[Tensor, Tensor]], passes: int) -> None:
        for number, batch in enumerate(self.recorder.batches(batches), start=1):
            update = number % passes == 0
            with self.recorder.step(update=update):
                self.recorder.loss(self._train(*batch, update=update))

    def _batches(self, number: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(number):
            points = torch.randn(size, FEATURES, device=self._device)
            yield points, torch.randint(CLASSES, (size,), device=self._device)

    def _train(self, points: Tensor, labels: Tensor, *, update: bool) -> Tensor:
        loss = cross_entropy(self._model(points), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if update:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(loop: Loop, rounds: int, steps: int) -> dict[tuple[str, str], list[float]]:
    """Return the times of a step (s) in the blocks of all rounds, by the name of the passes and the block."""
    found: dict[tuple[str, str], list[float]] = {(name, block): [] for name in PASSES for block in BLOCKS}
    for name, block in found:
        loop.seconds(block, 15, PASSES[name])
    orders = random.Random(0)
    for _ in range(rounds):
        for name, block in orders.sample([*found], len(found)):
            found[name, block].append(loop.seconds(block, steps, PASSES[name]) / steps)
    return found


def median_us(differences_s: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of differences in microseconds and the bounds of its 95 % interval."""
    ordered = sorted(seconds * 1e6 for seconds in differences_s)
    # The distribution-free interval between two order statistics.
    place = max(1, int(stats.binom.ppf(0.025, len(ordered), 0.5)))
    return statistics.median(ordered), ordered[place - 1], ordered[-place]


def results(found: dict[tuple[str, str], list[float]]) -> Iterator[dict[str, Any]]:
    """Yield the time of a step, the recorder's cost and the control, with and without accumulation."""
    for name in PASSES:
        first, recorded, again = (found[name, block] for block in BLOCKS)
        rounds = list(zip(first, recorded, again, strict=True))
        cost_us, low_us, high_us = median_us([with_it - (a + b) / 2 for a, with_it, b in rounds])
        control = median_us([b - a for a, _, b in rounds])
        result = {"name": name, "step_s": statistics.median(first), "control_us": control}
        yield {**result, "cost_us": cost_us, "low_us": low_us, "high_us": high_us}


def empty_step_us(recorder: Recorder) -> float:
    """Return the microseconds that the recorder takes for a step without any work (minimum of 200 trials)."""
    batches, least_s = [(torch.zeros(1, 1),)] * 100, float("inf")
    for _ in range(200):
        began = time.perf_counter()
        for _ in recorder.batches(batches):
            with recorder.step():
                pass
        least_s = min(least_s, (time.perf_counter() - began) / len(batches))
    return least_s * 1e6


def heartbeat_cost(folder: str, seconds: float = 5.0) -> tuple[float, float]:
    """Return the microseconds of a step in the heartbeat, and the milliseconds per second of its thread."""
    beat, number = Heartbeat(), 100_000
    began = time.perf_counter()
    for _ in range(number):
        beat.stage = DATA
        beat.stage = LOOP
        beat.stage = STEP
        beat.step_ended()
    step_us = (time.perf_counter() - began) / number * 1e6
    used_s = []
    for folders in ({}, {"BENCH_RUN_DIR": folder}):  # torch has threads of its own
        beat.start(folders, Launch("single", 0, 0, 1), "n1")
        began = time.process_time()
        for _ in range(round(10 * seconds)):
            beat.step_ended()
            time.sleep(0.1)
        used_s.append(time.process_time() - began)
    beat.close(left=True)
    return step_us, (used_s[1] - used_s[0]) / seconds * 1e3


def main() -> int:
    """Print the recorder's cost; return 1 if a whole interval is above the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the training")
    parser.add_argument("--width", type=int, default=1024, help="width of the layers")
    parser.add_argument("--batch", type=int, default=32, help="samples per step")
    parser.add_argument("--rounds", type=int, default=80, help="number of rounds")
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if given.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(given, folder)
        costs = list(results(measure(loop, given.rounds, given.steps)))
        empty_us = empty_step_us(loop.recorder)
        beat_us, thread_ms = heartbeat_cost(folder)
        loop.recorder.close()
    dist.destroy_process_group()
    for cost in costs:
        low, high, control = cost["low_us"], cost["high_us"], cost["control_us"]
        print(f"{cost['name']}, step of {cost['step_s'] * 1e3:.2f} ms, {given.rounds} rounds:")
        print(
            f"  the recorder adds {cost['cost_us']:.1f} us (95 % interval {low:.1f} to {high:.1f}), "
            f"{cost['cost_us'] / STEP_US:.2%} of a step of {STEP_US / 1e3:g} ms"
        )
        print(f"  control (bare loop): {control[0]:.1f} us ({control[1]:.1f} to {control[2]:.1f})")
    print(
        f"time of the recorder in an empty step: {empty_us:.1f} us, of which the heartbeat {beat_us:.2f} us"
    )
    print(f"CPU time of the heartbeat's thread: {thread_ms:.2f} ms per second")
    if given.json is not None:
        content = {"costs": costs, "empty_step_us": empty_us, "limit_us": LIMIT_US, "rounds": given.rounds}
        content |= {"heartbeat_us": beat_us, "heartbeat_thread_ms": thread_ms}
        given.json.write_text(json.dumps(content))
    if any(cost["low_us"] > LIMIT_US for cost in costs):
        print(f"the recorder adds more than {LIMIT_US} us to a step")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
