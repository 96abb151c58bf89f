"""What a loop holds of its recorder: the context of a step, and the loader whose batches are timed."""

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

from bench.measure.environment import device_for
from bench.measure.step_parts import Clock, clock_for
from bench.measure.transport import ask_nccl
from bench.record.attribution import Attribution
from bench.record.failures import Guard
from bench.record.hang_watch import Progress
from bench.record.session import Session
from bench.record.settings import Lengths, RecorderError
from bench.record.windows import Phase, Span, Windows

T = TypeVar("T")


class Step:
    """The context of a step; one object serves them all, because it costs time in every step."""

    __slots__ = ("_is_asked_for", "_is_open", "_recorder", "samples", "update")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_asked_for = self._is_open = False
        self.samples: float | None = None
        self.update = True

    def ask(self, samples: float | None, *, update: bool) -> Step:
        """Return the context for the next step.

        Raises:
            RecorderError: the one before was never entered, or is not left; no number of samples.
        """
        if self._is_open or self._is_asked_for:
            raise _misused(is_open=self._is_open)
        if samples is not None and not (isinstance(samples, (int, float)) and 0 <= samples < math.inf):
            samples = _number(samples)
        self._is_asked_for = True
        self.samples, self.update = samples, update
        return self

    def __enter__(self) -> Step:
        self._is_asked_for = False
        self._recorder.begin()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if kind is None:
            self._recorder.end(self.samples, update=self.update)
        else:
            self._recorder.abandon()


def _misused(*, is_open: bool) -> RecorderError:
    remedy = "write `with recorder.step():` around one step's forward, backward and update"
    if is_open:
        return RecorderError("recorder.step() within a step that has not ended", remedy=remedy)
    return RecorderError("recorder.step() was called without `with`", remedy=remedy)


def _number(samples: Any) -> float:
    """Return a number of samples of any kind: a tensor's, say."""
    try:
        number = float(samples)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if isinstance(samples, str) or not 0 <= number < math.inf:
        remedy = "give how many samples this rank trains on in the step"
        raise RecorderError(f"recorder.step(samples={samples!r}): not a number of samples", remedy=remedy)
    return number


