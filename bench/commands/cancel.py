"""`bench cancel`: end what this study has queued or running, nothing else."""

from __future__ import annotations

import typer

from bench.commands.common import ResultsOption, StudyArgument, find_study, say
from bench.commands.submit import OnlyOption
from bench.errors import UnwritableError
from bench.executors import executor_for
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.selection import only
from bench.units import count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cancel")(cancel_command)


def cancel_command(
    study: StudyArgument = None, results: ResultsOption = None, filters: OnlyOption = None
) -> int:
    """Cancel what a study has queued or running, and nothing else.

    What is cancelled counts as not done: the next `bench submit` starts it again. One that still
    submits or waits elsewhere starts nothing more, unless --only names a part.
    """
    planned = open_study(find_study(study, results))
    if not filters:
        _halt_submissions(planned)
    cancelled = executor_for(planned).cancel(only(planned.runs, planned.cells, filters or []))
    print(f"{count(cancelled, 'run')} cancelled")
    return 0


def _halt_submissions(planned: PlannedStudy) -> None:
    """Tell submissions that go on elsewhere; where the disk is full, jobs are cancelled all the same."""
    try:
        planned.ledger.halt()
    except UnwritableError as error:
        say(f"{error.message}: a `bench submit` that waits elsewhere cannot be told, and goes on")
