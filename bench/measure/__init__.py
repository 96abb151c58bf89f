"""Measurement shared by the built-in workload (``bench.workload``) and the recorder (``bench.record``).

Contains the clocks, step timers, windows and resource meters, the description of a run's environment and
transport, the result tables, and the exchange of values and failures between ranks. The training loop itself
is in ``bench.workload``, or in a user's program that calls the recorder.
"""
