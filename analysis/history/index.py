"""Keep what the history needs of each study in one file, so that only new and changed studies are read.

Every value of the index comes from the studies. It is replaced as a whole: if several commands write it, the
last one wins, and studies that it lacks are read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from analysis.history.series import Entry
from analysis.processes import in_background
from bench.study.layout import StudyFolder
from ddp_scaling_bench.errors import BenchError, UnwritableError
from ddp_scaling_bench.files import read_bytes, write_atomically
from ddp_scaling_bench.version import __version__

NAME = "history.json"
#: If the number changes, all studies are read again.
VERSION = f"{__version__}.1"
#: From this number of studies on, a second process reads half of them.
_MANY = 16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Index:
    """The content of the file; names of studies are their paths relative to its folder."""

    version: str
    studies: dict[str, Entry]


@dataclass(frozen=True)
class Source:
    """The folder of a study, or an archive, which ``open`` unpacks for this process."""

    path: Path
    open: Callable[[Path], StudyFolder] | None = None

    @property
    def plan(self) -> Path:
        """The file whose owner and mode are those of the study."""
        return self.path if self.open else StudyFolder(self.path).plan_json

    @property
    def is_private(self) -> bool:
        """True if only the owner can read the study."""
        return not self.plan.stat().st_mode & 0o077

    def stamp(self) -> list[int]:
        """Return times and sizes of files, which are equal if the study is unchanged."""
        study = StudyFolder(self.path)
        files = [self.plan, *(path for path in (study.ledger, study.runs) if path.exists())]
        return [value for path in files for value in (path.stat().st_mtime_ns, path.stat().st_size)]


_INDEX = TypeAdapter(Index)


def read_studies(sources: Sequence[Source], root: Path, *, rebuild: bool, say: Say) -> dict[str, Entry]:
    """Return the entries of studies by name, and update the index in the folder ``root``."""
    path = root / NAME
    known = {} if rebuild else _read(path, say)
    named = {os.path.relpath(source.path, root): source for source in sources}
    stamps = {name: source.stamp() for name, source in named.items()}
    new = {
        name: source
        for name, source in named.items()
        if name not in known or known[name].stamp != stamps[name]
    }
    entries = {name: entry for name, entry in known.items() if name not in new and (root / name).exists()}
    if len(new) >= _MANY:
        say(f"reading {len(new):,} studies")
    entries |= _evaluated(new, stamps)
    if new or entries.keys() != known.keys():
        private = any(source.is_private for source in sources)
        content = _INDEX.dump_json(Index(VERSION, dict(sorted(entries.items())))).decode()
        try:
            write_atomically(path, content, private=private)
        except UnwritableError as error:
            say(f"the next `bench history` reads the studies again: {error}")
    return {name: entries[name] for name in named}


def _read(path: Path, say: Say) -> dict[str, Entry]:
    try:
        index = _INDEX.validate_json(read_bytes(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError):
        say(f"{path}: is damaged, and written anew")
        return {}
    return index.studies if index.version == VERSION else {}


def _evaluated(sources: Mapping[str, Source], stamps: Mapping[str, list[int]]) -> dict[str, Entry]:
    """Return the entries of studies; of many folders, a second process reads half."""
    if not sources:
        return {}
    import analysis.history.evaluate  # noqa: F401 (the second process inherits it)

    folders = [name for name, source in sources.items() if not source.open]
    shared = {name: sources[name] for name in folders[1::2]} if len(folders) >= _MANY else {}
    others = in_background(lambda: _entries(shared, stamps)) if shared else dict
    own = {name: source for name, source in sources.items() if name not in shared}
    return _entries(own, stamps) | others()


def _entries(sources: Mapping[str, Source], stamps: Mapping[str, list[int]]) -> dict[str, Entry]:
    if not sources:
        return {}
    from analysis.history.evaluate import evaluate

    found, folders = {}, {}
    for name, source in sources.items():
        try:
            folders[name] = source.open(source.path) if source.open else StudyFolder(source.path)
        except BenchError as error:
            found[name] = Entry(stamp=stamps[name], left_out={"": str(error)})
    for name, (points, left_out) in evaluate(folders).items():
        found[name] = Entry(stamp=stamps[name], points=points, left_out=left_out)
    return found
