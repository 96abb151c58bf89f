"""The waits of FSDP2 on simulated devices, with a replay of the streams of its groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench.measure import step_parts
from bench.measure.findings import PartsNotTimed
from bench.measure.step_parts import CudaClock, StepParts, StepTimer
from bench.train.strategies.fsdp2 import ShardedParts
from tests.simulated_gpu.device import Costs, Link, Operation, Rank, Stream, World, install

BLOCKS, FORWARD_S, BACKWARD_S = 4, 2e-3, 4e-3
#: A collective is hidden by the computation of a block, or in forward, or nowhere.
LINKS = {"hidden": 1e-3, "in backward": 3e-3, "nowhere": 6e-3}


@dataclass(eq=False)
class Group:
    """A group of parameters, in the order of ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``."""

    model: Sharded
    replicas: int
    _all_gather_comm: Any = None
    _reduce_scatter_comm: Any = None
    _all_reduce_hook: Any = None
    gathered: tuple[Stream, int] | None = None
    has_gradients: bool = True

    def __post_init__(self) -> None:
        self._all_gather_comm = Comm(self.model)
        self._reduce_scatter_comm = Comm(self.model)
        self._is_hsdp = self.replicas > 1
        backend = SimpleNamespace(name=lambda: self.model.backend)
        shards = SimpleNamespace(_get_backend=lambda device: backend)
        self.mesh_info = SimpleNamespace(shard_process_group=shards)

    def unshard(self) -> None:
        if self.gathered is None:
            with self.model.on(self.model.gathers):
                self._all_gather_comm()
            self.gathered = self.model.gathers.mark()

    def wait_for_unshard(self) -> None:
        self.model.wait(self.gathered)
        self.gathered = None

    def post_backward(self) -> None:
        self.model.wait(self.model.scattered)
        if not self.has_gradients:
            return
        self._reduce_scatter_comm.allocate()
        self.model.scatters.wait_stream(self.model.rank.compute)
        with self.model.on(self.model.scatters):
            self._reduce_scatter_comm.allocate()
            self._reduce_scatter_comm()
        self.model.scattered = self.model.reduced = self.model.scatters.mark()
        if self._is_hsdp:
            self.model.reduces.wait_stream(self.model.scatters)
            with self.model.on(self.model.reduces):
                Comm(self.model)()
                if self._all_reduce_hook is not None:
                    self._all_reduce_hook(torch.zeros(1))
            self.model.reduced = self.model.reduces.mark()

    def finalize_backward(self) -> None:
        self.model.wait(self.model.reduced)


@dataclass
class Comm:
    """A collective on the current stream."""

    model: Sharded

    def __call__(self) -> None:
        self.model.rank.all_reduce(0).wait()

    def allocate(self) -> None:
        """Do nothing."""


class Marked(Stream):
    """A stream that other streams can wait for, as for an event."""

    def mark(self) -> tuple[Stream, int]:
        return self, len(self.operations) - 1


class Sharded(nn.Module):
    """A sharded model of equal blocks; the first one is reduced after backward."""

    backend = "nccl"

    def __init__(self, rank: Rank, replicas: int) -> None:
        super().__init__()
        self.rank = rank
        self.gathers, self.scatters, self.reduces = Marked(rank), Marked(rank), Marked(rank)
        self.scattered: Any = None
        self.reduced: Any = None
        self.groups = [Group(self, replicas) for _ in range(BLOCKS)]
        #: The positions of the waits in the stream of the computation, by their place.
        self.waits: dict[str, list[int]] = {"forward": [], "backward": [], "end": []}
        self.place = "forward"
        self.state = SimpleNamespace(
            _is_root=True, _fsdp_param_groups=self.groups, _root_post_backward_final_callback=self.finalize
        )

    def _get_fsdp_state(self) -> Any:
        return self.state

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.rank.current = self.rank.current, stream
        yield
        self.rank.current = before

    def wait(self, mark: tuple[Stream, int] | None) -> None:
        """Let the computation wait for another stream, or for its own."""
        stream, at = mark or (self.rank.compute, len(self.rank.compute.operations) - 1)
        with self.rank.world.changed:
            self.rank.compute.add(Operation(self.rank.now, after=[(stream, at)]))
        self.waits[self.place].append(len(self.rank.compute.operations) - 1)

    def run_forward(self) -> None:
        self.place = "forward"
        for stream in (self.gathers, self.scatters):
            stream.wait_stream(self.rank.compute)
        for group in self.groups:
            group.unshard()
            group.wait_for_unshard()
            self.rank.launch(FORWARD_S)

    def run_backward(self) -> None:
        self.place = "backward"
        for number in reversed(range(BLOCKS)):
            self.groups[number].unshard()
            self.groups[number].wait_for_unshard()
            if number:
                self.groups[number - 1].unshard()
            self.rank.launch(BACKWARD_S)
            if number:
                self.groups[number].post_backward()
        self.state._root_post_backward_final_callback()

    def finalize(self) -> None:
        self.place = "end"
        self.groups[0].post_backward()
        for group in self.groups:
            group.finalize_backward()

    def waited_s(self) -> dict[str, float]:
        """Return the idle time of the computation in the waits at each place."""
        ends = [operation.end or 0.0 for operation in self.rank.compute.operations]
        return {place: sum(ends[at] - ends[at - 1] for at in own) for place, own in self.waits.items()}


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    install(monkeypatch, step_parts)
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", Sharded)


@pytest.mark.parametrize(("replicas", "unused"), [(1, None), (2, None), (1, 1)])
@pytest.mark.parametrize("link_s", LINKS.values(), ids=LINKS)
def test_the_waits_of_a_sharded_model_are_the_idle_time_of_its_computation(link_s, replicas, unused):
    def program(rank: Rank) -> tuple[StepParts | None, dict[str, float]]:
        model = Sharded(rank, replicas)
        if unused is not None:
            model.groups[unused].has_gradients = False
        timer = StepTimer(CudaClock(torch.device("cuda", 0)))
        parts = ShardedParts(model)
        assert parts.start(timer) is None
        timer.start()
        timer.begin("forward")
        model.run_forward()
        timer.end()
        timer.begin("backward")
        model.run_backward()
        timer.end()
        timer.stop()
        parts.stop()
        assert "post_backward" not in vars(model.groups[0])
        return timer.parts(parts.read()), model.waited_s()

    costs = Costs(launch_s=2e-6, event_s=0.5e-6)
    for parts, waited_s in World(2, link=Link(link_s, 0.0), costs=costs).run(program):
        found = {place: getattr(parts, f"comm_{place}_s") for place in waited_s}
        assert found == pytest.approx(waited_s, rel=0.01, abs=50e-6)
        assert found["end"] >= link_s * (1 + (replicas > 1)) * 0.99
        assert parts.forward_s == pytest.approx(BLOCKS * FORWARD_S, rel=0.01)
        assert parts.backward_s == pytest.approx(BLOCKS * BACKWARD_S, rel=0.01)
        assert abs(parts.other_s) < 50e-6


def test_collectives_that_let_the_host_wait_leave_the_parts_unknown():
    def program(rank: Rank) -> PartsNotTimed | None:
        model = Sharded(rank, 1)
        model.backend = "gloo"
        return ShardedParts(model).start(StepTimer(CudaClock(torch.device("cuda", 0))))

    expected = PartsNotTimed(torch=torch.__version__, strategy="FSDP2 without NCCL")
    assert World(1).run(program) == [expected]
