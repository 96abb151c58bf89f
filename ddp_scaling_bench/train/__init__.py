"""The built-in training: ``python -P -m ddp_scaling_bench.train``."""
