"""Trainings that compute by sleeping, and whose collectives take a known time longer."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

from bench.measure.step_parts import HostClock, StepTimer
from bench.train import training
from bench.train.options import TrainOptions
from bench.train.strategies import ddp, fsdp2
from bench.train.strategies.zero1 import Zero1Parts
from tests.train.conftest import folder_of_test
from tests.train.scenarios import FixedFeed, join_group

TIMES_FSDP = TorchVersion(torch.__version__) >= "2.9"
BLOCKS, FORWARD_S, BACKWARD_S = 2, 5e-3, 8e-3
GATHER_S, SCATTER_S, REDUCE_S, BROADCAST_S = 10e-3, 16e-3, 12e-3, 14e-3


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return points.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradients[0]


class Block(nn.Linear):
    def forward(self, points: Tensor) -> Tensor:
        return Nap.apply(super().forward(points))  # type: ignore[no-untyped-call]


class Truth:
    """The seconds of the collectives of a step, by their place."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.place, self.reductions = "forward", 0
        self.seconds = dict.fromkeys(("forward", "backward", "end"), 0.0)

    def late(self, function: Callable[..., Any], seconds: float, *, reduces: bool) -> Callable[..., Any]:
        """Return a collective that takes ``seconds`` longer. The last of several reductions ends a step."""

        def call(*values: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self.reductions += reduces
            place = "end" if self.reductions > BLOCKS else self.place
            time.sleep(seconds)
            result = function(*values, **named)
            self.seconds[place] += time.perf_counter() - began
            return result

        return call


TRUTH = Truth()


class Naps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.Sequential(*(Block(16, 16) for _ in range(BLOCKS)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = (self.blocks(self.first(inputs)) - targets).square().mean()
        TRUTH.place = "backward"
        return loss


class Sharded(fsdp2.ShardedParts):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        TRUTH.place = "forward"
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)
        TRUTH.place = "forward"


def sharded(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Shard the model; its collectives begin late."""
    from torch.distributed.fsdp import fully_shard  # torch before 2.6 has none

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
        (group,) = [module._get_fsdp_state()._fsdp_param_group]
        for name, seconds in (("_all_gather_comm", GATHER_S), ("_reduce_scatter_comm", SCATTER_S)):
            kind = type(getattr(group, name))
            call = TRUTH.late(kind.__call__, seconds, reduces="reduce" in name)
            setattr(group, name, type(kind.__name__, (kind,), {"__call__": call})())
    return model


def zero1_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    with warnings.catch_warnings(action="ignore"):  # about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer._sync_params = TRUTH.late(optimizer._sync_params, BROADCAST_S, reduces=False)
    optimizer.register_step_pre_hook(lambda *_: setattr(TRUTH, "place", "end"))
    return optimizer


def parts_of(spec: Any, model: nn.Module, grad_accum: int = 1) -> list[dict[str, Any]]:
    """Return the parts of steps and the truth, and check that nothing is left of the timers."""
    training.strategy_of = lambda name: spec
    options = TrainOptions(device="cpu", grad_accum=grad_accum)
    batch = (torch.ones(4, 16), torch.zeros(4, 16))
    trainer = training.Trainer(model, FixedFeed([batch] * 99, None), options)
    before = [dict(vars(owner)) for owner in owners(trainer)]
    trainer.step()
    timer, found = StepTimer(HostClock()), []
    for steps in (1, 4):  # as in two epochs
        assert trainer.parts.start(timer) is None
        for _ in range(steps):
            TRUTH.start()
            parts = trainer.timed_step(timer)
            assert parts is not None
            found.append(asdict(parts) | {"other_s": parts.other_s, "truth": TRUTH.seconds})
        trainer.parts.stop()
    names = ("_all_gather_comm", "_reduce_scatter_comm", "_sync_params", "post_backward", "_all_reduce_hook")
    for owner, old in zip(owners(trainer), before, strict=True):
        assert all(vars(owner).get(name) is old.get(name) for name in names)
    return found[1:]


def owners(trainer: training.Trainer) -> list[object]:
    """Return the objects whose attributes the timers replace."""
    modules = [one for one in trainer.model.modules() if hasattr(one, "_get_fsdp_state")]
    return [trainer.optimizer, *(one._get_fsdp_state()._fsdp_param_group for one in modules)]


def run() -> int:
    """Write the parts of the steps of each training."""
    rank = join_group()
    fsdp = replace(fsdp2.SPEC, parts=Sharded)
    zero1 = replace(ddp.SPEC, parts=Zero1Parts, optimizer=zero1_optimizer)
    found = {"zero1": parts_of(zero1, ddp.wrap(Naps(), TrainOptions(device="cpu")))}
    if TIMES_FSDP:
        found["fsdp"] = parts_of(fsdp, sharded(Naps(), (2,)))
        found["fsdp, accumulated"] = parts_of(fsdp, sharded(Naps(), (2,)), grad_accum=2)
        dist.all_reduce = TRUTH.late(dist.all_reduce, REDUCE_S, reduces=True)
        found["replicas"] = parts_of(fsdp, sharded(Naps(), (2, 1)))
    if rank == 0:
        (folder_of_test() / "parts.json").write_text(json.dumps(found))
    return 0
