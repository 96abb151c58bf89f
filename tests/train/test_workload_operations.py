"""What a step computes, keeps and sends, compared with programs that are written by hand with torch alone."""

from contextlib import nullcontext
from itertools import repeat
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_scaling_bench.measure.torch_internals import parameter_groups
from ddp_scaling_bench.train.models import spec_of
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.training import Trainer, build_task, parameters_of, wrap, zero_batch
from tests.train import by_hand
from tests.train.test_training_strategies import needs_fsdp

TEXT = {"parameters": 300_000, "seq_len": 16}
MODELS = {"resnet50": {"image_size": 32}, "transformer": TEXT, "llama": TEXT}


@pytest.fixture(scope="module", autouse=True)
def group():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads wait for each other on a busy machine
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


class Kernels(TorchDispatchMode):
    """Count the operations that compute or copy, in forward, backward and the optimizer."""

    found = reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function == torch.ops.aten._local_scalar_dense.default
        self.found += not (function.is_view or function == torch.ops.aten.detach.default)
        return function(*args, **(kwargs or {}))


def built_in(model: str, **options):
    """Return a trainer, and a batch."""
    chosen = TrainOptions(device="cpu", model=model, **MODELS[model], **options)
    shape = spec_of(model).sample(chosen)
    task = build_task(chosen, shape)
    batch = zero_batch(task, shape, 2, torch.device("cpu"))
    return Trainer(wrap(task, chosen), SimpleNamespace(next=repeat(batch).__next__), chosen), batch


def network_by_hand(model: str, trainer: Trainer):
    if model == "resnet50":
        return by_hand.ResNet50()
    shape, time = trainer.parts.module.network.shape, TEXT["seq_len"]
    sizes = (shape.vocabulary, shape.width, shape.layers, shape.heads)
    if model == "llama":
        return by_hand.Llama(*sizes, shape.hidden, time)
    return by_hand.Gpt(*sizes, time)


def kernels_of(step) -> int:
    step()  # DDP rebuilds its buckets, and the optimizer makes its states
    step()
    with Kernels() as counter:
        step()
    return counter.found


@pytest.mark.parametrize(
    ("model", "precision", "strategy"),
    [
        ("resnet50", "fp32", "ddp"),  # bf16 takes half a minute on a CPU
        ("transformer", "fp32", "none"),
        ("transformer", "bf16", "ddp"),
        ("llama", "fp32", "ddp"),
    ],
)
def test_a_step_has_the_operations_of_a_loop_by_hand(model, precision, strategy):
    trainer, (inputs, targets) = built_in(model, strategy=strategy, precision=precision)
    network = network_by_hand(model, trainer)
    assert parameters_of(network) == parameters_of(trainer.parts.module)
    called = DistributedDataParallel(network, gradient_as_bucket_view=True) if strategy == "ddp" else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)

    def by_hand_step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            scores = called(inputs)
        functional.cross_entropy(scores.flatten(0, -2).float(), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        trainer.backward(trainer.feed.next(), syncs=True)
        trainer.update()

    expected = kernels_of(by_hand_step)
    assert kernels_of(step) <= 1.02 * expected


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # ZeRO's import
@pytest.mark.parametrize("strategy", ["none", "ddp", "zero1", pytest.param("fsdp", marks=needs_fsdp)])
def test_a_step_with_a_loss_scale_reads_no_value_of_the_device(strategy):
    trainer, _ = built_in("llama", strategy=strategy, precision="fp16", optimizer="adamw")
    trainer.step()
    with Kernels() as counter:
        trainer.step()
    assert (counter.reads > 0) == (strategy == "zero1")  # GradScaler does not see its fused optimizer


def kept_bytes(forward) -> int:
    """Return the size of what a forward pass keeps for backward, without weights that are gathered again."""
    kept = {}

    def keep(tensor):
        local = getattr(tensor, "to_local", lambda: tensor)()
        kept[local.untyped_storage()._cdata] = local.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    size = sum(one.nbytes() for one in kept.values())
    loss.backward()
    return size


@needs_fsdp
def test_fsdp_keeps_and_sends_what_its_mixed_precision_policy_says():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    trainer, (inputs, targets) = built_in("transformer", strategy="fsdp", precision="bf16")
    network = network_by_hand("transformer", trainer)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in network.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(network, mp_policy=policy, reshard_after_forward=False)

    def forward():
        return functional.cross_entropy(network(inputs).flatten(0, 1).float(), targets.flatten())

    trainer.step()
    assert kept_bytes(lambda: trainer.model(inputs, targets)) == pytest.approx(kept_bytes(forward), rel=0.05)
    own, by_hand_groups = parameter_groups(trainer.model), parameter_groups(network)
    for name, bytes_each in (("gathered_bytes", 2), ("reduced_bytes", 4)):
        sizes = [getattr(one, name) for one in own]
        assert sizes == [getattr(one, name) for one in by_hand_groups]
        assert sum(sizes) == bytes_each * parameters_of(network)[0]
