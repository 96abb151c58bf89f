"""Record the steps of a training loop; the loop or a framework's callback calls the recorder at each step.

The recorder measures steps in windows, and exchanges values with other ranks between them, without waiting.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnwritableError
from ..finding import Recorded
from ..measure.env_file import KEYS
from ..measure.environment import device_for
from ..measure.exchange import Met
from ..measure.failures import NoStep, write_failures
from ..measure.heartbeat import DATA, LOOP, PAUSED, STEP, Heartbeat
from ..measure.launch import LaunchError, launch_from
from ..measure.node import host_name
from ..measure.step_parts import clock_for
from ..measure.transport import request_nccl_log
from ..records import EpochRow
from ..run_folder import RunFolder
from ..train.strategies import Parts, Strategy, find_strategy
from ..units import short_name
from .attribution import Attribution
from .replicas import ReplicaSampler
from .session import Session
from .settings import Lengths, RecorderError, failures_kept, planned_cell, recording_folder
from .step_sample import StepSampler
from .windows import Phase, Span, Windows
from .writer import RunWriter

T = TypeVar("T")

#: The recorders by the process, the thread and the folder in which they record.
_recorders: WeakValueDictionary[tuple[int, int, Path], Recorder] = WeakValueDictionary()
#: The heartbeats of the recorders of this process, which count their steps.
_heartbeats: list[Heartbeat] = []

#: Maximum time that ``close`` waits for the last records of the other ranks.
CLOSE_TIMEOUT_S = 60.0
#: Maximum time of this wait at the exit of a process that did not call ``close``.
_EXIT_TIMEOUT_S = 5.0
#: Maximum time that a rank waits for the others after a checkpoint.
_MEET_TIMEOUT_S = 120.0
#: The values of env.json that only the program knows.
_DESCRIBED = ("workload", "strategy", "per_gpu_batch", "global_batch", "flops")
#: The columns of metrics.csv that a program can set.
_SETTABLE = ("val_loss", "val_accuracy", "val_mae", "val_rmse", "checkpoint_time_sec", "comm_time_sec")


class Recorder:
    """Measure a training loop and write metrics.csv, ranks.csv, steps.csv and env.json.

    ::

        recorder = Recorder(model)
        for batch in recorder.batches(loader):
            with recorder.step():
                ...
        recorder.close()

    A step is one optimizer step. The duration of a step is the time since the end of the previous step and
    includes everything that the loop does in between. The clock stops in ``with recorder.pause():`` and
    between two loops over ``batches``. Every rank creates a recorder, and rank 0 writes the files.

    Args:
        model: the model that the loop calls, with or without DDP. If omitted, the times of forward, backward
            and exposed communication are empty. :meth:`watch` can name it later.
        optimizer: the optimizer, whose communication is timed if it is torch's ``ZeroRedundancyOptimizer``.
        run_dir: the folder for the files, by default a new folder below ``bench-record``. The environment
            variable ``BENCH_RUN_DIR`` takes precedence.
        device: the device of the computation, by default the model's device. Without a model, it is the
            current CUDA device if the process uses CUDA when the first step begins.
        warmup_rounds: the warm-up is repeated until the step time is stable on all ranks, at most this often.
            The ranks must synchronise in every step.
        lengths: ``warmup_steps``, ``steps_per_epoch``, ``attribution_steps`` and ``epochs`` (None records to
            the end), as in the matrix. Those of a run's cell.json take precedence.

    Raises:
        RecorderError: a length is invalid, or several processes begin a step without a process group.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        warmup_rounds: int = 1,
        **lengths: int | None,
    ) -> None:
        unknown = lengths.keys() - Lengths.__dataclass_fields__
        if unknown:
            own = ("optimizer", "run_dir", "device", "warmup_rounds")
            allowed = ", ".join((*own, *Lengths.__dataclass_fields__))
            raise RecorderError(f"Recorder has no option {min(unknown)!r}", remedy=f"allowed: {allowed}")
        if type(warmup_rounds) is not int or warmup_rounds < 0:
            what = f"warmup_rounds is {warmup_rounds!r}"
            raise RecorderError(what, remedy="it must be a whole number, at least 0")
        _check_model(model)
        self._model, self._optimizer, self._run_dir, self._device = model, optimizer, run_dir, device
        self._micro_batches: int | None = None
        self._parts: Parts | None = None
        with failures_kept():
            self._cell = planned_cell(os.environ)
            self._lengths = Lengths.of(lengths, self._cell)
        if _device(model, device).type == "cuda":
            request_nccl_log(os.environ)
        self._windows = Windows(self._lengths, warmup_rounds=warmup_rounds)
        self._session: Session | None = None  # from open() or the first step on
        self._attribution: Attribution  # from the first step on
        self._untold: list[Callable[[RunWriter], None]] = []  # before there is a writer
        self._has_started = False  # whether the first step has begun
        self._started_at: Any = None  # the time at which the clock was started, or None while it is stopped
        self._spans: list[Span] = []  # of the current step so far
        self._step_samples: float | None = None
        self._batch_samples: float | None = None
        self._has_begun = False  # whether the step, or the loading of its data, has begun
        self._is_mid_step = False  # whether a micro-batch has ended, but not its step
        self._is_closed = False
        self._step = Step(self)
        self._heartbeat = Heartbeat()
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        micro_batches: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Name the model and its optimizer, before the first step.

        Args:
            model: as for the constructor.
            optimizer: as for the constructor.
            micro_batches: the number of forward passes of a step, of which only the last one's backward pass
                synchronises gradients. By default they are counted in the attribution window.
            parts: what measures the steps of a strategy that the model does not show.

        Raises:
            RecorderError: the first step has begun.
        """
        if self._has_started:
            raise RecorderError("recorder.watch() was called after the first step", remedy="call it before")
        _check_model(model)
        self._model, self._optimizer = model, optimizer or self._optimizer
        self._micro_batches, self._parts = micro_batches, parts
        if self._session is not None:
            self._session.watch(model, self._strategy())

    def open(self, met: Met) -> None:
        """Begin before the first step, so that env.json names the ranks even if no step follows.

        Call it on every rank after the ranks have met, in a store that exists before the process group.
        """
        self._open(met)

    def flush(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the last window now; rank 0 waits up to ``timeout_s`` for the records of other ranks."""
        if self._session is not None:
            self._session.flush(self.epochs, timeout_s=timeout_s)

    @property
    def epochs(self) -> int:
        """The number of windows (rows of metrics.csv) that this rank has completed."""
        return self._windows.posted

    @property
    def done(self) -> bool:
        """True if all planned windows are recorded: the loop can stop, on all ranks after the same step."""
        return self.epochs == self._lengths.epochs

    @property
    def last_loss(self) -> float | None:
        """This rank's mean loss in the last window, or in the warm-up before the first; None if unknown."""
        return self._windows.last_loss

    @property
    def last_row(self) -> EpochRow | None:
        """On rank 0, the last row of metrics.csv; after :meth:`close`, that of the last window."""
        writer = self._writer
        return None if writer is None else writer.results.last_row

    @property
    def write_error(self) -> UnwritableError | None:
        """On rank 0, why a file could not be written, if one could not."""
        return None if self._writer is None else self._writer.error

    def describe(self, *, ideal_step_s: float | None = None, **values: Any) -> None:
        """Add values that only the program knows to env.json.

        Args:
            ideal_step_s: the time in seconds of a step if all devices ran at their peak rate, for ``mfu``.
            values: the values by their names, which JSON can represent.

        Raises:
            RecorderError: a value is none of JSON, or the recorder measures it itself.
        """
        for name, value in values.items():
            if name in KEYS and name not in _DESCRIBED:
                raise RecorderError(f"{name} is measured by the recorder", remedy="use another name")
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                what = f"recorder.describe({name}=...): {type(value).__name__} is no value of JSON"
                raise RecorderError(what, remedy="pass a number, a text, a list or a dictionary") from None
        self._tell(lambda writer: writer.describe(ideal_step_s, values))

    @property
    def _writer(self) -> RunWriter | None:
        return None if self._session is None else self._session.writer

    def _tell(self, act: Callable[[RunWriter], None]) -> None:
        """Let rank 0's writer act, now or as soon as there is one."""
        if self._session is None:
            self._untold.append(act)
        elif self._session.writer is not None:
            act(self._session.writer)

    def set_columns(self, epoch: int | None = None, **columns: float) -> None:
        """Set values of metrics.csv that only the program knows, such as ``val_loss``.

        Args:
            epoch: the row, such as :attr:`epochs` for the last complete one; None means every row.
            columns: the values; only those of rank 0 are used.

        Raises:
            RecorderError: the recorder measures a column itself, or there is no such column.
        """
        for name in columns:
            if name not in _SETTABLE:
                raise RecorderError(f"{name} cannot be set", remedy=f"allowed: {', '.join(_SETTABLE)}")
        if values := {name: _as_float(own, f"set_columns({name}=...)") for name, own in columns.items()}:
            self._tell(lambda writer: writer.set_columns(epoch, values))

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """Return an iterable over ``loader`` that measures the time until each batch arrives as data loading.

        The start of the loader's workers and the time after the last batch are not measured.
        """
        return Batches(self, loader)

    def step(self, samples: float | None = None, *, update: bool = True) -> Step:
        """Return a context for one optimizer step: forward, backward and update.

        Args:
            samples: the number of samples that this rank trains on in the step; by default, the size of the
                batches taken from :meth:`batches`.
            update: False for a micro-batch that is not the last of its step (gradient accumulation).

        Raises:
            RecorderError: the steps are nested, the previous call was not used in a ``with`` statement, or
                ``samples`` is not a number.
        """
        return self._step.prepare(samples, update=update)

    def loss(self, loss: Tensor | float) -> None:
        """Add a micro-batch's loss to ``train_loss`` without waiting for the device.

        For a tensor with several values, the mean is added.
        """
        self._windows.loss(loss if isinstance(loss, Tensor) else _as_float(loss, "loss()"))

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Count as optimizer what belongs to its step: unscaling, clipping or clearing gradients.

        An optimizer's ``step`` counts without this call.
        """
        is_timed = self._windows.phase is Phase.ATTRIBUTION and self._attribution.times_model
        if is_timed:
            self._attribution.optimizer_begins()
        try:
            yield
        finally:
            if is_timed:
                self._attribution.optimizer_ended()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock for validation, checkpoints or plots."""
        was_running, stage = self._started_at is not None, self._heartbeat.stage
        self.stop_clock()
        self._heartbeat.stage = PAUSED
        try:
            yield
        finally:
            self._heartbeat.stage = stage
            if was_running:
                self.resume_clock()

    def end_epoch(self) -> None:
        """End the current row of metrics.csv (throughput window) if it contains a step; begin a new row."""
        self._stop()
        self._spans = []
        self._windows.leave()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the remaining records; rank 0 waits up to ``timeout_s`` for the records of other ranks."""
        if self._heartbeat.completed:
            atexit.unregister(self._close_at_exit)
        self._close(timeout_s)

    def give_up(self) -> None:
        """Write the remaining records after an exception, without waiting for other ranks.

        If the exception ends the process, the exception's cause is printed at that time.
        """
        self._close(0.0)

    def _close(self, timeout_s: float) -> None:
        if self._is_closed or self._session is None:  # before the first step, there is nothing to close
            return
        self._is_closed = True
        self.end_epoch()
        self._windows.phase = Phase.DONE
        if self._has_started:
            self._windows.conclude()
        self._heartbeat.close(left=timeout_s > 0)
        self._session.finish(self._windows.posted, self._heartbeat.completed, timeout_s=timeout_s)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    # -- calls of Step, Batches and frameworks' callbacks -------------------------------------

    def begin(self) -> None:
        """Start the clock if it is stopped, because a step or the loading of its data begins."""
        if self._started_at is None and self._windows.phase is not Phase.DONE:
            if not self._has_started:
                self._start()
            if self._clock.is_capturing():
                return  # the work of this step does not run yet
            self._windows.clock_starts()
            if self._windows.phase is Phase.ATTRIBUTION and not self._is_mid_step:
                self._attribution.start()
            self._started_at = self._clock.stamp()
        self._has_begun = True

    def step_begins(self) -> None:
        """Record that a step begins whose data have arrived."""
        self.begin()
        self._heartbeat.stage = STEP

    def data_begins(self) -> None:
        """Record that the loop begins to wait for a batch."""
        self.begin()
        self._heartbeat.stage = DATA
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_begins()

    def data_ended(self, batch: Any) -> None:
        """Record the arrival of the batch."""
        self._heartbeat.stage = LOOP
        if self._windows.phase is Phase.DONE:
            return
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_ended()
        if self._windows.wants_inputs:
            self._windows.inputs(batch)
        size = batch_size(batch)
        if size is not None:
            self._batch_samples = size if self._batch_samples is None else self._batch_samples + size

    def first_batch(self, wait_s: float, loader: object) -> None:
        """Record the wait for the first batch of a loop over ``loader``."""
        self._windows.first_batch(wait_s, loader)

    def forward_begins(self) -> None:
        """Record the start of the forward pass of a model that is not called as a module."""
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.forward_begins()

    def forward_ended(self, output: Any) -> None:
        """Record the end of the forward pass that :meth:`forward_begins` started."""
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.forward_ended(output)

    def end(self, samples: float | None, *, update: bool) -> None:
        """Record the end of a step, or of one of its micro-batches."""
        if update:
            self._heartbeat.step_ended()
        if self._windows.phase is Phase.DONE or self._started_at is None:
            return
        counted = self._batch_samples if samples is None else samples
        self._batch_samples = None
        if counted is not None:
            self._step_samples = counted if self._step_samples is None else self._step_samples + counted
        self._is_mid_step, self._has_begun = not update, False
        if self._clock.is_capturing():
            self.discard_step()
        elif update:
            now = self._clock.stamp()
            self._spans.append((self._started_at, now))
            spans, self._spans = self._spans, []
            step_samples, self._step_samples = self._step_samples, None
            self._started_at = self._windows.count(spans, step_samples, now)

    def discard_step(self) -> None:
        """Discard a step that ended in an exception."""
        self._windows.discard_sample()
        self._stop()
        self._spans = []
        self._step_samples = self._batch_samples = None
        self._is_mid_step = self._has_begun = False

    def stop_clock(self) -> None:
        """Stop the clock until :meth:`resume_clock` or the next step."""
        self._windows.discard_sample()
        if self._started_at is None:
            return
        if self._windows.phase is not Phase.ATTRIBUTION:
            self._spans.append((self._started_at, self._clock.stamp()))
        elif self._is_mid_step or self._has_begun:
            self._attribution.void()  # the parts of a step must not contain a pause
        self._stop()

    def _stop(self) -> None:
        if self._started_at is not None:
            self._started_at = None
            self._attribution.stops_early()
            self._windows.clock_stops()

    def resume_clock(self) -> None:
        """Resume the clock after :meth:`stop_clock`, within a step or between two steps."""
        starts_anew = self._windows.phase is Phase.ATTRIBUTION and not (self._is_mid_step or self._has_begun)
        if self._session is None or self._windows.phase is Phase.DONE or starts_anew:
            return
        if self._started_at is None:
            self._windows.clock_starts()
            self._started_at = self._clock.stamp()

    def rest(self) -> None:
        """Stop the clock between two steps, and discard any wait for the next batch."""
        if self._heartbeat.stage != STEP:  # no exception ended the step
            self._heartbeat.stage = PAUSED
        self._windows.discard_sample()
        if self._is_mid_step:
            self.stop_clock()
        self._stop()
        self._batch_samples = None
        self._has_begun = False

    def meet(self) -> None:
        """Wait for the other ranks while the clock is stopped, so that no rank measures a wait for another.

        This is no collective: ranks that do not come are waited for once, for a limited time.
        """
        if self._session is not None and self._started_at is None:
            self._session.meet(timeout_s=_MEET_TIMEOUT_S)

    def add(self, finding: Recorded) -> None:
        """Print a finding on rank 0 and add it to env.json."""
        self._tell(lambda writer: writer.add(finding))

    def _open(self, met: Met | None = None) -> None:
        # The model may have been moved to the device after the recorder was created.
        device = _device(self._model, self._device)
        folder = recording_folder(self._run_dir, os.environ)
        older = _recorders.get(place := (os.getpid(), threading.get_ident(), folder.resolve()))
        if older and not older._is_closed:  # of a training that failed and begins again
            older.close(timeout_s=0.0)
            if older._writer is not None:
                what = f"a new Recorder replaces the records of another one in {folder}"
                print(f"bench: warning: {what}", file=sys.stderr, flush=True)
        with failures_kept():
            self._session = Session(folder, device, self._lengths, self._cell, met)
        _recorders[place] = self
        for act in self._untold:
            self._tell(act)
        self._process = os.getpid()

    def _start(self) -> None:
        if self._session is None:
            self._open()
        session, model, strategy = self._session, self._model, self._strategy()
        assert session is not None
        if session.met is None:
            session.watch(model, strategy)
        self._clock, ranks = clock_for(session.device), session.launch.world_size
        counts = (ranks, self._micro_batches, session.model_parallel)
        self._attribution = Attribution(model, strategy, self._clock, *counts)
        replica = ReplicaSampler(model if ranks > 1 else None)
        self._windows.open(self._clock, self._attribution, session, StepSampler(model), replica)
        self._heartbeat.start(os.environ, session.launch, host_name(os.environ))
        _heartbeats.append(self._heartbeat)
        self._has_started = True

    def _strategy(self) -> tuple[Strategy | None, Parts]:
        return (None, self._parts) if self._parts else find_strategy(self._model, self._optimizer)

    def _close_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has nothing to write
        error = getattr(sys, "last_value", None)  # the exception that ends the process, if any
        if error is None and not any(one.completed for one in _heartbeats):
            _note_no_step()
        if isinstance(error, Exception) and self._session is not None:
            self._session.explain(error)
        self._close(_EXIT_TIMEOUT_S if error is None else 0.0)


@cache
def _note_no_step() -> None:
    """Write for a run of `bench`, or else print, on rank 0, that this training took no step."""
    folder = os.environ.get("BENCH_RUN_DIR")
    with suppress(LaunchError):
        if launch_from(os.environ).rank:
            return
        if folder and not RunFolder(Path(folder)).metrics_csv.exists():  # else another one did
            write_failures([NoStep()], 0)
        elif not (folder or RecorderError.was_raised):
            text = f"{NoStep().message}; put each step into `with recorder.step():`"
            print(f"bench: warning: {text}", file=sys.stderr, flush=True)


class Step:
    """The context manager of a step; one object is reused, because creating objects takes time."""

    __slots__ = ("_is_open", "_is_prepared", "_recorder", "_samples", "_update")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_prepared = self._is_open = False
        self._samples: float | None = None
        self._update = True

    def prepare(self, samples: float | None, *, update: bool) -> Step:
        """Prepare for the next step.

        Raises:
            RecorderError: the previous step was not entered or not left, or ``samples`` is not a number.
        """
        if torch.utils.data.get_worker_info() is not None:
            what = "recorder.step() was called in a worker of a DataLoader"
            raise RecorderError(what, remedy="call it in the training loop only")
        if self._is_open or self._is_prepared:
            mistake = "was called within another step" if self._is_open else "was called without `with`"
            remedy = "write `with recorder.step():` around one step's forward, backward and update"
            raise RecorderError(f"recorder.step() {mistake}", remedy=remedy)
        if samples is not None and not (isinstance(samples, (int, float)) and 0 <= samples < math.inf):
            samples = _as_number(samples)
        self._is_prepared, self._samples, self._update = True, samples, update
        return self

    def __enter__(self) -> Step:
        self._is_prepared = False
        self._recorder.step_begins()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if kind is None:
            self._recorder.end(self._samples, update=self._update)
        else:
            self._recorder.discard_step()


def _check_model(model: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        what = f"the model of the recorder is a {type(model).__name__}, not a torch.nn.Module"
        raise RecorderError(what, remedy="pass the model that the loop calls: Recorder(model)")


def _device(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    """Return the device of a recording; raise RecorderError if torch does not have the ``given`` one."""
    try:
        return device_for(model, given)
    except (RuntimeError, AssertionError):
        if given is None:
            raise
        remedy = 'pass "cuda" if the process has a GPU, else "cpu", or omit it'
        what = f"Recorder(device={str(given)!r}): torch has no such device"
        raise RecorderError(what, remedy=remedy) from None


def _shown(value: object) -> str:
    return short_name(" ".join(repr(value).split()))


def _as_float(value: Any, call: str) -> float:
    """Convert a value that was passed in a ``call`` to a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"recorder.{call}: {_shown(value)} is not a number"
        raise RecorderError(what, remedy="pass a number, or a tensor with one value") from None


