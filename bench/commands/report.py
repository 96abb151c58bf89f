"""`bench report`: the page, the tables and the figures of a study, or of a table measured elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.common import JsonOption, ResultsOption, find_study, print_json, say, settled_records
from bench.errors import BenchError
from bench.executors.base import note_standing
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study

#: What a table's name ends in; a study whose name does is given as a folder.
TABLE_SUFFIXES = (".csv", ".tsv")


class Mode(StrEnum):
    """How the sizes of a table relate, where its columns do not tell."""

    STRONG = "strong"
    WEAK = "weak"


SourceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STUDY|TABLE.csv]",
        help="A study's name or folder (left out: the one planned last), or a table measured elsewhere.",
        show_default=False,
    ),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="SIZE",
        help="What efficiencies refer to: a size (1x4, or 4 GPUs), a cell_id, no-ddp, or common (the "
        "smallest size that all series have); by default the smallest size measured.",
        show_default=False,
    ),
]
ModeOption = Annotated[
    Mode | None,
    typer.Option(
        "--mode", help="Of a table without batch columns: strong or weak scaling.", show_default=False
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="Where report/ of a table is made; by default beside the table.",
        show_default=False,
    ),
]
ProposalOption = Annotated[
    bool,
    typer.Option(
        "--proposal", help="Write the scaling section of a proposal, too: proposal.md and proposal.tex."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report_command)


def report_command(
    source: SourceArgument = None,
    baseline: BaselineOption = None,
    mode: ModeOption = None,
    output: OutputOption = None,
    proposal: ProposalOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a report: report/index.html, tables and figures.

    Of a study: what is missing or failed is shown with its reason. Of a TABLE.csv measured
    elsewhere: one row per run or per size. The page is one file and loads nothing.
    """
    if source is not None and _is_table(source):
        return _write_table(
            Path(source), baseline=baseline, mode=mode, output=output, proposal=proposal, as_json=as_json
        )
    for given, option in ((mode, "--mode"), (output, "--output")):
        if given is not None:
            raise BenchError(
                f"{option} is for a table measured elsewhere, not for a study",
                remedy=f"leave {option} out, or give a TABLE.csv",
            )
    return write(find_study(source, results), baseline=baseline, proposal=proposal, as_json=as_json)


def write(
    folder: StudyFolder, *, baseline: str | None = None, proposal: bool = False, as_json: bool = False
) -> int:
    """Settle the study's runs, write its report and print where it is."""
    planned = open_study(folder)
    note_standing(planned, settled_records(planned))
    from analysis.report.write import write_report

    page = write_report(folder.path, baseline=baseline, proposal=proposal, progress=say)
    _print(page, study=folder.name, as_json=as_json)
    return 0


def _is_table(source: str) -> bool:
    return source.lower().endswith(TABLE_SUFFIXES) and not Path(source).is_dir()


def _write_table(
    table: Path,
    *,
    baseline: str | None,
    mode: Mode | None,
    output: Path | None,
    proposal: bool,
    as_json: bool,
) -> int:
    folder = output if output is not None else table.parent
    if StudyFolder(folder).is_planned:
        raise BenchError(
            f"{folder} is a study: the report of {table.name} would replace its own",
            remedy="say where it should go: --output DIR",
        )
    from analysis.report.write import write_table_report

    page = write_table_report(
        table,
        output=folder,
        mode=mode.value if mode else None,
        baseline=baseline,
        proposal=proposal,
        progress=say,
    )
    _print(page, study=table.stem, as_json=as_json)
    return 0


def _print(page: Path, *, study: str, as_json: bool) -> None:
    if not as_json:
        print(page)
        return
    files = sorted(str(path) for path in page.parent.rglob("*") if path.is_file())
    print_json({"study": study, "report": str(page), "files": files})
