"""Start a Slurm test cluster and count the calls of Slurm's commands, for the scripts of this folder."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options
from tests.cluster.releases import find_release
from tests.jobs.slurm_studies import Study

#: The commands whose calls are counted.
COMMANDS = ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel")


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


_WRAPPER = """\
#!/bin/bash
start=$EPOCHREALTIME
{command} "$@"
code=$?
echo {name} $start $EPOCHREALTIME >>"{folder}/calls"
exit $code
"""


@dataclass(frozen=True)
class Counted:
    """A study with ``folder`` first on its PATH: wrappers in it record each call of a Slurm command."""

    study: Study
    folder: Path

    @classmethod
    def of(cls, study: Study, folder: Path) -> Counted:
        """Create ``folder`` with the wrappers, and return the study with ``folder`` first on its PATH."""
        folder.mkdir()
        for name in COMMANDS:
            wrapper = folder / name
            wrapper.write_text(_WRAPPER.format(name=name, folder=folder, command=shutil.which(name)))
            wrapper.chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        return cls(Study(study.folder, {**study.environment, "PATH": path}), folder)

    def calls(self) -> tuple[Counter[str], float]:
        """Return the calls of each Slurm command since the previous ``calls()``, and their seconds."""
        log = self.folder / "calls"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        log.write_text("")
        return Counter(name for name, _, _ in lines), sum(
            float(end) - float(start) for _, start, end in lines
        )
