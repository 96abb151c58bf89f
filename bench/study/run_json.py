"""Write run.json, the description of one attempt of a run, once; read it and sampled_step.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .. import __version__
from ..errors import unwritable
from ..matrix.cell import Cell, Run
from ..measure.findings import ScriptChanged
from .files import file_sha256, read_json, read_object, write_atomically
from .layout import RunFolder
from .ledger import Record, now
from .plan_json import PlannedStudy

# Paths are concatenated as text: with pathlib, reading thousands of files would take much longer.
_NAME = RunFolder(Path()).run_json.name
_encode = json.JSONEncoder(ensure_ascii=False).encode


def read_run(attempt: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return (content of run.json in folder ``attempt``, ``""``), or (None, why it cannot be read)."""
    return read_object(f"{attempt}/{_NAME}")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, with its configuration (``cell``), its folder and its job name."""

    run: Run
    cell: Cell
    number: int
    folder: RunFolder
    job_name: str

    def claim(self, study: PlannedStudy, **values: Any) -> None:
        """Create the folder of the attempt, which must not exist, and write its run.json, once and for all.

        Raises:
            UnwritableError: the folder exists, or cannot be created or written.
        """
        content = {
            "schema": 2,
            "bench_version": __version__,
            "study": study.folder.name,
            "run_id": self.run.run_id,
            "cell_id": self.run.cell_id,
            "repeat": self.run.repeat,
            "attempt": self.number,
            "order": self.run.order,
            "executor": study.executor,
            "job_name": self.job_name,
            "submitted_at": now(),
            **values,
        }
        try:
            self.folder.path.parent.mkdir(parents=True, exist_ok=True)
            self.folder.path.mkdir()
        except OSError as error:
            raise unwritable(self.folder.path, error) from None
        lines = (f" {json.dumps(key)}: {_encode(value)}" for key, value in content.items())
        write_atomically(self.folder.run_json, "{\n" + ",\n".join(lines) + "\n}\n")

    def release(self) -> None:
        """Remove the folder of an attempt that the scheduler refused, so that its number is free again."""
        with suppress(OSError):
            self.folder.run_json.unlink(missing_ok=True)
            self.folder.path.rmdir()


def next_attempt(study: PlannedStudy, run: Run, record: Record) -> Attempt:
    """Return the next attempt of a run, with a unique job name. ``record`` is the latest attempt.

    If the scheduler refused the last attempt, there is neither a job nor a folder, and its number is used
    again.
    """
    number = record.attempt + (not record.refused)
    folder = study.folder.attempt(run.run_id, number)
    return Attempt(run, study.cells[run.cell_id], number, folder, study.job_name(run.run_id, number))


def changed_script(run: Mapping[str, Any], found: str | None) -> ScriptChanged | None:
    """Return a finding if a script had another SHA-256 in the job (``found``) than at the submission."""
    command = run.get("command") or {}
    submitted = command.get("script_sha256")
    if submitted is None or found is None or submitted == found:
        return None
    return ScriptChanged(script=command["script"], submitted=submitted[:12], found=found[:12])


def script_sha256(run: Mapping[str, Any], folder: str | Path) -> str | None:
    """Return the current SHA-256 of the script of a run's command, or None without a readable script.

    ``folder`` is the folder in which the command is executed.
    """
    script = (run.get("command") or {}).get("script")
    return file_sha256(Path(folder, script)) if script else None


@dataclass(frozen=True)
class SlowCall:
    """All calls of one function from one line of the user's code.

    Attributes:
        path: the user's source file.
        line: number of the line in this file.
        function: the function that the line calls.
        calls: number of calls in the step.
        seconds: total time of these calls, minus the time of nested calls by the user's code.
        part: the part of the step whose timer covers the call, or None if no timer does.
        bytes: size of the tensors that are passed to a function of torch.distributed.
    """

    path: str
    line: int
    function: str
    calls: int
    seconds: float
    part: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class SampledStep:
    """The sampled step of one rank: its duration, its collectives (None if unknown) and its slowest calls."""

    rank: int
    step_s: float
    collectives: int | None
    slow_calls: list[SlowCall]


_STEP = TypeAdapter(SampledStep)


def read_sampled_step(folder: RunFolder) -> list[SampledStep]:
    """Return each rank's sampled step, if any. Malformed entries of sampled_step.json are left out."""
    content, steps = read_json(folder.sampled_step) or {}, []
    ranks = content.get("ranks")
    for rank in ranks if isinstance(ranks, list) and content.get("schema") == 1 else ():
        with suppress(ValidationError):
            steps.append(_STEP.validate_python(rank))
    return steps
