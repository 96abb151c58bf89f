"""The pytest fixtures ``cluster`` and ``running_cluster``.

All tests of a session share one cluster, which is started for the first test that uses it. Tests that use
it are marked ``cluster``. If no cluster can be started, these tests are skipped with the reason; with
CI=true they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options, Partition

OPTIONS = Options(
    partitions=(
        # Jobs in this partition preempt other jobs.
        Partition("urgent", "n[1-4]", {"PriorityTier": "10", "PreemptMode": "off"}),
        # This partition has small limits, for tests with jobs that exceed them.
        Partition("short", "n[1-2]", {"MaxTime": "5", "DefaultTime": "1", "MaxNodes": "1"}),
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests that use the cluster, so that ``-m "not cluster"`` excludes them."""
    for item in items:
        if "running_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Yield the cluster of the test session, for use by fixtures with a wider scope than one test."""
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
    """Yield the cluster, set its environment variables, and cancel remaining jobs afterwards."""
    for name, value in running_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield running_cluster
    running_cluster.clear()
