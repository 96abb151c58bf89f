"""probes.json: what communication costs, asked in several ways once the training has been measured.

Two probes, after the last epoch: training steps of five kinds (:mod:`bench.workload.probes.steps`)
and all-reduces of many sizes (:mod:`bench.workload.probes.sweep`). docs/measuring.md describes the file.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import psutil
import torch

from bench.matrix.workload import WorkloadOptions
from bench.measure.exchange import Collectives
from bench.measure.step_parts import clock_for
from bench.study.files import write_json
from bench.workload.data.feed import Feed
from bench.workload.probes.steps import StepProbes, StepReadings
from bench.workload.probes.sweep import AllReduceSweep, Sweep, message_sizes
from bench.workload.session import Session
from bench.workload.task import parameters_of
from bench.workload.training import STATES_PER_WEIGHT, Trainer, wrap

#: Of probes.json; a reader refuses what it does not know.
SCHEMA = 1
#: The share of the free memory that probes may take.
_OF_FREE = 0.8
_MIB = 2**20


@dataclass(frozen=True)
class Attributed:
    """What the last attribution window read per step, mean over ranks (s): exposed, and waiting within it."""

    exposed_s: float
    wait_s: float


class Probes:
    """Runs all probes of one rank, after the training."""

    def __init__(self, session: Session, collectives: Collectives, trainer: Trainer, feed: Feed) -> None:
        self._session = session
        self._options: WorkloadOptions = session.request.options
        self._collectives = collectives
        self._trainer = trainer
        self._feed = feed

    def run(self, attributed: Attributed | None) -> float | None:
        """Run what the options ask for; rank 0 writes probes.json.

        Args:
            attributed: what the hidden fraction is computed with; None leaves it out.

        Returns:
            Total communication, seconds per step (the union of its intervals), median over timed steps
            and mean over ranks; None where it was not measured.
        """
        if not self._options.probe_steps and not self._options.sweep_time:
            return None
        began = time.perf_counter()
        buckets = bucket_bytes(self._trainer)
        room = self._room_bytes()
        steps, why_no_steps = self._steps(room)
        steps_s = time.perf_counter() - began
        sweep, why_no_sweep = self._sweep(buckets, room)
        all_s = time.perf_counter() - began
        found = {
            "schema": SCHEMA,
            "world_size": self._collectives.world_size,
            "backend": self._session.request.backend,
            "seconds": {"steps": steps_s, "all_reduce": all_s - steps_s, "all": all_s},
            "bucket_bytes": buckets,
            "steps": None if steps is None else steps.as_json(),
            "all_reduce": None if sweep is None else sweep.as_json(),
            "reasons": {"steps": why_no_steps, "all_reduce": why_no_sweep},
            **hidden(sweep, buckets, attributed),
        }
        if self._session.is_first:
            write_json(self._session.folder.probes, found)
        self._session.say(f"bench: probes took {all_s:.3f} s")
        return None if steps is None else fmean(steps.comm_time_s)

    def _steps(self, room: float) -> tuple[StepReadings | None, str | None]:
        options = self._options
        if not options.probe_steps:
            return None, "probe_steps is 0"
        model = self._trainer.model.module
        _, weight_bytes = parameters_of(self._trainer.model)
        # The copy's weights, gradients and what its optimizer keeps.
        if weight_bytes * (2 + STATES_PER_WEIGHT[options.optimizer]) > room:
            return None, "no room in memory for a copy of the model"
        hooked = Trainer(wrap(copy.deepcopy(model), options), self._feed, options)
        clock = clock_for(self._session.device)
        probes = StepProbes(self._trainer, hooked, collectives=self._collectives, clock=clock)
        readings = probes.run(options.probe_steps, seed=options.seed)
        # In this order, while the process group is whole: see life.leave.
        hooked.model.reducer = None  # type: ignore[assignment]
        hooked.model.logger = None
        return readings, None

    def _sweep(self, buckets: list[int], room: float) -> tuple[Sweep | None, str | None]:
        options = self._options
        if not options.sweep_time:
            return None, "sweep_time is 0"
        if self._collectives.world_size == 1:
            return None, "one rank has nobody to communicate with"
        _, gradient_bytes = parameters_of(self._trainer.model)
        largest = None if options.sweep_max_mb is None else int(options.sweep_max_mb * _MIB)
        parameter = next(self._trainer.model.parameters())
        sweep = AllReduceSweep(
            collectives=self._collectives,
            clock=clock_for(self._session.device),
            device=parameter.device,
            dtype=parameter.dtype,
        )
        sizes = message_sizes(buckets, gradient_bytes=gradient_bytes, largest=largest)
        return sweep.run(sizes, budget_s=options.sweep_time, room_bytes=room / 2, seed=options.seed), None

    def _room_bytes(self) -> float:
        """Return what the rank with the least memory to spare may use."""
        device = self._session.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        else:
            host = next(one for one in self._session.joined.hosts if one.host == self._session.me.host)
            free = psutil.virtual_memory().available // len(host.ranks)
        return self._collectives.minima([_OF_FREE * free])[0]


def bucket_bytes(trainer: Trainer) -> list[int]:
    """Return the bytes of DDP's buckets as they are since it rebuilt them, in their order."""
    logger = trainer.model.logger
    if logger is None:
        return []
    logger.set_runtime_stats_and_log()
    told: Mapping[str, str] = logger._get_ddp_logging_data().strs_map
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return [int(size) for size in sizes.replace(",", " ").split()]


def hidden(sweep: Sweep | None, buckets: list[int], attributed: Attributed | None) -> dict[str, float | None]:
    """Return what the buckets take by themselves, and which part of it computation hid.

    The part is 1 − exposed / standalone, with the exposed communication but for the wait for
    late ranks, which no bucket has by itself. It is negative where communication beside
    computation takes longer than alone.
    """
    standalone = None if sweep is None else sweep.standalone_s(buckets)
    if standalone is None or attributed is None:
        return {"standalone_s": standalone, "hidden_fraction": None}
    exposed = attributed.exposed_s - attributed.wait_s
    return {"standalone_s": standalone, "hidden_fraction": 1 - exposed / standalone}
