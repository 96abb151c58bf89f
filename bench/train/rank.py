"""Run one rank: join the other ranks, build the model, measure, and leave the process group.

The measurements are the warm-up, the epochs, the probes and the trace.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from ..errors import unwritable
from ..finding import Recorded
from ..matrix.strategies import on_hosts, wire_problem
from ..measure.conditions import Conditions, Meters, allocator_retries
from ..measure.environment import Device, device_of
from ..measure.exchange import (
    REPORTS_TIMEOUT_S,
    Collectives,
    Peers,
    StoreExchange,
    Symptom,
    broken_group,
    nccl_of,
    symptom_of,
)
from ..measure.failures import Failure, HostRank, ModelTooLarge
from ..measure.findings import AllocatorRetries, ClockWasSet, NotStable, OtherLauncher, OtherStrategy
from ..measure.ranks import Host, core_facts, own_facts, threads_per_rank
from ..measure.results import (
    RankPlace,
    Results,
    Validation,
    count_dropped_steps,
    merge_windows,
    progress_line,
)
from ..measure.transport import (
    NcclLogFile,
    Transport,
    combine_traces,
    diverted_warnings,
    read_traces,
    request_nccl_log,
    users_variables,
)
from ..measure.wire import Placement, WireBytes
from ..study.cell_json import CellFile
from ..study.checksums import write_sums
from ..study.layout import RunFolder
from .data import DataShard, Feed, open_feed
from .failures import (
    TIMEOUT_OPTION,
    BrokenError,
    CollectiveError,
    SetupError,
    describe_error,
    known_failure,
)
from .gpus import choose_device
from .mfu import MfuBasis, count_step, mfu_basis, precisions_in_use
from .models import DataShape
from .nccl_watch import WATCHDOGS_WAIT, watched_group
from .options import TrainOptions
from .probes import Probes
from .rendezvous import Joined, Launch, check_size, join, joined_message, launch_from
from .session import Session
from .strategies import strategy_of
from .training import (
    STATES_PER_WEIGHT,
    Task,
    Trainer,
    Windows,
    build_task,
    parameters_of,
    use_precision,
    wrap,
    zero_batch,
)

#: Keeps the process group until the process ends. The group's destructor holds the GIL and waits for the
#: group's threads, one of which can need the GIL to free its last tensor. The process then hangs (seen with
#: torch 2.4.1, and with DDP's reducer in 2.13).
_KEPT_GROUPS: list[object] = []


def run(folder: RunFolder, cell: CellFile, options: TrainOptions) -> None:
    """Run this rank of a run; :mod:`bench.train.__main__` reports the errors."""
    env = users_variables(os.environ)
    launch = launch_from(env)
    check_size(launch, cell.world_size, cell.launcher)
    me = own_facts(launch.rank, launch.local_rank, env)
    joined = join(launch, me, timeout_s=options.join_timeout)
    threads = threads_per_rank(me, joined.facts)
    torch.set_num_threads(threads)
    use_precision(options.precision)
    device, gpu_facts = choose_device(
        options.device, launch, joined, env, backend=cell.backend, timeout_s=options.join_timeout
    )
    options, strategy_facts = _on_these_hosts(options, joined)
    found = _other_launcher(cell, launch)
    session = Session(folder, cell, options, launch, joined, me, device, threads, found)
    session.say(joined_message(joined, launch, cell.backend))
    for fact in (*core_facts(joined.facts), *gpu_facts, *strategy_facts):
        session.add(fact)
    session.write_environment(env)
    try:
        _train(session, env)
    except CollectiveError:
        raise
    except Exception as error:
        _exchange_causes(session, error)
        raise


def _on_these_hosts(options: TrainOptions, joined: Joined) -> tuple[TrainOptions, list[Recorded]]:
    """Return the options with the strategy that replaces the planned one, and a finding about it."""
    planned = options.strategy
    used = on_hosts(planned, [len(host.ranks) for host in joined.hosts])
    if used == planned:
        return options, []
    found = OtherStrategy(strategy=planned, used=used, hosts=len(joined.hosts))
    return replace(options, strategy=used), [found]


def _peers(session: Session) -> Peers:
    launch = session.launch
    return Peers(
        session.joined.store, launch.rank, session.joined.facts, rank_0_serves=not launch.agent_store
    )


def _exchange_causes(session: Session, error: Exception) -> None:
    """Report this rank's error to the other ranks, or read their reports if communication broke.

    Raises:
        BrokenError: communication broke, and another rank reported the cause.
    """
    if session.launch.world_size == 1:
        return
    symptom = symptom_of(error)
    if symptom is None:
        _peers(session).report(describe_error(error, timeout_s=session.options.join_timeout))
        return
    cause = _cause_of(session, symptom)
    if cause is not None:
        raise BrokenError(replace(cause, nccl=nccl_of(error))) from error


def _cause_of(session: Session, symptom: Symptom) -> Failure | None:
    """Return this rank's failure with the cause of broken communication that other ranks know."""
    timeout_s = session.options.join_timeout
    return _peers(session).explain(symptom, timeout_s=timeout_s, option=TIMEOUT_OPTION)


