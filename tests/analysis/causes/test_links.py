"""One slow link of a node is named with its rate, whatever the fabric of the others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from analysis.causes.catalogue import RESTS
from tests.analysis.causes.planted import attempts, causes, plant


def test_the_node_with_the_slow_link_is_named_with_its_rate(tmp_path: Path) -> None:
    """n3 exchanges 0.25 GB/s with both neighbours, the others 1 GB/s: three quarters of the exposed time."""
    path = plant(tmp_path / "s", {"exposed": 0.025})
    ring = ["n1", "n2", "n3", "n4", "n1"]
    pairs = [
        {"sender": one, "receiver": other, "bytes_per_s": [2.5e8 if "n3" in (one, other) else 1e9] * 3}
        for first, second in pairwise(ring)
        for one, other in ((first, second), (second, first))
    ]
    sizes = [{"bytes": 4096 * 4**n, "buckets": 0, "times_s": [[1e-4 * 4**n]] * 3} for n in range(4)]
    for folder in attempts(path):
        content = {"schema": 1, "world_size": 4, "all_reduce": {"sizes": sizes}}
        folder.probes.write_text(json.dumps(content | {"neighbours": {"bytes": 1 << 20, "pairs": pairs}}))
    found = causes(path)
    assert [cause for cause in found["cause"] if cause not in RESTS] == ["slow-link"]
    assert found["node"][0] == "n3"
    assert found["share"][0] == pytest.approx(0.15, abs=0.01)
    assert found["evidence"][0].startswith(
        "n3 exchanges 2.00 Gbit/s with its neighbours, but the other nodes 8.00 Gbit/s"
    )
