"""Write and check the SHA-256 of the files with the values that a run measured.

``SHA256SUMS`` has the format of coreutils: ``sha256sum -c SHA256SUMS`` in the run's folder checks it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .errors import unwritable
from .files import digest_of, regular_file, write_atomically
from .run_folder import RunFolder

#: A line is a digest of 64 letters and the name of one of four files.
_MOST_SUMS = 4096
_FOLDER = RunFolder(Path())
_SUMS = _FOLDER.sums.name
_TABLES = tuple(path.name for path in (_FOLDER.metrics_csv, _FOLDER.ranks_csv, _FOLDER.steps_csv))
_PROBES = _FOLDER.probes.name


def write_sums(folder: RunFolder) -> None:
    """Write SHA256SUMS after the last change of the other files.

    Raises:
        UnwritableError: a file cannot be read, or SHA256SUMS cannot be written.
    """
    names = [*_TABLES, *([_PROBES] if folder.probes.exists() else [])]
    try:
        lines = [f"{digest_of(f'{folder.path}/{name}')}  {name}\n" for name in names]
    except OSError as error:
        raise unwritable(folder.sums, error) from None
    write_atomically(folder.sums, "".join(lines))


def find_damage(folder: str | Path) -> str:
    """Return the first file of a run that is not as the run wrote it, and why; "" if all files are."""
    return next(_damages(str(folder)), "")


def _damages(folder: str) -> Iterator[str]:
    # Paths are joined as texts: with thousands of runs, pathlib would take longer than reading.
    shown = "/".join(folder.rsplit("/", 3)[-3:])
    try:
        with open(f"{folder}/{_SUMS}", "rb", buffering=0, opener=regular_file) as file:
            content = file.read(_MOST_SUMS + 1)
    except OSError as error:
        yield f"{shown}/{_SUMS} cannot be read: {error.strerror}"
        return
    if len(content) > _MOST_SUMS:
        yield f"{shown}/{_SUMS} is larger than {_MOST_SUMS} bytes"
        return
    lines = content.decode("ascii", "replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (*_TABLES, _PROBES):
        path = f"{folder}/{name}"
        if name not in sums:
            if name != _PROBES or os.path.lexists(path):
                yield f"{shown}/{_SUMS} does not contain {name}"
            continue
        try:
            if digest_of(path) != sums[name]:
                yield f"{shown}/{name} is not as the run wrote it: its SHA-256 is not that in {_SUMS}"
        except OSError as error:
            yield f"{shown}/{name} cannot be read: {error.strerror}"
