"""Measure your own training: ``from ddp_scaling_bench import Recorder``.

This package has no modules of its own. Its modules are the files of the folder ``bench``, loaded under
names that begin with ``ddp_scaling_bench``. A repository with a ``bench.py`` or ``bench/`` of its own can
therefore use both. For the same reason, jobs start the programs of bench under this name, and all imports
within ``bench`` are relative.
"""

import os

TYPE_CHECKING = False  # this module imports nothing that a file beside the user's script could replace
if TYPE_CHECKING:
    from typing import Any

    from bench.record import Recorder, RecorderError
    from bench.record.lightning import BenchCallback as LightningCallback
    from bench.record.transformers import BenchCallback as TransformersCallback

__path__ = [os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "bench")]  # noqa: PTH118, PTH120

__all__ = ["LightningCallback", "Recorder", "RecorderError", "TransformersCallback", "__version__"]

#: Module and name of each attribute. They are imported on first use, because most import torch.
_LAZY = {
    "Recorder": ("record", "Recorder"),
    "RecorderError": ("record", "RecorderError"),
    "LightningCallback": ("record.lightning", "BenchCallback"),
    "TransformersCallback": ("record.transformers", "BenchCallback"),
    "__version__": ("version", "__version__"),
}


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
