"""The Slurm releases that the test cluster can run: the installed one, and those of Debian suites.

Debian's mirrors contain one release of Slurm per suite. :mod:`tests.cluster.roots` downloads a suite's Slurm
into a cache; nothing is installed into the system. A :class:`Release` owns all differences in starting and
configuring the daemons of a release.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.cluster.containers import ClusterError, daemon_environment, run
from tests.cluster.roots import Root, suite_version

#: The suites that `make releases` tests, oldest first. sid changes, so no test expects a certain release.
SUITES = ("bullseye", "bookworm", "trixie", "sid")
#: Before this release, slurmd rejects CgroupPlugin in cgroup.conf.
_CGROUP_PLUGIN_SINCE = (21, 8)


@dataclass(frozen=True)
class Release:
    """Slurm's programs and plugins: those in ``root``, or those installed on this machine if it is empty."""

    name: str = "installed"
    root: str = ""

    @cached_property
    def version(self) -> str:
        """The version that Slurm prints, such as ``24.11.5``."""
        if self.root:
            return Root(Path(self.root)).version
        # Unlike sbatch --version, this needs no configuration.
        return run(["slurmd", "-V"], env=daemon_environment()).stdout.split()[-1]

    @property
    def number(self) -> tuple[int, int]:
        """The release as a pair that can be compared, such as ``(24, 11)``."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    def search_path(self, path: str) -> str:
        """Return ``path`` with the folder of Slurm's programs first.

        Users need this too, not only daemons: a batch script finds srun through the PATH of its submitter,
        and a command of another release cannot load the plugins in this release's ``PluginDir``.
        """
        if not self.root or str(Root(Path(self.root)).programs) in path.split(":"):
            return path
        return f"{Root(Path(self.root)).programs}:{path}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that this process lacks to call the commands of this release."""
        path = os.environ.get("PATH", "")
        return {"PATH": self.search_path(path)} if self.search_path(path) != path else {}

    @property
    def settings(self) -> Mapping[str, str]:
        """Lines of slurm.conf and slurmdbd.conf."""
        return {"PluginDir": str(Root(Path(self.root)).plugins)} if self.root else {}

    @property
    def cgroup_settings(self) -> Mapping[str, str]:
        """Lines of cgroup.conf."""
        return {"CgroupPlugin": "cgroup/v1"} if self.number >= _CGROUP_PLUGIN_SINCE else {}

    @property
    def slurmd_options(self) -> list[str]:
        """Options of slurmd, which otherwise starts the slurmstepd that was compiled into it."""
        return ["-d", f"{Root(Path(self.root)).programs}/slurmstepd"] if self.root else []


INSTALLED = Release()


def find_release(name: str) -> Release:
    """Return the release with a name: ``installed``, a Debian suite (``trixie``) or a number (``24.11``).

    Downloads the suite's root into the cache if it is not there yet.

    Raises:
        SuiteMissingError: the mirror does not have the suite.
        ClusterError: no suite contains this release, or its root cannot be made.
    """
    if name in ("", INSTALLED.name):
        return INSTALLED
    if not re.match(r"\d", name):
        return Release(name, str(Root.of_suite(name).path))
    if shutil.which("slurmd", path=daemon_environment()["PATH"]) and _begins(INSTALLED.version, name):
        return INSTALLED
    versions = {suite: suite_version(suite) for suite in SUITES}
    for suite, version in versions.items():
        if _begins(version, name):
            return find_release(suite)
    known = ", ".join(f"{suite} {version or 'is missing'}" for suite, version in versions.items())
    raise ClusterError(f"no Debian suite has Slurm {name}; the mirror has: {known}")


def _begins(version: str, number: str) -> bool:
    return f"{version}.".startswith(f"{number}.")
