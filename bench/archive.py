"""Archives of studies: all that a report reads, in one compressed tar file with a manifest of SHA-256.

The members of NAME.tar.gz are NAME/MANIFEST.json and then NAME/plan.json and so on, as in bench.study.layout.
An archive can come from anybody, so :meth:`tarfile.TarFile.extractall` is not used: its filters allow links,
which escaped them (CVE-2025-4517), and negative sizes made it read without end (CVE-2025-8194). An archive is
read once, forwards and in bounded portions. Only files that the manifest lists are created, in a new folder.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import digest_of, owner_readable, owner_writable, regular_file
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import human_bytes

from .study.layout import StudyFolder

#: The end of the name of each archive.
SUFFIX = ".tar.gz"
_MANIFEST = "MANIFEST.json"
_PORTION = 1 << 20
_MOST_FILES, _MOST_BYTES = 200_000, 2 << 30
#: The largest content of any archive, and that of a larger archive as a multiple of its own size. Files of
#: studies are packed about twentyfold, and zeros a thousandfold.
_BYTES, _RATIO = 256 << 20, 200
_MOST_PARTS, _LONGEST = 32, 255  # parts of a path (pathlib recurses), and bytes of a part


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@with_config(ConfigDict(extra="forbid", strict=True))
class _Manifest(TypedDict):
    """The content of MANIFEST.json: the study's name, and the SHA-256 of each file by its path."""

    study: Annotated[str, Field(pattern=r"^[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,199}$")]
    version: Literal[1]
    files: Annotated[dict[str, _Digest], Field(max_length=_MOST_FILES)]


class _DamageError(Exception):
    """The file is not an archive as :func:`write_archive` writes it; the text is the reason."""


class Archive(NamedTuple):
    """A written archive; ``is_private`` is true if other users cannot read some of its files."""

    path: Path
    files: int
    content_bytes: int
    manifest_sha256: str
    traces_left_out: int
    is_private: bool


def is_archive(name: str | Path) -> bool:
    """Return whether a name is that of an archive."""
    return str(name).endswith(SUFFIX)


# -- writing --------------------------------------------------------------------------


def write_archive(folder: StudyFolder, path: Path) -> Archive:
    """Write the archive of a study, and check that it can be opened. Equal studies give equal archives.

    It lacks the report and profiler traces. Other users can read it if they can read all its files.

    Raises:
        BenchError: ``path`` exists or has another suffix; the study contains links or too large files, or
            changes meanwhile.
        UnwritableError: the archive cannot be written.
    """
    if path.exists() or not is_archive(path):
        what = "exists" if path.exists() else f"is no name of an archive, which is a {SUFFIX} file"
        raise BenchError(f"{path}: {what}", remedy=f"give another file: --output NAME{SUFFIX}")
    every = dict(sorted(_files(folder)))
    files = {
        name: status for name, status in every.items() if Path(name).name != RunFolder(Path()).trace.name
    }
    sizes = {name: status.st_size for name, status in files.items()}
    if (total := sum(sizes.values())) > _MOST_BYTES:
        largest = max(files, key=lambda name: sizes[name])
        what = f"{folder.path}: has {human_bytes(total)}, more than an archive's 2 GiB"
        raise BenchError(what, remedy=f"remove files that bench did not write, such as {largest[-80:]}")
    name = folder.path.resolve().name
    sums = {one: digest_of(folder.path / one) for one in files}
    manifest = json.dumps({"study": name, "version": 1, "files": sums}, indent=1).encode()
    is_private = any(not status.st_mode & 0o044 for status in files.values())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (
            open(temporary, "wb", opener=owner_readable if is_private else owner_writable) as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            tarfile.TarFile(fileobj=packed, mode="w", encoding="utf-8", errors="strict") as archive,
        ):
            entry = tarfile.TarInfo(f"{name}/{_MANIFEST}")
            entry.size = len(manifest)
            archive.addfile(entry, io.BytesIO(manifest))
            for one, status in files.items():
                entry = tarfile.TarInfo(f"{name}/{one}")
                entry.size, entry.mtime = status.st_size, int(status.st_mtime)
                with open(folder.path / one, "rb", opener=regular_file) as content:
                    archive.addfile(entry, content)
        with open(temporary, "rb") as file:
            _unpack(file, None)
        os.replace(temporary, path)
    except (_DamageError, UnicodeError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise unwritable(path, error) from None  # type: ignore[arg-type]
        remedy = "repeat the command when nothing writes to the study"
        raise BenchError(f"{folder.path}: cannot be archived: {error}", remedy=remedy) from None
    finally:
        temporary.unlink(missing_ok=True)
    digest = hashlib.sha256(manifest).hexdigest()
    return Archive(path, len(files), total, digest, len(every) - len(files), is_private)


def _files(folder: StudyFolder) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of each file of a study that an archive has; raise BenchError for links."""
    for part in _parts(folder):
        if part.is_file():
            yield part.name, part.stat()
        for place, folders, names in os.walk(part, onerror=_raise):
            for path in (Path(place, name) for name in (*folders, *names)):
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise BenchError(
                        f"{path}: is a link or no file", remedy="replace it by a file, or remove it"
                    )
                if path.is_file():
                    yield str(Path(part.name, path.relative_to(part))), path.stat()


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _parts(folder: StudyFolder) -> tuple[Path, ...]:
    """Return the files and folders of a study that an archive has."""
    texts = (folder.matrix, folder.site, folder.plan_json, folder.ledger)
    return (*texts, folder.scripts, folder.packs, folder.runs)


# -- reading --------------------------------------------------------------------------


def open_archive(path: Path) -> StudyFolder:
    """Unpack an archive into a temporary folder, which is removed when the program ends; return the study.

    Raises:
        BenchError: the file is not an archive, it would create something else than files in the folder of
            the study, or a file differs from the manifest.
        UnwritableError: the temporary folder cannot be written.
    """
    folder = tempfile.TemporaryDirectory(prefix="bench-archive-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    try:
        with open(path, "rb", opener=regular_file) as file:
            return StudyFolder(Path(folder.name, _unpack(file, Path(folder.name))), archive=path)
    except _DamageError as damage:
        remedy = "get it again, or archive the study again: bench archive STUDY"
        raise BenchError(f"{path}: is not an intact archive: {damage}", remedy=remedy) from None
    except OSError as error:
        if error.filename in (path, str(path)):
            remedy = "check its name and its permissions"
            raise BenchError(f"{path}: cannot be read: {error.strerror}", remedy=remedy) from None
        raise unwritable(Path(error.filename or folder.name), error) from None


def _unpack(file: BinaryIO, target: Path | None) -> str:
    """Check an archive, write its files below ``target`` if it is given, and return the study's name."""
    most = min(_MOST_BYTES, max(_BYTES, _RATIO * os.fstat(file.fileno()).st_size))
    stream = _Stream(gzip.GzipFile(fileobj=file), most)
    members, content = _members(stream), io.BytesIO()
    first, size = next(members, ("", 0))
    if not first.endswith(f"/{_MANIFEST}"):
        remedy = "unpack it with tar -xf, and give a file in it"
        raise BenchError(f"{file.name}: is not an archive of `bench archive`", remedy=remedy)
    _copy(stream, min(size, _BYTES), content)
    try:
        manifest: _Manifest = TypeAdapter(_Manifest).validate_json(content.getvalue())
    except ValidationError:
        raise _DamageError(f"its first file is no {_MANIFEST} of a study") from None
    study, sums = manifest["study"], manifest["files"]
    if first != f"{study}/{_MANIFEST}" or not all(map(_is_inside, sums)):
        raise _DamageError(f"its {_MANIFEST} has names of other files than those of a study")
    if StudyFolder(Path()).plan_json.name not in sums:
        raise _DamageError("it has no plan.json")
    for name, size in members:
        path = name.removeprefix(f"{study}/")
        if path == name or path not in sums:
            raise _DamageError(f"{name!r:.80} is twice in it, or not in its {_MANIFEST}")
        place = target / name if target else Path(os.devnull)
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "xb" if target else "wb", opener=owner_readable) as out:
            if _copy(stream, size, out) != sums.pop(path):
                raise _DamageError(f"{name!r:.80} is not the file of its {_MANIFEST}")
    if sums:
        raise _DamageError(f"{min(sums)!r:.80} is missing")
    while stream.read(_PORTION):  # gzip checks its sum at the end
        pass
    return study


