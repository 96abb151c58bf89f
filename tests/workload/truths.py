"""Runs in which something is arranged so that what must be measured is known beforehand."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from bench.workload import rank as rank_module
from bench.workload.__main__ import main
from bench.workload.arguments import parse_arguments
from bench.workload.data.feed import SyntheticFeed
from bench.workload.models import Mlp
from bench.workload.training import wrap
from tests.workload.scenarios import NAP_S, rank_of_env

LINK_MS = "BENCH_TEST_LINK_MS"


class Link:
    """Carries one bucket after the other, each for a known time, by sleeping: it costs no processor time."""

    def __init__(self, bucket_s: float) -> None:
        self.bucket_s = bucket_s
        self.exposed_s: list[float] = []
        self._line = ThreadPoolExecutor(1)
        self._last_ready = 0.0

    def hook(self, state, bucket):  # DDP compares annotations with types, and these would be strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradients, is_last = bucket.buffer(), bucket.is_last()
        ready = time.perf_counter()

        def carry() -> None:
            if self.bucket_s:
                time.sleep(self.bucket_s)
            if is_last:
                self.exposed_s.append(time.perf_counter() - ready)
            future.set_result(gradients)

        self._line.submit(carry)
        return future


def link_of_known_time(argv: list[str]) -> int:
    """Gradients travel over a :class:`Link`; each rank writes how long it was waited for, step by step."""
    import os

    link = Link(float(os.environ[LINK_MS]) / 1e3)

    def wrap_with_link(task, options):
        model = wrap(task, options)
        model.register_comm_hook(None, link.hook)
        return model

    rank_module.wrap = wrap_with_link
    code = main(argv)
    folder = parse_arguments(argv).run_dir
    Path(folder, f"truth-{rank_of_env()}.json").write_text(json.dumps(link.exposed_s))
    return code


def late_rank_with_batch_norm(argv: list[str]) -> int:
    """Rank 1 naps before each batch, and the network has batch normalisation, whose buffers DDP may send."""
    plain = Mlp.__init__

    def normalised(self: Mlp, *, features: int, classes: int, width: int, recompute: bool) -> None:
        plain(self, features=features, classes=classes, width=width, recompute=recompute)
        self.last = nn.Sequential(nn.BatchNorm1d(width), self.last)

    Mlp.__init__ = normalised
    drawn = SyntheticFeed.next

    def slow(self: SyntheticFeed):
        time.sleep(NAP_S)
        return drawn(self)

    if rank_of_env() == 1:
        SyntheticFeed.next = slow
    return main(argv)
