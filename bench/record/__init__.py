"""Measure a training loop: what a user's own code imports, and what the built-in workload is made of.

::

    from bench.record import Recorder

    recorder = Recorder(model)
    for batch in recorder.batches(loader):
        with recorder.step():
            ...
    recorder.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.record.recorder import Recorder as Recorder
    from bench.record.recorder import RecorderError as RecorderError

__all__ = ["Recorder", "RecorderError"]


def __getattr__(name: str) -> Any:
    # On demand: the recorder is built on modules that themselves use this package's clocks.
    if name in __all__:
        from bench.record import recorder

        return getattr(recorder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
