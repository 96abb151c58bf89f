"""The recorder as a callback of Lightning: ``Trainer(callbacks=[BenchCallback()])``.

Lightning is an optional extra: ``pip install ddp-scaling-bench[lightning]``. The older package
``pytorch_lightning`` serves as well.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from bench.record.attribution import find_ddp
from bench.record.recorder import Recorder
from bench.record.settings import RecorderError


def _callback_class() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise RecorderError("Lightning is not installed", remedy="pip install 'ddp-scaling-bench[lightning]'")


Callback: Any = _callback_class()


class BenchCallback(Callback):  # type: ignore[misc]
    """Measures ``Trainer.fit``; validation and checkpoints after an epoch do not count.

    The time between two batches counts as data loading, Lightning's own work there included.

    Args:
        run_dir: as of :class:`bench.record.Recorder`.
        lengths: the same.
    """

    def __init__(self, *, run_dir: str | os.PathLike[str] | None = None, **lengths: int | None) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._lengths = lengths
        self._recorder: Recorder | None = None
        self._updates = 0
        self._is_called_by_hand = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Make a recorder of what the strategy made of the module: DDP, where there are several ranks."""
        self._recorder = Recorder(
            trainer.strategy.model, run_dir=self._run_dir, device=module.device, **self._lengths
        )
        # Without DDP, Lightning calls training_step itself, and no module's hooks.
        self._is_called_by_hand = find_ddp(trainer.strategy.model) is None
        self._updates = trainer.global_step
        self._recorder.data_begins()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Let the clock run: the epoch's first batch is being fetched."""
        if self._recorder is not None:
            self._recorder.data_begins()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Say that the batch is here."""
        if self._recorder is not None:
            self._recorder.begin()
            self._recorder.data_ended(batch)
            if self._is_called_by_hand:
                self._recorder.forward_begins()

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Say that the forward pass has ended."""
        if self._recorder is not None and self._is_called_by_hand:
            self._recorder.forward_ended(loss)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step, if the optimizer made one."""
        if self._recorder is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            # Lightning has divided it among the step's micro-batches.
            self._recorder.loss(loss * trainer.accumulate_grad_batches)
        update = trainer.global_step > self._updates
        self._updates = trainer.global_step
        self._recorder.end(None, update=update)
        self._recorder.data_begins()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Let the clock stand still."""
        self._rest()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Let the clock stand still until the next epoch."""
        self._rest()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write what is left."""
        if self._recorder is not None:
            self._recorder.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Write what is left, and wait for nobody."""
        if self._recorder is not None:
            self._recorder.give_up()

    def _rest(self) -> None:
        if self._recorder is not None:
            self._recorder.rest()
