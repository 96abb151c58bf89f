"""Make the fixtures of the test cluster, of the figures and of forked ranks known to all tests."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# `pytest` alone does not put the checkout on the path, `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# No test, and no `bench` that a test starts, reads the site defaults of whoever runs it.
os.environ["BENCH_SITE"] = ""

#: The tests need about half of this; more of them fail on a full disk than a reader can understand.
LEAST_FREE_BYTES = 2 * 2**30

# Each collection of garbage would look at all that the imported packages have made: a sixth of the time of the tests.
gc.disable()

pytest_plugins = ["tests.cluster.plugin", "tests.analysis.figures", "tests.train.ranks"]


def pytest_sessionstart() -> None:
    """End at once if the temporary folder is almost full."""
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
        pytest.exit(
            f"{folder} has {free / 2**30:.1f} GiB free, and the tests need {LEAST_FREE_BYTES / 2**30:.0f} GiB: "
            "delete files there, or name another folder with TMPDIR",
            returncode=2,
        )


def pytest_collection_finish() -> None:
    """Collect garbage from here on, rarely, and without what the imports have made."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start: a suite in the background inherits that it is ignored."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
