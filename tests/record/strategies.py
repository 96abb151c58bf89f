"""Trainings with different strategies, one after another in the same ranks, each with a recorder."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from ddp_scaling_bench.record import Recorder
from tests.record import loops
from tests.train.ranks import folder_of_test

#: Some sizes are odd, so that FSDP1 pads its shards.
SHAPES = ((16, 7), (7, 7), (7, 4))
PARAMETERS = sum(inputs * outputs + outputs for inputs, outputs in SHAPES)
FROZEN = 7 * 4 + 4
NAP_S = 0.01
LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 2, "epochs": 1}
STEPS = 3 + 4 + 3 + 2
CPU = torch.device("cpu")


class Nap(nn.Module):
    @torch.compiler.disable
    def forward(self, points: Tensor) -> Tensor:
        time.sleep(NAP_S)
        return points


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, last = (nn.Linear(*shape) for shape in SHAPES)
    last.requires_grad_(False)
    return nn.Sequential(first, nn.Sequential(second, nn.ReLU()), Nap(), last)


def flattened() -> FullyShardedDataParallel:
    options = {"use_orig_params": True, "device_id": CPU}
    model = network()
    model[1] = FullyShardedDataParallel(model[1], **options)
    model[3] = FullyShardedDataParallel(model[3], **options)
    return FullyShardedDataParallel(model, **options)


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), init_device_mesh("cpu", (2,))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def models() -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the name of a training, the model that its loop calls, and the model that the recorder gets."""
    model = flattened()
    yield "fsdp1", model, model
    if TorchVersion(torch.__version__) >= "2.6":
        model = sharded()
        yield "fsdp2", model, model
        yield "a layer of fsdp2", model, model[0]
    model = torch.compile(DistributedDataParallel(network()), backend="eager")
    yield "ddp, compiled", model, model
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(16), network()))
    yield "ddp with buffers", model, model
    model = DistributedDataParallel(network().requires_grad_(True)[:2])
    # A newer torch cannot compile its own DDP as one graph (2.15: Logger.set_runtime_stats_and_log).
    model.compile(backend="eager", fullgraph=TorchVersion(torch.__version__) < "2.14")
    yield "ddp, compiled in place", model, model


def strategies() -> int:
    loops.join()
    for name, model, given in models():
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        with Recorder(given, run_dir=folder_of_test() / name, **LENGTHS) as recorder:
            for batch in recorder.batches(loops.batches(STEPS, nap_s=NAP_S)):
                with recorder.step():
                    loops.train(model, optimizer, batch)
    return loops.leave()
