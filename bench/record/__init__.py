"""Measure your own training loop.

::

    from bench.record import Recorder

    recorder = Recorder(model)
    for batch in recorder.batches(loader):
        with recorder.step():
            ...
    recorder.close()

The measurement itself is in :mod:`bench.measure`, as for the built-in workload.
"""

from __future__ import annotations

from bench.record.recorder import Recorder
from bench.record.settings import RecorderError

__all__ = ["Recorder", "RecorderError"]
