"""`bench compare`: which cells are faster, slower, the same, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.commands.common import (
    JsonOption,
    ResultsOption,
    find_study,
    print_json,
    print_table,
    settled,
)
from bench.errors import BenchError
from bench.layout import write_atomically

if TYPE_CHECKING:
    from analysis.compare import Comparison

SHOWN_CELLS = 60


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare_command)


def compare_command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A study's name or folder: what is compared to.", show_default=False
        ),
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]", help="The other study's name or folder; not with --by.", show_default=False
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="KEY",
            help="Compare within A the values of a setting, such as backend or env.NCCL_ALGO.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="VALUE", help="With --by: the value that the others are compared to."),
    ] = None,
    minimum_effect: Annotated[
        float,
        typer.Option("--minimum-effect", help="The least relative change that is worth a verdict."),
    ] = 0.02,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="KEY", help="A setting that cells need not agree in; repeatable."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help=f"List every cell, not only {SHOWN_CELLS}, changed ones first."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the comparison as Markdown to this file, too.")
    ] = None,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two studies, or the values of one setting within a study, cell by cell.

    Exit code 1 where a cell is slower in B, or failed in B where A completed. For CI:
    bench compare results-before/l40s results/l40s
    """
    if not 0 <= minimum_effect < 1:
        raise BenchError(
            f"--minimum-effect {minimum_effect:g} is not between 0 and 1", remedy="0.02 stands for 2 %"
        )
    found = _comparison(a, b, by=by, base=base, effect=minimum_effect, ignore=ignore or [], results=results)
    from analysis.compare_text import as_content, markdown_report

    if output is not None:
        try:
            write_atomically(output, markdown_report(found))
        except OSError as error:
            raise BenchError(f"{output}: cannot be written: {error.strerror}") from None
    if as_json:
        print_json(as_content(found))
    else:
        _show(found, everything=everything)
    return 1 if found.regression else 0


def _comparison(
    a: str,
    b: str | None,
    *,
    by: str | None,
    base: str | None,
    effect: float,
    ignore: list[str],
    results: Path | None,
) -> Comparison:
    if (b is None) == (by is None):
        what = (
            "a second study is missing" if b is None else f"--by {by} looks at one study, and two are given"
        )
        raise BenchError(
            what, remedy="bench compare A B compares two studies, bench compare A --by KEY looks within one"
        )
    if by is None and base is not None:
        raise BenchError(
            "--base names a value of --by, which is not given", remedy="bench compare A --by KEY"
        )
    if by is not None and ignore:
        raise BenchError("--ignore is for two studies", remedy="--by compares cells that differ in KEY alone")
    folders = [settled(find_study(name, results)) for name in (a, b) if name is not None]
    from analysis.compare import compare_studies, compare_within
    from analysis.load import load_study

    studies = [load_study(folder.path) for folder in folders]
    if by is not None:
        return compare_within(studies[0], key=by, base=base, minimum_effect=effect)
    return compare_studies(studies[0], studies[1], minimum_effect=effect, ignore=ignore)


def _show(found: Comparison, *, everything: bool) -> None:
    from analysis.compare_text import HEADINGS, NUMERIC, conclusion, differences, remarks, table_rows, title

    whole = everything or len(found.cells) <= SHOWN_CELLS
    rows = table_rows(found, changed_first=not whole)
    shown = rows if whole else rows[:SHOWN_CELLS]
    print_table(title(found), HEADINGS, shown, right=NUMERIC)
    if len(shown) < len(rows):
        print(f"... and {len(rows) - len(shown)} more cells (--all lists them)")
    others = differences(found)
    if others:
        print()
        print_table("What differs as a whole", ["", "A", "B"], [(one.what, one.a, one.b) for one in others])
    print()
    for text in remarks(found):
        print(text)
    print(conclusion(found))
