"""The settings of a recording: the lengths of its windows, and the folder of its files.

The lengths in the run's cell.json override the program's settings, and these override the defaults.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from ..cell_json import CellFile, read_cell
from ..errors import BenchError
from ..files import read_json
from ..measure.failures import Failure, RankFailed, write_failures
from ..measure.node import host_name
from ..run_folder import RunFolder
from ..train.options import OPTIONS, expected_value

#: Files whose locks this process holds.
_claims: list[IO[str]] = []


class RecorderError(BenchError):
    """The recorder cannot record with these settings; ``failure`` says why."""

    exit_code = 1
    #: Whether this process had such an error.
    was_raised = False
    __module__ = "ddp_scaling_bench"  # the name in tracebacks, and for imports

    def __init__(self, found: Failure | str, *, remedy: str = "") -> None:
        self.failure = found if isinstance(found, Failure) else RankFailed(text=found, remedy=remedy)
        RecorderError.was_raised = True
        super().__init__(self.failure.message, remedy=self.failure.remedy)


@contextmanager
def failures_kept() -> Iterator[None]:
    """Write a RecorderError that is raised to the run's folder, for the reason of the run's end."""
    try:
        yield
    except RecorderError as error:
        write_failures([error.failure])
        raise


@dataclass(frozen=True)
class Lengths:
    """Lengths of the windows in optimizer steps, and the number of epochs (rows of metrics.csv).

    An epoch is a throughput window and an attribution window; the epochs of the training loop are others. If
    ``epochs`` is None, the recorder records until the end of the training.
    """

    warmup_steps: int
    steps_per_epoch: int
    attribution_steps: int
    epochs: int | None

    @classmethod
    def of(cls, given: Mapping[str, int | None], cell: CellFile | None) -> Lengths:
        """Return the lengths of a run's ``cell``, else those of ``given``, else the matrix's defaults.

        Raises:
            RecorderError: a length is not a whole number, or is too small or too large.
        """
        planned, lengths = {} if cell is None else cell.workload, {}
        for field in fields(cls):
            option = OPTIONS[field.name]
            value = planned.get(field.name, given.get(field.name, option.default))
            if value is not None and (expected := expected_value(option, value)):
                raise RecorderError(f"{field.name} is {value!r}", remedy=f"it must be {expected}")
            lengths[field.name] = value
        return cls(**lengths)


def planned_cell(env: Mapping[str, str]) -> CellFile | None:
    """Return the content of the run's cell.json, or None if no script of bench started this process.

    Raises:
        RecorderError: the file is damaged, or the script's file cannot be read.
    """
    folder = env.get("BENCH_RUN_DIR")
    if not folder or not ("BENCH_CELL_ID" in env or RunFolder(Path(folder)).cell.exists()):
        return None
    try:
        return read_cell(Path(folder))
    except BenchError as error:
        raise RecorderError(error.message, remedy=error.remedy) from None


def recording_folder(given: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    """Return ``BENCH_RUN_DIR`` if set, else ``given``, else a new folder below the current folder."""
    if folder := env.get("BENCH_RUN_DIR") or given:
        return Path(folder)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Path("bench-record", f"{stamp}-{os.getpid()}")


def make_folder(run_dir: str | os.PathLike[str] | None) -> RunFolder:
    """Create the folder of a recording, and claim it for this process if it is that of a run.

    Raises:
        RecorderError: it cannot be created, or another training records there.
    """
    folder = RunFolder(recording_folder(run_dir, os.environ))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder.path}: cannot be created: {error.strerror}"
        raise RecorderError(what, remedy="give another folder as run_dir") from None
    if "BENCH_RUN_DIR" in os.environ:
        _claim(folder)
    print(f"bench: recording into {folder.path}", flush=True)
    return folder


def _claim(folder: RunFolder) -> None:
    """Lock a run's folder for this process, or raise if another training records there.

    The kernel ends the lock with the process: the trainings of a run can follow each other.
    """
    own = {"host": host_name(os.environ), "pid": os.getpid()}
    try:
        file = folder.recorder.open("a")
        _claims.append(file)  # closing it would end the lock
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(json.dumps(own))
        file.flush()
    except BlockingIOError:
        other = read_json(folder.recorder) or {}
        raise RecorderError(
            f"process {other.get('pid')} on {other.get('host')} already records into {folder.path}: the "
            "command started several trainings. Give the command of one process, without a launcher: "
            "bench starts it once per rank"
        ) from None
    except OSError:
        return  # the file system knows no locks, or is full, which the first result will show
