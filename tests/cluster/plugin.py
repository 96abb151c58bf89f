"""What tests use of the cluster: the fixtures ``cluster`` and ``running_cluster``.

One cluster serves a whole test session; it starts when the first test asks for it. A test
that asks for it is marked ``cluster``; where none can be started it is skipped, with the
reason, and fails where the tests have to be complete (CI=true).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options, Partition

OPTIONS = Options(
    partitions=(
        # Its jobs push others out: what a preempted job looks like.
        Partition("urgent", "n[1-4]", {"PriorityTier": "10", "PreemptMode": "off"}),
        # Small and short: what a job beyond a partition's limits looks like.
        Partition("short", "n[1-2]", {"MaxTime": "5", "DefaultTime": "1", "MaxNodes": "1"}),
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the cluster, so that ``-m "not cluster"`` leaves it out."""
    for item in items:
        if "running_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Yield the session's cluster, for fixtures of a wider scope than one test."""
    if lacking := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(lacking, pytrace=False)
        pytest.skip(lacking)
    cluster = Cluster.start(OPTIONS)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield the cluster, with Slurm's commands pointed at it; jobs that a test leaves are cancelled."""
    for name, value in running_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield running_cluster
    running_cluster.clear()
