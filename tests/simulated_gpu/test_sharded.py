"""The waits of FSDP2 on simulated devices, with a replay of the streams of its groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.measure.findings import PartsNotTimed
from ddp_scaling_bench.measure.results import Window
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.run_folder import RunFolder
from tests.simulated_gpu.device import Costs, Link, Operation, Rank, Stream, World
from tests.simulated_gpu.training import Feed, Model, Optimizer, Pass, loop, record

BLOCKS, FORWARD_S, BACKWARD_S = 4, 2e-3, 4e-3
#: A collective is hidden by the computation of a block, or in backward, or nowhere.
HIDDEN, IN_BACKWARD, NOWHERE = 1e-3, 3e-3, 6e-3


@dataclass(eq=False)
class Group:
    """A group of parameters, in the order of ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``."""

    model: Sharded
    replicas: int
    _all_gather_comm: Any = None
    _reduce_scatter_comm: Any = None
    _all_reduce_hook: Any = None
    gathered: tuple[Stream, int] | None = None
    #: The end of the group's last reduction, until the last backward pass of a step waits for it.
    pending: tuple[Stream, int] | None = None
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
            with self.model.rank.on(self.model.gathers):
                self._all_gather_comm()
            self.gathered = self.model.gathers.last()

    def wait_for_unshard(self) -> None:
        self.model.wait(self.gathered)
        self.gathered = None

    def post_backward(self) -> None:
        self.model.wait(self.model.scattered)
        if not self.has_gradients:
            return
        if self.pending is not None:
            self.model.wait(self.pending)
        self._reduce_scatter_comm.allocate()
        self.model.scatters.wait_stream(self.model.rank.compute)
        with self.model.rank.on(self.model.scatters):
            self._reduce_scatter_comm.allocate()
            self._reduce_scatter_comm()
        self.model.scattered = self.model.reduced = self.model.scatters.last()
        if self._is_hsdp:
            self.model.reduces.wait_stream(self.model.scatters)
            with self.model.rank.on(self.model.reduces):
                Comm(self.model, self.model.replicas, self.model.replicated_bytes)()
                if self._all_reduce_hook is not None:
                    self._all_reduce_hook(torch.zeros(1))
            self.model.reduced = self.model.reduces.last()
        self.pending = self.model.reduced

    def finalize_backward(self) -> None:
        self.model.wait(self.model.reduced)
        self.pending = None


@dataclass
class Comm:
    """A collective on the current stream, by default between the shards."""

    model: Sharded
    network: Stream | None = None
    size: int = 0

    def __call__(self) -> None:
        rank = self.model.rank
        of_shards, rank.network = rank.network, self.network or rank.network
        rank.all_reduce(self.size).wait()
        rank.network = of_shards

    def allocate(self) -> None:
        """Do nothing."""


class Sharded(nn.Module):
    """A sharded model of equal blocks; the first one is reduced after backward."""

    backend = "nccl"

    def __init__(self, rank: Rank, replicas: int) -> None:
        super().__init__()
        self.rank = rank
        self.gathers, self.scatters, self.reduces = Stream(rank), Stream(rank), Stream(rank)
        self.replicas, self.replicated_bytes = rank.network, 0
        self.scattered: Any = None
        self.reduced: Any = None
        self.weight = nn.Parameter(torch.zeros(2))
        self.groups = [Group(self, replicas) for _ in range(BLOCKS)]
        #: For each step, the positions of the waits in the stream of the computation, by their place.
        self.waits: list[dict[str, list[int]]] = []
        self.place = "forward"
        self.is_last_backward = True
        self.state = SimpleNamespace(
            _is_root=True, _fsdp_param_groups=self.groups, _root_post_backward_final_callback=self.finalize
        )

    def _get_fsdp_state(self) -> Any:
        return self.state

    def wait(self, mark: tuple[Stream, int] | None) -> None:
        """Let the computation wait for another stream, or for its own."""
        with self.rank.world.changed:
            _, at = self.rank.compute.add(Operation(self.rank.now, after=[mark or self.rank.compute.last()]))
        self.waits[-1][self.place].append(at)

    def forward(self) -> torch.Tensor:
        self.place = "forward"
        self.waits.append({"forward": [], "backward": [], "end": []})
        for stream in (self.gathers, self.scatters):
            stream.wait_stream(self.rank.compute)
        for group in self.groups:
            group.unshard()
            group.wait_for_unshard()
            self.rank.launch(FORWARD_S)
        loss: torch.Tensor = Pass.apply(self.weight, self)
        return loss

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
        final = self.state._root_post_backward_final_callback
        torch.autograd.Variable._execution_engine.queue_callback(final)

    def finalize(self) -> None:
        self.place = "end"
        self.groups[0].post_backward()
        for group in self.groups if self.is_last_backward else ():
            group.finalize_backward()

    def waited_s(self, step: int) -> dict[str, float]:
        """Return the idle time of the computation in the waits of a step at each place."""
        ends = [operation.end or 0.0 for operation in self.rank.compute.operations]
        places = self.waits[step].items()
        return {place: sum(ends[at] - ends[at - 1] for at in own) for place, own in places}


def recorded(folder, world: World, models: list[Sharded]) -> list[Window]:
    """Train the model of each rank."""

    def program(rank: Rank, recorder: Recorder) -> None:
        def update() -> None:
            with recorder.optimizer():
                Optimizer(Model()).step()

        recorder.watch(models[rank.number])
        loop(recorder, models[rank.number], update)

    return record(world, folder, program, attribution_steps=3)


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", Sharded)


@pytest.mark.parametrize(
    ("link_s", "replicas", "unused"),
    [(HIDDEN, 1, None), (HIDDEN, 2, None), (IN_BACKWARD, 1, None), (NOWHERE, 2, None), (NOWHERE, 1, 1)],
)
def test_the_waits_of_a_sharded_model_are_the_idle_time_of_its_computation(
    tmp_path, link_s, replicas, unused
):
    world = World(2, link=Link(link_s, 0.0), costs=Costs(launch_s=2e-6, event_s=0.5e-6))
    models = [Sharded(rank, replicas) for rank in world.ranks]
    for model in models:
        if unused is not None:
            model.groups[unused].has_gradients = False
    for window, model in zip(recorded(tmp_path, world, models), models, strict=True):
        assert window.conditions["rank"]["sync_passes"] == 10
        assert "post_backward" not in vars(model.groups[0])
        for step, parts in zip(range(-3, 0), window.parts, strict=True):
            waited_s = model.waited_s(step)
            found = {place: getattr(parts, f"comm_{place}_s") for place in waited_s}
            assert found == pytest.approx(waited_s, rel=0.01, abs=50e-6)
            assert found["end"] >= link_s * (1 + (replicas > 1)) * 0.99
            assert parts.forward_s == pytest.approx(BLOCKS * FORWARD_S, rel=0.01)
            assert parts.backward_s == pytest.approx(BLOCKS * BACKWARD_S, rel=0.01)
            assert abs(parts.other_s) < 50e-6


def test_a_pass_waits_for_the_all_reduces_of_the_pass_before(tmp_path):
    """As with ``set_is_last_backward(False)`` for all micro-batches but the last one.

    A group's all-reduce takes 15 ms, on another network than its other collectives.
    """
    world = World(2, link=Link(1e-3, 1e-3), costs=Costs(launch_s=2e-6, event_s=0.5e-6))
    models = [Sharded(rank, 2) for rank in world.ranks]
    for model in models:
        model.replicas, model.replicated_bytes = Stream(model.rank), 14

    def program(rank: Rank, recorder: Recorder) -> None:
        model = models[rank.number]
        recorder.watch(model)
        for _ in recorder.batches(iter(Feed(Model()).next, None)):
            with recorder.step():
                for model.is_last_backward in (False, True):
                    model().backward()
                with recorder.optimizer():
                    Optimizer(Model()).step()
            if recorder.done:
                break

    windows = record(world, tmp_path, program, attribution_steps=3)
    for window, model in zip(windows, models, strict=True):
        for step, parts in zip(range(-3, 0), window.parts, strict=True):
            passes = [model.waited_s(2 * step), model.waited_s(2 * step + 1)]
            waited_s = {place: sum(one[place] for one in passes) for place in passes[0]}
            found = {place: getattr(parts, f"comm_{place}_s") for place in waited_s}
            assert found == pytest.approx(waited_s, rel=0.01, abs=100e-6)
            assert found["backward"] > 10e-3
            assert abs(parts.other_s) < 100e-6


def test_collectives_that_let_the_host_wait_leave_the_parts_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(Sharded, "backend", "gloo")
    world = World(1)
    [window] = recorded(tmp_path, world, [Sharded(world.ranks[0], 1)])
    assert all(math.isnan(parts.exposed_s) for parts in window.parts)
    expected = PartsNotTimed(torch=torch.__version__, strategy="FSDP2 without NCCL")
    assert expected.as_json() in read_json(RunFolder(tmp_path).env)["facts"]
