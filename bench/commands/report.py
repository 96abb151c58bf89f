"""`bench report`: the page, the tables and the figures of a study."""

from __future__ import annotations

import typer

from bench.commands.common import JsonOption, ResultsOption, StudyArgument, find_study, print_json, say
from bench.executors import executor_for
from bench.executors.base import open_study
from bench.layout import StudyFolder


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report_command)


def report_command(
    study: StudyArgument = None, results: ResultsOption = None, as_json: JsonOption = False
) -> int:
    """Write a study's report: report/index.html, tables and figures.

    The page is one file and loads nothing. It goes through the plan: what is missing or
    failed is shown with its reason.
    """
    return write(find_study(study, results), as_json=as_json)


def write(folder: StudyFolder, *, as_json: bool = False) -> int:
    """Settle the study's runs, write its report and print where it is."""
    executor_for(open_study(folder)).refresh()
    from analysis.report import write_report

    page = write_report(folder.path, progress=say)
    if as_json:
        files = sorted(str(path) for path in page.parent.rglob("*") if path.is_file())
        print_json({"study": folder.name, "report": str(page), "files": files})
    else:
        print(page)
    return 0
