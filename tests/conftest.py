"""Make the test cluster's fixtures known to all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

# `pytest` alone does not put the checkout on the path, `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# No test, and no `bench` that a test starts, reads the site defaults of whoever runs it.
os.environ["BENCH_SITE"] = ""

pytest_plugins = ["tests.cluster.plugin"]


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start: a suite in the background inherits that it is ignored."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after the cluster's plugin has marked its tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that use the test cluster first: they are the longest, and one worker runs a whole file."""
    long_files = {item.path for item in items if item.get_closest_marker("cluster")}
    items.sort(key=lambda item: item.path not in long_files)
