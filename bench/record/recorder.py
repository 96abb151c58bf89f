"""Record the steps of a training loop; the loop or a framework's callback calls the recorder at each step.

The recorder counts all steps and measures them in windows (see :mod:`bench.record.windows`). It exchanges
values with other ranks only between windows, and without waiting.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..finding import Recorded
from ..measure.environment import device_for
from ..measure.findings import ModelNotCalled
from ..measure.step_parts import clock_for
from ..measure.transport import request_nccl_log
from .attribution import Attribution
from .session import Lengths, RecorderError, Session, failures_kept, planned_cell
from .windows import Phase, Span, StepSampler, Windows

T = TypeVar("T")

#: Maximum time that ``close`` waits for the last records of the other ranks.
CLOSE_TIMEOUT_S = 60.0
#: Maximum time of this wait at the exit of a process that did not call ``close``.
_EXIT_TIMEOUT_S = 5.0
#: Maximum time that a rank waits for the others after a checkpoint.
_MEET_TIMEOUT_S = 120.0


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
            and exposed communication are empty.
        run_dir: the folder for the files, by default a new folder below ``bench-record``. The environment
            variable ``BENCH_RUN_DIR`` takes precedence.
        device: the device of the computation, by default the model's device. Without a model, it is the
            current CUDA device if the process uses CUDA when the first step begins.
        lengths: ``warmup_steps``, ``steps_per_epoch``, ``attribution_steps`` and ``epochs`` (None records to
            the end), as in the matrix. Those of a run's cell.json take precedence.

    Raises:
        RecorderError: a length is invalid, or several processes begin a step without a process group.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        **lengths: int | None,
    ) -> None:
        unknown = lengths.keys() - Lengths.__dataclass_fields__
        if unknown:
            allowed = ", ".join(("run_dir", "device", *Lengths.__dataclass_fields__))
            raise RecorderError(f"Recorder has no option {min(unknown)!r}", remedy=f"allowed: {allowed}")
        self._model = model
        with failures_kept():
            self._cell = planned_cell(os.environ)
            self._lengths = Lengths.of(lengths, self._cell)
        self._run_dir = run_dir
        self._device = device
        if device_for(model, device).type == "cuda":
            request_nccl_log(os.environ)
        self._windows = Windows(self._lengths)
        self._session: Session | None = None  # from the first step on
        self._started_at: Any = None  # the time at which the clock was started, or None while it is stopped
        self._spans: list[Span] = []  # of the current step so far
        self._step_samples: float | None = None
        self._batch_samples: float | None = None
        self._has_begun = False  # whether the step, or the loading of its data, has begun
        self._is_mid_step = False  # whether a micro-batch has ended, but not its step
        self._is_closed = False
        self._step = Step(self)

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
        self._windows.loss(loss)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock for validation, checkpoints or plots."""
        was_running = self._started_at is not None
        self.stop_clock()
        try:
            yield
        finally:
            if was_running:
                self.resume_clock()

    def end_epoch(self) -> None:
        """End the current row of metrics.csv (throughput window) if it contains a step; begin a new row."""
        self._started_at, self._spans = None, []
        self._windows.leave()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the remaining records; rank 0 waits up to ``timeout_s`` for the records of other ranks."""
        atexit.unregister(self._close_at_exit)
        self._close(timeout_s)

    def give_up(self) -> None:
        """Write the remaining records after an exception, without waiting for other ranks.

        If the exception ends the process, the exception's cause is printed at that time.
        """
        self._close(0.0)

    def _close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._session is None:
            return
        self.end_epoch()
        self._windows.phase = Phase.DONE
        self._warn_of_unused_model()
        warmup = self._windows.warmup_steps
        self._session.finish(self._windows.posted, warmup_steps=warmup, timeout_s=timeout_s)

    def _warn_of_unused_model(self) -> None:
        instrumented = self._windows.posted > 0 and self._lengths.attribution_steps > 0
        timed = self._model is not None and self._attribution.times_model
        unused = timed and instrumented and not self._attribution.was_called
        if unused:
            self.add(ModelNotCalled())

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
            if self._session is None:
                self._open()
            if self._windows.phase is Phase.ATTRIBUTION and not self._is_mid_step:
                self._attribution.start()
            self._started_at = self._clock.stamp()
        self._has_begun = True

    def data_begins(self) -> None:
        """Record that the loop begins to wait for a batch."""
        self.begin()
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_begins()

    def data_ended(self, batch: Any) -> None:
        """Record the arrival of the batch."""
        if self._windows.phase is Phase.DONE:
            return
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_ended()
        size = batch_size(batch)
        if size is not None:
            self._batch_samples = size if self._batch_samples is None else self._batch_samples + size

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
        if self._windows.phase is Phase.DONE or self._started_at is None:
            return
        counted = self._batch_samples if samples is None else samples
        self._batch_samples = None
        if counted is not None:
            self._step_samples = counted if self._step_samples is None else self._step_samples + counted
        self._is_mid_step, self._has_begun = not update, False
        if update:
            now = self._clock.stamp()
            self._spans.append((self._started_at, now))
            spans, self._spans = self._spans, []
            step_samples, self._step_samples = self._step_samples, None
            self._started_at = self._windows.count(spans, step_samples, now)

    def discard_step(self) -> None:
        """Discard a step that ended in an exception."""
        self._windows.discard_sample()
        self._started_at = None
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
        self._started_at = None

    def resume_clock(self) -> None:
        """Resume the clock after :meth:`stop_clock`, within a step or between two steps."""
        starts_anew = self._windows.phase is Phase.ATTRIBUTION and not (self._is_mid_step or self._has_begun)
        if self._session is None or self._windows.phase is Phase.DONE or starts_anew:
            return
        if self._started_at is None:
            self._started_at = self._clock.stamp()

    def rest(self) -> None:
        """Stop the clock between two steps, and discard any wait for the next batch."""
        self._windows.discard_sample()
        if self._is_mid_step:
            self.stop_clock()
        self._started_at = self._batch_samples = None
        self._has_begun = False

    def meet(self) -> None:
        """Wait for the other ranks while the clock is stopped, so that no rank measures a wait for another.

        This is no collective: ranks that do not come are waited for once, for a limited time.
        """
        if self._session is not None and self._started_at is None:
            self._session.meet(timeout_s=_MEET_TIMEOUT_S)

    def add(self, finding: Recorded) -> None:
        """Print a finding on rank 0 and add it to env.json."""
        if self._session is not None and self._session.launch.rank == 0:
            self._session.add(finding)

    def _open(self) -> None:
        # The model may have been moved to the device after the recorder was created.
        device = device_for(self._model, self._device)
        self._clock = clock_for(device)
        with failures_kept():
            session = Session(
                self._model, run_dir=self._run_dir, device=device, lengths=self._lengths, cell=self._cell
            )
        self._attribution = Attribution(self._model, self._clock, world_size=session.launch.world_size)
        self._windows.open(self._clock, self._attribution, session, StepSampler(self._model))
        self._session = session
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has nothing to write
        error = getattr(sys, "last_value", None)  # the exception that ends the process, if any
        if isinstance(error, Exception) and self._session is not None:
            self._session.explain(error)
        self._close(_EXIT_TIMEOUT_S if error is None else 0.0)


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
        if self._is_open or self._is_prepared:
            mistake = "was called within another step" if self._is_open else "was called without `with`"
            remedy = "write `with recorder.step():` around one step's forward, backward and update"
            raise RecorderError(f"recorder.step() {mistake}", remedy=remedy)
        if samples is not None and not (isinstance(samples, (int, float)) and 0 <= samples < math.inf):
            samples = _as_number(samples)
        self._is_prepared = True
        self._samples, self._update = samples, update
        return self

    def __enter__(self) -> Step:
        self._is_prepared = False
        self._recorder.begin()
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


def _as_number(samples: Any) -> float:
    """Convert ``samples`` of another type, such as a tensor, to a number."""
    try:
        number = float(samples)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if isinstance(samples, str) or not 0 <= number < math.inf:
        remedy = "pass the number of samples that this rank trains on in the step"
        raise RecorderError(
            f"recorder.step(samples={samples!r}): not a valid number of samples", remedy=remedy
        )
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
        batches = iter(self.loader)
        try:
            while True:
                recorder.data_begins()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
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