def _watched(session: Session, log: NcclLogFile | None) -> AbstractContextManager[None]:
    """End the process if NCCL fails; without NCCL or other ranks, do nothing."""
    if log is None or session.launch.world_size == 1:
        return nullcontext()

    def explain(symptom: Symptom) -> Failure:
        _print_nccl_warnings()
        log.release(session.folder if session.is_first else None)
        if known := _cause_of(session, symptom):
            return known
        own, timeout_s = (_peers(session).name_of(session.launch.rank),), session.options.join_timeout
        return broken_group(symptom, timeout_s=timeout_s, option=TIMEOUT_OPTION, failed=own)

    return watched_group(explain)


def _print_nccl_warnings() -> None:
    """Print NCCL's warnings, which NCCL_DEBUG_FILE diverts from the job's output."""
    sys.stderr.write("".join(f"{line}\n" for line in diverted_warnings(os.environ)))


def _train(session: Session, env: dict[str, str]) -> None:
    """Build the model and measure; ``env`` contains the environment variables for env.json."""
    log: NcclLogFile | None = None
    if session.cell.backend == "nccl":
        request_nccl_log(os.environ)
        log = NcclLogFile.from_env(os.environ, session.folder.out if session.is_first else None)
        os.environ.setdefault(*WATCHDOGS_WAIT)  # the user's value stays
    try:
        collectives = _start_process_group(session)
        with _watched(session, log):
            _build_and_measure(session, collectives, log, env)
    except CollectiveError:
        raise
    except Exception:
        _print_nccl_warnings()
        raise
    finally:
        if log is not None:
            log.release(session.folder if session.is_first else None)
    # Rank 0 must not end before the other ranks are done, because its process can host the store.
    collectives.barrier()
    dist.destroy_process_group()


def _build_and_measure(
    session: Session, collectives: Collectives, log: NcclLogFile | None, env: dict[str, str]
) -> None:
    trainer = _build(session, collectives)
    try:
        devices = collectives.objects(device_of(session.device, session.me.host))
        basis = _mfu_basis(session, trainer.feed.shape, devices, env)
        known: dict[str, Any] = {"flops": None if basis is None else basis.as_json()}
        known["parameters"], known["gradient_bytes"] = parameters_of(trainer.model)
        session.write_environment(env, **known)
        ideal_s = None if basis is None else basis.ideal_s
        wire = _wire_bytes(session, trainer, env)
        Measurement(session, collectives, trainer, devices=devices, ideal_s=ideal_s, wire=wire).run()
        known["wire_bytes"] = wire.as_json()
        in_use = None if log is None else _transport_in_use(session, collectives, env)
        session.write_environment(env, in_use, **known, **trainer.parts.facts())
    finally:
        trainer.feed.close()


def _wire_bytes(session: Session, trainer: Trainer, env: Mapping[str, str]) -> WireBytes:
    options = session.options
    place = Placement([rank.host for rank in session.joined.facts], session.cell.backend, env)
    return WireBytes(trainer.parts.messages, place, micro_batches=options.grad_accum)


def _mfu_basis(
    session: Session, shape: DataShape, devices: Sequence[Device], env: Mapping[str, str]
) -> MfuBasis | None:
    """Return the quantities from which MFU is computed, on rank 0, or None on other ranks."""
    if not session.is_first:
        return None
    options = session.options
    distinct = {device.identity: device.model for device in devices}
    return mfu_basis(
        count_step(options, shape, session.cell.per_gpu_batch),
        precisions_in_use(options.precision, env),
        list(distinct.values()),
        ranks=len(devices),
    )


