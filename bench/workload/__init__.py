"""The built-in DDP training that a cell runs and measures: ``python -m bench.workload``."""
