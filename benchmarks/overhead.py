"""What the harness adds to a training step: its throughput window against a loop written by hand.

Both run in the same two gloo ranks, one thread each, on networks of the same size: a block of
steps of one, a block of the other, in alternating order. A pair of neighbouring blocks gives
one ratio; the interval is Student's t on the logarithms of the ratios.

    python benchmarks/overhead.py [--device cpu|cuda] [--parameters 8M] [--pairs 200] [--steps 5]

On a GPU it is one nccl rank. Exits with 1 where the harness adds more than 1 % (0.5 % on a GPU; the whole
interval lies above that).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from scipy import stats
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.matrix.options import WorkloadOptions
from bench.workload.collectives import Collectives
from bench.workload.feed import Place, open_feed
from bench.workload.models.mlp import Mlp, width_for
from bench.workload.resources import Meters
from bench.workload.synthetic import generator_on, signal_for
from bench.workload.task import build_task
from bench.workload.training import Trainer, wrap
from bench.workload.windows import Windows

RANKS = 2
MOST_ADDED = {"cpu": 0.01, "cuda": 0.005}


@dataclass(frozen=True)
class Seat:
    """A rank, its device, and how many there are: two on a CPU, one on a GPU."""

    rank: int
    world_size: int
    device: torch.device
    backend: str


def seat(rank: int, device: str) -> Seat:
    """Return what rank ``rank`` computes on."""
    if device == "cpu":
        return Seat(rank, RANKS, torch.device("cpu"), "gloo")
    torch.cuda.set_device(0)
    return Seat(rank, 1, torch.device("cuda", 0), "nccl")


def by_hand(options: WorkloadOptions, batch: int, here: Seat) -> Callable[[int], float]:
    """Return a function that trains some steps in a plain loop and returns the seconds they took."""
    device, rank = here.device, here.rank
    torch.manual_seed(options.seed)
    feed = open_feed(options, batch, Place(rank, here.world_size, device))
    signal, generator = signal_for(options, feed.shape, device), generator_on(device, options.seed, 7, rank)
    features = feed.shape.inputs[0]
    width = width_for(options.parameters or 0, features=features, classes=10)
    network: nn.Module = Mlp(features=features, classes=10, width=width, recompute=False).to(device)
    model = DistributedDataParallel(
        network, gradient_as_bucket_view=True, bucket_cap_mb=int(options.bucket_cap_mb)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    def train(steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            inputs, targets = signal.draw(batch, generator)
            loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return train


def by_harness(options: WorkloadOptions, batch: int, here: Seat) -> Callable[[int], float]:
    """Return a function that runs one throughput window and returns the seconds it took."""
    device, rank = here.device, here.rank
    feed = open_feed(options, batch, Place(rank, here.world_size, device))
    trainer = Trainer(wrap(build_task(options, feed.shape), options), feed, options)
    meters = Meters(device, speaks_for_host=rank == 0, speaks_for_device=True)
    windows = Windows(trainer, Collectives(device, here.backend), meters, device)
    windows.warm_up(options.warmup_steps)
    return lambda steps: windows.throughput(steps).seconds


def measure(rank: int, port: int, given: argparse.Namespace, result: Path) -> None:
    """Run all pairs on one rank; rank 0 writes the blocks' seconds, maxima over ranks."""
    torch.set_num_threads(1)
    here = seat(rank, given.device)
    store = TCPStore("127.0.0.1", port, here.world_size, is_master=rank == 0)
    dist.init_process_group(here.backend, store=store, rank=rank, world_size=here.world_size)
    options = WorkloadOptions.model_validate(
        {"device": given.device, "model": "mlp", "parameters": given.parameters}
    )
    ways = [by_hand(options, given.batch, here), by_harness(options, given.batch, here)]
    collectives = Collectives(here.device, here.backend)
    for way in ways:
        way(options.warmup_steps)
    pairs = []
    for pair in range(given.pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        seconds = {number: ways[number](given.steps) for number in order}
        pairs.append(collectives.maxima([seconds[0], seconds[1]]))
    if rank == 0:
        result.write_text(json.dumps(pairs))
    collectives.barrier()
    os._exit(0)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(given: argparse.Namespace) -> list[list[float]]:
    """Fork the ranks and return the pairs of blocks: seconds by hand, seconds in the harness."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "pairs.json")
        children = []
        for rank in range(RANKS if given.device == "cpu" else 1):
            child = os.fork()
            if child == 0:
                try:
                    measure(rank, port, given, result)
                finally:
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        pairs: list[list[float]] = json.loads(result.read_text())
        return pairs


def main() -> int:
    """Print the ratio with its interval; return 1 where the harness clearly adds more than 1 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with --steps 100 or so"
    )
    parser.add_argument("--parameters", default="8M", help="of the mlp; 1M has steps of a few milliseconds")
    parser.add_argument("--batch", type=int, default=22, help="samples per rank")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument(
        "--steps", type=int, default=5, help="per block; short blocks share the machine's noise"
    )
    given = parser.parse_args()
    given.parameters = WorkloadOptions(parameters=given.parameters).parameters
    pairs = run(given)
    logs = [math.log(harness / hand) for hand, harness in pairs]
    centre, error = sum(logs) / len(logs), float(stats.sem(logs))
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=centre, scale=error)
    hand_s, harness_s = (sorted(column)[len(pairs) // 2] / given.steps for column in zip(*pairs, strict=True))
    print(
        f"mlp of {given.parameters:,} parameters, {given.device}, {given.pairs} pairs of {given.steps} steps"
    )
    print(f"median step: by hand {hand_s * 1e3:.3f} ms, in the harness {harness_s * 1e3:.3f} ms")
    ratio, interval = math.exp(centre), (math.exp(low), math.exp(high))
    print(f"ratio harness / by hand: {ratio:.4f}, 95 % interval [{interval[0]:.4f}, {interval[1]:.4f}]")
    most = MOST_ADDED[given.device]
    if interval[0] > 1 + most:
        print(f"the harness adds more than {most:.1%}")
        return 1
    at_most = interval[1] <= 1 + most
    print(
        f"the harness adds at most {most:.1%}"
        if at_most
        else "undecided: the machine is too noisy for these pairs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
