"""Private interfaces of torch, which any release can change or remove.

No other module uses such an interface. If a release lacks an interface, the function for it returns an empty
value, and the values in the last column stay empty:

=========================== ==================================================== ============================
function                    interface of torch                                   empty without it
=========================== ==================================================== ============================
set_ddp_sample_rate         ``DDP._set_ddp_runtime_logging_sample_rate``         all parts of a step
ddp_times, ddp_texts        ``DDP.logger._get_ddp_logging_data``                 all parts of a step; buckets
unused_parameter_bytes      the same                                             unused parameters
backward_callbacks          ``autograd.Variable._execution_engine``              parts in a user's loop
group_store                 ``distributed_c10d._get_default_store``              recordings of several ranks
count_collectives           ``ProcessGroup._get_sequence_number_for_group``      collectives of a step
compilations                ``torch._dynamo.utils.compilation_time_metrics``     recompilations
observe_compiled_calls      ``Module._compiled_call_impl``                       nothing; hooks are compiled
fsdp_version                ``Module._is_fsdp_managed_module``,                  strategy of a module within
                            ``Module._fsdp_use_orig_params``, and                a model with FSDP
                            ``Parameter._fsdp_flattened``
observe_sharding            ``FSDPModule._get_fsdp_state``, and of its states    all parts with FSDP2
                            and their groups: ``_fsdp_param_groups`` (before
                            2.13 ``_fsdp_param_group``), ``_is_root``,
                            ``_root_post_backward_final_callback``,
                            ``_all_gather_comm``, ``_reduce_scatter_comm`` (both
                            since 2.9), ``_all_reduce_hook``, ``_is_hsdp``,
                            ``mesh_info``, ``ProcessGroup._get_backend``,
                            ``wait_for_unshard``, ``post_backward`` and
                            ``finalize_backward``
observe_parameter_sync      ``ZeroRedundancyOptimizer._sync_params``             all parts with ZeRO-1
parameter_groups            ``FSDPModule._get_fsdp_state`` and its groups        sizes of FSDP2's messages
collective_timeout_s        ``ProcessGroup._get_backend``, ``options._timeout``  the time-out in messages
group_error                 ``ProcessGroup._get_backend``, ``get_error``         survivors' messages with NCCL
end_loader_workers          ``_MultiProcessingDataLoaderIter._shutdown_workers`` nothing, but exit is slower
import_dynamo               ``torch._dynamo``                                    nothing, but start is slower
spin_device                 ``torch.cuda._sleep``                                nothing; memory is filled
=========================== ==================================================== ============================

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
from torch.torch_version import TorchVersion

from .findings import PartsNotTimed
from .step_parts import ShardingTimer

#: Errors of a call to an interface that is missing or takes other arguments.
_MISSING = (AttributeError, TypeError)
#: Errors of a call without a process group, or of a call that the group's backend does not support.
_NO_GROUP = (dist.DistError, RuntimeError, ValueError)


def set_ddp_sample_rate(model: DistributedDataParallel, steps: int) -> None:
    """Make DDP's logger record times in each of the first ten steps, then in one of every ``steps`` steps."""
    with suppress(*_MISSING):
        model._set_ddp_runtime_logging_sample_rate(steps)  # type: ignore[no-untyped-call]


def ddp_times(model: DistributedDataParallel) -> Mapping[str, int]:
    """Return the numbers of DDP's logger; times are in nanoseconds.

    The result is empty if the sample rate cannot be set, because the times could then belong to an earlier
    step.
    """
    with suppress(*_MISSING):
        if (log := _ddp_log(model)) is not None:
            numbers: Mapping[str, int] = log.ints_map
            return numbers
    return {}


def ddp_texts(model: DistributedDataParallel) -> Mapping[str, str]:
    """Return the texts of DDP's logger, such as ``rebuilt_bucket_sizes``."""
    with suppress(*_MISSING):
        if (log := _ddp_log(model)) is not None:
            texts: Mapping[str, str] = log.strs_map
            return texts
    return {}


def unused_parameter_bytes(model: DistributedDataParallel) -> int | None:
    """Return the size of the parameters that the last backward pass did not use, or None if it is unknown.

    torch 2.4 and 2.7 add up the sizes of all steps; 2.10 does not. Before 2.10, only the value 0 is reliable.
    """
    found = ddp_times(model).get("unused_parameter_size") if model.find_unused_parameters else None
    return found if not found or TorchVersion(torch.__version__) >= "2.10" else None


def _ddp_log(model: DistributedDataParallel) -> Any | None:
    """Return the log of DDP after its values are up to date; on CUDA this waits for the device."""
    logger = getattr(model, "logger", None)
    if logger is None or not hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        return None
    logger.set_runtime_stats_and_log()
    return logger._get_ddp_logging_data()


def backward_callbacks() -> Callable[[Callable[[], None]], None] | None:
    """Return torch's function ``queue(callback)``, or None if this release of torch lacks it.

    The current backward pass calls the queued callbacks at its end, in the order in which they were queued.
    If a callback queues another callback, the new callback is called last.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
    return queue


def group_store() -> Store | None:
    """Return the store of the default process group, or None if it is unknown."""
    try:
        store: Store = distributed_c10d._get_default_store()
    except (*_MISSING, *_NO_GROUP):
        return None
    return store


def count_collectives() -> int | None:
    """Return the number of collectives called on the default group, or None if it is unknown."""
    try:
        return int(distributed_c10d._get_default_group()._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (*_MISSING, *_NO_GROUP):
        return None


def compilations() -> tuple[int, float] | None:
    """Return the number of frames that torch.compile has compiled so far, and the seconds that this took.

    The result is None if these values are unknown. The names of the metric differ between releases of torch.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0.0
    with suppress(*_MISSING):
        metrics = dynamo.compilation_time_metrics.items()
        seconds = [one for name, times in metrics if name.endswith("compile_inner") for one in times]
        return len(seconds), sum(seconds)
    return None


