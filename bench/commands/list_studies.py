"""`bench list`: list the studies of a results folder."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count

from ..study.layout import StudyFolder, latest_first
from ..study.ledger import RunState
from ..study.plan_json import open_study
from ..terminal import print_json, print_table, say
from .next_step import step_of_study
from .options import JsonOption, ResultsOption, no_study, results_folder


def list_command(results: ResultsOption = None, as_json: JsonOption = False) -> int:
    """List the studies of a results folder, the newest first, with their states and next commands.

    The states are those of the last command that updated the study; `bench status STUDY` updates them.
    """
    root = results_folder(results)
    listed = [_described(folder) for folder in latest_first(root)]
    if as_json:
        print_json({"studies": listed})
        return 0
    if not listed:
        if results is not None and not root.is_dir():
            raise no_study(root)
        say(str(no_study(root)))
        return 0
    rows = [(one["study"], one["planned"], one["matrix"], _runs(one), one["next"]) for one in listed]
    print_table("", ("study", "planned", "matrix", "runs", "next"), rows)
    return 0


def _described(folder: StudyFolder) -> dict[str, Any]:
    """Return the JSON object of a study; ``problem`` says why the states of its runs are not known."""
    page = folder.report / "index.html"
    described: dict[str, Any] = {
        "study": folder.name,
        "planned": f"{datetime.fromtimestamp(folder.planned_s, UTC):%Y-%m-%d}",
        "matrix": None,
        "states": {},
        "problem": None,
        "report": str(page) if page.is_file() else None,
        "next": None,
    }
    try:
        planned = open_study(folder)
        records = planned.records()
    except BenchError as error:
        return described | {"problem": error.message, "next": error.remedy}
    except OSError as error:
        return described | {"problem": f"not readable: {error.strerror}"}
    return described | {
        "matrix": planned.matrix_path or None,
        "states": dict(Counter(str(record.state) for record in records.values())),
        "next": step_of_study(folder, records),
    }


def _runs(study: dict[str, Any]) -> str:
    """Return ``12 of 15 runs completed; 2 failed; 1 not started``."""
    if study["problem"]:
        return str(study["problem"])
    states = {RunState(state): n for state, n in study["states"].items()}
    completed = states.pop(RunState.COMPLETED, 0)
    total = completed + sum(states.values())
    others = [f"{n:,} {state.words}" for state, n in states.items()]
    return "; ".join([f"{completed:,} of {count(total, 'run')} completed", *others])
