"""`bench compare`: compare two studies, or the values of one setting, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.commands.console import print_json, print_table
from bench.commands.options import JsonOption, ResultsOption, find_study, settle_study
from bench.errors import BenchError
from bench.study.files import write_atomically

if TYPE_CHECKING:
    from analysis.compare.comparison import Comparison

SHOWN_CELLS = 60


AArgument = Annotated[
    str,
    typer.Argument(metavar="A", help="The name or folder of the first study.", show_default=False),
]
BArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]", help="The name or folder of the second study; not with --by.", show_default=False
    ),
]
ByOption = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="KEY",
        help="Compare the values of a setting within A, such as backend or env.NCCL_ALGO.",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="VALUE", help="With --by: the value that the others are compared with."),
]
EffectOption = Annotated[
    float,
    typer.Option("--minimum-effect", help="The smallest relative change that counts as a difference."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="KEY", help="A setting in which matched cells may differ; repeatable."),
]
AllOption = Annotated[
    bool, typer.Option("--all", help=f"List every cell, not only {SHOWN_CELLS} with changed ones first.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="Also write the comparison as Markdown to this file.")
]


def compare_command(
    a: AArgument,
    b: BArgument = None,
    by: ByOption = None,
    base: BaseOption = None,
    minimum_effect: EffectOption = 0.02,
    ignore: IgnoreOption = None,
    everything: AllOption = False,
    output: OutputOption = None,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two studies, or the values of one setting within a study, cell by cell.

    The exit code is 1 if a cell is slower in B, or failed in B but completed in A. For CI:
    bench compare results-before/l40s results/l40s
    """
    settings = _Settings(by=by, base=base, minimum_effect=minimum_effect, ignore=ignore or [])
    settings.check(b)
    folders = [settle_study(find_study(name, results)) for name in (a, b) if name is not None]
    found = _comparison([folder.path for folder in folders], settings)
    from analysis.compare.text import as_content, markdown_report

    if output is not None:
        write_atomically(output, markdown_report(found))
    if as_json:
        print_json(as_content(found))
    else:
        _show(found, everything=everything)
    return 1 if found.regression else 0


@dataclass(frozen=True)
class _Settings:
    """The options of a comparison."""

    by: str | None
    base: str | None
    minimum_effect: float
    ignore: list[str]

    def check(self, b: str | None) -> None:
        """Raise BenchError if options contradict each other, or the second study ``b``."""
        if not 0 <= self.minimum_effect < 1:
            what = f"--minimum-effect {self.minimum_effect:g} is not between 0 and 1"
            raise BenchError(what, remedy="0.02 means 2 %")
        if (b is None) == (self.by is None):
            both = f"--by {self.by} compares within one study, but two are given"
            remedy = "use bench compare A B for two studies, bench compare A --by KEY for one"
            raise BenchError("a second study is missing" if b is None else both, remedy=remedy)
        if self.by is None and self.base is not None:
            what = "--base is a value of --by, which is missing"
            raise BenchError(what, remedy="bench compare A --by KEY")
        if self.by is not None and self.ignore:
            what = "--ignore is only for two studies"
            raise BenchError(what, remedy="--by compares cells that differ in KEY alone")


def _comparison(folders: Sequence[Path], settings: _Settings) -> Comparison:
    from analysis.compare.comparison import compare_studies, compare_within
    from analysis.data.load import load_study

    studies = [load_study(folder) for folder in folders]
    effect = settings.minimum_effect
    if settings.by is not None:
        return compare_within(studies[0], key=settings.by, base=settings.base, minimum_effect=effect)
    return compare_studies(*studies, minimum_effect=effect, ignore=settings.ignore)


def _show(found: Comparison, *, everything: bool) -> None:
    from analysis.compare.text import (
        HEADINGS,
        NUMERIC,
        conclusion,
        differences,
        remarks,
        table_rows,
        title,
    )

    whole = everything or len(found.cells) <= SHOWN_CELLS
    cells = table_rows(found, changed_first=not whole)
    print_table(title(found), HEADINGS, cells if whole else cells[:SHOWN_CELLS], right=NUMERIC)
    if not whole:
        print(f"... and {len(cells) - SHOWN_CELLS} more cells (--all lists them)")
    if others := differences(found):
        print()
        print_table(
            "Differences between the studies", ["", "A", "B"], [(one.what, one.a, one.b) for one in others]
        )
    print()
    for text in remarks(found):
        print(text)
    print(conclusion(found))
