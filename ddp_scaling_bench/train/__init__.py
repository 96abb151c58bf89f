"""The built-in training: ``python -m ddp_scaling_bench.train``."""
