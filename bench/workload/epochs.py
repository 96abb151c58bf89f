"""The measurements of a run: warm-up, epochs, probes, trace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from bench.errors import unwritable
from bench.measure.conditions import Conditions, Meters
from bench.measure.environment import Device
from bench.measure.exchange import Collectives
from bench.measure.results import (
    EpochRecord,
    RankPlace,
    Results,
    Validation,
    count_dropped_steps,
    merge_windows,
    progress_line,
)
from bench.workload.data import Feed
from bench.workload.probes import Probes
from bench.workload.session import Session
from bench.workload.training import Trainer, Windows, parameters_of

_CLOCK_WAS_SET = (
    "the clock of a host was set during {steps} attribution step(s), which are left out because DDP's logger"
    " reads that clock; throughput is measured with another clock"
)


def measure(
    session: Session,
    collectives: Collectives,
    feed: Feed,
    model: DistributedDataParallel,
    *,
    devices: Sequence[Device],
    ideal_s: float | None,
) -> None:
    """Warm up, measure all epochs, then run the probes and the trace; rank 0 writes the tables each epoch.

    Args:
        session: the state of this rank.
        collectives: exchanges values between ranks.
        feed: this rank's batches.
        model: the model to train.
        devices: the devices of all ranks.
        ideal_s: the time of a step if all devices ran at their stated peak FLOP/s; None if unknown.

    Raises:
        CollectiveError: the loss is NaN or infinite.
    """
    options = session.request.options
    trainer = Trainer(model, feed, options)
    windows = _windows(session, collectives, trainer, devices)
    warmup_steps, stable = windows.warm_up(options.warmup_steps)
    if not stable:
        session.warnings.append(f"the step time was not yet stable after {warmup_steps} warm-up steps")
    places = [
        RankPlace(rank.rank, rank.local_rank, rank.host, device.name, device.identity)
        for rank, device in zip(session.joined.facts, devices, strict=True)
    ]
    results = Results(session.folder, places) if session.is_first else None
    record: EpochRecord | None = None
    dropped_steps = 0
    for epoch in range(1, options.epochs + 1):
        record, dropped = _epoch(
            session, epoch, windows, trainer, feed, collectives, places=places, ideal_s=ideal_s
        )
        dropped_steps += dropped
        if results is not None and record is not None:
            results.add(record)
            session.say(progress_line(record, options.epochs))
    if dropped_steps:
        session.warn(_CLOCK_WAS_SET.format(steps=dropped_steps))
    comm_s = Probes(session, collectives, trainer, feed).run(_transfer_s(record))
    if results is not None and comm_s is not None:
        results.add_communication(comm_s)
    if options.trace_steps:
        _trace(session, trainer, options.trace_steps)


def _windows(
    session: Session, collectives: Collectives, trainer: Trainer, devices: Sequence[Device]
) -> Windows:
    """Return the windows of this rank; the first rank on a host or device samples the host or device."""
    identities = [device.identity for device in devices]
    rank, request = session.launch.rank, session.request
    is_first_on_host = rank in {host.ranks[0] for host in session.joined.hosts}
    is_first_on_device = rank == identities.index(identities[rank])
    _, gradient_bytes = parameters_of(trainer.model)
    return Windows(
        trainer,
        collectives,
        Meters(session.device, reads_host=is_first_on_host, reads_device=is_first_on_device),
        session.device,
        samples_per_step=request.per_gpu_batch * request.options.grad_accum,
        conditions=Conditions(
            session.device, os.environ, reads_node=is_first_on_host, gradient_bytes=gradient_bytes
        ),
    )


def _transfer_s(record: EpochRecord | None) -> float | None:
    """Return exposed communication minus wait in seconds per step, averaged over ranks."""
    ranks = [] if record is None else record.ranks
    known = [(rank.parts.exposed_s, rank.wait_s) for rank in ranks if rank.parts and rank.wait_s is not None]
    return fmean(e for e, _ in known) - fmean(w for _, w in known) if known else None


def _epoch(
    session: Session,
    epoch: int,
    windows: Windows,
    trainer: Trainer,
    feed: Feed,
    collectives: Collectives,
    *,
    places: Sequence[RankPlace],
    ideal_s: float | None,
) -> tuple[EpochRecord | None, int]:
    """Measure an epoch; return its record and the number of attribution steps that were left out.

    Only rank 0 combines the windows of all ranks; the other ranks return None and 0.
    """
    options = session.request.options
    window = windows.throughput(options.steps_per_epoch)
    windows.check_losses(window.loss, f"epoch {epoch}")
    if options.attribution_steps:
        window = windows.attribution(window, options.attribution_steps)
    rank_windows = collectives.gathered(window)
    validation = _validate(trainer, feed, collectives) if options.val_steps else None
    checkpoint_s = _checkpoint(session, trainer, epoch) if options.checkpoint else None
    if rank_windows is None:
        return None, 0
    record = merge_windows(epoch, rank_windows, places, on_gpus=session.device.type == "cuda")
    record = replace(record, validation=validation, checkpoint_s=checkpoint_s, ideal_step_s=ideal_s)
    return record, count_dropped_steps(rank_windows)


def _validate(trainer: Trainer, feed: Feed, collectives: Collectives) -> Validation:
    """Validate the model and return the validation sums over all ranks."""
    task = trainer.model.module
    task.eval()
    own = [0.0] * len(astuple(Validation()))
    for inputs, targets in feed.validation():
        batch = astuple(task.validate(inputs, targets))
        own = [total + more for total, more in zip(own, batch, strict=True)]
    task.train()
    return Validation(*collectives.sums(own))


def _checkpoint(session: Session, trainer: Trainer, epoch: int) -> float | None:
    """Write the checkpoint on rank 0 and return the duration in seconds; None on other ranks."""
    if not session.is_first:
        return None
    began = time.perf_counter()
    state = {
        "epoch": epoch,
        "model": trainer.model.module.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }
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
