"""Run the workload as a program; see :mod:`bench.workload.main`."""

from __future__ import annotations

import os
import sys

from bench.workload.main import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end waits for communication that a lost rank will never complete,
    # and costs a tenth of a second where all is well. Every file is closed by now.
    os._exit(code)
