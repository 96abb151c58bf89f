"""`bench report`: write the page, tables and figures of a study, or of a table measured elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddp_scaling_bench.errors import BenchError, UnwritableError
from ddp_scaling_bench.files import check_writable

from ..study.layout import StudyFolder
from .advise import parse_samples
from .console import print_json, say, show
from .options import JsonOption, ResultsOption, find_study, require_report, settle_study

if TYPE_CHECKING:
    from analysis.report.proposal import Work
    from analysis.report.write import Report

#: File suffix of tables. A study whose name ends in this suffix must be given by its folder.
TABLE_SUFFIX = ".csv"


BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="SIZE",
        help="The reference for efficiencies: a size (1x4, or 4 GPUs), a cell_id, no-ddp, or common (the "
        "smallest size that all series have); default: the smallest measured size.",
        show_default=False,
    ),
]
ProposalOption = Annotated[
    bool, typer.Option("--proposal", help="Also write the scaling section of a proposal as .md and .tex.")
]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--samples",
        help="With --proposal: samples per epoch of the training that you ask time for, such as 1.3M.",
        show_default=False,
    ),
]
EpochsOption = Annotated[
    int, typer.Option("--epochs", min=1, help="With --samples: epochs of that training.")
]
TrainingsOption = Annotated[
    int, typer.Option("--trainings", min=1, help="With --samples: the number of such trainings.")
]
IncludeDisturbedOption = Annotated[
    bool, typer.Option("--include-disturbed", help="Use all completed runs, including disturbed ones.")
]

SourceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STUDY|TABLE.csv]",
        help="A study's name or folder (default: the study planned last), or a table measured elsewhere.",
        show_default=False,
    ),
]
_MODE = "The scaling mode (strong or weak) of a table without batch columns."
ModeOption = Annotated[
    Literal["strong", "weak"] | None, typer.Option("--mode", help=_MODE, show_default=False)
]
_OUTPUT = (
    "The folder in which STUDY-report/ or TABLE-report/ is created; default: report/ of the study, or the "
    "table's folder."
)
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help=_OUTPUT, show_default=False)
]


def report_command(
    source: SourceArgument = None,
    baseline: BaselineOption = None,
    mode: ModeOption = None,
    output: OutputOption = None,
    proposal: ProposalOption = False,
    samples: SamplesOption = None,
    epochs: EpochsOption = 1,
    trainings: TrainingsOption = 1,
    include_disturbed: IncludeDisturbedOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a report: report/index.html (TABLE-report/index.html), tables and figures.

    For a study, missing and failed runs are listed with the reason. A TABLE.csv measured elsewhere
    has one row per run or per size. The page is one file and works offline. With --output, the report of a
    study that you cannot write to goes to another folder.
    """
    require_report("bench report")
    work = _work(samples, epochs, trainings, proposal=proposal)
    options: dict[str, Any] = {"baseline": baseline, "proposal": proposal, "work": work}
    if source is not None and source.lower().endswith(TABLE_SUFFIX) and not Path(source).is_dir():
        if include_disturbed:
            raise BenchError("--include-disturbed is for a study, not for a table", remedy="omit it")
        from analysis.report.write import write_table_report

        table = Path(source)
        written = write_table_report(table, output=output or table.parent, mode=mode, progress=say, **options)
        return _print(written, study=table.stem, as_json=as_json)
    if mode is not None:
        what = "--mode is for a table measured elsewhere, not for a study"
        raise BenchError(what, remedy="omit --mode, or give a TABLE.csv")
    folder = find_study(source, results)
    return write(folder, as_json=as_json, output=output, include_disturbed=include_disturbed, **options)


def _work(samples: str | None, epochs: int, trainings: int, *, proposal: bool) -> Work | None:
    """Return the trainings that the proposal asks time for, or None if none are stated."""
    if samples is None:
        for option, number in (("--epochs", epochs), ("--trainings", trainings)):
            if number > 1:
                remedy = "add --samples, the samples per epoch"
                raise BenchError(f"{option} requires --samples", remedy=remedy)
        return None
    if not proposal:
        raise BenchError("--samples requires --proposal", remedy="add --proposal, or omit --samples")
    from analysis.report.proposal import Work

    return Work(parse_samples(samples), epochs, trainings)


def write(folder: StudyFolder, *, as_json: bool = False, output: Path | None = None, **options: Any) -> int:
    """Update the records of a study, write its report, and print the path and the validity of the numbers.

    ``options`` are those of :func:`analysis.report.write.write_report`.
    """
    try:
        check_writable(output or folder.report)  # a large study takes minutes
        records = settle_study(folder)
        from analysis.report.write import write_report

        written = write_report(folder.path, output=output, records=records, progress=say, **options)
    except UnwritableError as error:
        elsewhere = f"write the report elsewhere: bench report {shlex.quote(str(folder.path))} --output DIR"
        remedy = f"{error.remedy}, or {elsewhere}" if error.remedy else elsewhere
        raise UnwritableError(error.message, remedy=remedy) from None
    return _print(written, study=folder.name, as_json=as_json)


def _print(written: Report, *, study: str, as_json: bool) -> int:
    """Print the path of the page and the validity of the numbers; return the exit code."""
    from analysis.text import heading, message

    page = written.page
    if not as_json:
        show(page)
        for one in written.validity:
            advice = f"{message(one)} {one.remedy}".strip()
            say(f"{one.severity}: {heading(one)}. {advice} [{one.kind}]")
        return 0
    files = sorted(str(path) for path in page.parent.rglob("*") if path.is_file())
    validity = [
        {
            "code": one.kind,
            "severity": one.severity,
            "message": message(one),
            "remedy": one.remedy,
            "cells": one.subject,
            "values": one.values,
        }
        for one in written.validity
    ]
    content = {"study": study, "report": str(page), "files": files, "validity": validity}
    content["findings"] = [
        {**one.as_json(), "message": message(one), "remedy": one.remedy, "runs": runs}
        for one, runs in written.of_runs
    ]
    content["checks"] = [check.as_json() for check in written.assessment.checks]
    print_json({**content, "recommended": written.recommended, "verdicts": written.verdicts})
    return 0