def _transport_in_use(session: Session, collectives: Collectives, env: Mapping[str, str]) -> Transport:
    """Return the transport in NCCL's log; warn if NCCL fell back to a slower transport."""
    folder = session.folder if session.is_first else None
    traces = read_traces("nccl", env=os.environ, rank=session.launch.rank, folder=folder)
    transport, fallback = combine_traces(
        collectives.objects(traces), session.joined.facts, backend="nccl", env=env
    )
    if fallback:
        session.add(fallback)
    return transport


def _start_process_group(session: Session) -> Collectives:
    """Start the process group, using the store in which the ranks joined."""
    backend, timeout_s = session.cell.backend, session.options.join_timeout
    dist.init_process_group(
        backend,
        store=PrefixStore("group", session.joined.store),
        rank=session.launch.rank,
        world_size=session.launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=session.device if backend == "nccl" else None,
    )
    _KEPT_GROUPS.append(dist.group.WORLD)
    return Collectives(session.device, backend)


def _other_launcher(cell: CellFile, launch: Launch) -> list[Recorded]:
    """Return a finding if another launcher than the planned one started the ranks."""
    if cell.launcher == launch.launcher:
        return []
    return [OtherLauncher(planned=cell.launcher, used=launch.launcher)]


def _build(session: Session, collectives: Collectives) -> Trainer:
    """Open the data and build the model; if any rank has a problem, all ranks end with one message."""
    options = session.options
    built: tuple[Feed, Task] | None = None
    problem: Failure | None = None
    try:
        built = _open(session)
    except (SetupError, MemoryError, RuntimeError) as error:
        problem = known_failure(error, timeout_s=options.join_timeout)
        if problem is None:
            raise
    _raise_any_problem(session, collectives, problem)
    assert built is not None
    feed, task = built
    try:
        model = wrap(task, options)
    except SetupError as error:  # of every rank, or else other ranks wait for this one in a collective
        exchange = StoreExchange()
        exchange.post("refused", True)
        if not exchange.wait_for_all("refused", timeout_s=REPORTS_TIMEOUT_S):
            _raise_any_problem(session, collectives, error.failures[0])
        raise
    return Trainer(model, feed, options)


def _open(session: Session) -> tuple[Feed, Task]:
    """Check the options, open the data, and build the model.

    Raises:
        SetupError: this rank cannot train with these options, data or memory.
    """
    options = session.options
    if found := wire_problem(vars(options), session.cell.backend):
        raise SetupError(found[1], remedy=found[2])
    strategy = strategy_of(options.strategy)
    if strategy.one_rank and session.launch.world_size > 1:
        what = f"workload.strategy {strategy.name} does not exchange gradients"
        raise SetupError(what, remedy="start one rank")
    shard = DataShard(session.launch.rank, session.launch.world_size, session.device)
    feed = open_feed(options, session.cell.per_gpu_batch, shard)
    _check_memory(session, feed)
    if options.compile and (options.bucket_cap_mb or 1) < 1:
        # torch splits compiled graphs at the buckets, and assumes 1 MiB for the first bucket.
        raise SetupError("workload.compile true needs workload.bucket_cap_mb of 1 or more")
    task = build_task(options, feed.shape)
    if "weights" not in strategy.sharded:
        task.to(session.device)  # else one block after the other is moved, so that only its part stays
    return feed, task


def _check_memory(session: Session, feed: Feed) -> None:
    """Reject a model that does not fit into memory, before the kernel kills ranks or other users' jobs."""
    options = session.options
    with torch.device("meta"):
        task = build_task(options, feed.shape)
    (parameters, whole), hosts = parameters_of(task), session.joined.hosts
    needed = _kept_bytes(options, task, hosts)
    host = next(host for host in hosts if host.host == session.me.host)
    ranks, what = len(host.ranks), f"weights, gradients and {options.optimizer}'s states"
    if session.device.type == "cuda":
        total = torch.cuda.get_device_properties(session.device).total_memory
        _check_fits(what, parameters, needed, 1, total)
        needed, what = 0.0, "the weights in the host's memory, from which each rank takes its part,"
    if "weights" in strategy_of(options.strategy).sharded:
        needed = max(needed, whole)  # each rank builds the whole model in the host's memory
    _check_fits(what, parameters, needed, ranks, host.memory_bytes)


