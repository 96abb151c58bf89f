"""Make the test cluster's fixtures known to all tests."""

from __future__ import annotations

import sys
from pathlib import Path

# `pytest` alone does not put the checkout on the path, `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

pytest_plugins = ["tests.cluster.plugin"]
