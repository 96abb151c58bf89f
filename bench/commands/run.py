"""`bench run`: plan, start, wait and report in one command."""

from __future__ import annotations

from functools import partial

from ..study.plan_json import open_study
from .console import say
from .options import (
    BudgetOption,
    MatrixArgument,
    OnlyOption,
    PatienceOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    SiteOption,
    parse_patience_s,
    require_report,
)
from .plan import plan_study, say_warnings
from .report import write
from .submit import check_budget, runs_to_start, start
from .waiting import Patience


def run_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    retry_disturbed: RetryDisturbedOption = False,
    budget: BudgetOption = None,
    patience: PatienceOption = None,
    site: SiteOption = None,
) -> int:
    """Plan a matrix, start the runs that are not yet done, wait for them, and write the report.

    Ctrl-C ends the current run and stops; the same command continues later.
    Example: bench run smoke_cpu
    """
    require_report("bench run")
    limited = Patience(parse_patience_s(patience))
    plan, folder = plan_study(matrix, site=site, results=results)
    say(f"study {plan.matrix.study}: {plan.cost}")
    say_warnings(plan)
    study = open_study(folder)
    choose = partial(
        runs_to_start, study, filters or [], retry_failed=retry_failed, retry_disturbed=retry_disturbed
    )
    runs, seen = limited.until_answered(choose)
    check_budget(study, runs, budget)
    code = start(study, runs, seen=seen, patience=limited)
    write(folder)
    return code
