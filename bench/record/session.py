"""One rank's part of a recording: each rank posts its records to the store, and rank 0 writes the files.

The lengths in the run's cell.json override the program's settings, and these override the defaults.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BenchError, UnwritableError
from ..finding import Recorded, with_remedies
from ..measure.environment import device_of, shared_environment
from ..measure.exchange import Peers, StoreExchange, error_line, nccl_of, raised, symptom_of
from ..measure.failure_files import write_failures
from ..measure.failures import Failure, LossNotFinite, OtherSize, RankFailed
from ..measure.findings import (
    ClockWasSet,
    MeasurementsLost,
    ModelNotWrapped,
    NotStable,
    NoWindow,
    RankUnfinished,
    SamplesUnknown,
    StepsDiffer,
)
from ..measure.node import host_name
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
from ..study.cell_json import CellFile, read_cell
from ..study.checksums import write_sums
from ..study.files import read_json, write_json
from ..study.layout import RunFolder
from ..study.run_json import changed_script, read_run, script_sha256
from ..train.options import OPTIONS, expected_value
from ..train.strategies import find_strategy

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


class RecorderError(BenchError):
    """The recorder cannot record with these settings; ``failure`` says why."""

    exit_code = 1

    def __init__(self, found: Failure | str, *, remedy: str = "") -> None:
        self.failure = found if isinstance(found, Failure) else RankFailed(text=found, remedy=remedy)
        super().__init__(self.failure.message, remedy=self.failure.remedy)


@contextmanager
def failures_kept() -> Iterator[None]:
    """Write a RecorderError that is raised to the run's folder, for the reason of the run's end."""
    try:
        yield
    except RecorderError as error:
        write_failures([error.failure])
        raise


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
    def of(cls, given: Mapping[str, int | None], cell: CellFile | None) -> Lengths:
        """Return the lengths of a run's ``cell``, else those of ``given``, else the matrix's defaults.

        Raises:
            RecorderError: a length is not a whole number, or is too small or too large.
        """
        planned, lengths = {} if cell is None else cell.workload, {}
        for field in fields(cls):
            option = OPTIONS[field.name]
            value = planned.get(field.name, given.get(field.name, option.default))
            if value is not None and (expected := expected_value(option, value)):
                raise RecorderError(f"{field.name} is {value!r}", remedy=f"it must be {expected}")
            lengths[field.name] = value
        return cls(**lengths)


def planned_cell(env: Mapping[str, str]) -> CellFile | None:
    """Return the content of the run's cell.json, or None if no script of bench started this process.

    Raises:
        RecorderError: the file is damaged, or the script's file cannot be read.
    """
    folder = env.get("BENCH_RUN_DIR")
    if not folder or not ("BENCH_CELL_ID" in env or RunFolder(Path(folder)).cell.exists()):
        return None
    try:
        return read_cell(Path(folder))
    except BenchError as error:
        raise RecorderError(error.message, remedy=error.remedy) from None


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


def launch_from(
    env: Mapping[str, str], group: tuple[int, int] | None, cell: CellFile | None = None
) -> Launch:
    """Detect how this process was launched; ``group`` is (rank, world size) in the process group, if any.

    Raises:
        RecorderError: several processes were started without a process group, or the group's size is not
            that of the run's ``cell``, if it is known.
    """
    launcher, _, local_rank, processes = _launcher_of(env)
    if group is not None:
        if cell is not None and group[1] != cell.world_size:
            planned, started = cell.world_size, group[1]
            raise RecorderError(OtherSize(started=started, planned=planned, launcher=cell.launcher))
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
        cell: CellFile | None,
    ) -> None:
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        self.launch = launch_from(os.environ, group, cell)
        self.exchange = StoreExchange()
        self.backend = None if group is None else backend_for(device)
        self.cell = cell
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

    def add(self, finding: Recorded) -> None:
        """Print a finding and, on rank 0, add it to env.json."""
        if self._writer is not None:
            self._writer.add(finding)
        else:
            _print(finding)

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
            own = (peers.name_of(self.exchange.rank),)
            failure: Failure | None = replace(raised(error), failed=own)
            hint = "see the traceback above"
        else:
            option, hint = "the time-out of init_process_group", ""
            failure = peers.explain(symptom, timeout_s=self._timeout_s, option=option)
            failure = failure and replace(failure, nccl=nccl_of(error))
        if failure is not None:
            write_failures([failure], self.exchange.rank)
            text = "; ".join(filter(None, (with_remedies([failure]), hint)))
            print(f"bench: error: {text}", file=sys.stderr, flush=True)

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
            writer.add(RankUnfinished(ranks=tuple(late), timeout_s=timeout_s))
        counts = self.exchange.read_all("closed")
        if counts and len(set(counts)) > 1:
            most, fewest = max(counts), min(counts)
            most_rank, fewest_rank = counts.index(most), counts.index(fewest)
            writer.add(StepsDiffer(most_rank=most_rank, fewest_rank=fewest_rank, most=most, fewest=fewest))
        if not writer.epochs:
            writer.add(NoWindow(steps=warmup_steps + 1))


def _lost(error: UnwritableError) -> MeasurementsLost:
    return MeasurementsLost(reason=str(error))


def _print(finding: Recorded) -> None:
    print(f"bench: {finding.severity}: {finding}", flush=True)


def _make_folder(run_dir: str | os.PathLike[str] | None) -> RunFolder:
    folder = RunFolder(recording_folder(run_dir, os.environ))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecorderError(f"{folder.path}: cannot be created: {error.strerror}") from None
    if "BENCH_RUN_DIR" in os.environ:
        _claim(folder)
    print(f"bench: recording into {folder.path}", flush=True)
    return folder


def _claim(folder: RunFolder) -> None:
    """Note that this process records into the folder of a run, which is the folder of one training.

    Raises:
        RecorderError: another training records there, because the command has a launcher of its own.
    """
    host, pid = host_name(os.environ), os.getpid()
    own = folder.recorder.with_name(f".recorder.{host}.{pid}")
    try:
        own.write_text(json.dumps({"host": host, "pid": pid}))
        os.link(own, folder.recorder)
    except FileExistsError:
        other = read_json(folder.recorder) or {}
        if other != {"host": host, "pid": pid} and _is_running(other, host):
            raise RecorderError(
                f"process {other.get('pid')} on {other.get('host')} already records into {folder.path}: the "
                "command started several trainings. Give the command of one process, without a launcher: "
                "bench starts it once per rank"
            ) from None
        os.replace(own, folder.recorder)  # the trainings of a run can follow each other
    except OSError:
        return  # the file system knows no links, or is full, which the first result will show
    finally:
        own.unlink(missing_ok=True)


def _is_running(process: Mapping[str, Any], host: str) -> bool:
    """Return whether a process has not ended; True on another host, which does not tell."""
    try:
        os.kill(int(process["pid"]), 0) if process["host"] == host else None
    except ProcessLookupError:
        return False
    except (KeyError, OSError, TypeError, ValueError):
        return True
    return True


class RunWriter:
    """Write env.json and the tables on rank 0 as the ranks' records become complete."""

    def __init__(self, session: Session, folder: RunFolder, model: nn.Module | None) -> None:
        self._folder = folder
        self._exchange = session.exchange
        self._launch = session.launch
        self._lengths = session.lengths
        self._device = session.device
        self._backend = session.backend or (session.cell.backend if session.cell else "none")
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
        self._found: list[Recorded] = []
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

    def add(self, finding: Recorded) -> None:
        """Print a finding and add it to env.json, unless the same finding is known."""
        if finding in self._found:
            return
        self._keep(finding)
        if self._facts:
            try:
                self._write_environment()
            except UnwritableError as error:
                self._keep(_lost(error))

    def _keep(self, finding: Recorded) -> None:
        if finding not in self._found:
            self._found.append(finding)
            _print(finding)

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
        if is_last and self._wire is not None and (unlike := self._wire.finding()):
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
            self._keep(ModelNotWrapped())
        for finding in core_facts(self._facts):
            self.add(finding)
        self._write_environment()
        return True

    def _add_epoch(self, windows: Sequence[Window]) -> None:
        record = merge_windows(self.epochs + 1, windows, self._places, wire=self._wire)
        self._results.add(record)
        row = record.row
        if not all(window.stable for window in windows):
            steps = fewest_warmup_steps(self._lengths.warmup_steps, self._device)
            self.add(NotStable(steps=steps))
        if jumps := [window.clock_jumps for window in windows if window.clock_jumps]:
            self.add(ClockWasSet(steps=max(jumps)))
        if math.isnan(row.samples):
            self.add(SamplesUnknown())
        elif self._samples_per_step is None:
            self._samples_per_step = row.samples / row.steps
            self._write_environment()
        losses = [0.0 if window.loss is None else window.loss for window in windows]
        if wrong := [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]:
            self.add(LossNotFinite(epoch=self.epochs + 1, ranks=tuple(wrong), severity="warning"))
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
