"""The pytest fixtures ``cluster``, ``running_cluster`` and ``start_cluster``, and the option ``--slurm``.

All tests of a session share one cluster, which is started for the first test that uses it. Tests that use
it are marked ``cluster``. If no cluster can be started, these tests are skipped with the reason; with
CI=true they fail instead. A suite that the Debian mirror does not have is always a reason to skip.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest

from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options, Partition
from tests.cluster.containers import ClusterError
from tests.cluster.releases import Release, find_release
from tests.cluster.roots import SuiteMissingError

StartCluster = Callable[[Options], AbstractContextManager[Cluster]]

OPTIONS = Options(
    partitions=(
        # Jobs in this partition preempt other jobs.
        Partition("urgent", "n[1-4]", {"PriorityTier": "10", "PreemptMode": "off"}),
        # This partition has small limits, for tests with jobs that exceed them.
        Partition("short", "n[1-2]", {"MaxTime": "5", "DefaultTime": "1", "MaxNodes": "1"}),
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the Slurm release of the test cluster."""
    parser.addoption(
        "--slurm",
        default="",
        metavar="SUITE|RELEASE",
        help="run the tests on Slurm of this Debian suite or release (default: the installed Slurm)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests that use the cluster, so that ``-m "not cluster"`` excludes them; put long modules first."""
    for item in items:
        if {"running_cluster", "start_cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("cluster")
    # The modules that wait most come first, so that the others fill the waiting times of the last of them.
    long = {item.path for item in items if any(map(item.get_closest_marker, ("cluster", "slow", "browser")))}
    items.sort(key=lambda item: item.path not in long)


def release_or_skip(name: str) -> Release:
    """Return the release with this name; skip the test, or fail in CI, if no cluster can run it here."""
    try:
        release = find_release(name)
        lacking = missing(release)
    except SuiteMissingError as error:
        pytest.skip(str(error))
    except ClusterError as error:
        lacking = str(error)
    if lacking:
        if os.environ.get("CI") == "true":
            pytest.fail(lacking, pytrace=False)
        pytest.skip(lacking)
    return release


@contextmanager
def started(options: Options) -> Iterator[Cluster]:
    """Start a cluster and stop it at the end of the block."""
    cluster = Cluster.start(options)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def start_cluster(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    """Yield a function that starts a cluster of the session's release, for a ``with`` block."""
    release = release_or_skip(request.config.getoption("--slurm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", release.search_path(os.environ["PATH"]))
        yield lambda options: started(replace(options, release=release))


@pytest.fixture(scope="session")
def running_cluster(start_cluster: StartCluster) -> Iterator[Cluster]:
    """Yield the cluster of the test session, for use by fixtures with a wider scope than one test."""
    with start_cluster(OPTIONS) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield the cluster, set its environment variables, and cancel remaining jobs afterwards."""
    for name, value in running_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield running_cluster
    running_cluster.clear()
