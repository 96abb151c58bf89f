"""Run all probes after the last epoch and write probes.json on rank 0 (see docs/measuring.md)."""

from __future__ import annotations

import copy
import time
from statistics import fmean
from typing import Any

import psutil
import torch

from bench.measure.environment import bucket_bytes
from bench.measure.exchange import Collectives
from bench.measure.step_parts import clock_for
from bench.study.files import write_json
from bench.workload.data import Feed
from bench.workload.probes.neighbours import exchange_with_neighbours
from bench.workload.probes.steps import StepProbes, StepReadings
from bench.workload.probes.sweep import AllReduceSweep, Sweep, message_sizes
from bench.workload.session import Session
from bench.workload.training import STATES_PER_WEIGHT, Trainer, parameters_of, wrap

#: The schema version of probes.json; files with an unknown version are rejected.
SCHEMA = 1
#: The fraction of the free memory that probes may use.
_SHARE_OF_FREE = 0.8
#: The exchange between neighbours takes at most about this fraction of the time of the sweep.
_NEIGHBOURS_SHARE = 0.3
_MIB = 2**20


class Probes:
    """Runs all probes on one rank, after the training."""

    def __init__(self, session: Session, collectives: Collectives, trainer: Trainer, feed: Feed) -> None:
        self._session = session
        self._options = session.request.options
        self._collectives = collectives
        self._trainer = trainer
        self._feed = feed

    def run(self, transfer_s: float | None) -> float | None:
        """Run the probes that the options enable; rank 0 writes probes.json.

        Args:
            transfer_s: exposed communication minus wait, in seconds per step of the last attribution window,
                averaged over ranks. It is needed for the hidden fraction.

        Returns:
            The time per step (s) during which at least one bucket was being reduced: the median over timed
            steps, averaged over ranks. None if it was not measured.
        """
        if not self._options.probe_steps and not self._options.sweep_time:
            return None
        began = time.perf_counter()
        buckets = bucket_bytes(self._trainer.model)
        available = self._available_bytes()
        steps, no_steps_reason = self._steps(available)
        steps_s = time.perf_counter() - began
        sweep, no_sweep_reason = self._sweep(buckets, available)
        sweep_s = time.perf_counter() - began - steps_s
        neighbours, no_neighbours_reason = self._neighbours(sweep, no_sweep_reason)
        all_s = time.perf_counter() - began
        content = {
            "schema": SCHEMA,
            "world_size": self._collectives.world_size,
            "backend": self._session.request.backend,
            "seconds": {
                "steps": steps_s,
                "all_reduce": sweep_s,
                "neighbours": all_s - steps_s - sweep_s,
                "all": all_s,
            },
            "bucket_bytes": buckets,
            "steps": None if steps is None else steps.as_json(),
            "all_reduce": None if sweep is None else sweep.as_json(),
            "neighbours": neighbours,
            "reasons": {
                "steps": no_steps_reason,
                "all_reduce": no_sweep_reason,
                "neighbours": no_neighbours_reason,
            },
            **hidden_fraction(sweep, buckets, transfer_s),
        }
        if self._session.is_first:
            write_json(self._session.folder.probes, content)
        self._session.say(f"bench: probes took {all_s:.3f} s")
        return None if steps is None else fmean(steps.comm_time_s)

    def _steps(self, available_bytes: float) -> tuple[StepReadings | None, str | None]:
        options = self._options
        if not options.probe_steps:
            return None, "probe_steps is 0"
        model = self._trainer.model.module
        _, weight_bytes = parameters_of(self._trainer.model)
        # The copy of the model needs its own weights, gradients and optimizer states.
        if weight_bytes * (2 + STATES_PER_WEIGHT[options.optimizer]) > available_bytes:
            return None, "not enough memory for a copy of the model"
        hooked = Trainer(wrap(copy.deepcopy(model), options), self._feed, options)
        clock = clock_for(self._session.device)
        probes = StepProbes(self._trainer, hooked, collectives=self._collectives, clock=clock)
        readings = probes.run(options.probe_steps, seed=options.seed)
        return readings, None

    def _sweep(self, buckets: list[int], available_bytes: float) -> tuple[Sweep | None, str | None]:
        options = self._options
        if not options.sweep_time:
            return None, "sweep_time is 0"
        if self._collectives.world_size == 1:
            return None, "a single rank does not communicate"
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
        room = available_bytes / 2
        return sweep.run(sizes, budget_s=options.sweep_time, room_bytes=room, seed=options.seed), None

    def _neighbours(
        self, sweep: Sweep | None, no_sweep_reason: str | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Return the value of ``neighbours`` in probes.json, or the reason why it is null."""
        hosts = self._session.joined.hosts
        if sweep is None or not sweep.sizes:
            return None, no_sweep_reason or "the sweep measured no message"
        if len(hosts) == 1:
            return None, "one node has no neighbour"
        on_gpus = self._session.request.backend == "nccl"
        largest = len(sweep.sizes) - 1
        return exchange_with_neighbours(
            self._collectives,
            {host.ranks[0]: host.host for host in hosts},
            self._session.device if on_gpus else torch.device("cpu"),
            bytes_per_s=sweep.sizes[largest].bytes / sweep.time_s(largest),
            budget_s=self._options.sweep_time * _NEIGHBOURS_SHARE,
        ), None

    def _available_bytes(self) -> float:
        """Return the memory that probes may use on the rank with the least free memory."""
        device = self._session.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        else:
            host = next(one for one in self._session.joined.hosts if one.host == self._session.me.host)
            free = psutil.virtual_memory().available // len(host.ranks)
        return self._collectives.minima([_SHARE_OF_FREE * free])[0]


def hidden_fraction(
    sweep: Sweep | None, buckets: list[int], transfer_s: float | None
) -> dict[str, float | None]:
    """Return ``standalone_s`` and ``hidden_fraction`` of probes.json.

    The standalone time is the time to reduce all buckets without computation. The hidden fraction is the
    share of the standalone time that computation hid: 1 − ``transfer_s`` / standalone time. The fraction is
    negative if communication takes longer during computation than on its own.
    """
    standalone = None if sweep is None else sweep.standalone_s(buckets)
    hidden = None if standalone is None or transfer_s is None else 1 - transfer_s / standalone
    return {"standalone_s": standalone, "hidden_fraction": hidden}
