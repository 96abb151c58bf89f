"""What DDP's own logger knows about the last backward pass, without its lag.

DDP stamps, per rank, when backward's computation starts and ends and when communication
starts and ends. ``backward_comm_time`` is the span from the first bucket to the last, not
communication; what the step waits for is the part of the span after the computation's end:

    exposed = backward_comm_time - backward_compute_comm_overlap_time

Source: ``torch/csrc/distributed/c10d/logger.cpp`` and ``reducer.cpp`` (times in nanoseconds).
On torch 2.13 with gloo, compute + exposed is the duration of ``loss.backward()`` to 0.1 %.

The logger computes its figures when the *next* forward begins. Asking it to do so right after
the step (:func:`read`) gives this step's figures, so nothing has to be shifted; on CUDA that
call waits for the device. Under ``no_sync`` the logger is frozen: only the micro-batch that
synchronises can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

#: A sample rate that no iteration after the tenth reaches (the first ten are always sampled).
_NEVER = 2**31 - 1
#: Iterations that DDP samples whatever the rate.
ALWAYS_SAMPLED = 10
_SECONDS_PER_TICK = 1e-9


@dataclass(frozen=True, slots=True)
class BackwardReading:
    """One rank's backward pass: computation, and the wait for communication after it (seconds).

    ``began_ns`` is the host's wall clock when DDP took backward to begin: where its forward ended.
    """

    compute_s: float
    exposed_s: float
    began_ns: int


def sample_every_step(model: DistributedDataParallel) -> None:
    """Let the logger stamp every step from now on."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]


def sample_no_step(model: DistributedDataParallel) -> None:
    """Let the logger stamp nothing any more (on CUDA its stamps cost a synchronisation per step)."""
    model._set_ddp_runtime_logging_sample_rate(_NEVER)  # type: ignore[no-untyped-call]


def read(model: DistributedDataParallel) -> BackwardReading | None:
    """Return the figures of the backward pass that just ended; None where DDP stamped nothing."""
    logger = model.logger
    if logger is None:
        return None
    logger.set_runtime_stats_and_log()
    figures = logger._get_ddp_logging_data().ints_map
    span = figures.get("backward_comm_time", 0)
    compute = figures.get("backward_compute_time", 0)
    if span <= 0 or compute <= 0:
        return None
    overlap = figures.get("backward_compute_comm_overlap_time", 0)
    exposed = max(0, span - overlap)
    began_ns = figures.get("backward_compute_time_start", 0)
    return BackwardReading(compute * _SECONDS_PER_TICK, exposed * _SECONDS_PER_TICK, began_ns)
