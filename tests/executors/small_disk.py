"""A small disk that login node and nodes share, to be filled up or made read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.bed import Cluster

SIZE = 4 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A mounted file system of some megabytes."""

    path: Path

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 1024)
            except OSError:
                return

    def free(self) -> None:
        """Give the space back."""
        (self.path / "filler").unlink()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave no byte free for a while."""
        self.fill()
        try:
            yield
        finally:
            self.free()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Let nobody write for a while; no file may be open for writing."""
        _run("mount", "-o", "remount,ro", str(self.path))
        try:
            yield
        finally:
            _run("mount", "-o", "remount,rw", str(self.path))


@contextmanager
def small_disk(cluster: Cluster, folder: Path) -> Iterator[SmallDisk]:
    """Make a disk in a file, and mount it here and on every node (whose mounts are their own).

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
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