def _kept_bytes(options: TrainOptions, model: nn.Module, hosts: Sequence[Host]) -> float:
    """Return the bytes of weights, gradients and states of the optimizer that a rank on these hosts needs."""
    strategy = strategy_of(options.strategy)
    ranks = len(hosts[0].ranks) if strategy.within_hosts else sum(len(host.ranks) for host in hosts)
    _, trained = parameters_of(model)
    whole = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": trained,
        "states": trained * STATES_PER_WEIGHT[options.optimizer],
    }
    return math.fsum(size / ranks if name in strategy.sharded else size for name, size in whole.items())


def _check_fits(what: str, parameters: int, needed: float, ranks: int, available: int) -> None:
    if needed * ranks > available:
        raise SetupError(
            ModelTooLarge(
                states=what,
                parameters=parameters,
                needed_bytes=math.ceil(needed * ranks),
                ranks=ranks,
                available_bytes=available,
            )
        )


def _raise_any_problem(session: Session, collectives: Collectives, problem: Failure | None) -> None:
    """Raise the problems of all ranks on every rank; if only some ranks have a problem, name these ranks."""
    ranks_by_problem: dict[Failure, list[HostRank]] = {}
    for rank, found in zip(session.joined.facts, collectives.objects(problem), strict=True):
        if found is not None:
            ranks_by_problem.setdefault(found, []).append(HostRank(rank.rank, rank.host))
    if ranks_by_problem:
        size = session.launch.world_size
        named = [
            replace(found, failed=() if len(ranks) == size else tuple(ranks))
            for found, ranks in ranks_by_problem.items()
        ]
        raise CollectiveError(*named)


class Measurement:
    """Measure the training of one rank: the warm-up, the epochs, the probes and the trace.

    Rank 0 writes the tables after each epoch.

    Args:
        devices: the devices of all ranks.
        ideal_s: the time of a step if all devices ran at their stated peak FLOP/s, or None if unknown.
        wire: compares the bytes on the wire.
    """

    def __init__(
        self,
        session: Session,
        collectives: Collectives,
        trainer: Trainer,
        *,
        devices: Sequence[Device],
        ideal_s: float | None,
        wire: WireBytes,
    ) -> None:
        self._session, self._collectives, self._trainer = session, collectives, trainer
        self._ideal_s, self._wire = ideal_s, wire
        self._windows = _windows(session, collectives, trainer, devices)
        self._places = [
            RankPlace(rank.rank, rank.local_rank, rank.host, device.name, device.identity)
            for rank, device in zip(session.joined.facts, devices, strict=True)
        ]
        self._results = Results(session.folder) if session.is_first else None
        #: On rank 0: exposed communication without the wait for late ranks (s per step, mean over ranks).
        self._transfer_s: float | None = None
        self._dropped_steps = 0

    def run(self) -> None:
        """Measure.

        Raises:
            CollectiveError: the loss is NaN or infinite.
        """
        session, options = self._session, self._session.options
        warmup_steps, stable = self._windows.warm_up(options.warmup_steps)
        if not stable:
            session.found.append(NotStable(steps=warmup_steps))
        for epoch in range(1, options.epochs + 1):
            self._measure_epoch(epoch)
        dropped = ClockWasSet(steps=self._dropped_steps) if self._dropped_steps else None
        retries = _allocator_retries(session, self._collectives)
        for found in (self._windows.untimed, dropped, self._wire.finding(), retries):
            if found is not None:
                session.add(found)
        comm_s = Probes(session, self._collectives, self._trainer).run(self._transfer_s)
        if self._results is not None and comm_s is not None:
            self._results.add_communication(comm_s)
        if session.is_first:
            write_sums(session.folder)
        if options.trace_steps:
            _trace(session, self._trainer, options.trace_steps)

    def _measure_epoch(self, epoch: int) -> None:
        """Measure an epoch; rank 0 combines the windows of all ranks and writes them."""
        session, options = self._session, self._session.options
        window = self._windows.throughput(options.steps_per_epoch)
        self._windows.check_losses(window.loss, epoch)
        self._windows.sample_loaded(window)
        if options.attribution_steps:
            window = self._windows.attribution(window, options.attribution_steps)
        rank_windows = self._collectives.gathered(window)
        validation = _validate(self._trainer, self._collectives) if options.val_steps else None
        checkpoint_s = _checkpoint(session, self._trainer, epoch) if options.checkpoint else None
        if rank_windows is None or self._results is None:
            return
        record = merge_windows(
            epoch,
            rank_windows,
            self._places,
            validation=validation,
            checkpoint_s=checkpoint_s,
            ideal_step_s=self._ideal_s,
            wire=self._wire,
        )
        self._results.add(record)
        exposed_s, wait_s = record.row.comm_exposed_time_sec, record.row.comm_wait_time_sec
        self._transfer_s = None if math.isnan(exposed_s) else exposed_s - wait_s
        self._dropped_steps += count_dropped_steps(rank_windows)
        session.say(progress_line(record.row, options.epochs))


