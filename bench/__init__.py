"""Plan, run and diagnose scaling studies of PyTorch (DDP, FSDP, HSDP) on Slurm clusters."""

import ddp_scaling_bench
from ddp_scaling_bench.version import __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    if name in ddp_scaling_bench.__all__:
        raise ImportError(f"{name} is in another package: from ddp_scaling_bench import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
