"""`bench status`: show the state of every run of a study."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from ddp_scaling_bench.errors import UnavailableError
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import SeparateTrainings
from ddp_scaling_bench.units import count

from ..matrix.cell import labelled_commands
from ..study.conditions import disturbance_text
from ..study.found import findings_of_env
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..study.readings import readings_of
from ..study.together import together_of
from ..terminal import (
    SHOWN_ROWS,
    print_commands,
    print_json,
    print_table,
    say,
    short_names,
    show,
    study_title,
)
from .options import AllOption, JsonOption, ResultsOption, StudyArgument, find_study, say_if_copy
from .submit import counts_line, new_submission

#: Seconds between two updates with --watch.
WATCH_S = 5.0
#: Maximum number of characters of a recorded finding.
MAX_LINE = 160
#: The findings about the values of runs that have ended, by folder, for `--watch`.
_VALUES: dict[Path, Sequence[Finding]] = {}

#: The states that are listed first, in this order.
_FIRST_STATES = ("failed", "unknown", "running", "queued", "cancelled")


def status_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat every few seconds until no run is in progress.")
    ] = False,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> int:
    """Show the state of each run, and why a failed run failed.

    The command first updates the records of runs that have ended. A run that was killed before it could
    write its result is shown as failed, with that reason. The exit code is 1 if a run is failed
    or unknown (Slurm has forgotten its job).
    """
    from rich.console import Console

    planned = open_study(find_study(study, results))
    submission = None if planned.folder.archive else new_submission(planned)
    if submission:
        say_if_copy(submission.engine)
    while True:
        try:
            records = submission.records(wait=watch) if submission else planned.records()
        except UnavailableError:
            if not as_json:
                say("Slurm is unreachable: these are the last known states")
                _show(planned, planned.records(), everything=everything)
            raise
        if as_json:
            print_json(status_content(planned, records))
        else:
            if watch:
                Console().clear()
            _show(planned, records, everything=everything)
        if not watch or not submission or not any(record.state.active for record in records.values()):
            break
        time.sleep(WATCH_S)
    if watch and submission and not all(record.state.ended for record in records.values()):
        say(f"no run is in progress: `bench submit {planned.folder.name}` starts the planned runs")
    return int(any(record.state in (RunState.FAILED, RunState.UNKNOWN) for record in records.values()))


def _show(planned: PlannedStudy, records: Mapping[str, Record], *, everything: bool) -> None:
    """Print a table of runs, with failed and unknown runs first, and a line of counts."""
    order = {RunState(name): place for place, name in enumerate(_FIRST_STATES)}

    def rank(record: Record) -> tuple[int, bool, bool]:
        return order.get(record.state, len(order)), not record.stuck, not record.is_disturbed

    ranked = sorted(records.values(), key=rank)
    shown = ranked if everything else ranked[:SHOWN_ROWS]
    # The class is a column only if a run has one.
    classes = {record.run_id: record.failure_class for record in shown if record.failure_class}
    names = short_names(planned)
    rows: list[tuple[Any, ...]] = []
    for record in shown:
        own = (names[record.run_id], record.state, *([classes.get(record.run_id)] if classes else []))
        rows.append((*own, record.attempt or None, record.job_id or None, _remark(record)))
        lines = (shorten(str(one), MAX_LINE, placeholder=" …") for one in _warnings(planned, record))
        rows += [(*("" for _ in own), None, None, line) for line in lines]
    columns = ["run", "state", *(["class"] if classes else []), "attempt", "job", "reason"]
    hidden = len(ranked) - len(shown)
    print_table(study_title(planned), columns, rows, right=["attempt"], hidden=hidden)
    print_commands(planned.cells.values())
    if disturbed := sum(record.is_disturbed for record in ranked):
        show(f"{count(disturbed, 'completed run was', 'completed runs were')} disturbed")
    if unknown := sum(_unknown(planned, record) for record in ranked):
        show(f"{count(unknown, 'completed run')}: not measured whether the ranks train together")
    stuck = sum(record.stuck for record in ranked)
    counts = counts_line(Counter(str(record.state) for record in ranked))
    show(f"{counts} ({stuck} will not start)" if stuck else counts)
    if failed := [record.run_id for record in ranked if record.state is RunState.FAILED]:
        run = f"/{failed[0]}" if len(failed) == 1 else ""
        study = planned.folder.archive or f"{planned.folder.name}{run}"
        show(f"what to do about failures: bench doctor {study}")


def _warnings(planned: PlannedStudy, record: Record) -> list[Finding]:
    """Return the errors and warnings of an attempt that has ended, without its reasons.

    They are those of env.json, of the values that a command reported, and of the logs.
    """
    if record.end is None:
        return []
    folder, cell = planned.run_folder(record), planned.cell_of(record.run_id)
    found: list[Finding] = [*findings_of_env(read_json(folder.env)), *(record.end.warnings or ())]
    if cell.reads_values and record.state is RunState.COMPLETED:
        if folder.path not in _VALUES:
            _VALUES[folder.path] = readings_of(folder, cell).findings
        found += _VALUES[folder.path]
    if _are_together(planned, record) is False and not any(
        isinstance(one, SeparateTrainings) for one in found
    ):
        found.append(SeparateTrainings(by="bytes"))
    return [one for one in found if one.severity != "info" and one not in record.end.reasons]


def _are_together(planned: PlannedStudy, record: Record) -> bool | None:
    """Return whether the ranks of a run train together; None if this was not measured."""
    folder, cell = planned.run_folder(record), planned.cell_of(record.run_id)
    return together_of(folder, cell, read_json(folder.env) or {}) if record.end else None


def _unknown(planned: PlannedStudy, record: Record) -> bool:
    """Return whether it is not known if the ranks of a command's completed run train together."""
    cell = planned.cell_of(record.run_id)
    is_asked = cell.measures and not cell.follows_plan and cell.world_size > 1 and not cell.is_exchange_rare
    return is_asked and record.state is RunState.COMPLETED and _are_together(planned, record) is None


def _remark(record: Record) -> str:
    """Return the first cause of a failure or the reason of a run's state, and what disturbed the run."""
    disturbed = f"disturbed by {disturbance_text(record)}" if record.is_disturbed else ""
    return "; ".join(filter(None, (record.why, disturbed)))


def status_content(planned: PlannedStudy, records: Mapping[str, Record]) -> dict[str, Any]:
    """Return the output of `bench status --json`."""
    counts = Counter(str(record.state) for record in records.values())
    runs = {run.run_id: run for run in planned.runs}
    names = ("attempt", "state", "reason", "cause", "failure_class", "exit_code")
    return {
        "study": planned.folder.name,
        "folder": str(planned.folder.source),
        "counts": {str(state): counts[str(state)] for state in RunState},
        "commands": [command.as_json() for command in labelled_commands(planned.cells.values())],
        "runs": [
            {
                "run_id": record.run_id,
                "cell_id": runs[record.run_id].cell_id,
                "repeat": runs[record.run_id].repeat,
                **{name: getattr(record, name) for name in names},
                "job_id": record.job_id or None,
                "disturbed": disturbance_text(record),
                "reasons": [one.told() for one in record.end.reasons] if record.end else [],
                "findings": [one.told() for one in _warnings(planned, record)],
                "together": _are_together(planned, record),
                "log_line": record.end.log_line if record.end else None,
                "will_not_start": record.stuck,
            }
            for record in records.values()
        ],
    }
