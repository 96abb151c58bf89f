"""The recorder as a callback of Lightning: ``Trainer(callbacks=[BenchCallback()])``.

Lightning is an optional extra: ``pip install ddp-scaling-bench[lightning]``. The older package
``pytorch_lightning`` is supported, too.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..train.strategies import find_strategy
from .recorder import Recorder
from .settings import RecorderError


def _callback_class() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise RecorderError("Lightning is not installed", remedy="pip install 'ddp-scaling-bench[lightning]'")


Callback: Any = _callback_class()


class BenchCallback(Callback):  # type: ignore[misc]
    """Measure ``Trainer.fit``, except validation and the checkpoints between epochs.

    The time between two batches, including Lightning's own work, counts as data loading. The
    arguments are the same as for :class:`ddp_scaling_bench.record.Recorder`.
    """

    def __init__(self, *, run_dir: str | os.PathLike[str] | None = None, **lengths: Any) -> None:
        super().__init__()
        self._run_dir, self._lengths = run_dir, lengths
        self._recorder: Recorder | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Create a recorder for the strategy's model, which is a DDP module if there are several ranks."""
        model, device = trainer.strategy.model, module.device
        self._recorder = Recorder(model, run_dir=self._run_dir, device=device, **self._lengths)
        # Without a wrapper, Lightning calls training_step directly, so no module hooks run.
        self._has_hooks = find_strategy(model)[0] is not None
        self._updates = trainer.global_step
        self._recorder.data_begins()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Start the clock, because Lightning now fetches the epoch's first batch."""
        if self._recorder is not None:
            self._recorder.data_begins()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Record the arrival of the batch."""
        if self._recorder is not None:
            self._recorder.begin()
            self._recorder.data_ended(batch)
            self._recorder.step_begins()
            if not self._has_hooks:
                self._recorder.forward_begins()

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Record the end of the forward pass."""
        if self._recorder is not None and not self._has_hooks:
            self._recorder.forward_ended(loss)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step if the optimizer took one."""
        if self._recorder is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            # Lightning divided the loss by the number of micro-batches.
            self._recorder.loss(loss * trainer.accumulate_grad_batches)
        update = trainer.global_step > self._updates
        self._updates = trainer.global_step
        self._recorder.end(None, update=update)
        self._recorder.data_begins()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Stop the clock until the next batch is fetched."""
        if self._recorder is not None:
            self._recorder.rest()

    on_validation_start = on_train_epoch_end

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write the remaining records."""
        if self._recorder is not None:
            self._recorder.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Write the remaining records without waiting for other ranks."""
        if self._recorder is not None:
            self._recorder.give_up()
