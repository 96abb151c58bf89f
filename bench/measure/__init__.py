"""Measurement shared by the built-in workload (``bench.train``) and the recorder (``bench.record``).

This package contains the clocks, step timers, windows and resource meters. It also describes a run's
environment and transport, writes the result tables, and exchanges values and failures between ranks. The
training loop itself is in ``bench.train``, or in a user's program that calls the recorder.
"""
