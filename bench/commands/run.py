"""`bench run`: plan, start, wait and report in one command."""

from __future__ import annotations

from ..cost import summary
from ..study.plan_json import open_study
from ..terminal import say
from .options import (
    BudgetOption,
    MatrixArgument,
    OnlyOption,
    ResultsOption,
    RetryDisturbedOption,
    RetryOption,
    SiteOption,
    StepTimeOption,
    YesOption,
    choose_runs,
    require_report,
)
from .plan import plan_study, say_warnings
from .report import write
from .submit import check_cost, new_submission, start


def run_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    filters: OnlyOption = None,
    retry_failed: RetryOption = False,
    retry_disturbed: RetryDisturbedOption = False,
    budget: BudgetOption = None,
    site: SiteOption = None,
    yes: YesOption = False,
    step_time: StepTimeOption = None,
) -> int:
    """Plan a matrix, start the runs that are not yet done, wait for them, and write the report.

    Ctrl-C ends the current run and stops; the same command continues later.
    Example: bench run smoke_cpu
    """
    require_report("bench run")
    plan, folder = plan_study(matrix, site=site, results=results)
    study = open_study(folder)
    say(f"study {plan.matrix.study}: {summary(study)}")
    say_warnings(plan)
    submission = new_submission(study)
    seen = submission.records(wait=True)
    runs = choose_runs(study, seen, filters, retry_failed=retry_failed, retry_disturbed=retry_disturbed)
    check_cost(study, runs, budget=budget, step_time=step_time, ask=not yes)
    code = start(submission, runs, seen, wait=True)
    return max(code, write(folder))
