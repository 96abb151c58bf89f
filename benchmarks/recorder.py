"""Measure the overhead of the recorder in a user's training loop.

The script trains one model in gloo ranks with one thread each. A round consists of four blocks of steps in
random order: the loop without the recorder ("bare") twice, the loop with the recorder in its throughput
window, and the loop with the hooks of the attribution window. Each block is compared with the bare blocks of
its round. The result is the trimmed mean of the ratios over all rounds with its 95 % interval.

    python benchmarks/recorder.py [--ranks 2] [--width 1024] [--rounds 200] [--steps 5]

The script exits with 1 if the whole interval is above 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from paired import in_ranks, ratio
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measure.step_parts import clock_for
from bench.record import Recorder
from bench.record.attribution import Attribution

MOST_ADDED = 0.01
FEATURES, CLASSES = 784, 10
#: Samples per rank.
BATCH = 32
#: The blocks of a round. The difference between its two bare blocks shows the noise of the comparison.
WAYS = ("bare", "recorded", "attributed", "bare")


class Loop:
    """A model with its training loop in three forms: bare, with the recorder, with the attribution hooks."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        width = given.width
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self._model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, CLASSES)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        # One endless window: its start and end are outside of all blocks.
        self._recorder = Recorder(
            self._model, run_dir=folder, warmup_steps=10, steps_per_epoch=10**7, attribution_steps=0
        )
        self._attribution = Attribution(self._model, clock_for(torch.device("cpu")), world_size=given.ranks)

    def _batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(steps):
            yield torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))

    def _train(self, points: Tensor, labels: Tensor) -> None:
        loss = cross_entropy(self._model(points), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def bare(self, steps: int) -> float:
        """Run some steps of the loop without the recorder; return the time in seconds."""

        def loop() -> None:
            for batch in self._batches(steps):
                self._train(*batch)

        return self._timed(loop)

    def recorded(self, steps: int) -> float:
        """Run some steps with the recorder; return the time in seconds."""

        def loop() -> None:
            for batch in self._recorder.batches(self._batches(steps)):
                with self._recorder.step():
                    self._train(*batch)

        return self._timed(loop)

    def attributed(self, steps: int) -> float:
        """Run some steps with the hooks of the attribution window; return the time in seconds."""

        def loop() -> None:
            for batch in self._batches(steps):
                self._attribution.start()
                self._train(*batch)
                self._attribution.stop()

        self._attribution.attach()
        seconds = self._timed(loop)
        self._attribution.detach()
        return seconds

    @staticmethod
    def _timed(run: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began


def measure(rank: int, port: int, *, given: argparse.Namespace, folder: str) -> list[list[float]]:
    """Run all rounds as one of the ranks; return the seconds of each round's blocks, as ordered in ``WAYS``.

    The seconds are those of the slowest rank.
    """
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, given.ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(given.ranks)}
    loop = Loop(given, folder)
    for way in WAYS:
        getattr(loop, way)(15)
    rounds, orders = [], random.Random(0)
    for _ in range(given.rounds):
        order = orders.sample(range(len(WAYS)), len(WAYS))  # the same on all ranks
        own = {place: getattr(loop, WAYS[place])(given.steps) for place in order}
        seconds = torch.tensor([own[place] for place in range(len(WAYS))], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        rounds.append(seconds.tolist())
    dist.barrier()
    return rounds


def empty_step_us() -> float:
    """Return the microseconds that the recorder adds to a step without any work (minimum of 200 trials)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        recorder = Recorder(run_dir=folder, warmup_steps=10, steps_per_epoch=10**7, attribution_steps=0)
        least = math.inf
        batch = (torch.zeros(1, 1),)
        for _ in range(200):
            began = time.perf_counter()
            for _ in recorder.batches([batch] * 100):
                with recorder.step():
                    pass
            least = min(least, (time.perf_counter() - began) / 100)
        recorder.close()
    return least * 1e6


def main() -> int:
    """Print the ratios with their intervals; return 1 if the whole interval is above 1 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="number of ranks; a single rank has less noise, because it waits for no other rank",
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="width of the layers; with 256, steps are short"
    )
    parser.add_argument("--rounds", type=int, default=200, help="number of rounds")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = in_ranks(partial(measure, given=given, folder=folder), ranks=given.ranks)
    bare, recorded, attributed, again = zip(*rounds, strict=True)
    bare_ms = statistics.median(bare) / given.steps * 1e3
    print(f"ranks: {given.ranks}; {given.rounds} rounds of {given.steps} steps, {bare_ms:.3f} ms each")
    both = [math.sqrt(first * second) for first, second in zip(bare, again, strict=True)]
    found = ratio(zip(both, recorded, strict=True))
    print(f"ratio recorder / bare loop: {found}")
    print(f"ratio bare loop / bare loop: {ratio(zip(bare, again, strict=True))}")
    print(f"ratio attribution window / bare loop: {ratio(zip(both, attributed, strict=True))}")
    print(f"time of the recorder in an empty step: {empty_step_us():.1f} us")
    return 1 if found.adds_more_than(MOST_ADDED, who="the recorder") else 0


if __name__ == "__main__":
    sys.exit(main())
