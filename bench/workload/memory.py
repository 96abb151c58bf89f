"""The memory of a rank by its use: predicted from the strategy, and measured in one step more.

A strategy divides the weights, the gradients and the optimizer's states, or some of them, among ranks (S.
Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC20). It gathers
divided weights for as long as it needs them. Activations are all tensors that forward saves for backward,
except for weights. With autocast, they include the copies of the weights in the lower precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from ..matrix.workload import WorkloadOptions
from ..measure.ranks import Host
from ..measure.torch_internals import parameter_groups
from .models import DataShape
from .strategies import strategy_of
from .training import STATES_PER_WEIGHT, Trainer, build_task, parameters_of, zero_batch


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by their use; None if they are unknown.

    Attributes:
        weights: those that the rank has between steps.
        gradients: those that the optimizer reads.
        states: the tensors of the optimizer after a step.
        gathered: the most divided weights that are gathered at the same time in forward.
        activations: the tensors that a forward pass saves for backward, without weights.
    """

    weights: float
    gradients: float | None
    states: float
    gathered: float | None
    activations: float | None


def kept_bytes(options: WorkloadOptions, model: nn.Module, hosts: Sequence[Host]) -> dict[str, float]:
    """Return the bytes of ``weights``, ``gradients`` and ``states`` that a rank on these hosts needs."""
    strategy = strategy_of(options.strategy)
    ranks = len(hosts[0].ranks) if strategy.within_hosts else sum(len(host.ranks) for host in hosts)
    _, trained = parameters_of(model)
    whole = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": trained,
        "states": trained * STATES_PER_WEIGHT[options.optimizer],
    }
    return {name: size / ranks if name in strategy.sharded else size for name, size in whole.items()}


def predict(
    options: WorkloadOptions, model: nn.Module, shape: DataShape, hosts: Sequence[Host], *, per_gpu_batch: int
) -> Memory:
    """Predict the memory of a rank on these hosts, with a wrapped model after its first step."""
    groups = parameter_groups(model)
    kept = sum(one.gathered_bytes for one in groups if one.is_kept)
    others = max((one.gathered_bytes for one in groups if not one.is_kept), default=0)
    return Memory(
        **kept_bytes(options, model, hosts),
        gathered=kept + others if groups or "weights" not in strategy_of(options.strategy).sharded else None,
        activations=_predict_activations(options, shape, per_gpu_batch),
    )


def _predict_activations(options: WorkloadOptions, shape: DataShape, per_gpu_batch: int) -> float | None:
    """Return the bytes that forward saves on the meta device, or None with autocast, which it lacks."""
    if options.precision not in ("fp32", "tf32"):
        return None
    plain = options.model_copy(update={"device": "cpu", "precision": "fp32", "compile": False})
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        task = build_task(plain, shape)
        found = ForwardBytes(task)
        with found.counted(), _FusedAttention():
            task(*zero_batch(task, shape, per_gpu_batch, torch.device("meta")))
    return found.activations


class _FusedAttention(TorchFunctionMode):
    """Let attention save what torch's fused kernels save; the meta device would save its matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _SavedByAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _SavedByAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Tensors are [batch, heads, length, width]; the output lies as [batch, length, heads, width].
        output = torch.empty_like(value.transpose(1, 2).contiguous()).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        return output


def measure_step(trainer: Trainer, *, compiled: bool) -> Memory:
    """Train one step more, and measure the memory of its tensors.

    Hooks would be compiled with a ``compiled`` model, so the tensors of its forward pass are not measured.
    """
    gradients: list[int] = []

    def before_update(*_: Any) -> None:
        gradients.append(_bytes(p.grad for p in trainer.model.parameters() if p.grad is not None))

    weights = _bytes(trainer.model.parameters())
    found = ForwardBytes(trainer.model)
    optimizer: Any = trainer.optimizer
    with optimizer.register_step_pre_hook(before_update), nullcontext() if compiled else found.counted():
        trainer.step()
    trainer.take_loss()
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has one of its own part
    states = [one for states in own.state.values() for one in states.values() if isinstance(one, Tensor)]
    updated = gradients[0] if gradients else None  # a scaler skips the update if gradients overflow
    in_forward = (None, None) if compiled else (found.gathered, found.activations)
    return Memory(weights, updated, _bytes(states), *in_forward)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, or the tensor itself."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(own.numel() * own.element_size() for own in map(_local, tensors))


class ForwardBytes:
    """Count ``activations`` and ``gathered`` of :class:`Memory`, the most of any forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own = {_storage(one) for one in chain(model.parameters(), model.buffers())}
        self._saved: dict[StorageWeakRef, int] = {}
        self._gathered: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self._is_in_forward = False
        self.activations = self.gathered = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in the forward passes within this context."""
        begin = self._model.register_forward_pre_hook(self._begin)
        end = register_module_forward_hook(self._ended)
        with begin, end, saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _begin(self, *_: Any) -> None:
        self._saved.clear()
        self._is_in_forward = True

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._is_in_forward:
            self._saved.setdefault(_storage(tensor), tensor.untyped_storage().nbytes())
        return tensor

    def _ended(self, module: nn.Module, *_: Any) -> None:
        """Count the gathered weights before those of a module are freed, and at the end all tensors."""
        weights = map(_local, self._model.parameters())
        present = {_storage(one): one.untyped_storage() for one in weights}
        gathered = {key: own for key, own in present.items() if key not in self._own}
        self._gathered |= gathered
        self.gathered = max(self.gathered, sum(own.nbytes() for own in gathered.values()))
        if module is self._model:
            self._is_in_forward = False
            saved = self._saved.items()
            size = sum(size for one, size in saved if one not in self._own and one not in self._gathered)
            self.activations = max(self.activations, size)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
