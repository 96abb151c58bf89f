"""From the warm-up to the last row: what a run measures, epoch by epoch."""

from __future__ import annotations

import math
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
from bench.measure.meters import Meters, Usage, peak_memory_bytes
from bench.measure.results import EpochRecord, RankPlace, RankRecord, Results, Validation
from bench.measure.step_parts import PART_FIELDS, StepParts, mean_parts
from bench.workload.data.feed import Feed
from bench.workload.probes.probes import Attributed, Probes
from bench.workload.session import Session
from bench.workload.trace import trace
from bench.workload.training import Trainer
from bench.workload.windows import Throughput, Windows

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
        speaks_for_host=rank in {host.ranks[0] for host in session.joined.hosts},
        speaks_for_device=rank == identities.index(identities[rank]),
    )
    counters = len(set(identities)) if session.device.type == "cuda" else len(session.joined.hosts)
    trainer = Trainer(model, feed, options)
    windows = Windows(trainer, collectives, meters, session.device)
    warm_up = windows.warm_up(options.warmup_steps)
    if not warm_up.stable:
        session.warnings.append(f"the step time was not yet stable after {warm_up.steps} warm-up steps")
    results = Results(session.folder, _places(session, devices)) if session.is_first else None
    record: EpochRecord | None = None
    for epoch in range(1, options.epochs + 1):
        record = _epoch(session, epoch, windows, trainer, feed, collectives, counters)
        record = replace(record, ideal_step_s=ideal_s)
        if results is not None:
            results.add(record)
        session.say(_epoch_line(record, options.epochs))
    if windows.clock_jumps:
        session.warn(_JUMPED.format(steps=windows.clock_jumps))
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
        RankPlace(one.rank, one.local_rank, one.host, device.name)
        for one, device in zip(session.joined.facts, devices, strict=True)
    ]


def _epoch(
    session: Session,
    epoch: int,
    windows: Windows,
    trainer: Trainer,
    feed: Feed,
    collectives: Collectives,
    energy_counters: int,
) -> EpochRecord:
    options = session.request.options
    throughput = windows.throughput(options.steps_per_epoch)
    windows.check_losses(throughput.loss, f"epoch {epoch}")
    peak = peak_memory_bytes(session.device)
    step_s, slowest = collectives.slowest(throughput.step_s)
    attribution = windows.attribution(options.attribution_steps) if options.attribution_steps else []
    ranks = gather_ranks(collectives, throughput, attribution, peak_mem_bytes=peak)
    global_batch = session.request.per_gpu_batch * session.launch.world_size * options.grad_accum
    return EpochRecord(
        epoch=epoch,
        samples=options.steps_per_epoch * global_batch,
        step_s=step_s,
        slowest_rank=slowest,
        attribution_steps=len(attribution),
        ranks=ranks,
        validation=_validate(trainer, feed, collectives) if options.val_steps else None,
        checkpoint_s=_checkpoint(session, trainer, epoch) if options.checkpoint else None,
        energy_counters=energy_counters,
    )


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


def _epoch_line(record: EpochRecord, epochs: int) -> str:
    seconds = max(rank.window_s for rank in record.ranks)
    assert record.samples is not None, "the workload counts its samples"
    return (
        f"bench: epoch {record.epoch}/{epochs}: {len(record.step_s)} steps in {seconds:.3f} s,"
        f" {record.samples / seconds:.1f} samples/s"
    )


def gather_ranks(
    collectives: Collectives,
    throughput: Throughput,
    attribution: Sequence[StepParts],
    *,
    peak_mem_bytes: float,
) -> list[RankRecord]:
    """Return the record of every rank, on every rank."""
    usage = throughput.usage
    row = [throughput.seconds, throughput.loss, peak_mem_bytes]
    row += [math.nan if value is None else value for value in astuple(usage)]
    if attribution:
        # Wait per step first, then the mean: the rank that waits least changes from step to step.
        exposed = [parts.exposed_s for parts in attribution]
        least = collectives.minima(exposed)
        wait = sum(own - low for own, low in zip(exposed, least, strict=True)) / len(exposed)
        row += [*astuple(mean_parts(list(attribution))), wait]
    return [_record(values, attributed=bool(attribution)) for values in collectives.rows(row)]


def _record(values: Sequence[float], *, attributed: bool) -> RankRecord:
    window_s, loss, peak = values[:3]
    usage = Usage(*(None if math.isnan(value) else value for value in values[3:6]))
    if not attributed:
        return RankRecord(window_s, loss, peak, usage, None, None)
    return RankRecord(window_s, loss, peak, usage, StepParts(*values[6 : 6 + len(PART_FIELDS)]), values[-1])
