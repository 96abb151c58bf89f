"""Run one rank: join the other ranks, build the model, train under the recorder, and leave the process group.

After the epochs that the recorder measures, the probes and the trace train on.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from ..cell_json import CellFile
from ..errors import unwritable
from ..finding import Recorded
from ..known_strategies import on_hosts, wire_problem
from ..measure.environment import device_of
from ..measure.exchange import Collectives, StoreExchange
from ..measure.failures import Failure, HostRank, LossNotFinite
from ..measure.findings import OtherLauncher, OtherStrategy
from ..measure.launch import launch_from
from ..measure.peers import REPORTS_TIMEOUT_S, Peers, broken_group
from ..measure.ranks import own_facts, threads_per_rank
from ..measure.torch_internals import Symptom
from ..measure.transport import diverted_warnings, release_nccl_log, users_variables
from ..record import Recorder
from ..run_folder import RunFolder
from .data import Feed, open_feed
from .failures import (
    TIMEOUT_OPTION,
    CollectiveError,
    SetupError,
    WorkloadError,
    failure_from,
    known_failure,
)
from .gpus import choose_device
from .memory import check_memory
from .mfu import count_step, mfu_basis, precisions_in_use
from .nccl_watch import WATCHDOGS_WAIT, watched_group
from .options import TrainOptions
from .probes import run_probes
from .rendezvous import check_size, join, joined_message
from .session import Session
from .strategies import strategy_of
from .training import Task, Trainer, build_task, use_precision, wrap

#: Keeps the process group until the process ends. The group's destructor holds the GIL and waits for the
#: group's threads, one of which can need the GIL to free its last tensor. The process then hangs (seen with
#: torch 2.4.1, and with DDP's reducer in 2.13).
_KEPT_GROUPS: list[object] = []
#: The warm-up is repeated at most this often until the step time is stable.
_WARMUP_ROUNDS = 3


def run(folder: RunFolder, cell: CellFile, options: TrainOptions) -> None:
    """Run this rank of a run; :mod:`ddp_scaling_bench.train.__main__` reports the errors."""
    env = users_variables(os.environ)
    launch = launch_from(env)
    check_size(launch, cell.world_size, cell.launcher)
    me = own_facts(launch.rank, launch.local_rank, env)
    joined = join(launch, me, timeout_s=options.join_timeout)
    torch.set_num_threads(threads_per_rank(me, joined.facts))
    use_precision(options.precision)
    device, found = choose_device(
        options.device, launch, joined, env, backend=cell.backend, timeout_s=options.join_timeout
    )
    differences: list[Recorded] = [*found]
    planned, hosts = options.strategy, [len(host.ranks) for host in joined.hosts]
    options = replace(options, strategy=on_hosts(planned, hosts))
    if options.strategy != planned:
        differences.append(OtherStrategy(strategy=planned, used=options.strategy, hosts=len(hosts)))
    if cell.launcher != launch.launcher:
        differences.append(OtherLauncher(planned=cell.launcher, used=launch.launcher))
    session = Session(folder, cell, options, launch, joined, me, device)
    session.say(joined_message(joined, cell.backend))
    try:
        _train(session, differences)
    except CollectiveError:
        release_nccl_log(os.environ, session.folder if session.is_first else None)
        raise
    except Exception as error:
        _end_nccl_log(session)
        if launch.world_size > 1:
            own = failure_from(error, timeout_s=options.join_timeout)
            failure = _peers(session).failure_of(error, own)
            if failure not in (None, own):
                raise WorkloadError(failure) from error
        raise


def _peers(session: Session) -> Peers:
    joined, timeout_s = session.joined, session.options.join_timeout
    return Peers(joined.store, session.launch, joined.facts, timeout_s=timeout_s, option=TIMEOUT_OPTION)


def _watched(session: Session) -> AbstractContextManager[None]:
    """End the process if NCCL fails; without NCCL or other ranks, do nothing."""
    if session.cell.backend != "nccl" or session.launch.world_size == 1:
        return nullcontext()

    def explain(symptom: Symptom) -> Failure:
        _end_nccl_log(session)
        peers, timeout_s = _peers(session), session.options.join_timeout
        own = (peers.name_of(session.launch.rank),)
        unknown = broken_group(symptom, timeout_s=timeout_s, option=TIMEOUT_OPTION, failed=own)
        return peers.explain(symptom) or unknown

    return watched_group(explain)


def _end_nccl_log(session: Session) -> None:
    """Print NCCL's warnings, which NCCL_DEBUG_FILE diverts from the job's output, and keep rank 0's log."""
    sys.stderr.write("".join(f"{line}\n" for line in diverted_warnings(os.environ)))
    release_nccl_log(os.environ, session.folder if session.is_first else None)