class Batches(Generic[T]):
    """A loader whose batches are timed."""

    def __init__(self, recorder: Recorder, loader: Iterable[T]) -> None:
        self._recorder = recorder
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        recorder = self._recorder
        batches = iter(self._loader)
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
    """Return the samples in a batch: the first dimension of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else None
    parts: Iterable[Any] = ()
    if isinstance(batch, (list, tuple)):
        parts = batch
    elif isinstance(batch, Mapping):  # asked last: that takes longest
        parts = batch.values()
    for part in parts:
        size = batch_size(part)
        if size is not None:
            return size
    return None


# The recorder: what a training loop, or a framework's callback, tells about its steps.
#
# The loop stays what it is. The recorder counts its steps and measures some of them; the windows are
# in :mod:`bench.record.windows`, and the other ranks are reached through :mod:`bench.record.session`,
# outside of windows only and without waiting.


#: How long the end waits for the other ranks' last records.
CLOSE_TIMEOUT_S = 60.0
#: The same where nobody called close.
_LATE_TIMEOUT_S = 5.0


class Recorder:
    """Measures a training loop and writes metrics.csv, ranks.csv, steps.csv and env.json.

    ::

        recorder = Recorder(model)
        for batch in recorder.batches(loader):
            with recorder.step():
                ...
        recorder.close()

    A step is one optimizer step. The clock runs from one step's end to the next one's, whatever
    the loop does there; it stands still in ``with recorder.pause():``, and between two loops over
    ``batches``. Every rank makes a recorder; rank 0 writes.

    Args:
        model: what the loop calls, under DDP or not. Without it forward, backward and exposed
            communication stay empty.
        run_dir: where the files go; ``$BENCH_RUN_DIR`` comes first, a new folder below
            ``bench-record`` is the default.
        device: where the model computes; the default is the model's own.
        lengths: ``warmup_steps``, ``steps_per_epoch``, ``attribution_steps`` and ``epochs`` (None:
            until the end), as the matrix has them; the harness's come first.

    Raises:
        RecorderError: a length that cannot be; at the first step, several processes without a
            process group.
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
        self._lengths = Lengths.of(lengths, os.environ)
        self._run_dir = run_dir
        self._device = device_for(model, device)
        self._clock: Clock = clock_for(self._device)
        if self._device.type == "cuda":
            ask_nccl(os.environ)
        self._windows = Windows(self._clock, device=self._device, lengths=self._lengths)
        self._session: Session | None = None  # from the first step on
        self._guard: Guard | None = None
        self._mark: Any = None  # where the clock runs from; None while it stands still
        self._spans: list[Span] = []  # of the step so far
        self._step_samples: float | None = None
        self._drawn: float | None = None
        self._has_begun = False  # the step, or its data
        self._is_halfway = False  # a micro-batch has ended, and its step has not
        self._is_paused = self._is_closed = False
        self._handle = Step(self)

    # -- what a loop says -----------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """Return ``loader``'s batches; the time until each is there counts as data loading.

        The start of the loader's workers and what comes after its last batch do not count.
        """
        return Batches(self, loader)

    def step(self, samples: float | None = None, *, update: bool = True) -> Step:
        """Return a context for one optimizer step: forward, backward and update.

        Args:
            samples: this rank's samples of the step; the default is the size of what ``batches`` gave.
            update: False for a micro-batch that is not the last of its step (gradient accumulation).

        Raises:
            RecorderError: a step within a step, or without ``with``; ``samples`` is no number of them.
        """
        return self._handle.ask(samples, update=update)

    def loss(self, loss: Tensor | float) -> None:
        """Take the loss of a micro-batch for ``train_loss``; the device is not waited for.

        One with several values counts with their mean.
        """
        self._windows.loss(loss)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the clock stand still: validation, checkpoints, plots."""
        was_running = self._mark is not None
        self.stand_still()
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused
            if was_running:
                self.run_on()

    def end_epoch(self) -> None:
        """End the current throughput window here, if it has a step; the next one begins a new row."""
        self._leave()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is left; rank 0 waits for the other ranks' records, but not for ever."""
        atexit.unregister(self._close_late)
        self._close(timeout_s)

    def give_up(self) -> None:
        """Write what is left after an exception, and wait for nobody: the other ranks may never come.

        If the exception ends the process, it is explained then.
        """
        self._close(0.0)

    def _close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._session is None:
            return
        if self._guard is not None:
            self._guard.withdraw()
        self._leave()
        self._windows.end()
        self._warn_of_another_model()
        warmup = self._windows.warmup_steps
        self._session.finish(self._windows.posted, warmup_steps=warmup, timeout_s=timeout_s)

    def _warn_of_another_model(self) -> None:
        assert self._session is not None
        instrumented = self._windows.posted > 0 and self._lengths.attribution_steps > 0
        unused = self._model is not None and instrumented and not self._attribution.was_called
        if unused and self._session.place.rank == 0:
            self._session.warn(
                "the model that the recorder was given was never called in an instrumented step: forward and "
                "backward are not known; give it what the loop calls"
            )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    # -- what frameworks' callbacks say ---------------------------------------------------

    def begin(self) -> None:
        """Let the clock run, if it stands still: a step or its data begin."""
        if self._mark is None and self._windows.phase is not Phase.DONE:
            if self._session is None:
                self._open()
            if self._windows.phase is Phase.ATTRIBUTION and not self._is_halfway:
                self._attribution.start()
            self._mark = self._clock.stamp()
        self._has_begun = True

    def data_begins(self) -> None:
        """Say that the loop now waits for a batch."""
        self.begin()
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_begins()

    def data_ended(self, batch: Any) -> None:
        """Say that the batch is here."""
        if self._windows.phase is Phase.DONE:
            return
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.data_ended()
        size = batch_size(batch)
        if size is not None:
            self._drawn = size if self._drawn is None else self._drawn + size

    def forward_begins(self) -> None:
        """Say that the model computes now, where nothing calls it as a module."""
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.forward_begins()

    def forward_ended(self, output: Any) -> None:
        """Say that the model has computed ``output``."""
        if self._windows.phase is Phase.ATTRIBUTION:
            self._attribution.forward_ended(output)

    def end(self, samples: float | None, *, update: bool) -> None:
        """Say that a step, or one of its micro-batches, has ended."""
        if self._windows.phase is Phase.DONE or self._mark is None:
            return
        counted = self._drawn if samples is None else samples
        self._drawn = None
        if counted is not None:
            self._step_samples = counted if self._step_samples is None else self._step_samples + counted
        self._is_halfway, self._has_begun = not update, False
        if update:
            now = self._clock.stamp()
            self._spans.append((self._mark, now))
            spans, self._spans = self._spans, []
            whole, self._step_samples = self._step_samples, None
            self._mark = self._windows.count(spans, whole, now)

    def abandon(self) -> None:
        """Say that a step ended in an exception: it does not count."""
        self._mark = None
        self._spans = []
        self._step_samples = self._drawn = None
        self._is_halfway = self._has_begun = False

    def stand_still(self) -> None:
        """Stop the clock until :meth:`run_on`, or the next step."""
        if self._mark is None:
            return
        if self._windows.phase is not Phase.ATTRIBUTION:
            self._spans.append((self._mark, self._clock.stamp()))
        elif self._is_halfway or self._has_begun:
            self._attribution.void()  # its parts are timed without a pause; one between two steps is fine
        self._mark = None

    def run_on(self) -> None:
        """Let the clock run on after :meth:`stand_still`, within a step or between two."""
        begins_anew = self._windows.phase is Phase.ATTRIBUTION and not (self._is_halfway or self._has_begun)
        if self._session is None or self._windows.phase is Phase.DONE or begins_anew:
            return
        if self._mark is None:
            self._mark = self._clock.stamp()

    def rest(self) -> None:
        """Stop the clock between two steps: what a loader was asked for in vain does not count."""
        if self._is_halfway:
            self.stand_still()
        self._mark = self._drawn = None
        self._has_begun = False

    # -- its own ------------------------------------------------------------------------

    def _open(self) -> None:
        session = Session(self._model, run_dir=self._run_dir, device=self._device, lengths=self._lengths)
        self._attribution = Attribution(self._model, self._clock, world_size=session.place.world_size)
        self._windows.open(self._attribution, session)
        self._session = session
        self._process = os.getpid()
        self._guard = Guard(session, device=self._device, progress=self._progress)
        atexit.register(self._close_late)

    def _progress(self) -> Progress:
        windows = self._windows
        return Progress(windows.total, windows.phase is not Phase.DONE, self._is_paused)

    def _leave(self) -> None:
        """Hand over what the window that is open has so far."""
        self._mark, self._spans = None, []
        self._windows.leave()

    def _close_late(self) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked has nothing to write
        error = getattr(sys, "last_value", None)  # what ends the process, if it is an exception
        if isinstance(error, Exception) and self._guard is not None:
            self._guard.explain(error)
        self._close(_LATE_TIMEOUT_S if error is None else 0.0)
