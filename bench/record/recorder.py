"""The recorder: the windows of the built-in workload, in a loop that somebody else wrote.

The loop stays what it is. The recorder counts its steps and measures some of them: a warm-up,
then epochs of a throughput window (a clock beside the loop and nothing else) and an attribution
window (hooks that split the step). It communicates outside of windows only, and never waits.
"""

from __future__ import annotations

import atexit
import enum
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.layout import RunFolder
from bench.record import ddp_logger
from bench.record.attribution import Attribution, find_ddp
from bench.record.clock import Clock, clock_for
from bench.record.exchange import Exchange, LocalExchange, StoreExchange, wait_for_all
from bench.record.loop import Batches, Step, batch_size
from bench.record.merging import Window, parts_row
from bench.record.scribe import Scribe
from bench.record.settings import Lengths, Place, RecorderError, place_of, recording_folder
from bench.workload.hosts import own_facts
from bench.workload.resources import Meters, peak_memory_bytes
from bench.workload.windows import is_stable

__all__ = ["Recorder", "RecorderError"]

T = TypeVar("T")

#: How long the end waits for the other ranks' last records.
CLOSE_TIMEOUT_S = 60.0
#: The same where nobody called close.
_LATE_TIMEOUT_S = 5.0


class _Phase(enum.Enum):
    """Where the recorder is; rank 0 writes files in a step that has another one behind it.

    It comes late to that other step, whose gradients bring the ranks together again before
    anything is timed.
    """

    WARM_UP = enum.auto()
    THROUGHPUT = enum.auto()
    ATTRIBUTION = enum.auto()
    BETWEEN = enum.auto()
    DONE = enum.auto()


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
        self._device = _device(model, device)
        self._clock: Clock = clock_for(self._device)
        self._phase = _Phase.WARM_UP
        self._steps = 0  # of the phase
        self._windows = 0
        self._mark: Any = None  # where the clock runs from; None while it stands still
        self._spans: list[tuple[Any, Any]] = []  # of the step so far
        self._taken: list[list[tuple[Any, Any]]] = []  # of the window's steps
        self._step_samples: float | None = None
        self._drawn: float | None = None
        self._samples: list[float | None] = []
        self._parts: list[list[float] | None] = []
        self._clock_jumps = 0  # in the window
        self._loss_sum: Tensor | None = None
        self._losses = 0
        self._window: Window | None = None
        self._stable = False
        self._has_begun = False  # the step, or its data
        self._is_halfway = False  # a micro-batch has ended, and its step has not
        self._is_open = self._is_closed = False
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
        """
        self._handle.samples, self._handle.update = samples, update
        return self._handle

    def loss(self, loss: Tensor | float) -> None:
        """Take the loss of a micro-batch for ``train_loss``; the device is not waited for.

        One with several values counts with their mean.
        """
        if self._phase is not _Phase.THROUGHPUT:
            return
        value = torch.as_tensor(loss).detach().float()  # a sum in half precision soon stands still
        value = value.mean() if value.dim() else value
        self._loss_sum = value.clone() if self._loss_sum is None else self._loss_sum.add_(value)
        self._losses += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the clock stand still: validation, checkpoints, plots."""
        was_running = self._mark is not None
        self.stand_still()
        try:
            yield
        finally:
            if was_running:
                self.run_on()

    def end_epoch(self) -> None:
        """End the current throughput window here, if it has a step; the next one begins a new row."""
        self._leave_windows()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is left; rank 0 waits for the other ranks' records, but not for ever."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_late)
        if not self._is_open:
            return
        self._leave_windows()
        self._phase = _Phase.DONE
        self._exchange.post("closed", self._windows)
        if self._scribe is not None:
            self._finish(self._scribe, timeout_s)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the other ranks may never come.
        self.close(timeout_s=CLOSE_TIMEOUT_S if kind is None else 0.0)

    # -- what frameworks' callbacks say ---------------------------------------------------

    def begin(self) -> None:
        """Let the clock run, if it stands still: a step or its data begin."""
        if self._mark is None and self._phase is not _Phase.DONE:
            if not self._is_open:
                self._open()
            if self._phase is _Phase.ATTRIBUTION and not self._is_halfway:
                self._attribution.start()
            self._mark = self._clock.stamp()
        self._has_begun = True

    def data_begins(self) -> None:
        """Say that the loop now waits for a batch."""
        self.begin()
        if self._phase is _Phase.ATTRIBUTION:
            self._attribution.data_begins()

    def data_ended(self, batch: Any) -> None:
        """Say that the batch is here."""
        if self._phase is _Phase.DONE:
            return
        if self._phase is _Phase.ATTRIBUTION:
            self._attribution.data_ended()
        size = batch_size(batch)
        if size is not None:
            self._drawn = size if self._drawn is None else self._drawn + size

    def forward_begins(self) -> None:
        """Say that the model computes now, where nothing calls it as a module."""
        if self._phase is _Phase.ATTRIBUTION:
            self._attribution.forward_begins()

    def forward_ended(self, output: Any) -> None:
        """Say that the model has computed ``output``."""
        if self._phase is _Phase.ATTRIBUTION:
            self._attribution.forward_ended(output)

    def end(self, samples: float | None, *, update: bool) -> None:
        """Say that a step, or one of its micro-batches, has ended."""
        if self._phase is _Phase.DONE or self._mark is None:
            return
        counted = self._drawn if samples is None else samples
        self._drawn = None
        if counted is not None:
            self._step_samples = counted if self._step_samples is None else self._step_samples + counted
        self._is_halfway, self._has_begun = not update, False
        if update:
            self._complete()

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
        if self._phase is not _Phase.ATTRIBUTION:
            self._spans.append((self._mark, self._clock.stamp()))
        elif self._is_halfway or self._has_begun:
            self._attribution.void()  # its parts are timed without a pause; one between two steps is fine
        self._mark = None

    def run_on(self) -> None:
        """Let the clock run on after :meth:`stand_still`, within a step or between two."""
        begins_anew = self._phase is _Phase.ATTRIBUTION and not (self._is_halfway or self._has_begun)
        if self._is_open and self._mark is None and self._phase is not _Phase.DONE and not begins_anew:
            self._mark = self._clock.stamp()

    def rest(self) -> None:
        """Stop the clock between two steps: what a loader was asked for in vain does not count."""
        if self._is_halfway:
            self.stand_still()
        self._mark = self._drawn = None
        self._has_begun = False

    # -- windows --------------------------------------------------------------------------

    def _open(self) -> None:
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        self._place: Place = place_of(os.environ, group)
        self._exchange: Exchange = LocalExchange() if group is None else StoreExchange()
        self._attribution = Attribution(self._model, self._clock, world_size=self._place.world_size)
        # Every rank reads all counters; what is of a whole host or device is counted once, at the end.
        self._meters = Meters(self._device, speaks_for_host=True, speaks_for_device=True)
        self._scribe: Scribe | None = None
        self._warmup_steps = self._lengths.warmup_steps
        ddp = find_ddp(self._model)
        if ddp is not None:
            ddp_logger.sample_no_step(ddp)
        if self._device.type == "cuda":
            self._warmup_steps = max(self._warmup_steps, ddp_logger.ALWAYS_SAMPLED + 1)
        if self._place.rank == 0:
            self._scribe = self._new_scribe()
        facts = own_facts(self._place.rank, self._place.local_rank, os.environ).as_json()
        name, identity = _device_names(self._device)
        self._exchange.post("facts", {"facts": facts, "device": name, "identity": identity})
        self._is_open = True
        atexit.register(self._close_late)

    def _new_scribe(self) -> Scribe:
        folder = RunFolder(recording_folder(self._run_dir, os.environ))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecorderError(f"{folder.path}: cannot be made: {error.strerror}") from None
        print(f"bench: recording into {folder.path}", flush=True)
        return Scribe(
            folder,
            self._exchange,
            place=self._place,
            lengths=self._lengths,
            device=self._device,
            model=self._model,
        )

    def _complete(self) -> None:
        """Count a whole step, and change the phase where it was the last."""
        now = self._clock.stamp()
        self._spans.append((self._mark, now))
        spans, self._spans = self._spans, []
        samples, self._step_samples = self._step_samples, None
        self._mark = now
        self._steps += 1
        if self._phase is _Phase.THROUGHPUT:
            self._taken.append(spans)
            self._samples.append(samples)
            if self._steps == self._lengths.steps_per_epoch:
                self._end_throughput()
        elif self._phase is _Phase.ATTRIBUTION:
            self._attribute()
        elif self._phase is _Phase.WARM_UP:
            self._taken.append(spans)
            if self._steps == self._warmup_steps - 1:
                self._look()
            elif self._steps == self._warmup_steps:
                self._stable = is_stable(self._seconds())
                self._next_window()
        elif self._phase is _Phase.BETWEEN:
            if self._steps == 1:
                self._look()  # this step's gradients came after every rank's record
            else:
                self._next_window()

    def _next_window(self) -> None:
        if self._windows == self._lengths.epochs:
            self._phase, self._mark = _Phase.DONE, None
            return
        self._taken, self._samples, self._parts = [], [], []
        self._clock_jumps = 0
        self._loss_sum, self._losses = None, 0
        self._enter(_Phase.THROUGHPUT)
        self._clock.settle()
        self._meters.start()
        self._mark = self._clock.stamp()

    def _end_throughput(self) -> None:
        self._window = self._throughput()
        if self._lengths.attribution_steps:
            self._enter(_Phase.ATTRIBUTION)
            self._attribution.attach()
            self._attribution.start()
            self._mark = self._clock.stamp()
        else:
            self._post()

    def _attribute(self) -> None:
        parts = self._attribution.stop()
        self._clock_jumps += self._attribution.clock_jumped
        if self._steps > 1:  # the first has other buckets' timers, and warms up the hooks
            self._parts.append(parts_row(parts))
        if self._steps > self._lengths.attribution_steps:
            self._attribution.detach()
            self._post()
        else:
            self._attribution.start()

    def _post(self) -> None:
        assert self._window is not None
        self._window = replace(self._window, clock_jumps=self._clock_jumps)
        self._windows += 1
        self._exchange.post(f"window/{self._windows}", self._window.as_json())
        self._window = None
        self._enter(_Phase.BETWEEN)

    def _leave_windows(self) -> None:
        """Post what the window that is open has so far."""
        self._mark, self._spans = None, []
        if self._phase is _Phase.THROUGHPUT and self._taken:
            self._window = self._throughput()
            self._post()
        elif self._phase is _Phase.ATTRIBUTION:
            self._attribution.detach()
            self._post()

    def _throughput(self) -> Window:
        """Return the throughput window that ends now; its steps' parts come after it."""
        seconds = self._seconds()
        usage = self._meters.stop()
        loss = None if self._loss_sum is None else float(self._loss_sum) / self._losses
        peak = peak_memory_bytes(self._device)
        return Window(seconds, self._samples, self._parts, loss, peak, usage, self._stable)

    def _seconds(self) -> list[float]:
        """Return the seconds of each step of the window."""
        self._clock.settle()
        return [sum(self._clock.seconds(*span) for span in spans) for spans in self._taken]

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._steps = phase, 0

    def _look(self) -> None:
        if self._scribe is not None:
            self._scribe.look()

    def _finish(self, scribe: Scribe, timeout_s: float) -> None:
        late = wait_for_all(self._exchange, "closed", world_size=self._place.world_size, timeout_s=timeout_s)
        scribe.look()
        if late and timeout_s:
            ranks = ", ".join(map(str, late))
            scribe.warn(f"no end came from rank {ranks} in {timeout_s:g} s: what they recorded last is lost")
        counts = self._exchange.read("closed")
        if counts and len(set(counts)) > 1:
            most, fewest = max(counts), min(counts)
            told = f"rank {counts.index(most)} has {most}, rank {counts.index(fewest)} has {fewest}"
            scribe.warn(f"ranks took different numbers of steps ({told} epochs): what all have is kept")
        if not scribe.epochs:
            wanted = self._warmup_steps + 1
            scribe.warn(f"no window was recorded: there were fewer than {wanted} steps on some rank")

    def _close_late(self) -> None:
        self.close(timeout_s=_LATE_TIMEOUT_S)


def _device(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    if given is not None:
        device = torch.device(given)
    else:
        weight = next(model.parameters(), None) if model is not None else None
        device = torch.device("cpu") if weight is None else weight.device
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_names(device: torch.device) -> tuple[str, str]:
    """Return what ranks.csv calls the device, and which one of the host's it is."""
    if device.type != "cuda":
        return str(device), ""
    properties = torch.cuda.get_device_properties(device)
    return str(device), str(getattr(properties, "uuid", device))
