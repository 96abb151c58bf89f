"""The recorder as a callback of HuggingFace's Trainer: ``Trainer(callbacks=[BenchCallback()])``.

Transformers is an optional extra: ``pip install ddp-scaling-bench[transformers]``.

The Trainer passes neither itself nor its batches to callbacks. While it trains, the callback therefore
replaces two methods of the Trainer with functions that call them: ``get_batch_samples``, which fetches the
batches of a step, and ``training_step``, which returns the loss of a batch.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..measure.findings import SamplesUnknown
from .recorder import Recorder, batch_size
from .settings import RecorderError


def _callback_class() -> Any:
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ImportError:
        remedy = "pip install 'ddp-scaling-bench[transformers]'"
        raise RecorderError("Transformers is not installed", remedy=remedy) from None


Callback: Any = _callback_class()


class BenchCallback(Callback):  # type: ignore[misc]
    """Measure ``Trainer.train``, except evaluation and checkpoints.

    Args:
        samples: a function that returns the number of samples in a batch. The default is the length of
            the batch's first tensor. If the length of the first batch is not the batch size of the Trainer,
            as for packed sequences, the samples are unknown.
        run_dir, lengths: the same as for :class:`ddp_scaling_bench.record.Recorder`.
    """

    def __init__(
        self,
        *,
        samples: Callable[[Any], float] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        **lengths: Any,
    ) -> None:
        self._count: Callable[[Any], float | None] | None = samples
        self._run_dir, self._lengths = run_dir, lengths
        self._recorder: Recorder  # this and the Trainer while it trains
        self._trainer: Any
        self._replaced: dict[str, Any] = {}  # attributes of the Trainer object itself, as they were
        self._batches = 0  # of the current step
        self._samples: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Create a recorder for the model that the Trainer calls, which is a DDP module on several ranks."""
        if self._replaced:  # the Trainer begins again, with a smaller batch
            self._end(self._recorder.give_up)
        self._trainer = _calling_trainer(self)
        self._recorder = Recorder(
            self._trainer.model_wrapped, run_dir=self._run_dir, device=args.device, **self._lengths
        )
        self._batch_size = state.train_batch_size or args.train_batch_size
        if args.accelerator_config.split_batches:
            self._batch_size //= args.world_size
        self._replace("get_batch_samples", self._fetch)
        self._replace("training_step", self._train)

    def on_step_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Count a step, and stop the clock if an evaluation or a checkpoint follows."""
        self._recorder.end(self._samples, update=True)
        if control.should_evaluate or control.should_save:
            self._recorder.rest()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Stop the clock until the next batch is fetched."""
        self._recorder.rest()

    def on_save(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Wait for the rank that wrote the checkpoint."""
        self._recorder.meet()

    def on_train_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Write the remaining records."""
        self._end(self._recorder.close)

    def _end(self, close: Callable[[], None]) -> None:
        close()
        for name, own in self._replaced.items():
            delattr(self._trainer, name)
            if own is not None:
                setattr(self._trainer, name, own)
        self._replaced.clear()

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        method = getattr(self._trainer, name, None)
        if method is None:
            raise RecorderError(
                f"this release of Transformers has no Trainer.{name}",
                remedy="pip install 'transformers>=4.46'",
            )
        self._replaced[name] = vars(self._trainer).get(name)
        setattr(self._trainer, name, lambda *values, **named: function(method, *values, **named))

    def _fetch(self, method: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Fetch the batches of a step."""
        self._recorder.data_begins()
        fetched = method(*values, **named)
        self._recorder.data_ended(None)
        batches = fetched[0]
        if batches:
            self._recorder.step_begins()
        self._batches, self._samples = len(batches), self._samples_of(batches)
        return fetched

    def _train(self, method: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Train on a batch; the losses of a step's batches add up to the loss of the step."""
        loss = method(*values, **named)
        self._recorder.loss(loss * self._batches)
        return loss

    def _samples_of(self, batches: Sequence[Any]) -> float | None:
        """Return the number of samples in a step, or None if it is unknown."""
        if not batches:
            return None
        if self._count is None:
            length, self._count = batch_size(batches[0]), batch_size
            if length != self._batch_size:
                self._count = lambda batch: None  # the structure of a batch is unknown
                self._recorder.add(SamplesUnknown(length=length, batch_size=self._batch_size))
        counts = [self._count(batch) for batch in batches]
        return None if None in counts else sum(count for count in counts if count is not None)


def _calling_trainer(callback: BenchCallback) -> Any:
    """Return the Trainer that calls ``callback``, from the calls that lead here."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
        if any(one is callback for one in getattr(handler, "callbacks", ())):
            return frame.f_locals["self"]
        frame = frame.f_back
    raise RecorderError(
        "the callback was not called by a Trainer of Transformers",
        remedy="pass it to one: Trainer(callbacks=[TransformersCallback()])",
    )
