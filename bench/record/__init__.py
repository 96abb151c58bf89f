"""Measure a training loop of one's own.

::

    from bench.record import Recorder

    recorder = Recorder(model)
    for batch in recorder.batches(loader):
        with recorder.step():
            ...
    recorder.close()

How it is measured stands in :mod:`bench.measure`, as for the built-in workload.
"""

from __future__ import annotations

from bench.record.recorder import Recorder
from bench.record.settings import RecorderError

__all__ = ["Recorder", "RecorderError"]
