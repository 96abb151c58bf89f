"""Private interfaces of torch, which any release can change or remove.

No other module uses such an interface. If a release lacks an interface, the function for it returns an empty
value, and these values stay empty:

- all parts of a step: ``set_ddp_sample_rate``, ``ddp_times`` (also buckets and unused parameters),
  ``observe_sharding`` (FSDP2), ``observe_parameter_sync`` (ZeRO-1), ``backward_callbacks`` (a user's loop);
- ``group_store``: recordings of several ranks; ``fsdp_version``: the strategy of a module within a model;
- ``count_collectives``: collectives of a step; ``compilations``: recompilations;
- ``is_whole``: FSDP1's shards, which cannot be compared between ranks;
- ``parameter_groups``: sizes of FSDP2's messages; ``collective_timeout_s``: the time-out in messages;
- ``group_error``: survivors' messages with NCCL.

Without the other interfaces, hooks are compiled, memory is filled, and start and exit are slower.

``tests/measure/test_torch_internals.py`` and, for FSDP, ``tests/record/test_strategies.py`` check that all
these interfaces exist. The first of them passed with torch 2.4.1, 2.7.1, 2.10.0, 2.13.0 and 2.15.0
(``make torch-releases``).
"""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion

from .findings import PartsNotTimed
from .step_parts import ShardingTimer

#: Errors of a call to an interface that is missing or takes other arguments.
_MISSING = (AttributeError, TypeError)
#: The same, and errors without a process group, or of a call that the group's backend does not support.
_UNKNOWN = (*_MISSING, dist.DistError, RuntimeError, ValueError)


def set_ddp_sample_rate(model: DistributedDataParallel, steps: int) -> None:
    """Make DDP's logger record times in each of the first ten steps, then in one of every ``steps`` steps."""
    with suppress(*_MISSING):
        model._set_ddp_runtime_logging_sample_rate(steps)  # type: ignore[no-untyped-call]


def ddp_times(model: DistributedDataParallel) -> Mapping[str, int]:
    """Return the numbers of DDP's logger; times are in nanoseconds. On CUDA, this waits for the device.

    The result is empty if the sample rate cannot be set: the times could then belong to an earlier step.
    """
    return dict(_ddp_log(model, "ints_map"))


def ddp_texts(model: DistributedDataParallel) -> Mapping[str, str]:
    """Return the texts of DDP's logger, such as ``rebuilt_bucket_sizes``."""
    return dict(_ddp_log(model, "strs_map"))


def _ddp_log(model: DistributedDataParallel, name: str) -> Any:
    logger = getattr(model, "logger", None)
    if logger is not None and hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        with suppress(*_MISSING):
            logger.set_runtime_stats_and_log()
            return getattr(logger._get_ddp_logging_data(), name)
    return {}


def unused_parameter_bytes(model: DistributedDataParallel) -> int | None:
    """Return the size of the parameters that the last backward pass did not use, or None if it is unknown.

    torch 2.4 and 2.7 add up the sizes of all steps; 2.10 does not. Before 2.10, only the value 0 is reliable.
    """
    found = ddp_times(model).get("unused_parameter_size") if model.find_unused_parameters else None
    return found if not found or TorchVersion(torch.__version__) >= "2.10" else None


def backward_callbacks() -> Callable[[Callable[[], None]], None] | None:
    """Return torch's function ``queue(callback)``, or None if this release of torch lacks it.

    The current backward pass calls queued callbacks at its end, in order, and last those that they queue.
    """
    return getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)


def group_store() -> Store | None:
    """Return the store of the default process group, or None if it is unknown."""
    with suppress(*_UNKNOWN):
        store: Store = distributed_c10d._get_default_store()
        return store
    return None


def count_collectives() -> int | None:
    """Return the number of collectives called on all groups of several ranks, or None if it is unknown.

    The default group counts even if it has one rank.
    """
    with suppress(*_UNKNOWN):
        default = distributed_c10d._get_default_group()
        groups = [one for one in distributed_c10d._world.pg_map if one is default or one.size() > 1]
        backends: set[Any] = {one._get_backend(kind) for one in groups for kind in one._device_types}
        return sum(int(one._get_sequence_number_for_group()) for one in backends)
    return None


def is_whole(parameter: nn.Parameter) -> bool:
    """Return whether a rank has all values of a parameter: it is neither a shard nor without values."""
    is_part = hasattr(parameter, "full_tensor") or getattr(parameter, "_fsdp_flattened", False)
    return not (is_part or is_lazy(parameter) or parameter.is_meta) and parameter.numel() > 0


