"""Count how often a part of a training loop lets the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

#: The beginnings of torch's warnings: of an operation that lets the host wait, and that the mode is new.
_WAIT, _NEW_MODE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"


class HostWaits:
    """Count operations of torch's sync debug mode, such as ``tensor.item()``, and calls it does not know.

    The user's mode and filters stay as they are, and other warnings are shown at the end.
    """

    def __init__(self) -> None:
        self._end: Callable[[], int] | None = None

    def start(self) -> None:
        """Begin to count, after the end of an earlier count."""
        self.stop()
        calls = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wait(*values: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                return call(*values, **named)

            return wait

        mode = torch.cuda.get_sync_debug_mode()
        caught = warnings.catch_warnings(record=True)
        log: list[Any] = caught.__enter__()
        for text in (_WAIT, _NEW_MODE):
            warnings.filterwarnings("always", message=text)
        if not mode:
            torch.cuda.set_sync_debug_mode(1)
        owners: tuple[tuple[Any, str], ...] = (
            (torch.cuda, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.distributed, "barrier"),
        )
        before = [(owner, name, getattr(owner, name)) for owner, name in owners]
        for owner, name, call in before:
            setattr(owner, name, counted(call))

        def end() -> int:
            for change in before:
                setattr(*change)
            if not mode:
                torch.cuda.set_sync_debug_mode(0)
            caught.__exit__(None, None, None)
            waits = [one for one in log if str(one.message).startswith(_WAIT)]
            for one in log:
                if mode or not str(one.message).startswith((_WAIT, _NEW_MODE)):
                    warnings.showwarning(one.message, one.category, one.filename, one.lineno)
            return calls + len(waits)

        self._end = end

    def stop(self) -> int | None:
        """Return the number of waits since the start, or None if nothing was counted."""
        end, self._end = self._end, None
        return None if end is None else end()