def observe_compiled_calls(
    model: nn.Module, begins: Callable[[], None], ended: Callable[[Any], None]
) -> Callable[[], None] | None:
    """Call ``begins`` and ``ended`` around each call of a model that ``model.compile()`` compiled in place.

    Hooks of such a model are compiled with it, which fails with ``fullgraph=True``. The result is a function
    that ends the observation, or None for any other model.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is None:
        return None

    def call(*values: Any, **named: Any) -> Any:
        begins()
        output = compiled(*values, **named)
        ended(output)
        return output

    model._compiled_call_impl = call
    return lambda: setattr(model, "_compiled_call_impl", compiled)


def fsdp_version(module: nn.Module) -> int | None:
    """Return 1 or 2 if a module belongs to a model with FSDP of this version, else None.

    The attributes are those that FSDP sets for torch.compile.
    """
    own = vars(module)
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
        interface, ``model`` is only a part of a sharded model, it is replicated and not sharded, or the
        collectives of CUDA are not those of NCCL.
    """
    try:
        states = _sharding_states(model)
        changes = [change for state in states for change in _observations(state, observer)]
        is_part = all(state._is_root is False for state in states)
        unseen = _unseen([group for state in states for group in _groups(state)], observer)
    except (*_MISSING, *_NO_GROUP):
        unseen = "FSDP2"
    if unseen:
        return PartsNotTimed(torch=torch.__version__, strategy=unseen)
    if is_part:
        return PartsNotTimed()
    return _replaced(changes)


def _unseen(groups: list[Any], observer: ShardingTimer) -> str:
    """Return how groups communicate if an observer cannot see it, else an empty text."""
    shards: list[Any] = [getattr(group.mesh_info, "shard_process_group", None) for group in groups]
    if None in shards:  # replicas only: no collective of FSDP2 is called
        return "replicate"
    if observer.is_on_host:
        return ""
    names = {one._get_backend(torch.device("cuda")).name() for one in shards}
    return "" if names <= {"nccl"} else "FSDP2 without NCCL"  # others let the host wait


def _replaced(changes: list[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set attributes, given as object, name and value; return the function that sets the former values."""
    before = [(owner, name, vars(owner).get(name, _OF_CLASS)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)

    def restore() -> None:
        for owner, name, value in before:
            if value is _OF_CLASS:
                delattr(owner, name)
            else:
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
        comm = _observed_comm(group._reduce_scatter_comm, observer.scatters, observer.allocates)
        yield group, "_reduce_scatter_comm", comm
        hook = group._all_reduce_hook
        if hook is not None or group._is_hsdp:
            yield group, "_all_reduce_hook", _observed_hook(hook, observer.all_reduced)
        if observer.is_on_host:
            continue
        waits = partial(observer.waits_for_gather, group)
        yield group, "wait_for_unshard", _observed(group.wait_for_unshard, waits)
        yield group, "post_backward", _observed(group.post_backward, observer.post_backward)
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

    def call(self: Any, *values: Any, **named: Any) -> Any:
        return make(partial(kind.__call__, self, *values, **named))

    methods: dict[str, Any] = {"__call__": call}
    if allocates is not None:

        def allocate(self: Any, *values: Any, **named: Any) -> Any:
            allocates()
            return kind.allocate(self, *values, **named)

        methods["allocate"] = allocate
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
    sync = getattr(optimizer, "_sync_params", None)
    if sync is None:
        return PartsNotTimed(torch=torch.__version__, strategy="ZeRO-1")
    return _replaced([(optimizer, "_sync_params", _observed(sync, make))])


class ParameterGroup(NamedTuple):
    """Parameters that FSDP2 gathers in one message, and whose gradients it reduces in one message.

    ``is_kept`` is true if they stay gathered until backward. Sizes include padding. ``shards`` are the ranks
    that share the parameters, and ``replicas`` those with the same shard.
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
    try:
        backend = distributed_c10d._get_default_group()._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (*_MISSING, *_NO_GROUP):
        return None


class GroupError(enum.Enum):
    """The state of the default process group."""

    NONE = enum.auto()
    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def group_error() -> GroupError | None:
    """Return the error that torch's watchdog has found in the NCCL group, or None if this is unknown.

    The watchdog writes the error to standard error before this function returns it.
    """
    try:
        backend = distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        name = backend.get_error().name
    except (*_MISSING, *_NO_GROUP):
        return None
    return {"SUCCESS": GroupError.NONE, "TIMEOUT": GroupError.TIMED_OUT}.get(name, GroupError.LOST)


def end_loader_workers(batches: object) -> None:
    """Stop a DataLoader's persistent workers, which would otherwise delay the end of the process."""
    with suppress(*_MISSING):
        batches._shutdown_workers()  # type: ignore[attr-defined]


def import_dynamo() -> None:
    """Import the module that DDP imports when it is created, without garbage collection.

    Garbage collection would take a quarter of the time, and an import leaves little garbage.
    """
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
