"""`bench cancel`: cancel the queued and running runs of a study."""

from __future__ import annotations

from ddp_scaling_bench.errors import UnwritableError
from ddp_scaling_bench.units import count

from ..jobs.engine import Engine
from ..study.plan_json import open_study
from ..terminal import say, show
from .options import AdoptOption, OnlyOption, ResultsOption, StudyArgument, find_study, only


def cancel_command(
    study: StudyArgument = None,
    results: ResultsOption = None,
    filters: OnlyOption = None,
    adopt: AdoptOption = False,
) -> int:
    """Cancel the queued and running runs of a study, and nothing else.

    Without --only, the command also prevents a `bench submit` in another terminal from starting more runs. A
    later `bench submit` starts the cancelled runs again.
    """
    planned = open_study(find_study(study, results))
    engine = Engine(planned)
    engine.check_place(adopt=adopt)
    if not filters:
        try:
            planned.ledger.note("halted")
        except UnwritableError as error:  # jobs are cancelled even if the disk is full
            say(f"{error.message}; a `bench submit` in another terminal may start further runs")
    runs = only(planned, filters or [])
    cancelled = engine.cancel(runs)
    show(f"{count(cancelled, 'run')} cancelled")
    return 0
