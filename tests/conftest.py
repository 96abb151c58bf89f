"""Make the fixtures of the test cluster and of the figures known to all tests."""

import contextlib
import os
import signal
import sys
from pathlib import Path

# `pytest` alone does not put the checkout on the path, `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# No test, and no `bench` that a test starts, reads the site defaults of whoever runs it.
os.environ["BENCH_SITE"] = ""

pytest_plugins = ["tests.cluster.plugin", "tests.analysis.figures"]


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start: a suite in the background inherits that it is ignored."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
