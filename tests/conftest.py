"""Make the test cluster's fixtures known to all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# `pytest` alone does not put the checkout on the path, `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# No test, and no `bench` that a test starts, reads the site defaults of whoever runs it.
os.environ["BENCH_SITE"] = ""

pytest_plugins = ["tests.cluster.plugin"]