def _train(session: Session, differences: Sequence[Recorded]) -> None:
    """Build the model and train; ``differences`` of the run from its plan are added to env.json."""
    cell, options = session.cell, session.options
    recorder = Recorder(run_dir=session.folder.path, device=session.device, warmup_rounds=_WARMUP_ROUNDS)
    recorder.open(session.joined)
    recorder.describe(
        workload=asdict(options),
        strategy=options.strategy,
        per_gpu_batch=cell.per_gpu_batch,
        global_batch=cell.per_gpu_batch * session.launch.world_size * options.grad_accum,
    )
    for finding in differences:
        recorder.add(finding)
    if cell.backend == "nccl":
        os.environ.setdefault(*WATCHDOGS_WAIT)  # the user's value stays
    collectives = _start_process_group(session)
    with _watched(session):
        trainer = _build(session, collectives)
    try:
        with _watched(session):
            _measure(session, collectives, trainer, recorder)
        if options.trace_steps:
            with _watched(session):
                _trace(session, trainer, options.trace_steps)
        run_probes(session, collectives, trainer, recorder)
    finally:
        trainer.feed.close()
    # Rank 0 must not end before the other ranks are done, because its process can host the store.
    collectives.barrier()
    dist.destroy_process_group()


def _measure(session: Session, collectives: Collectives, trainer: Trainer, recorder: Recorder) -> None:
    """Train under the recorder, and close it: the probes and the trace change no value of its windows."""
    recorder.watch(trainer.model, micro_batches=trainer.micro_batches, parts=trainer.parts)
    devices = collectives.objects(device_of(session.device, session.me.host))
    if session.is_first:
        ideal_s, flops = mfu_basis(
            count_step(session.options, trainer.feed.shape, session.cell.per_gpu_batch),
            precisions_in_use(session.options.precision, os.environ),
            [*{device.identity: device.model for device in devices}.values()],
            ranks=len(devices),
        )
        recorder.describe(flops=flops, ideal_step_s=ideal_s)
    measure(session, collectives, trainer, recorder)
    recorder.close()


def measure(session: Session, collectives: Collectives, trainer: Trainer, recorder: Recorder) -> None:
    """Train until the recorder has measured all epochs.

    Raises:
        CollectiveError: the loss is NaN or infinite.
    """
    warmup_loss, epoch = None, 0
    for number, batch in enumerate(recorder.batches(iter(trainer.feed.next, None)), start=1):
        is_last = number % trainer.micro_batches == 0
        with recorder.step(update=is_last):
            recorder.loss(trainer.backward(batch, syncs=is_last))
            if is_last:
                with recorder.optimizer():
                    trainer.update()
        if warmup_loss is None:
            warmup_loss = recorder.last_loss
        if recorder.epochs > epoch:
            with recorder.pause():
                if not epoch:
                    _check_losses(collectives, warmup_loss, None)
                epoch = recorder.epochs
                _end_epoch(session, collectives, trainer, recorder)
            if recorder.done:
                break


