"""Write run.json, the description of one attempt of a run, once; read it and sampled_step.json."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ddp_scaling_bench.errors import unwritable
from ddp_scaling_bench.files import read_json, write_atomically
from ddp_scaling_bench.records import SampledStep
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.version import __version__

from ..matrix.cell import Cell, Run
from .ledger import Record, now
from .plan_json import PlannedStudy

_encode = json.JSONEncoder(ensure_ascii=False).encode


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


_STEP = TypeAdapter(SampledStep)


def read_sampled_step(folder: RunFolder) -> list[SampledStep]:
    """Return each rank's sampled step, if any. Malformed entries of sampled_step.json are left out."""
    content, steps = read_json(folder.sampled_step) or {}, []
    ranks = content.get("ranks")
    for rank in ranks if isinstance(ranks, list) and content.get("schema") == 1 else ():
        with suppress(ValidationError):
            steps.append(_STEP.validate_python(rank))
    return steps
