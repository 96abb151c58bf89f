"""Write env.json and the tables of a run on rank 0, as the ranks' records become complete."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_high
from typing import Any

import torch
from torch import nn

from ..checksums import write_sums
from ..errors import UnwritableError
from ..files import write_json
from ..finding import Recorded
from ..measure.env_file import changed_script, script_sha256, write_environment
from ..measure.environment import nccl_version
from ..measure.exchange import Met, StoreExchange
from ..measure.failures import LossNotFinite
from ..measure.findings import (
    AllocatorRetries,
    ClockWasSet,
    FewerWindows,
    LayoutDoubtful,
    MeasurementsLost,
    ModelNotWrapped,
    NotStable,
    SamplesOfReplicas,
    SamplesUnknown,
    SideStreams,
    SlowFirstSteps,
    WaitsForDevice,
)
from ..measure.launch import Launch
from ..measure.ranks import RankFacts, core_facts, cores_of_nodes, hosts_of, kept_variables, local_ranks
from ..measure.results import RankPlace, Results, Window, merge_windows, progress_line, samples_of_all
from ..measure.transport import Transport, combine_traces, configured_transport, users_variables
from ..measure.wire import Placement, WireBytes
from ..records import EpochRow
from ..run_folder import RunFolder, read_run
from ..train.strategies import Parts, Strategy
from .replicas import Replicas, Verdict
from .settings import Lengths

#: Least wait (s) for the first batch of a loop, and its share of the measured time, that is reported.
_SLOW_FIRST_S, _SLOW_FIRST_SHARE = 0.02, 0.05


@dataclass(eq=False)
class Recording:
    """What a rank knows of a recording; ``met`` describes all ranks if they met before it.

    ``is_rare`` is true if the matrix says that the ranks exchange parameters rarely. ``model_parallel`` ranks
    share a replica of the model.
    """

    launch: Launch
    exchange: StoreExchange
    backend: str
    device: torch.device
    lengths: Lengths
    met: Met | None
    warmup_steps: int = 0
    is_rare: bool = False
    model_parallel: int = 1


def model_sizes(model: nn.Module | None, strategy: Strategy | None) -> tuple[int | None, int | None]:
    """Return the number of parameters and the size of their gradients in bytes, over all shards.

    Both are None without a model, and in a wrapper that is not known and may have only a shard.
    """
    if model is None or (strategy is not None and strategy.untimed):
        return None, None
    parameters = list(model.parameters())  # a DTensor of FSDP2 has the size of the whole parameter
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return sum(p.numel() for p in parameters), trained


class RunWriter:
    """Write the files of a run, whose ranks send their records to the store."""

    def __init__(self, session: Recording, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._exchange, self._backend = session.exchange, session.backend
        self._transport: Transport | None = None  # None until it has been observed
        self._parts = Parts(nn.Module())
        self._has_bare_model = False
        self._facts: list[RankFacts] = []
        self._places: list[RankPlace] = []
        self.results = Results(folder)
        self._wire: WireBytes | None = None  # None until the hosts are known
        self._found: list[Recorded] = []
        self._retries: Counter[int] = Counter()  # of the allocator, by rank
        self._clock_jumps = 0
        self._described: dict[str, Any] = {}
        self._has_sample = self._is_sealed = False
        #: Whether the files of all planned windows are complete.
        self.is_finished = False
        self._replicas = Replicas(self._exchange, session.lengths.steps_per_epoch)
        self._waits_s: list[float] = []  # for the first batch of each loop, beyond the mean of all batches
        self._restarts_workers = False
        self._rows: list[EpochRow] = []
        #: Why a file could not be written, if one could not.
        self.error: UnwritableError | None = None
        self._ideal_step_s: float | None = None
        self.epochs = 0
        run = read_run(folder.path)[0] or {}  # the run's folder of `bench submit` describes the command
        self._described["script_sha256"] = sha256 = script_sha256(run, os.environ.get("PWD", ""))
        if changed := changed_script(run, sha256):
            self._keep(changed)
        if session.met:
            self._take_facts(session.met.facts)

    def watch(self, model: nn.Module | None, strategy: Strategy | None, parts: Parts) -> None:
        """Note which model is trained, and its strategy."""
        self._parts = parts
        self._has_bare_model = model is not None and strategy is None and type(parts) is Parts
        parameters, gradient_bytes = model_sizes(model, strategy)
        known = {"parameters": parameters, "gradient_bytes": gradient_bytes}
        self._described = {"strategy": strategy and strategy.name, **known, **self._described}
        if self._facts:
            self._wire = self._new_wire()
            self._check_wrapper()
            self._try(self._write_environment)

    def describe(self, ideal_step_s: float | None, values: Mapping[str, Any]) -> None:
        """Add values to env.json."""
        self._ideal_step_s = self._ideal_step_s if ideal_step_s is None else ideal_step_s
        self._described |= values
        self._try(self._write_environment)

    def set_columns(self, epoch: int | None, columns: Mapping[str, float]) -> None:
        """Set values of metrics.csv in the row of an epoch, or in all rows."""
        self._try(lambda: self.results.set_columns(epoch, columns))
        if self._is_sealed:
            self._try(lambda: write_sums(self._folder))

    def write(self, *, is_last: bool = False) -> None:
        """Write complete records without waiting; if writing fails, say so and continue.

        With ``is_last``, also write throughput windows whose attribution window did not end. SHA256SUMS
        follows at the end, or already after the last window if the program may be killed then.
        """
        self._try(lambda: self._write_complete(is_last))

    def add(self, finding: Recorded) -> None:
        """Print a finding and add it to env.json, unless the same finding is known."""
        if finding not in self._found:
            self._keep(finding)
            self._try(self._write_environment)

    def _add_first(self, finding: Recorded) -> None:
        """Add a finding unless one of its kind is known."""
        if not any(type(one) is type(finding) for one in self._found):
            self.add(finding)

    def _update(self, finding: Recorded) -> None:
        """Add a finding in place of an earlier one of its kind, which had smaller numbers."""
        for at in [at for at, one in enumerate(self._found) if type(one) is type(finding)]:
            self._found[at] = finding
        self._keep(finding)
        self._try(self._write_environment)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except UnwritableError as error:
            self.error = error
            self._keep(MeasurementsLost(reason=str(error)))

    def _keep(self, finding: Recorded) -> None:
        if finding not in self._found:
            self._found.append(finding)
            print(f"bench: {finding.severity}: {finding}", flush=True)

    def _write_complete(self, is_last: bool) -> None:
        if not self._places and not self._read_facts():
            return
        while (contents := self._windows_of(self.epochs + 1, is_last)) is not None:
            try:
                self._add_epoch([Window.from_json(content) for content in contents])
            finally:  # if a file cannot be written, its next version contains this epoch
                self.epochs += 1
        if self._transport is None and (traces := self._exchange.read_all("transport")) is not None:
            known: Any = {"backend": self._backend, "env": os.environ}
            self._transport, slower = combine_traces(traces, self._facts, **known)
            for finding in slower:
                self._keep(finding)
            self._described |= self._parts.facts()  # by now, DDP has rebuilt its buckets
            self._write_environment()
        if not self._has_sample:
            self._write_sample(is_last)
        is_complete = self.epochs == self._session.lengths.epochs and self._replicas.has_samples
        if self.epochs and (is_last or is_complete):
            self._conclude()
            if is_last or not self._session.met:
                write_sums(self._folder)
                self._is_sealed = True
        self.is_finished |= is_complete

    def _conclude(self) -> None:
        """Add what complete windows show, because the program may be killed afterwards."""
        verdict = self._exchange_verdict()
        if len(self._facts) > 1:
            self._described["exchange"] = {"together": verdict.together, "by": verdict.by}
        for finding in (self._wire and self._wire.finding(), verdict.finding, self._slow_first_steps()):
            if finding:
                self._keep(finding)
        self._write_environment()

    def _exchange_verdict(self) -> Verdict:
        nodes, ranks = len({one.host for one in self._facts}), len(self._facts)
        is_counted = self._backend == "gloo" or (self._transport or {}).get("network") == "Socket"
        ends = nodes if nodes > 1 or self._backend != "gloo" else ranks  # gloo on one node: the loopback
        needed = 2 * (ends - 1) * (self._described.get("gradient_bytes") or 0) * is_counted or math.nan
        if self._session.is_rare:
            return Verdict()
        is_bare, has_layout = self._has_bare_model, self._session.model_parallel > 1
        return self._replicas.verdict(
            self._parts, needed, is_bare=is_bare, has_nodes=nodes > 1, has_layout=has_layout
        )

    def _slow_first_steps(self) -> SlowFirstSteps | None:
        waits, total_s = self._waits_s, sum(row.epoch_time_sec for row in self._rows)
        if len(waits) < 2 or median(waits) < _SLOW_FIRST_S or sum(waits) <= _SLOW_FIRST_SHARE * total_s:
            return None
        mean, share = round(fmean(waits), 6), round(sum(waits) / total_s, 6)
        return SlowFirstSteps(steps=len(waits), excess_s=mean, share=share, workers=self._restarts_workers)

    def fewer_windows(self) -> FewerWindows | None:
        """Return a finding if the training ended before all planned windows.

        Of shorter windows, only the last one counts, because the program can end others on purpose.
        """
        planned, steps = self._session.lengths.epochs, self._session.lengths.steps_per_epoch
        *earlier, last = (int(row.steps) for row in self._rows)
        shortest = last if all(one == steps for one in earlier) else steps
        if planned is None or (self.epochs >= planned and shortest == steps):
            return None
        known: dict[str, Any] = {"planned_epochs": planned, "planned_steps": steps}
        return FewerWindows(epochs=self.epochs, steps=shortest, **known)

    def _write_sample(self, is_last: bool) -> None:
        """Write sampled_step.json when all ranks have posted their sampled step, or at the end with fewer."""
        samples = self._exchange.read_all("sample")
        if samples is None and is_last:
            samples = [one for one in self._exchange.read_each("sample") if one is not None]
        if samples:
            write_json(self._folder.sampled_step, {"schema": 1, "ranks": samples})
            self._has_sample = True

    def _windows_of(self, epoch: int, is_last: bool) -> list[Any] | None:
        """Return the windows of all ranks, or None if any window is missing."""
        contents = self._exchange.read_all(f"window/{epoch}")
        if contents is not None or not is_last:
            return contents
        complete, early = (self._exchange.read_each(f"{name}/{epoch}") for name in ("window", "early"))
        either = [one or throughput for one, throughput in zip(complete, early, strict=True)]
        return None if None in either else either

    def _read_facts(self) -> bool:
        if (contents := self._exchange.read_all("facts")) is None:
            return False
        facts = self._facts or [RankFacts(**one["facts"]) for one in contents]
        self._places = [
            RankPlace(own.rank, local_rank, own.host, one["device"], one["identity"])
            for own, local_rank, one in zip(facts, local_ranks(facts), contents, strict=True)
        ]
        if not self._facts:
            self._take_facts(facts)
        return True

    def _take_facts(self, facts: list[RankFacts]) -> None:
        self._facts = facts
        self._wire = self._new_wire()
        self._check_wrapper()
        for finding in core_facts(facts):
            self._keep(finding)
        self._try(self._write_environment)

    def _check_wrapper(self) -> None:
        if self._has_bare_model and len(self._facts) > 1:
            self._keep(ModelNotWrapped())

    def _new_wire(self) -> WireBytes:
        place = Placement([facts.host for facts in self._facts], self._backend, os.environ)
        return WireBytes(self._parts.messages, place)

    def _add_epoch(self, windows: Sequence[Window]) -> None:
        ideal_step_s, wire = self._ideal_step_s, self._wire
        shared = self._session.model_parallel
        record = merge_windows(
            *(self.epochs + 1, windows, self._places),
            model_parallel=shared,
            ideal_step_s=ideal_step_s,
            wire=wire,
        )
        row, is_first = record[0], not self.epochs
        self._rows.append(row)
        self._replicas.add(windows, math.nan if wire is None else wire.sent_bytes)
        slowest = max(windows, key=lambda window: sum(window.first_waits_s))
        usual_s = 0.0 if math.isnan(row.data_load_time_sec) else row.data_load_time_sec
        self._waits_s += [wait_s - usual_s for wait_s in slowest.first_waits_s]
        self._restarts_workers |= slowest.restarts_workers
        self.results.add(record)
        if not all(window.stable for window in windows):
            self.add(NotStable(steps=self._session.warmup_steps))
        if waits := max(window.host_waits or 0 for window in windows):
            self._add_first(WaitsForDevice(waits=waits))
        if side_s := max(window.side_s for window in windows):
            self._add_first(SideStreams(step_s=round(side_s, 6)))
        if jumps := max(window.clock_jumps for window in windows):
            self._clock_jumps += jumps
            self._update(ClockWasSet(steps=self._clock_jumps))
        counted = [(window.conditions or {}).get("rank", {}).get("allocator_retries") for window in windows]
        self._retries.update({rank: retries for rank, retries in enumerate(counted) if retries})
        for rank, most in self._retries.most_common(1):  # steps are slow if memory does not suffice at once
            self._update(AllocatorRetries(retries=int(most), rank=rank, host=self._places[rank].host))
        if math.isnan(row.samples):
            counts = [rank.samples for rank in record[1]]
            is_unclear = shared > 1 and any(count > 0 for count in counts)
            self.add(SamplesOfReplicas(model_parallel=shared) if is_unclear else SamplesUnknown())
        elif is_first:
            steps = ([one for one in window.samples if one is not None] for window in windows)
            typical = [median_high(own) if own else 0.0 for own in steps]  # the last of a loop can be smaller
            batch = samples_of_all(typical, shared)
            self._described.setdefault("global_batch", round(batch) if batch == round(batch) else batch)
        losses = [0.0 if window.loss is None else window.loss for window in windows]
        if wrong := [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]:
            self.add(LossNotFinite(epoch=self.epochs + 1, ranks=tuple(wrong), severity="warning"))
        if is_first:
            self._check_layout(shared)
            self._write_environment()
        print(progress_line(row, self._session.lengths.epochs), flush=True)

    def _check_layout(self, model_parallel: int) -> None:
        """Compare the number of different first batches with that of the planned replicas."""
        known = [one for one in self._exchange.read_each("inputs") if one is not None]
        different, replicas = len(set(known)), len(self._facts) // model_parallel
        is_odd = different > replicas if model_parallel > 1 else 1 < different < replicas
        if is_odd and len(known) == len(self._facts) > 1:
            self._keep(LayoutDoubtful(different=different, replicas=replicas))

    def _write_environment(self) -> None:
        if not self._facts:
            return
        env = users_variables(os.environ)
        launch, met, device = self._session.launch, self._session.met, self._session.device
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        seconds = None if met is None else round(met.seconds, 6)
        known = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
            "device_name": torch.cuda.get_device_name(device) if gpu else self._facts[0].cpu_model,
            "device_memory_bytes": int(gpu.total_memory) if gpu else None,
            "device": device.type,
            "backend": self._backend,
            "world_size": launch.world_size,
            "launcher": launch.launcher,
            "joined": {"ranks": len(self._facts), "expected": launch.world_size, "seconds": seconds},
            "hosts": [host.as_json() for host in hosts_of(self._facts)],
            "cores": cores_of_nodes(self._facts),
            "transport": self._transport or configured_transport(self._backend, env),
            "threads_per_rank": torch.get_num_threads(),
            **kept_variables(env),
            "recorder": vars(self._session.lengths),
            "facts": [fact.as_json() for fact in self._found],
            "wire_bytes": None if self._wire is None else self._wire.as_json(),
        }
        write_environment(self._folder, **known | self._described)
