"""Files that several programs write and read at the same time: nobody sees half of one."""

from __future__ import annotations

import fcntl
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.errors import unwritable

#: What every file system writes in one go.
_PAGE_BYTES = 4096


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename it, so that a reader never sees half a file.

    Raises:
        UnwritableError: the disk is full or read-only, or the folder is not there; what was at
            ``path`` before is still there.
    """
    # The host too: on a shared file system two nodes may have the same process id.
    beside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb", buffering=0) as file:
            _write_whole(file, text.encode())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON (sorted keys would hide the order that readers expect)."""
    write_atomically(path, _as_json(content))


def rewrite_json(path: Path, content: Any) -> None:
    """Write ``content`` over the JSON in ``path``, in one call where both fit a page; else replace it.

    Thousands of runs may end between two looks, and to make and free a file for each is most of what
    that costs. A page that is there needs no space, and a call that fills it is not interrupted: the
    file is never left half-written. A reader in that very moment reads again (:func:`read_json`).

    Raises:
        UnwritableError: as for :func:`write_atomically`.
    """
    text = _as_json(content)
    if not _overwritten(path, text.encode()):
        write_atomically(path, text)


def _overwritten(path: Path, data: bytes) -> bool:
    """Write over what is in a file, if that goes; False where it is as it was, or broken."""
    try:
        with open(path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another look may be settling the same run
            old = os.fstat(file.fileno()).st_size
            if not 0 < max(old, len(data)) <= _PAGE_BYTES:
                return False
            # Blanks in place of what was longer: to shorten the file would be a second call.
            data = data[:-1].ljust(old - 1) + b"\n"
            return file.write(data) == len(data)
    except OSError:
        return False  # to replace it will say what is wrong


def read_json(path: Path) -> Any | None:
    """Return the JSON in ``path``; None where the file is absent or not whole."""
    try:
        try:
            return json.loads(_read_at_once(path))
        except ValueError:  # it was being rewritten, and is whole by now; or it is broken
            return json.loads(_read_at_once(path))
    except (OSError, ValueError):
        return None


def _as_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _read_at_once(path: Path) -> str:
    """Read a file of up to a page by one call, between whose parts nobody can rewrite it."""
    with open(path, "rb", buffering=0) as file:
        data = file.read(_PAGE_BYTES + 1)
        if len(data) > _PAGE_BYTES:
            data += file.readall()
    return data.decode()


def _write_whole(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
