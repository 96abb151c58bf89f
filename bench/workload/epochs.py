"""From the warm-up to the last row: what a run measures, epoch by epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.measure.environment import Device
from bench.measure.exchange import Collectives
from bench.measure.meters import Meters
from bench.measure.results import EpochRecord, RankPlace, Results, Validation, progress_line
from bench.measure.windows import count_dropped_steps, merge_windows
from bench.workload.data.feed import Feed
from bench.workload.probes.probes import Attributed, Probes
from bench.workload.session import Session
from bench.workload.trace import trace
from bench.workload.training import Trainer
from bench.workload.windows import Windows

_JUMPED = (
    "a host's clock was set during {steps} step(s) of the attribution windows, which do not count:"
    " DDP's logger reads that clock; throughput is timed with another one"
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
    """Warm up, measure every epoch, then probe and trace; rank 0 writes the tables after each epoch.

    Args:
        session: this rank.
        collectives: the ranks' own reductions.
        feed: the rank's batches.
        model: what is trained.
        devices: every rank's.
        ideal_s: what a step takes where all devices run at their stated peaks; None where that is not known.

    Raises:
        CollectiveError: the loss is no number.
    """
    options = session.request.options
    identities = [device.identity for device in devices]
    rank = session.launch.rank
    meters = Meters(
        session.device,
        reads_host=rank in {host.ranks[0] for host in session.joined.hosts},
        reads_device=rank == identities.index(identities[rank]),
    )
    trainer = Trainer(model, feed, options)
    samples = session.request.per_gpu_batch * options.grad_accum
    windows = Windows(trainer, collectives, meters, session.device, samples_per_step=samples)
    warm_up = windows.warm_up(options.warmup_steps)
    if not warm_up.stable:
        session.warnings.append(f"the step time was not yet stable after {warm_up.steps} warm-up steps")
    places = _places(session, devices)
    results = Results(session.folder, places) if session.is_first else None
    record: EpochRecord | None = None
    dropped_steps = 0
    for epoch in range(1, options.epochs + 1):
        record, dropped = _epoch(
            session, epoch, windows, trainer, feed, collectives, places=places, ideal_s=ideal_s
        )
        dropped_steps += dropped
        if results is not None:
            results.add(record)
        session.say(progress_line(record, options.epochs))
    if dropped_steps:
        session.warn(_JUMPED.format(steps=dropped_steps))
    comm_s = Probes(session, collectives, trainer, feed).run(_attributed(record))
    if results is not None and comm_s is not None:
        results.add_communication(comm_s)
    if options.trace_steps:
        trace(session, trainer, options.trace_steps)


def _attributed(record: EpochRecord | None) -> Attributed | None:
    """Return the means over ranks of an epoch's exposed communication and of the wait within it."""
    ranks = [] if record is None else record.ranks
    known = [(rank.parts.exposed_s, rank.wait_s) for rank in ranks if rank.parts and rank.wait_s is not None]
    return Attributed(fmean(e for e, _ in known), fmean(w for _, w in known)) if known else None


def _places(session: Session, devices: Sequence[Device]) -> list[RankPlace]:
    return [
        RankPlace(one.rank, one.local_rank, one.host, device.name, device.identity)
        for one, device in zip(session.joined.facts, devices, strict=True)
    ]


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
) -> tuple[EpochRecord, int]:
    """Return the epoch's record, and the number of attributed steps that do not count."""
    options = session.request.options
    window = windows.throughput(options.steps_per_epoch)
    windows.check_losses(window.loss, f"epoch {epoch}")
    if options.attribution_steps:
        window = windows.attribution(window, options.attribution_steps)
    of_ranks = collectives.objects(window)
    record = merge_windows(epoch, of_ranks, places, on_gpus=session.device.type == "cuda")
    record = replace(
        record,
        validation=_validate(trainer, feed, collectives) if options.val_steps else None,
        checkpoint_s=_checkpoint(session, trainer, epoch) if options.checkpoint else None,
        ideal_step_s=ideal_s,
    )
    return record, count_dropped_steps(of_ranks)


def _validate(trainer: Trainer, feed: Feed, collectives: Collectives) -> Validation:
    """Return the sums over all ranks' validation batches."""
    task = trainer.model.module
    task.eval()
    own = [0.0] * len(astuple(Validation()))
    for inputs, targets in feed.validation():
        batch = astuple(task.validate(inputs, targets))
        own = [total + more for total, more in zip(own, batch, strict=True)]
    task.train()
    return Validation(*collectives.sums(own))


def _checkpoint(session: Session, trainer: Trainer, epoch: int) -> float | None:
    """Write rank 0's checkpoint in place of the last one and return the seconds it took."""
    if not session.is_first:
        return None
    began = time.perf_counter()
    path: Path = session.folder.path / "checkpoint.pt"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        state = {
            "epoch": epoch,
            "model": trainer.model.module.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
        }
        torch.save(state, beside)
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return time.perf_counter() - began
