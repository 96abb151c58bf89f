"""One rank's part of a recording: each rank posts its records to the store, and rank 0 writes the files.

The harness's environment variables override the script's settings, and the script's settings override
defaults.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BenchError, UnwritableError
from ..facts import Fact
from ..matrix.workload import WorkloadOptions
from ..measure.environment import device_of, shared_environment
from ..measure.exchange import Peers, StoreExchange, error_line, symptom_of, with_nccl_error
from ..measure.ranks import RankFacts, core_facts, own_facts
from ..measure.results import (
    RankPlace,
    Results,
    Window,
    fewest_warmup_steps,
    merge_windows,
    progress_line,
)
from ..measure.torch_internals import collective_timeout_s
from ..measure.transport import (
    Transport,
    backend_for,
    combine_traces,
    configured_transport,
    read_traces,
    users_variables,
)
from ..measure.wire import Placement, WireBytes
from ..study.checksums import write_sums
from ..study.files import write_json
from ..study.layout import RunFolder
from ..study.run_json import changed_script, read_run, script_sha256
from ..words import sentence
from ..workload.strategies import find_strategy

_MINIMA = {"warmup_steps": 3, "steps_per_epoch": 1, "attribution_steps": 0, "epochs": 1}
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


class RecorderError(BenchError):
    """The recorder cannot record with these settings."""

    exit_code = 1


@dataclass(frozen=True)
class Lengths:
    """Lengths of the windows in optimizer steps, and the number of epochs (rows of metrics.csv).

    An epoch here is a throughput window (steps timed as a whole) and an attribution window (steps timed by
    part). It is independent of the epochs of the training loop. After the last epoch the recorder is idle. If
    ``epochs`` is None, the recorder records until the end of the training.
    """

    warmup_steps: int
    steps_per_epoch: int
    attribution_steps: int
    epochs: int | None

    @classmethod
    def of(cls, given: Mapping[str, int | None], env: Mapping[str, str]) -> Lengths:
        """Return the lengths from ``BENCH_WARMUP_STEPS`` and similar variables, else from ``given``.

        Raises:
            RecorderError: a length is not a whole number or is too small.
        """
        found: dict[str, int | None] = {}
        for field in fields(cls):
            name = field.name
            variable = f"BENCH_{name.upper()}"
            if text := env.get(variable):
                if not text.isdigit():
                    raise RecorderError(f"{variable} is {text!r}, not a whole number")
                found[name] = _checked(variable, int(text), _MINIMA[name])
            else:
                value = given.get(name, int(WorkloadOptions.model_fields[name].default))
                found[name] = None if value is None else _checked(name, value, _MINIMA[name])
        return cls(**found)  # type: ignore[arg-type]


def _checked(name: str, value: int, least: int) -> int:
    if value < least:
        raise RecorderError(f"{name} is {value}", remedy=f"it must be {least} or more")
    return value


def recording_folder(given: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    """Return ``BENCH_RUN_DIR`` if set, else ``given``, else a new folder below the current folder."""
    if folder := env.get("BENCH_RUN_DIR") or given:
        return Path(folder)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("bench-record", f"{stamp}-{os.getpid()}")


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, the process's rank and local rank, and the world size."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int


def launch_from(env: Mapping[str, str], group: tuple[int, int] | None) -> Launch:
    """Detect how this process was launched; ``group`` is (rank, world size) in the process group, if any.

    Raises:
        RecorderError: several processes were started without a process group, or the group's size differs
            from the cell's (``BENCH_EXPECTED_WORLD_SIZE``).
    """
    launcher, _, local_rank, processes = _launcher_of(env)
    if group is not None:
        expected = env.get("BENCH_EXPECTED_WORLD_SIZE", "")
        if expected.isdigit() and int(expected) != group[1]:
            raise RecorderError(
                f"the process group has {group[1]} processes, but the cell has {expected}",
                remedy="let the script take the number of processes from the launcher's variables",
            )
        return Launch(launcher, group[0], local_rank, group[1])
    if processes > 1:
        raise RecorderError(
            f"the first step came before torch.distributed was set up, in a job of {processes} processes",
            remedy="call torch.distributed.init_process_group before the recorder's first step",
        )
    return Launch(launcher, 0, local_rank, 1)


def _launcher_of(env: Mapping[str, str]) -> tuple[str, int, int, int]:
    """Return the launcher's name, and the rank, local rank and world size from the launcher's variables."""
    # A job's script has Slurm's variables as well, but only tasks of srun have a step id. The scripts that
    # bench generates also set torchrun's variables for tasks of srun.
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    is_srun = in_step and "TORCHELASTIC_RUN_ID" not in env
    launcher, names = ("srun", _SRUN_VARIABLES) if is_srun else ("torchrun", _TORCHRUN_VARIABLES)
    if all(env.get(name, "").isdigit() for name in names):
        rank, local_rank, world_size = (int(env[name]) for name in names)
        return launcher, rank, local_rank, world_size
    return "single", 0, 0, 1


def model_sizes(model: nn.Module | None) -> tuple[int | None, int | None]:
    """Return the number of parameters and the size of their gradients in bytes, over all shards.

    Both are None without a model, and in a wrapper that is not known and may have only a shard.
    """
    strategy, _ = find_strategy(model)
    if model is None or (strategy is not None and strategy.untimed):
        return None, None
    parameters = list(model.parameters())  # a DTensor of FSDP2 has the size of the whole parameter
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return sum(p.numel() for p in parameters), trained


class Session:
    """One rank of a recording, from its first step on.

    Raises:
        RecorderError: several processes run without a process group, or the folder cannot be created.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        run_dir: str | os.PathLike[str] | None,
        device: torch.device,
        lengths: Lengths,
    ) -> None:
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        self.launch = launch_from(os.environ, group)
        self.exchange = StoreExchange()
        self.backend = None if group is None else backend_for(device)
        self.device = device
        self.lengths = lengths
        self._timeout_s = collective_timeout_s(device)
        self._meetings: int | None = 0  # None after a time-out
        self._folder = _make_folder(run_dir) if self.launch.rank == 0 else None
        self._writer = None if self._folder is None else RunWriter(self, self._folder, model)
        facts = own_facts(
            self.launch.rank, self.launch.local_rank, os.environ, threads=torch.get_num_threads()
        )
        own = device_of(device, facts.host)
        record = {"facts": asdict(facts), "device": own.name, "identity": own.identity}
        self.exchange.post("facts", record)

    def post(self, number: int, window: Window, *, early: bool = False) -> None:
        """Send this rank's window of epoch ``number`` to the store; in epoch 1, also the transport in use.

        ``early`` is true for a throughput window that is sent before the attribution window, so that the
        throughput is kept if the attribution window never ends.
        """
        self.exchange.post(f"{'early' if early else 'window'}/{number}", window.as_json())
        if number == 1 and not early and self.backend is not None:
            traces = read_traces(self.backend, env=os.environ, rank=self.launch.rank, folder=self._folder)
            self.exchange.post("transport", traces)

    def write(self) -> None:
        """On rank 0, write the epochs that are complete on all ranks."""
        if self._writer is not None:
            self._writer.write()

    def add(self, fact: Fact) -> None:
        """Print a fact and, on rank 0, add it to env.json."""
        if self._writer is not None:
            self._writer.add(fact)
        else:
            _print(fact)

    def explain(self, error: Exception) -> None:
        """Print and report this rank's error; if communication broke, print the cause that others report."""
        contents = self.exchange.read_all("facts") or []
        if len(contents) < 2:
            return
        facts = [RankFacts(**one["facts"]) for one in contents]
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
        peers = Peers(self.exchange.store, self.exchange.rank, facts, rank_0_serves=not by_agent)
        symptom = symptom_of(error)
        if symptom is None:
            peers.report(error_line(error))
            cause: str | None = f"{error_line(error)}; see the traceback above"
        else:
            remedy = "raise the time-out of init_process_group"
            cause = peers.explain(symptom, timeout_s=self._timeout_s, remedy=remedy)
        if cause is not None:
            reason = cause if symptom is None else with_nccl_error(cause, error)
            print(f"bench: error: {peers.name_of(self.exchange.rank)}: {reason}", file=sys.stderr, flush=True)

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all ranks have called this equally often; after a time-out, never wait again."""
        if self._meetings is None:
            return
        self._meetings += 1
        name = f"meeting/{self._meetings}"
        self.exchange.post(name, True)
        if self.exchange.wait_for_all(name, timeout_s=timeout_s):
            self._meetings = None

    def finish(self, posted: int, *, warmup_steps: int, timeout_s: float) -> None:
        """Report that this rank ended after ``posted`` windows; rank 0 waits and writes the last records."""
        self.exchange.post("closed", posted)
        writer = self._writer
        if writer is None:
            return
        late = self.exchange.wait_for_all("closed", timeout_s=timeout_s)
        writer.write(is_last=True)
        if late and timeout_s:
            writer.add(Fact("rank-unfinished", values={"ranks": late, "timeout_s": timeout_s}))
        counts = self.exchange.read_all("closed")
        if counts and len(set(counts)) > 1:
            most, fewest = max(counts), min(counts)
            ends = {"most_rank": counts.index(most), "fewest_rank": counts.index(fewest)}
            writer.add(Fact("steps-differ", values={**ends, "most": most, "fewest": fewest}))
        if not writer.epochs:
            writer.add(Fact("no-window", values={"steps": warmup_steps + 1}))


def _lost(error: UnwritableError) -> Fact:
    return Fact("measurements-lost", values={"reason": str(error)})


def _print(fact: Fact) -> None:
    print(f"bench: {fact.severity}: {sentence(fact)}", flush=True)


def _make_folder(run_dir: str | os.PathLike[str] | None) -> RunFolder:
    folder = RunFolder(recording_folder(run_dir, os.environ))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecorderError(f"{folder.path}: cannot be created: {error.strerror}") from None
    print(f"bench: recording into {folder.path}", flush=True)
    return folder


class RunWriter:
    """Write env.json and the tables on rank 0 as the ranks' records become complete."""

    def __init__(self, session: Session, folder: RunFolder, model: nn.Module | None) -> None:
        self._folder = folder
        self._exchange = session.exchange
        self._launch = session.launch
        self._lengths = session.lengths
        self._device = session.device
        self._backend = session.backend or os.environ.get("BENCH_BACKEND", "none")
        self._transport: Transport | None = None  # None until it has been observed
        self._parameters, self._gradient_bytes = model_sizes(model)
        self._strategy, self._parts = find_strategy(model)
        self._has_bare_model = model is not None and self._strategy is None
        self._strategy_facts: dict[str, Any] = {}
        self._facts: list[RankFacts] = []
        self._places: list[RankPlace] = []
        self._results = Results(folder)
        self._wire: WireBytes | None = None  # None until the hosts are known
        self._samples_per_step: float | None = None
        self._found: list[Fact] = []
        self._has_sample = False
        self.epochs = 0
        run = read_run(folder.path)[0] or {}  # the run's folder of `bench submit` describes the command
        self._script_sha256 = script_sha256(run, os.environ.get("PWD", ""))
        if changed := changed_script(run, self._script_sha256):
            self._keep(changed)

    def write(self, *, is_last: bool = False) -> None:
        """Write complete records without waiting; if writing fails, say so and continue.

        With ``is_last``, also write throughput windows whose attribution window did not end. After the last
        window, write SHA256SUMS.
        """
        try:
            self._write_complete(is_last)
            if self.epochs and (is_last or self.epochs == self._lengths.epochs):
                write_sums(self._folder)
        except UnwritableError as error:
            self._keep(_lost(error))

    def add(self, fact: Fact) -> None:
        """Print a fact and add it to env.json, unless the same fact is known."""
        if fact in self._found:
            return
        self._keep(fact)
        if self._facts:
            try:
                self._write_environment()
            except UnwritableError as error:
                self._keep(_lost(error))

    def _keep(self, fact: Fact) -> None:
        if fact not in self._found:
            self._found.append(fact)
            _print(fact)

    def _write_complete(self, is_last: bool) -> None:
        if not self._facts and not self._read_facts():
            return
        while (contents := self._windows_of(self.epochs + 1, is_last)) is not None:
            self._add_epoch([Window.from_json(content) for content in contents])
            self.epochs += 1
        if self._transport is None and (traces := self._exchange.read_all("transport")) is not None:
            self._transport, slower = combine_traces(
                traces, self._facts, backend=self._backend, env=os.environ
            )
            if slower:
                self._keep(slower)
            self._strategy_facts = self._parts.facts()  # by now, DDP has rebuilt its buckets
            self._write_environment()
        if not self._has_sample:
            self._write_sample(is_last)
        if is_last and self._wire is not None and (unlike := self._wire.fact()):
            self.add(unlike)

    def _write_sample(self, is_last: bool) -> None:
        """Write sampled_step.json when all ranks have posted their sampled step, or at the end with fewer."""
        samples = self._exchange.read_all("sample")
        if samples is None and is_last:
            found = [self._exchange.read("sample", rank) for rank in range(self._launch.world_size)]
            samples = [one for one in found if one is not None]
        if samples:
            write_json(self._folder.sampled_step, {"schema": 1, "ranks": samples})
            self._has_sample = True

    def _windows_of(self, epoch: int, is_last: bool) -> list[Any] | None:
        """Return the windows of all ranks, or None if any window is missing."""
        contents = self._exchange.read_all(f"window/{epoch}")
        if contents is not None or not is_last:
            return contents
        read = self._exchange.read
        ranks = range(self._launch.world_size)
        either = [read(f"window/{epoch}", rank) or read(f"early/{epoch}", rank) for rank in ranks]
        return None if None in either else either

    def _read_facts(self) -> bool:
        contents = self._exchange.read_all("facts")
        if contents is None:
            return False
        self._facts = [RankFacts(**one["facts"]) for one in contents]
        self._places = [
            RankPlace(facts.rank, facts.local_rank, facts.host, one["device"], one["identity"])
            for facts, one in zip(self._facts, contents, strict=True)
        ]
        place = Placement([facts.host for facts in self._facts], self._backend, os.environ)
        self._wire = WireBytes(self._parts.messages, place)
        if self._launch.world_size > 1 and self._has_bare_model:
            self._keep(Fact("model-not-wrapped"))
        for fact in core_facts(self._facts):
            self.add(fact)
        self._write_environment()
        return True

    def _add_epoch(self, windows: Sequence[Window]) -> None:
        record = merge_windows(self.epochs + 1, windows, self._places, wire=self._wire)
        self._results.add(record)
        row = record.row
        if not all(window.stable for window in windows):
            steps = fewest_warmup_steps(self._lengths.warmup_steps, self._device)
            self.add(Fact("not-stable", values={"steps": steps}))
        if jumps := [window.clock_jumps for window in windows if window.clock_jumps]:
            self.add(Fact("clock-was-set", values={"steps": max(jumps)}))
        if math.isnan(row.samples):
            self.add(Fact("samples-unknown"))
        elif self._samples_per_step is None:
            self._samples_per_step = row.samples / row.steps
            self._write_environment()
        losses = [0.0 if window.loss is None else window.loss for window in windows]
        if wrong := [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]:
            self.add(Fact("loss-not-finite", values={"epoch": self.epochs + 1, "ranks": wrong}))
        print(progress_line(row, self._lengths.epochs), flush=True)

    def _write_environment(self) -> None:
        env = users_variables(os.environ)
        batch = self._samples_per_step
        content = shared_environment(
            self._facts,
            env,
            backend=self._backend,
            world_size=self._launch.world_size,
            launcher=self._launch.launcher,
            join_s=None,
            device=self._device,
            threads=torch.get_num_threads(),
            transport=self._transport or configured_transport(self._backend, env),
        ) | {
            "recorder": vars(self._lengths),
            "strategy": None if self._strategy is None else self._strategy.name,
            "global_batch": round(batch) if batch is not None and batch == round(batch) else None,
            "parameters": self._parameters,
            "gradient_bytes": self._gradient_bytes,
            "script_sha256": self._script_sha256,
            "facts": [fact.as_json() for fact in self._found],
            "wire_bytes": None if self._wire is None else self._wire.as_json(),
            **self._strategy_facts,
        }
        write_json(self._folder.env, content)
