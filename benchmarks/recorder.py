"""What a recorder adds to a user's loop: the same loop with it and without it, in the same ranks.

Two gloo ranks, one thread each, one model. A block of steps of the bare loop, a block of the same
loop with the recorder in its throughput window, and a block with the hooks of the attribution
window, in rotating order. Neighbouring blocks give one ratio each; the interval is Student's t on
the logarithms of the ratios.

    python benchmarks/recorder.py [--width 1024] [--rounds 200] [--steps 5]

Exits with 1 where the recorder adds more than 1 % (the whole interval lies above that).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.record import Recorder
from bench.record.attribution import Attribution
from bench.record.clock import clock_for

RANKS = 2
MOST_ADDED = 0.01
FEATURES, CLASSES = 784, 10
WAYS = ("bare", "recorded", "attributed")


class Loop:
    """One model and its loop, in three ways."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        width = given.width
        layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self._model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, CLASSES)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._batch = given.batch
        # One window that never ends: its own beginning and end are outside of every block.
        self._recorder = Recorder(
            self._model, run_dir=folder, warmup_steps=10, steps_per_epoch=10**7, attribution_steps=0
        )
        self._attribution = Attribution(self._model, clock_for(torch.device("cpu")), world_size=RANKS)

    def _batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(steps):
            yield torch.randn(self._batch, FEATURES), torch.randint(CLASSES, (self._batch,))

    def _train(self, points: Tensor, labels: Tensor) -> None:
        loss = cross_entropy(self._model(points), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def bare(self, steps: int) -> float:
        """Return the seconds of some steps of the loop as it is."""
        return self._timed(lambda: [self._train(*batch) for batch in self._batches(steps)])

    def recorded(self, steps: int) -> float:
        """Return the same with the recorder."""

        def loop() -> None:
            for batch in self._recorder.batches(self._batches(steps)):
                with self._recorder.step():
                    self._train(*batch)

        return self._timed(loop)

    def attributed(self, steps: int) -> float:
        """Return the same with every part of the step timed."""

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


def measure(rank: int, port: int, given: argparse.Namespace, folder: str) -> None:
    """Run all rounds on one rank; rank 0 writes the blocks' seconds, maxima over ranks."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    loop = Loop(given, folder)
    for way in WAYS:
        getattr(loop, way)(15)
    rounds = []
    for number in range(given.rounds):
        order = [WAYS[(place + number) % len(WAYS)] for place in range(len(WAYS))]
        own = {way: getattr(loop, way)(given.steps) for way in order}
        seconds = torch.tensor([own[way] for way in WAYS], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        rounds.append(seconds.tolist())
    if rank == 0:
        Path(folder, "rounds.json").write_text(json.dumps(rounds))
    dist.barrier()
    os._exit(0)


def empty_step_us() -> float:
    """Return the microseconds that the recorder takes in an empty step of one process; the least of many."""
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


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(given: argparse.Namespace) -> list[list[float]]:
    """Fork the ranks and return the rounds: seconds of each way."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    measure(rank, port, given, folder)
                finally:
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        rounds: list[list[float]] = json.loads(Path(folder, "rounds.json").read_text())
        return rounds


def ratio(rounds: list[list[float]], way: int) -> tuple[float, float, float]:
    """Return the ratio of a way to the bare loop, with its 95 % interval."""
    logs = [math.log(one[way] / one[0]) for one in rounds]
    centre = sum(logs) / len(logs)
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=centre, scale=float(stats.sem(logs)))
    return math.exp(centre), math.exp(low), math.exp(high)


def main() -> int:
    """Print the ratios with their intervals; return 1 where the recorder clearly adds more than 1 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024, help="of the layers; 256 has short steps")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5, help="per block; short blocks share the noise")
    given = parser.parse_args()
    rounds = run(given)
    bare_ms = sorted(one[0] for one in rounds)[len(rounds) // 2] / given.steps * 1e3
    print(f"{RANKS} ranks, {given.rounds} rounds of {given.steps} steps; median bare step {bare_ms:.3f} ms")
    value, low, high = ratio(rounds, 1)
    print(f"ratio recorder / bare loop: {value:.4f}, 95 % interval [{low:.4f}, {high:.4f}]")
    print(
        "ratio attribution window / bare loop: {:.4f}, 95 % interval [{:.4f}, {:.4f}]".format(
            *ratio(rounds, 2)
        )
    )
    print(f"the recorder's own time in a step: {empty_step_us():.1f} us")
    if low > 1 + MOST_ADDED:
        print("the recorder adds more than 1 %")
        return 1
    at_most = high <= 1 + MOST_ADDED
    print(
        "the recorder adds at most 1 %" if at_most else "undecided: the machine is too noisy for these rounds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
