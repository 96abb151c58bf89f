"""Measurement shared by the built-in workload (``bench.workload``) and the recorder (``bench.record``).

Clocks, parts of a step, windows, meters, the environment and transport of a run, its tables, and the
exchange of values and failures between ranks. The training loop itself is elsewhere.
"""
