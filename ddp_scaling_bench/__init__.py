"""Measure your own training: ``from ddp_scaling_bench import Recorder``.

This package is what runs in a job: the recorder, its instruments and the built-in training. It needs the
standard library and torch only, and nothing of ``bench``, which plans, submits and analyses. It can be
imported beside any file or package of the user that is named ``bench``.
"""

TYPE_CHECKING = False  # this module imports nothing that a file beside the user's script could replace
if TYPE_CHECKING:
    from typing import Any

    from .record import Recorder, RecorderError
    from .record.lightning import BenchCallback as LightningCallback
    from .record.transformers import BenchCallback as TransformersCallback
    from .version import __version__

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
