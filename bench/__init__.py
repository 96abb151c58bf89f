"""Plan, run and diagnose scaling studies of PyTorch DDP on Slurm clusters."""

__version__ = "0.1.0"