def _is_inside(name: str) -> bool:
    """Return whether a path is canonical, and that of a file of a study that an archive has."""
    parts = name.split("/")
    is_plain = not {"", ".", ".."} & {*parts} and name.isprintable() and len(parts) <= _MOST_PARTS
    return is_plain and parts[0] in _NAMES and all(len(part.encode()) <= _LONGEST for part in parts)


_NAMES = {part.name for part in _parts(StudyFolder(Path()))}


def _members(stream: _Stream) -> Iterator[tuple[str, int]]:
    """Yield name and size of each file; its content must be read before the next one."""
    try:
        archive = tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="strict")  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            is_plain = member.type == tarfile.REGTYPE and member.sparse is None and member.size >= 0
            if not is_plain or set(member.pax_headers) - {"path"}:
                raise _DamageError(
                    f"{member.name!r:.80} is no plain file, so `bench archive` did not write it"
                )
            yield member.name, member.size
    except (tarfile.TarError, LookupError, ValueError, ArithmeticError, TypeError, RecursionError):
        raise _DamageError("it is empty, or contains no tar file") from None


def _copy(stream: _Stream, size: int, file: BinaryIO) -> str:
    """Copy the next bytes of a stream to a file; return their SHA-256."""
    digest = hashlib.sha256()
    while size:
        if not (portion := stream.read(min(size, _PORTION))):
            raise _DamageError("it ends within a file")
        digest.update(portion)
        file.write(portion)
        size -= len(portion)
    return digest.hexdigest()


class _Stream:
    """The content of an archive for :class:`tarfile.TarFile`, which can only be read forwards.

    Portions and the whole are bounded: a header can name any size, and a small file become any number of
    zeros.
    """

    def __init__(self, file: gzip.GzipFile, most: int) -> None:
        self._file, self._most, self._position = file, most, 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _PORTION:
            raise _DamageError("a header has an impossible size")
        try:
            portion = self._file.read(size)
        except EOFError:
            raise _DamageError("it ends too early, as after a copy that was interrupted") from None
        except gzip.BadGzipFile:
            raise _DamageError("it is no gzip file (perhaps a web page that a browser saved)") from None
        except Exception as error:  # of gzip, zlib or the disk
            raise _DamageError(f"it cannot be decompressed ({error!r:.80})") from None
        self._position += len(portion)
        if self._position > self._most:
            raise _DamageError(f"it contains more than {human_bytes(self._most)}, too much for its size")
        return portion

    def seek(self, position: int) -> None:
        """Skip the padding behind a file: a header cannot lead to another place."""
        if not 0 <= position - self._position < tarfile.BLOCKSIZE:
            raise _DamageError("its files are not one behind another")
        self.read(position - self._position)