def _allocator_retries(session: Session, collectives: Collectives) -> AllocatorRetries | None:
    """Return a finding if the memory of a GPU did not suffice at once, which slows steps."""
    if session.device.type != "cuda":
        return None
    retries = [row[0] for row in collectives.rows([allocator_retries(session.device) or 0])]
    rank, most = max(enumerate(retries), key=lambda one: one[1])
    host = session.joined.facts[rank].host
    return AllocatorRetries(retries=int(most), rank=rank, host=host) if most else None


def _windows(
    session: Session, collectives: Collectives, trainer: Trainer, devices: Sequence[Device]
) -> Windows:
    """Return the object that measures this rank's steps; a host's first rank also samples the host."""
    identities = [device.identity for device in devices]
    rank = session.launch.rank
    is_first_on_host = rank in {host.ranks[0] for host in session.joined.hosts}
    is_first_on_device = rank == identities.index(identities[rank])
    return Windows(
        trainer,
        collectives,
        Meters(session.device, reads_host=is_first_on_host, reads_device=is_first_on_device),
        session.device,
        samples_per_step=session.cell.per_gpu_batch * session.options.grad_accum,
        conditions=Conditions(session.device, os.environ, reads_node=is_first_on_host),
    )


def _validate(trainer: Trainer, collectives: Collectives) -> Validation:
    """Validate the model and return the validation sums over all ranks."""
    task = trainer.parts.module
    assert isinstance(task, Task)
    task.eval()
    own = [0.0] * len(astuple(Validation()))
    for inputs, targets, counts in _validation_batches(trainer, task, collectives):
        batch = astuple(task.validate(inputs, targets))
        own = [total + counts * more for total, more in zip(own, batch, strict=True)]
    task.train()
    trainer.parts.validated()
    return Validation(*collectives.sums(own))


def _validation_batches(
    trainer: Trainer, task: Task, collectives: Collectives
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield this rank's batches, and whether they count: other ranks can have one more.

    All ranks yield equally many batches, because all ranks gather sharded weights.
    """
    own = trainer.feed.validation()
    while True:
        batch = next(own, None)
        if not any(collectives.maxima([float(batch is not None)])):
            return
        padding = zero_batch(task, trainer.feed.shape, 1, trainer.loss_sum.device)
        yield *(batch or padding), batch is not None


def _checkpoint(session: Session, trainer: Trainer, epoch: int) -> float | None:
    """Write the checkpoint on rank 0 and return the duration in seconds, or None on other ranks."""
    began = time.perf_counter()
    state = {"epoch": epoch, **trainer.state()}
    if not session.is_first:
        return None
    with _replacing(session.folder.path / "checkpoint.pt") as temporary:
        torch.save(state, temporary)
    return time.perf_counter() - began


def _trace(session: Session, trainer: Trainer, steps: int) -> None:
    """Train ``steps`` steps; rank 0 profiles them and writes a gzipped Chrome trace.

    One additional step runs first, so that the start of the profiler is not in the trace.

    Raises:
        UnwritableError: the trace could not be written.
    """
    if not session.is_first:
        for _ in range(steps + 1):
            trainer.step()
        return
    activities = [ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=schedule, record_shapes=True) as profiler:
        for number in range(steps + 1):
            with record_function(f"bench: traced step {number}"):
                trainer.step()
            if number < steps:  # the profiler ends the last step when its context exits
                profiler.step()
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
    path = session.folder.trace
    try:
        with _replacing(path) as temporary:
            profiler.export_chrome_trace(str(temporary))
    except OSError as error:
        raise unwritable(path, error) from error
    session.say(f"bench: a trace of {steps} steps of rank 0 is in {path.name}")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the same suffix (torch compresses ``.gz``), then rename it to ``path``."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
