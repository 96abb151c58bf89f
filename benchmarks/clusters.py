"""Start a Slurm test cluster, for the scripts of this folder."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options
from tests.cluster.releases import find_release


@contextmanager
def without_slurmdbd(cluster: Cluster) -> Iterator[None]:
    """Stop the accounting daemon within a ``with`` block."""
    cluster.stop_slurmdbd()
    try:
        yield
    finally:
        cluster.start_slurmdbd()


#: Faults of Slurm's daemons.
DAEMONS: dict[str, Callable[[Cluster], AbstractContextManager[None]]] = {
    "controller stopped": Cluster.without_slurmctld,
    "controller frozen": Cluster.frozen_slurmctld,
    "accounting stopped": without_slurmdbd,
}


def add_release_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the Slurm release."""
    parser.add_argument("--slurm", default="", metavar="SUITE|RELEASE", help="default: the installed Slurm")


@contextmanager
def own_cluster(
    options: Options | None = None, *, slurm: str = "", exit_code: int = 1
) -> Iterator[tuple[Cluster, Path]]:
    """Start a Slurm test cluster, yield it with an empty folder, and remove both at the end.

    If no cluster of the release ``slurm`` can be started here, exit with the reason.
    """
    release = find_release(slurm)
    if lacking := missing(release):
        print(f"not run: {lacking}")
        sys.exit(exit_code)
    cluster = Cluster.start(replace(options or Options(), release=release))
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield cluster, Path(folder)
    finally:
        cluster.stop()
