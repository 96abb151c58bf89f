"""`bench run`: plan, start, wait and report in one command."""

from __future__ import annotations

from functools import partial

from bench.commands.console import say
from bench.commands.options import (
    BudgetOption,
    MatrixArgument,
    OnlyOption,
    PatienceOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    SiteOption,
    parse_patience_s,
)
from bench.commands.plan import plan_study, say_warnings
from bench.commands.report import write
from bench.commands.submit import check_budget, runs_to_start, start
from bench.commands.waiting import Patience
from bench.study.plan_json import open_study


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
