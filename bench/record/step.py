"""What a loop holds of its recorder: the context of a step, and the loader whose batches are timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from bench.record.settings import RecorderError

if TYPE_CHECKING:
    from bench.record.recorder import Recorder

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
