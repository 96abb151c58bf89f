"""Measure the overhead of the workload's throughput window over a hand-written training loop.

The window and the loop take turns, a few steps (a block) at a time. Both train networks of the same size in
the same two gloo ranks with one thread each. Each pair of neighbouring blocks gives a ratio of times. The
result is the trimmed mean of the ratios with its 95 % interval.

    python benchmarks/overhead.py [--device cpu|cuda] [--parameters 8M] [--batch 22] [--pairs 200] [--steps 5]
                                  [--json FILE]

On a GPU, one nccl rank is used. The script exits with 1 if the whole interval is above 1 % (0.5 % on a GPU).
Choose a size for which the GPU is busy all the time, such as ``--parameters 64M --batch 1024``. With a small
network, the host launches kernels too slowly for the GPU, and every call of Python counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from paired import in_ranks, ratio
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measure.conditions import Conditions, Meters
from bench.measure.exchange import Collectives
from bench.train.data import DataShard, generator_on, open_feed, signal_for
from bench.train.models.mlp import Mlp, mlp_width
from bench.train.options import TrainOptions
from bench.train.training import Trainer, Windows, build_task, wrap
from bench.units import parse_count

RANKS = 2
MOST_ADDED = {"cpu": 0.01, "cuda": 0.005}


@dataclass(frozen=True)
class Seat:
    """The rank of this process, its device and backend, and the number of ranks (CPU: 2, GPU: 1)."""

    rank: int
    world_size: int
    device: torch.device
    backend: str


def seat(rank: int, device: str) -> Seat:
    """Set up the device of a rank on ``cpu`` or ``cuda`` and return its Seat."""
    if device == "cpu":
        return Seat(rank, RANKS, torch.device("cpu"), "gloo")
    torch.cuda.set_device(0)
    return Seat(rank, 1, torch.device("cuda", 0), "nccl")


def by_hand(options: TrainOptions, batch: int, here: Seat) -> Callable[[int], float]:
    """Return a function that trains a number of steps in a hand-written loop and returns the seconds."""
    device, rank = here.device, here.rank
    torch.manual_seed(options.seed)
    feed = open_feed(options, batch, DataShard(rank, here.world_size, device))
    signal, generator = signal_for(options, feed.shape, device), generator_on(device, options.seed, 7, rank)
    features = feed.shape.inputs[0]
    width = mlp_width(options.parameters or 0, features=features, classes=10)
    network: nn.Module = Mlp(features=features, classes=10, width=width, recompute=False).to(device)
    model = DistributedDataParallel(
        network,
        device_ids=[device.index] if device.type == "cuda" else None,  # as in torch's tutorial
        gradient_as_bucket_view=True,
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


def by_harness(options: TrainOptions, batch: int, here: Seat) -> Callable[[int], float]:
    """Return a function that runs a throughput window of a number of steps and returns the seconds."""
    device, rank = here.device, here.rank
    sampler = Conditions(device, os.environ, reads_node=rank == 0)
    feed = open_feed(options, batch, DataShard(rank, here.world_size, device))
    trainer = Trainer(wrap(build_task(options, feed.shape).to(device), options), feed, options)
    meters = Meters(device, reads_host=rank == 0, reads_device=True)
    collectives = Collectives(device, here.backend)
    windows = Windows(trainer, collectives, meters, device, samples_per_step=batch, conditions=sampler)
    windows.warm_up(options.warmup_steps)

    def train(steps: int) -> float:
        window = windows.throughput(steps)
        assert window.window_s is not None
        return window.window_s

    return train


def measure(rank: int, port: int, *, given: argparse.Namespace) -> list[list[float]]:
    """Run all pairs of blocks as one of the ranks; return the seconds of each pair's blocks.

    The hand-written loop is first in each pair. The seconds are those of the slowest rank.
    """
    torch.set_num_threads(1)
    here = seat(rank, given.device)
    store = TCPStore("127.0.0.1", port, here.world_size, is_master=rank == 0)
    dist.init_process_group(
        here.backend,
        store=store,
        rank=rank,
        world_size=here.world_size,
        device_id=here.device if here.backend == "nccl" else None,
    )
    options = TrainOptions(device=given.device, model="mlp", parameters=given.parameters)
    ways = [by_hand(options, given.batch, here), by_harness(options, given.batch, here)]
    collectives = Collectives(here.device, here.backend)
    for way in ways:
        way(options.warmup_steps)
    pairs = []
    for pair in range(given.pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        seconds = {number: ways[number](given.steps) for number in order}
        pairs.append(collectives.maxima([seconds[0], seconds[1]]))
    collectives.barrier()
    return pairs


def _arguments() -> argparse.Namespace:
    """Parse the command line; ``parameters`` is a number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the training")
    parser.add_argument("--parameters", type=parse_count, default="8M", help="size of the mlp")
    parser.add_argument("--batch", type=int, default=22, help="samples per rank")
    parser.add_argument("--pairs", type=int, default=200, help="number of pairs of blocks")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    return parser.parse_args()


def main() -> int:
    """Print the ratio with its interval; return 1 if the whole interval is above the limit."""
    given = _arguments()
    ranks = RANKS if given.device == "cpu" else 1
    pairs = in_ranks(partial(measure, given=given), ranks=ranks)
    hand_s, harness_s = (statistics.median(column) / given.steps for column in zip(*pairs, strict=True))
    print(
        f"mlp of {given.parameters:,} parameters, {given.device}, "
        f"{given.pairs} pairs of blocks of {given.steps} steps"
    )
    print(f"median step: hand-written loop {hand_s * 1e3:.3f} ms, harness {harness_s * 1e3:.3f} ms")
    found = ratio(pairs)
    print(f"ratio harness / hand-written loop: {found}")
    if given.json is not None:
        size = {name: vars(given)[name] for name in ("parameters", "batch", "pairs", "steps")}
        seconds = {"hand_written_step_s": hand_s, "harness_step_s": harness_s}
        ratios = {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}
        content = {**size, **seconds, **ratios, "limit": 1 + MOST_ADDED[given.device]}
        given.json.write_text(json.dumps(content))
    return int(found.adds_more_than(MOST_ADDED[given.device], who="the harness"))


if __name__ == "__main__":
    sys.exit(main())
