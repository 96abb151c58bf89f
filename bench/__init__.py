"""Plan, run and diagnose scaling studies of PyTorch (DDP, FSDP, HSDP) on Slurm clusters."""

from ddp_scaling_bench.version import __version__

__all__ = ["__version__"]
