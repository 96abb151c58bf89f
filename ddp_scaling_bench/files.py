"""Read and write JSON and CSV files that several processes can access at the same time."""

from __future__ import annotations

import codecs
import csv
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import NOT_REGULAR, unwritable

#: Larger files are not those of a study: a plan of 300,000 runs has 0.2 GB, and steps.csv of 10 million
#: steps 0.4 GB.
LARGEST_BYTES = 1 << 30

_HOST = os.uname().nodename


def file_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None if it cannot be read."""
    try:
        return digest_of(path)
    except OSError:
        return None


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a file that :func:`read_bytes` would read; raise OSError for other files."""
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def owner_writable(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)``; a new file can be changed only by its owner.

    Users with umask 002 share a group, whose members could otherwise change scripts that run as this user.
    """
    return os.open(path, flags, 0o644)


def owner_readable(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)``; a new file can be read only by its owner."""
    return os.open(path, flags, 0o600)


def regular_file(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)``; raise OSError for FIFOs and devices, which could block."""
    return _regular(path, flags)[0]


def _regular(path: str, flags: int) -> tuple[int, int]:
    """Open a regular file; return its descriptor and its size."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(mode := status.st_mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else NOT_REGULAR
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "It is not a regular file"
        raise OSError(number, what, path)
    return descriptor, status.st_size


def bounded_file(path: str, flags: int) -> int:
    """Open a file as :func:`regular_file`; raise OSError if it is larger than :data:`LARGEST_BYTES`."""
    return _bounded(path, flags)[0]


def _bounded(path: str, flags: int) -> tuple[int, int]:
    """Open a regular file that is not too large; return its descriptor and its size."""
    descriptor, size = _regular(path, flags)
    if size > LARGEST_BYTES:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"it is larger than {LARGEST_BYTES >> 30} GiB", path)
    return descriptor, size


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` to a temporary file and rename it, so that readers never see a partial file.

    If ``private``, only the owner can read the file.

    Raises:
        UnwritableError: the disk is full or read-only, or the folder does not exist; the previous
            content of ``path`` is kept.
    """
    # Include the host name: on a shared file system, processes of two nodes can have the same id.
    temporary = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.tmp")
    try:
        opener = owner_readable if private else owner_writable
        with open(temporary, "wb", buffering=0, opener=opener) as file:
            left = memoryview(text.encode())
            while left:
                left = left[file.write(left) :]
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


def check_writable(folder: Path) -> None:
    """Raise UnwritableError if no files can be created in ``folder``, or in its closest existing parent."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_read_only else errno.EACCES
        raise unwritable(existing, OSError(number, os.strerror(number)))


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON atomically, keeping the order of keys."""
    write_atomically(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def read_object(path: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return (JSON object in the file, ``""``), or (None, a problem such as ``is missing``)."""
    try:
        content = json.loads(read_bytes(path))
    except FileNotFoundError:
        return None, "is missing"
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return None, "is not valid JSON"
    return (content, "") if isinstance(content, dict) else (None, "is not a JSON object")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None if the file is missing or broken."""
    return read_object(path)[0]


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows of a CSV file; both are empty if it cannot be read.

    Rows with more or fewer values than columns are left out.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_bytes(path).decode("utf-8", "replace"), newline=""))
        rows = [row for row in reader if None not in row and None not in row.values()]
        return list(reader.fieldnames or []), rows
    except (OSError, csv.Error):
        return [], []


def read_bytes(path: str | Path) -> bytes:
    """Read a regular file of at most :data:`LARGEST_BYTES`; raise OSError for other files."""
    return b"".join(_blocks(path))


def _blocks(path: str | Path) -> Iterator[bytes]:
    """Yield the content of a file in portions; what is appended meanwhile is left out."""
    # A study has thousands of small files: for each, `open` would take longer than reading.
    descriptor, left = _bounded(str(path), os.O_RDONLY)
    try:
        while left and (block := os.read(descriptor, min(left, 1 << 20))):
            yield block
            left -= len(block)
    finally:
        os.close(descriptor)


def is_binary(start: bytes) -> bool:
    """Return whether the first bytes of a file are no text: no UTF-8, and one in 50 is a control character.

    Zeros do not count: they are in UTF-16, and in logs whose end was lost.
    """
    with suppress(UnicodeDecodeError):
        codecs.utf_8_decode(start)  # the last character may be cut
        return False
    return sum(byte < 32 and byte not in b"\0\a\b\t\n\f\r\x1b" for byte in start) * 50 > len(start)
