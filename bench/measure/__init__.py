"""What is measured of a rank, and how it is written down, whoever wrote the training loop.

The built-in workload (``bench.workload``) and the recorder of other people's loops (``bench.record``)
must read the same numbers in the same way: their clocks, the parts of a step, the meters of a host, the
transport in use, the tables of a run, and what ranks tell each other when one is lost are here.
How steps come about, and when a window begins, is not.
"""
