"""`bench cancel`: end what this study has queued or running, nothing else."""

from __future__ import annotations

import typer

from bench.commands.common import ResultsOption, StudyArgument, find_study
from bench.commands.submit import OnlyOption
from bench.executors import executor_for
from bench.executors.base import open_study
from bench.selection import only
from bench.units import count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cancel")(cancel_command)


def cancel_command(
    study: StudyArgument = None, results: ResultsOption = None, filters: OnlyOption = None
) -> int:
    """Cancel what a study has queued or running, and nothing else.

    What is cancelled counts as not done: the next `bench submit` starts it again.
    """
    planned = open_study(find_study(study, results))
    cancelled = executor_for(planned).cancel(only(planned.runs, planned.cells, filters or []))
    print(f"{count(cancelled, 'run')} cancelled")
    return 0
