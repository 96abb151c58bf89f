"""What a loop holds of its recorder: the context of a step, and the loader whose batches are timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from bench.record.recorder import Recorder

T = TypeVar("T")


class Step:
    """The context of a step; one object serves them all, because it costs time in every step."""

    __slots__ = ("_recorder", "samples", "update")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.samples: float | None = None
        self.update = True

    def __enter__(self) -> Step:
        self._recorder.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._recorder.end(self.samples, update=self.update)
        else:
            self._recorder.abandon()


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
    if isinstance(batch, Mapping):
        return next((size for one in batch.values() if (size := batch_size(one)) is not None), None)
    if isinstance(batch, (list, tuple)):
        return next((size for one in batch if (size := batch_size(one)) is not None), None)
    return None