def compilations() -> tuple[int, float] | None:
    """Return how many frames torch.compile has compiled so far, and the seconds (None if unknown)."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is None:
        return 0, 0.0
    with suppress(*_MISSING):
        metrics = dynamo.compilation_time_metrics.items()  # the names differ between releases of torch
        seconds = [one for name, times in metrics if name.endswith("compile_inner") for one in times]
        return len(seconds), sum(seconds)
    return None


def observe_compiled_calls(
    model: nn.Module, begins: Callable[[], None], ended: Callable[[Any], None]
) -> Callable[[], None] | None:
    """Call ``begins`` and ``ended`` around each call of a model that ``model.compile()`` compiled in place.

    Hooks of it would be compiled, too, and fail with ``fullgraph=True``. The result ends the observation; it
    is None for any other model.
    """
    compiled: Any = getattr(model, "_compiled_call_impl", None)

    def call(*values: Any, **named: Any) -> Any:
        begins()
        output = compiled(*values, **named)
        ended(output)
        return output

    return None if compiled is None else _replaced([(model, "_compiled_call_impl", call)])


def fsdp_version(module: nn.Module) -> int | None:
    """Return 1 or 2 if a module belongs to a model with FSDP of this version, else None."""
    own = vars(module)  # FSDP sets these attributes for torch.compile
    if not own.get("_is_fsdp_managed_module"):
        return None
    # FSDP1 marks the parts of its flat parameters, and the flat parameters themselves.
    flattened = (getattr(one, "_fsdp_flattened", False) is True for one in module.parameters())
    return 1 if own.get("_fsdp_use_orig_params") is False or any(flattened) else 2


#: Stands for a method that an object has from its class.
_OF_CLASS = object()


def observe_sharding(model: nn.Module, observer: ShardingTimer) -> Callable[[], None] | PartsNotTimed:
    """Let ``observer`` make the calls of FSDP2 in all groups of ``model`` that communicate or wait.

    Returns:
        A function that ends the observation, or the reason why there is none: this release of torch lacks an
        interface, ``model`` is a part or replicated only, or the collectives of CUDA are not those of NCCL.
    """
    try:
        states = _sharding_states(model)
        changes = [change for state in states for change in _observations(state, observer)]
        is_part = all(state._is_root is False for state in states)
        unseen = _unseen([group for state in states for group in _groups(state)], observer)
    except _UNKNOWN:
        unseen = "FSDP2"
    if unseen:
        return PartsNotTimed(torch=torch.__version__, strategy=unseen)
    return PartsNotTimed() if is_part else _replaced(changes)


def _unseen(groups: list[Any], observer: ShardingTimer) -> str:
    """Return how groups communicate if an observer cannot see it, else an empty text."""
    shards: list[Any] = [getattr(group.mesh_info, "shard_process_group", None) for group in groups]
    if None in shards:  # replicas only: no collective of FSDP2 is called
        return "replicate"
    is_seen = observer.is_on_host or all(
        one._get_backend(torch.device("cuda")).name() == "nccl" for one in shards
    )
    return "" if is_seen else "FSDP2 without NCCL"  # other backends let the host wait


def _replaced(changes: list[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set attributes, given as object, name and value; return the function that sets the former values."""
    before = [(owner, name, vars(owner).get(name, _OF_CLASS)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)

    def restore() -> None:
        for owner, name, value in before:
            delattr(owner, name)
            if value is not _OF_CLASS:
                setattr(owner, name, value)

    return restore


def _sharding_states(model: nn.Module) -> list[Any]:
    """Return the states of FSDP2's modules; a state can belong to several modules."""
    states = [getattr(module, "_get_fsdp_state", lambda: None)() for module in model.modules()]
    return list({id(state): state for state in states if state}.values())


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters; None stands for those that belong to modules within the module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [one for one in ([state._fsdp_param_group] if groups is None else groups) if one is not None]


def _observations(state: Any, observer: ShardingTimer) -> Iterator[tuple[Any, str, Any]]:
    """Yield the object, the name and the new value of each attribute of a state and its groups."""
    name = "_root_post_backward_final_callback"
    yield state, name, _observed(getattr(state, name), observer.ends)
    for group in _groups(state):
        gathers = partial(observer.gathers, group)
        yield group, "_all_gather_comm", _observed_comm(group._all_gather_comm, gathers)
        allocates = partial(observer.allocates, group)
        comm = _observed_comm(group._reduce_scatter_comm, observer.scatters, allocates)
        yield group, "_reduce_scatter_comm", comm
        hook = group._all_reduce_hook
        if hook is not None or group._is_hsdp:
            yield group, "_all_reduce_hook", _observed_hook(hook, partial(observer.all_reduced, group))
        if observer.is_on_host:
            continue
        waits = partial(observer.waits_for_gather, group)
        yield group, "wait_for_unshard", _observed(group.wait_for_unshard, waits)
        post_backward = partial(observer.post_backward, group)
        yield group, "post_backward", _observed(group.post_backward, post_backward)
        yield group, "finalize_backward", _observed(group.finalize_backward, observer.finalizes)


def _observed(function: Callable[..., Any], make: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    return lambda *values, **named: make(lambda: function(*values, **named))


def _observed_hook(hook: Callable[[Tensor], None] | None, ended: Callable[[], None]) -> Callable[..., None]:
    def call(reduced: Tensor) -> None:
        if hook is not None:
            hook(reduced)
        ended()

    return call


def _observed_comm(
    comm: Any, make: Callable[[Callable[[], Any]], Any], allocates: Callable[[], None] | None = None
) -> Any:
    """Return a collective of FSDP2 of the same class, whose calls ``make`` makes."""
    kind = type(comm)

    def allocate(self: Any, *values: Any, **named: Any) -> Any:
        if allocates is not None:
            allocates()
        return kind.allocate(self, *values, **named)

    methods: dict[str, Any] = {
        "__call__": lambda self, *values, **named: make(partial(kind.__call__, self, *values, **named)),
        "allocate": allocate,
    }
    observed: Any = object.__new__(type(kind.__name__, (kind,), methods))
    observed.__dict__ = vars(comm)
    return observed


def observe_parameter_sync(
    optimizer: object, make: Callable[[Callable[[], Any]], Any]
) -> Callable[[], None] | PartsNotTimed:
    """Let ``make`` make the call with which ``ZeroRedundancyOptimizer`` broadcasts the updated parameters.

    Returns:
        A function that ends the observation, or the reason why there is none.
    """
    if (sync := getattr(optimizer, "_sync_params", None)) is None:
        return PartsNotTimed(torch=torch.__version__, strategy="ZeRO-1")
    return _replaced([(optimizer, "_sync_params", _observed(sync, make))])


def broadcast_bytes(optimizer: Any) -> list[int]:
    """Return the sizes of the buckets in which ``ZeroRedundancyOptimizer`` broadcasts parameters, if any."""
    with suppress(*_MISSING):
        return [one.numel() * one.element_size() for of_device in optimizer._buckets for one in of_device]
    return []


class ParameterGroup(NamedTuple):
    """Parameters that FSDP2 gathers in one message, and whose gradients it reduces in one (with padding).

    ``is_kept`` is true if they stay gathered until backward. ``shards`` are the ranks that share the
    parameters, and ``replicas`` those with the same shard.
    """

    gathered_bytes: int
    reduced_bytes: int
    is_kept: bool
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Return FSDP2's groups of parameters after the first step; empty if torch does not show them."""
    with suppress(*_MISSING):
        return [_parameter_group(group) for state in _sharding_states(model) for group in _groups(state)]
    return []


def _parameter_group(group: Any) -> ParameterGroup:
    mesh, gathered, reduced = group.mesh_info, 0, 0
    for one in group.fsdp_params:
        numel = one.padded_sharded_param_size.numel() * mesh.shard_mesh_size
        dtype = one.param_dtype or one.orig_dtype
        gathered += numel * dtype.itemsize
        reduced += numel * (one.reduce_dtype or dtype).itemsize * one.sharded_param.requires_grad
    is_kept = group.post_forward_mesh_info is None
    replicas = getattr(mesh, "replicate_process_group", None)
    return ParameterGroup(gathered, reduced, is_kept, mesh.shard_process_group, replicas)


def collective_timeout_s(device: torch.device) -> float | None:
    """Return the time-out of the collectives that serve ``device``, or None if it is unknown."""
    with suppress(*_UNKNOWN):
        backend = distributed_c10d._get_default_group()._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    return None


class Symptom(enum.Enum):
    """The error that a rank sees when communication breaks; such an error seldom names the cause."""

    NONE = enum.auto()
    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def group_error() -> Symptom | None:
    """Return the error that torch's watchdog has found in the NCCL group, and printed; None if unknown."""
    with suppress(*_UNKNOWN):
        backend = distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        known = {"SUCCESS": Symptom.NONE, "TIMEOUT": Symptom.TIMED_OUT}
        return known.get(backend.get_error().name, Symptom.LOST)
    return None


def end_loader_workers(batches: object) -> None:
    """Stop a DataLoader's persistent workers, which would otherwise delay the end of the process."""
    with suppress(*_MISSING):
        batches._shutdown_workers()  # type: ignore[attr-defined]


def import_dynamo() -> None:
    """Import the module that DDP imports; garbage collection would take a quarter of the time."""
    gc.disable()
    try:
        with suppress(ImportError):
            import torch._dynamo  # noqa: F401
    finally:
        gc.enable()


def spin_device(cycles: int) -> bool:
    """Keep the current CUDA stream busy for some ``cycles`` of the device; return False if torch cannot."""
    with suppress(*_MISSING):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        return True
    return False
