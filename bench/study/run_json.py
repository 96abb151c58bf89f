"""Read and write run.json, the record of one attempt of a run, and read sampled_step.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import unwritable
from ..facts import Fact
from ..matrix.cell import Cell, Run
from ..variables import shown_variables
from .files import (
    file_sha256,
    object_text,
    read_json,
    read_object,
    rewrite_object,
    write_atomically,
)
from .layout import RunFolder
from .ledger import RunRecord, RunState
from .plan_json import PlannedStudy

#: Kinds of facts in env.json about the values that a command without the recorder reports: one average of the
#: whole run, values that metrics.csv lacks, and a pattern that matches several times in a line. The last two
#: are also codes of its warnings.
AVERAGE_OF_RUN, VALUES_LEFT_OUT, REPEATED_MATCHES = "average-of-run", "values-left-out", "repeated-matches"
# Paths are concatenated as text: with pathlib, reading thousands of files would take much longer.
_NAME = RunFolder(Path()).run_json.name


def read_run(attempt: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return (content of run.json in folder ``attempt``, ``""``), or (None, why it cannot be read)."""
    return read_object(f"{attempt}/{_NAME}")


def write_run(folder: RunFolder, content: Mapping[str, Any]) -> None:
    """Write the run.json of an attempt."""
    write_atomically(folder.run_json, object_text(content))


def update_run(
    folder: RunFolder, changes: Mapping[str, Any], *, fallback: Mapping[str, Any] | None = None
) -> None:
    """Change values in run.json. If the file is missing or broken, write ``fallback`` with the changes."""
    known = read_run(folder.path)[0]
    content = fallback if known is None else known
    if content is not None and {**content, **changes} != known:
        rewrite_object(folder.run_json, {**content, **changes})


def find_reason(folder: RunFolder) -> tuple[str, int, str]:
    """Return the path of run.json, the number of the line with ``reason`` (1 without one), and the reason."""
    path = folder.run_json
    reason = str((read_run(folder.path)[0] or {}).get("reason") or "run.json has no reason")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return str(path), next((at for at, line in enumerate(lines, start=1) if '"reason"' in line), 1), reason


def read_warnings(run: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return ``warnings`` in the content of a run.json, or None if the logs were not searched for them.

    Each warning has the keys ``cause``, ``path``, ``line``, ``evidence``, ``explanation`` and ``remedy``,
    like ``cause`` of a run that failed.
    """
    found = run.get("warnings")
    if not isinstance(found, list):
        return None
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("cause"), str)]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, with its configuration (``cell``), its folder and its job name."""

    run: Run
    cell: Cell
    number: int
    folder: RunFolder
    job_name: str

    def describe(self, study: PlannedStudy, **values: Any) -> dict[str, Any]:
        """Return the initial content of run.json; ``values`` are added or override the defaults."""
        cell = self.cell.as_json()
        return {
            "schema": 1,
            "bench_version": __version__,
            "study": study.folder.name,
            "run_id": self.run.run_id,
            "cell_id": self.run.cell_id,
            "repeat": self.run.repeat,
            "attempt": self.number,
            "order": self.run.order,
            "executor": study.executor,
            "job_name": self.job_name,
            "job_id": None,
            "cell": cell | {"env": shown_variables(cell)},
            "state": str(RunState.QUEUED),
            "reason": "",
            "failure_class": None,
            "exit_code": None,
            "submitted_at": None,
            "started_at": None,
            "ended_at": None,
            **values,
        }


def changed_script(run: Mapping[str, Any], found: str | None) -> Fact | None:
    """Return a fact if a script had another SHA-256 in the job (``found``) than at the submission."""
    command = run.get("command") or {}
    submitted = command.get("script_sha256")
    if submitted is None or found is None or submitted == found:
        return None
    values = {"script": command["script"], "submitted": submitted[:12], "found": found[:12]}
    return Fact("script-changed", values=values)


def script_sha256(run: Mapping[str, Any], folder: str | Path) -> str | None:
    """Return the current SHA-256 of the script of a run's command, or None without a readable script.

    ``folder`` is the folder in which the command is executed.
    """
    script = (run.get("command") or {}).get("script")
    return file_sha256(Path(folder, script)) if script else None


def next_attempt(study: PlannedStudy, run: Run, record: RunRecord) -> Attempt:
    """Return the next attempt of a run, with a unique job name.

    If Slurm rejected the last attempt, that attempt has no job, and the next attempt reuses its number.
    """
    rejected = record.state is RunState.PLANNED and bool(record.details.get("refused"))
    number = record.attempt if rejected else record.attempt + 1
    name = f"{study.folder.name}.{run.run_id}.a{number}.{study.plan.get('key', '')}"
    return Attempt(run, study.cells[run.cell_id], number, study.folder.attempt(run.run_id, number), name)


def new_attempt(study: PlannedStudy, run: Run, record: RunRecord) -> Attempt:
    """Return the next attempt of a run and create its folder. Folders of earlier attempts are kept."""
    attempt = next_attempt(study, run, record)
    try:
        attempt.folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(attempt.folder.path, error) from None
    return attempt


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


def read_sampled_step(folder: RunFolder) -> list[SampledStep]:
    """Return each rank's sampled step, if any. Malformed entries of sampled_step.json are left out."""
    content = read_json(folder.sampled_step)
    return list(_steps(content)) if content is not None and content.get("schema") == 1 else []


def _call(call: Mapping[str, Any]) -> SlowCall:
    part, size = call["part"], call["bytes"]
    return SlowCall(
        path=str(call["path"]),
        line=int(call["line"]),
        function=str(call["function"]),
        calls=int(call["calls"]),
        seconds=float(call["seconds"]),
        part=part if isinstance(part, str) else None,
        bytes=size if isinstance(size, int) else None,
    )


def _steps(content: Mapping[str, Any]) -> Iterator[SampledStep]:
    ranks = content.get("ranks")
    for rank in ranks if isinstance(ranks, list) else ():
        try:
            calls = [_call(call) for call in rank["slow_calls"]]
            yield SampledStep(int(rank["rank"]), float(rank["step_s"]), rank["collectives"], calls)
        except (KeyError, TypeError, ValueError):
            continue
