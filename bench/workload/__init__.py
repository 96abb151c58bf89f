"""The built-in training that a cell runs and measures: ``python -m bench.workload``."""