def _end_epoch(session: Session, collectives: Collectives, trainer: Trainer, recorder: Recorder) -> None:
    """Check the losses of all ranks, validate, and write a checkpoint."""
    options, epoch = session.options, recorder.epochs
    _check_losses(collectives, recorder.last_loss, epoch)
    columns = trainer.validate(collectives).columns if options.val_steps else {}
    if options.checkpoint:
        columns["checkpoint_time_sec"] = _checkpoint(session, trainer, epoch)
    recorder.set_columns(epoch, **columns)
    recorder.flush()
    if error := recorder.write_error:  # a program of a user trains on
        raise error


def _check_losses(collectives: Collectives, own: float | None, epoch: int | None) -> None:
    """Raise a CollectiveError on all ranks if any loss, of an epoch or (None) the warm-up, is not finite."""
    losses = [loss for (loss,) in collectives.rows([math.nan if own is None else own])]
    wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if wrong:
        # NaN on one rank reaches the other ranks with the next all-reduce of gradients.
        everywhere, ranks = len(wrong) == len(losses), tuple(wrong)
        value: Literal["NaN", "infinite"] = "NaN" if any(map(math.isnan, losses)) else "infinite"
        raise CollectiveError(LossNotFinite(epoch=epoch, ranks=ranks, everywhere=everywhere, value=value))


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


def _build(session: Session, collectives: Collectives) -> Trainer:
    """Open the data and build the model; if any rank has a problem, all ranks end with one message."""
    options = session.options
    problem: Failure | None = None
    try:
        feed, task = _open(session)
    except (SetupError, MemoryError, RuntimeError) as error:
        problem = known_failure(error, timeout_s=options.join_timeout)
        if problem is None:
            raise
    _raise_any_problem(session, collectives, problem)
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
    """Check the options and the memory, open the data, and build the model."""
    options = session.options
    if found := wire_problem(vars(options), session.cell.backend):
        raise SetupError(found[1], remedy=found[2])
    strategy = strategy_of(options.strategy)
    if strategy.one_rank and session.launch.world_size > 1:
        what = f"workload.strategy {strategy.name} does not exchange gradients"
        raise SetupError(what, remedy="start one rank")
    launch, batch = session.launch, session.cell.per_gpu_batch
    feed = open_feed(options, batch, launch.rank, launch.world_size, session.device)
    check_memory(session, feed.shape)
    if options.compile and (options.bucket_cap_mb or 1) < 1:
        # torch splits compiled graphs at the buckets, and assumes 1 MiB for the first bucket.
        raise SetupError("workload.compile true needs workload.bucket_cap_mb of 1 or more")
    task = build_task(options, feed.shape)
    if "weights" not in strategy.sharded:
        task.to(session.device)  # else one block after the other is moved, so that only its part stays
    return feed, task


def _raise_any_problem(session: Session, collectives: Collectives, problem: Failure | None) -> None:
    """Raise the problems of all ranks on every rank; if only some ranks have a problem, name these ranks."""
    ranks_by_problem: dict[Failure, list[HostRank]] = {}
    for rank, found in zip(session.joined.facts, collectives.objects(problem), strict=True):
        if found is not None:
            ranks_by_problem.setdefault(found, []).append(HostRank(rank.rank, rank.host))
    if ranks_by_problem:
        size, every = session.launch.world_size, ranks_by_problem.items()
        named = (replace(one, failed=() if len(ranks) == size else tuple(ranks)) for one, ranks in every)
        raise CollectiveError(*named)


def _checkpoint(session: Session, trainer: Trainer, epoch: int) -> float:
    """Write the checkpoint on rank 0, and return the duration in seconds."""
    began = time.perf_counter()
    state = {"epoch": epoch, **trainer.state()}
    if session.is_first:
        with _replacing(session.folder.path / "checkpoint.pt") as temporary:
            torch.save(state, temporary)
    return time.perf_counter() - began


def _trace(session: Session, trainer: Trainer, steps: int) -> None:
    """Train ``steps`` steps; rank 0 profiles them and writes a gzipped Chrome trace.

    One additional step runs first, so that the start of the profiler is not in the trace.
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
