"""Trainings whose ranks train together or not, one after another in the same ranks, each with a recorder."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.record import Recorder
from tests.record import loops
from tests.train.ranks import folder_of_test

LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 1, "epochs": 1}
STEPS = 3 + 4 + 2 + 2


def average(tensors: list[Tensor]) -> None:
    for one in tensors:
        dist.all_reduce(one)
        one.div_(dist.get_world_size())


def gradients(model: Any) -> None:
    average([one.grad for one in model.parameters() if one.grad is not None])


def weights(model: Any) -> None:
    average([one.detach() for one in model.parameters()])


def logs(model: Any) -> None:
    dist.all_reduce(torch.ones(()))


def other_start() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def low_rank() -> Any:
    """A frozen layer, and one that is 0 at the start."""
    model: Any = loops.network()
    model[0].requires_grad_(False)
    nn.init.zeros_(model[2].weight)
    return model


def with_unused() -> Any:
    """A network with a parameter that only weight decay changes."""
    model: Any = loops.network()
    model[1].unused = nn.Parameter(torch.randn(9))
    return model


def decays(model: Any) -> None:
    model[1].unused.grad = torch.zeros(9)


def ddp(build: Callable[[], nn.Module] = loops.network, **options: Any) -> nn.Module:
    return DistributedDataParallel(build(), **options)


#: By name: the model, and functions of it after the backward pass, after the update and after the step.
TRAININGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Callable[[Any], None]]]] = {
    "apart": (loops.network, {}),
    "apart, with logs": (loops.network, {"step": logs}),
    "apart, low rank": (low_rank, {}),
    "apart, decay": (with_unused, {"backward": decays}),
    "apart, other starts": (other_start, {}),
    "apart, other starts, with logs": (other_start, {"step": logs}),
    "apart, ddp": (lambda: ddp(process_group=dist.new_subgroups(1)[0]), {}),
    "copies": (loops.network, {}),
    "gradients": (loops.network, {"backward": gradients}),
    "gradients, other starts": (other_start, {"backward": gradients}),
    "weights": (loops.network, {"update": weights}),
    "weights, after the step": (loops.network, {"step": weights}),
    "ddp": (ddp, {}),
    "ddp, copies": (ddp, {}),
    "ddp, low rank": (lambda: ddp(low_rank), {}),
    "no model": (loops.network, {}),
}


def trainings() -> int:
    rank = loops.join()
    for name, (build, exchanges) in TRAININGS.items():
        model = build()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, 0.01) if "decay" in name else torch.optim.SGD(trained, 0.1)
        torch.manual_seed(7 if "copies" in name else rank)
        given = None if name == "no model" else model
        with Recorder(given, run_dir=folder_of_test() / name, **LENGTHS) as recorder:
            for points, labels in recorder.batches(loops.batches(STEPS)):
                with recorder.step():
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(points), labels).backward()
                    exchanges.get("backward", id)(model)
                    optimizer.step()
                    exchanges.get("update", id)(model)
                exchanges.get("step", id)(model)
    return loops.leave()


def evaluates() -> int:
    """Collectives of 2 MB between loops of four steps, in a pause within a step, and in one between two."""
    loops.join()
    model, optimizer = loops.trained(ddp())
    evaluated = torch.ones(500_000)
    with Recorder(model, run_dir=folder_of_test(), **loops.LENGTHS) as recorder:
        while recorder.epochs < loops.LENGTHS["epochs"]:
            for number, batch in enumerate(recorder.batches(loops.batches(4))):
                with recorder.step():
                    loops.train(model, optimizer, batch)
                    with recorder.pause():
                        average([evaluated] * (number == 1))
                with recorder.pause():
                    average([evaluated] * (number == 2))
            average([evaluated])
    return loops.leave()


def one_is_late() -> int:
    """Ranks that never wait for each other train on until rank 0 has completed the files."""
    rank = loops.join()
    model, optimizer = loops.trained(loops.network())
    torch.manual_seed(rank)
    with Recorder(model, run_dir=folder_of_test(), **LENGTHS) as recorder:
        sums, deadline = folder_of_test() / "SHA256SUMS", time.monotonic() + loops.DEADLINE_S
        while not (recorder.epochs and sums.exists()) and time.monotonic() < deadline:
            with recorder.step(samples=1):
                loops.train(model, optimizer, next(loops.batches(1, nap_s=0.002 + 0.02 * rank)))
        print("separate-trainings" in (folder_of_test() / "env.json").read_text(), flush=True)
    return loops.leave()
