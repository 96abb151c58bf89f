"""Read and write JSON and CSV files that several processes can access at the same time."""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from ..errors import NOT_REGULAR, unwritable

#: Every file system writes up to this many bytes in one operation.
_PAGE_BYTES = 4096

_HOST = os.uname().nodename
_encode = json.JSONEncoder(ensure_ascii=False).encode


def file_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None if it cannot be read."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


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
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else NOT_REGULAR
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "It is not a regular file"
        raise OSError(number, what, path)
    return descriptor


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


def object_text(content: Mapping[str, Any]) -> str:
    """Return a JSON object as text with one line per key.

    This format is short and quick to write: Python's encoder for indented text takes six times as long.
    """
    lines = (f" {encode_basestring(key)}: {_encode(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def rewrite_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the JSON object in a file; overwrite the file in place if old and new text fit into 4096 bytes.

    Longer content is written to a temporary file, which is then renamed. `bench status` can rewrite thousands
    of files, and would otherwise spend most of its time on creating and deleting temporary files. Overwriting
    needs no disk space and only one write call. :func:`read_object` reads a file again if the file is only
    partly written.

    Raises:
        UnwritableError: see :func:`write_atomically`.
    """
    text = object_text(content)
    if not _overwrite(path, text.encode()):
        write_atomically(path, text)


def _overwrite(path: Path, data: bytes) -> bool:
    """Overwrite a file in place; return False if that was not possible."""
    try:
        with open(path, "r+b", buffering=0, opener=regular_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process can rewrite the same file
            old_bytes = os.fstat(file.fileno()).st_size
            if not 0 < max(old_bytes, len(data)) <= _PAGE_BYTES:
                return False
            # Pad with spaces, because truncating the file would need a second call.
            data = data[:-1].ljust(old_bytes - 1) + b"\n"
            return file.write(data) == len(data)
    except OSError:
        return False  # write_atomically reports the cause


def read_object(path: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return (JSON object in the file, ``""``), or (None, a problem such as ``is missing``)."""
    try:
        try:
            content = json.loads(read_bytes(path))
        except (ValueError, RecursionError):  # the file is broken, or another process is rewriting it
            content = json.loads(read_bytes(path, lock=True))
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
        with open(path, encoding="utf-8", errors="replace", newline="", opener=regular_file) as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row and None not in row.values()]
            return list(reader.fieldnames or []), rows
    except (OSError, csv.Error):
        return [], []


def read_bytes(path: str | Path, *, lock: bool = False) -> bytes:
    """Read a file; with ``lock``, first wait until no other process is rewriting it."""
    with open(path, "rb", buffering=0, opener=regular_file) as file:
        if lock:
            with suppress(OSError):  # the file system does not support locks
                fcntl.flock(file, fcntl.LOCK_SH)
        data = file.read(_PAGE_BYTES + 1)
        return data if len(data) <= _PAGE_BYTES else data + file.readall()
