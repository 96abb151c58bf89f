"""A trace of some steps by torch's profiler, after all that is measured: it slows steps down."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.errors import unwritable
from bench.workload.session import Session
from bench.workload.training import Trainer


def trace(session: Session, trainer: Trainer, steps: int) -> None:
    """Train ``steps`` steps; rank 0 profiles its own and writes them as a gzipped Chrome trace.

    One more before them lets the profiler start: what its start costs is not in the file.

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
            if number < steps:  # the end of the context ends the last one
                profiler.step()
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
    _write(profiler, session.folder.trace)
    session.say(f"bench: a trace of {steps} steps of rank 0 is in {session.folder.trace.name}")


def _write(profiler: profile, path: Path) -> None:
    # torch compresses where the name ends with .gz.
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        profiler.export_chrome_trace(str(beside))
        os.replace(beside, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