def _as_number(samples: Any) -> float:
    """Convert ``samples`` of another type, such as a tensor, to a number."""
    try:
        number = float(samples)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if isinstance(samples, str) or not 0 <= number < math.inf:
        text = f"recorder.step(samples={_shown(samples)}): not a valid number of samples"
        raise RecorderError(text, remedy="pass the number of samples that this rank trains on in the step")
    return number


class Batches(Generic[T]):
    """An iterable over a loader that times the arrival of each batch."""

    def __init__(self, recorder: Recorder, loader: Iterable[T]) -> None:
        self._recorder = recorder
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        recorder = self._recorder
        batches, is_first = iter(self.loader), True
        try:
            while True:
                recorder.data_begins()
                began = time.perf_counter() if is_first else 0.0
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if is_first:
                    is_first = False
                    recorder.first_batch(time.perf_counter() - began, self.loader)
                recorder.data_ended(batch)
                yield batch
        finally:
            recorder.rest()


def batch_size(batch: Any) -> float | None:
    """Return the length of the first tensor in a batch, or None if the batch contains no tensor."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else None
    parts: Iterable[Any] = ()
    if isinstance(batch, (list, tuple)):
        parts = batch
    elif isinstance(batch, Mapping):  # last, because this check takes longest
        parts = batch.values()
    return next((size for part in parts if (size := batch_size(part)) is not None), None)
