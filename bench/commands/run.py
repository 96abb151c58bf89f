"""`bench run`: plan, start, wait and report in one."""

from __future__ import annotations

import typer

from bench.commands.common import MatrixArgument, ResultsOption, SiteOption, say
from bench.commands.plan import cost_line, planned
from bench.commands.report import write
from bench.commands.submit import BudgetOption, OnlyOption, RetryOption, check_budget, runs_to_start, start
from bench.study.plan_json import open_study


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run_command)


def run_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    site: SiteOption = None,
) -> int:
    """Plan a matrix, run what is not yet done, and write the report.

    Ctrl-C stops after ending the run that goes on; the same command continues later.
    Example: bench run smoke_cpu
    """
    plan, folder = planned(matrix, site=site, results=results)
    say(f"study {plan.matrix.study}: {cost_line(plan)}")
    if plan.document.site:
        say(str(plan.document.site))
    for warning in plan.warnings:
        say(f"warning: {warning}")
    study = open_study(folder)
    runs = runs_to_start(study, filters=filters or [], retry_failed=retry_failed)
    check_budget(study, runs, budget)
    code = start(study, runs, wait=True)
    write(folder)
    return code
