"""The part of bench that runs in a job, as one file: a zip of ``ddp_scaling_bench``, which Python can import.

A plan writes it into the study's folder, and the scripts put it on PYTHONPATH, so that neither the
environment of the job nor a read-only container needs an installation of bench. Its name contains a digest of
its content: jobs in the queue keep the file that they were planned with.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import ddp_scaling_bench
from ddp_scaling_bench.errors import BenchError, unwritable

if TYPE_CHECKING:
    from .study.plan_json import PlannedStudy

_SOURCE = Path(ddp_scaling_bench.__file__).resolve().parent
#: Python's modules, and the tables that they read.
_SUFFIXES = (".py", ".csv")
#: The oldest time that a zip can store: equal contents give equal files.
_TIME = (1980, 1, 1, 0, 0, 0)


@cache
def _contents() -> Mapping[str, bytes]:
    """Return the content of each file by its name in the zip, in the order of the names."""
    files = (path for path in _SOURCE.rglob("*") if path.suffix in _SUFFIXES)
    contents = {f"{_SOURCE.name}/{path.relative_to(_SOURCE).as_posix()}": path.read_bytes() for path in files}
    return dict(sorted(contents.items()))


@cache
def package_name() -> str:
    """Return the file's name: ``ddp_scaling_bench-DIGEST.zip``, with 16 digits of a sha256 of its content."""
    digest = hashlib.sha256()
    for name, content in _contents().items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{_SOURCE.name}-{digest.hexdigest()[:16]}.zip"


def write_package(folder: Path) -> None:
    """Write the file into ``folder``, which is created; raise OSError if this fails.

    A file of this name is left as it is. It appears as a whole, because jobs may read it at any time.
    """
    path = folder / package_name()
    if path.exists():
        return
    folder.mkdir(mode=0o755, exist_ok=True)  # only the owner may replace what the jobs import
    with (
        NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file,
        zipfile.ZipFile(file, "w") as package,
    ):
        for name, content in _contents().items():
            package.writestr(zipfile.ZipInfo(name, _TIME), content)  # not compressed: no module is needed
    complete = Path(file.name)
    complete.chmod(0o644)
    complete.replace(path)


def ensure_package(study: PlannedStudy) -> None:
    """Write the file again if it was deleted, or the study was copied without it.

    Raises:
        BenchError: the study was planned with another version of bench, or the file cannot be written.
    """
    name, folder = study.plan.get("package"), study.folder.package
    if name is None or (folder / name).is_file():
        return
    if name != package_name():
        what = f"{folder / name}: does not exist, and this version of bench has another content"
        raise BenchError(what, remedy="plan the study again (bench plan MATRIX), or copy the file back")
    try:
        write_package(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
