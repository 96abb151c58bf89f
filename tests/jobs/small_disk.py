"""A small disk, shared by login node and nodes, that tests fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.bed import Cluster
from tests.common import run_program

SIZE = 4 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A mounted file system of a few megabytes."""

    path: Path

    def fill(self) -> None:
        """Fill the disk."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 1024)
            except OSError:
                return

    def free(self) -> None:
        """Free the space."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(cluster: Cluster, folder: Path) -> Iterator[SmallDisk]:
    """Create a disk in a file, and mount it here and on every node.

    Raises:
        CalledProcessError: there is no loop device here.
    """
    image, mounted = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(SIZE)
    mounted.mkdir()
    _run("mke2fs", "-q", "-F", "-t", "ext2", "-m", "0", str(image))
    loop = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        _run("mount", loop, str(mounted))
        for node in cluster.nodes:
            cluster.run_on_node(node, ["mount", loop, mounted])
        yield SmallDisk(mounted)
    finally:
        for node in cluster.nodes:
            cluster.run_on_node(node, ["umount", "--lazy", mounted], check=False)
        subprocess.run(["umount", "--lazy", mounted], check=False)
        _run("losetup", "--detach", loop)


def _run(*words: str) -> str:
    return run_program(words, check=True).stdout
