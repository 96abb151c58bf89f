"""`bench compare`: compare two studies, or the values of one setting, cell by cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.files import write_atomically

from ..terminal import SHOWN_ROWS, print_json, print_table, show
from .completion import complete_key, complete_study
from .options import AllOption, JsonOption, ResultsOption, find_study, require_report, settle_study

if TYPE_CHECKING:
    from analysis.compare.comparison import Comparison
    from analysis.compare.strategies import StrategyRow

AArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[A]",
        help="The name, folder or archive of the first study; with --by, by default the study planned last.",
        autocompletion=complete_study,
    ),
]
BArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]",
        help="The name, folder or archive of the second study; not with --by.",
        autocompletion=complete_study,
    ),
]
ByOption = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="KEY",
        help="Compare cells of A that differ only in this setting, such as backend or env.NCCL_ALGO.",
        autocompletion=complete_key,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="VALUE", help="With --by: the value with which the others are compared."),
]
EffectOption = Annotated[
    float,
    typer.Option("--minimum-effect", help="The smallest relative change (0.02: 2 %) that is a difference."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="KEY", help="Ignore this setting when cells are matched; repeatable."),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="Also write the comparison as Markdown to this file.")
]


StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 3 if no cell is slower, but the data are too few to judge a cell."
    ),
]


def compare_command(
    a: AArgument = None,
    b: BArgument = None,
    by: ByOption = None,
    base: BaseOption = None,
    minimum_effect: EffectOption = 0.02,
    ignore: IgnoreOption = None,
    everything: AllOption = False,
    output: OutputOption = None,
    strict: StrictOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two studies, or the values of one setting within a study, cell by cell.

    The exit code is 1 if a cell is slower in B, or failed in B but completed in A. With --strict, it is
    3 if the data are too few to judge a cell. Example for CI: bench compare results-before/l40s
    results/l40s
    """
    require_report("bench compare")
    _check_options(b, by=by, base=base, minimum_effect=minimum_effect, ignore=ignore)
    folders = [find_study(name, results) for name in ([a] if b is None else [a, b])]
    records = [settle_study(folder) for folder in folders]
    from analysis.checks.assessment import CheckedStudy
    from analysis.compare.comparison import compare_studies, compare_within
    from analysis.compare.strategies import HEADINGS, NUMERIC, strategy_rows
    from analysis.compare.text import as_content, markdown_report
    from analysis.data.load import load_study

    studies = [
        replace(load_study(folder.path, records=own), folder=folder)
        for folder, own in zip(folders, records, strict=True)
    ]
    strategies: list[StrategyRow] = []
    if by is None:
        found = compare_studies(*studies, minimum_effect=minimum_effect, ignore=ignore or [])
    else:
        own = CheckedStudy.of(studies[0])
        found = compare_within(own, key=by, base=base, minimum_effect=minimum_effect)
        strategies = strategy_rows(own, found) if by == "strategy" else []
    if output is not None:
        write_atomically(output, markdown_report(found))
    if as_json:
        side_by_side = {"strategies": [one.as_json() for one in strategies]} if strategies else {}
        print_json(as_content(found) | side_by_side)
    else:
        _show(found, everything=everything)
        if strategies:
            show()
            texts = [one.texts(one.row.cell_id) for one in strategies]
            print_table("Strategies", HEADINGS, texts, right=NUMERIC)
    if found.regression:
        return 1
    return 3 if strict and found.undecided else 0


def _check_options(
    b: str | None, *, by: str | None, base: str | None, minimum_effect: float, ignore: list[str] | None
) -> None:
    """Raise BenchError if the options contradict each other."""
    if not 0 <= minimum_effect < 1:
        what = f"--minimum-effect {minimum_effect:g} is not between 0 and 1"
        raise BenchError(what, remedy="write a fraction, such as 0.02 for 2 %")
    if (b is None) == (by is None):
        both = f"--by {by} compares cells of one study, but two studies are given"
        remedy = "use bench compare A B for two studies, bench compare A --by KEY for one"
        raise BenchError("a second study is missing" if b is None else both, remedy=remedy)
    if by is None and base is not None:
        raise BenchError("--base requires --by", remedy="use bench compare A --by KEY --base VALUE")
    if by is not None and ignore:
        remedy = "omit it: --by compares cells that differ only in KEY"
        raise BenchError("--ignore cannot be used with --by", remedy=remedy)


def _show(found: Comparison, *, everything: bool) -> None:
    from analysis.compare.text import conclusion, difference_rows, headings, remarks, table_rows, title

    hidden = 0 if everything else max(0, len(found.cells) - SHOWN_ROWS)
    cells = table_rows(found, changed_first=hidden > 0)
    shown = cells[: len(cells) - hidden]
    names = headings(found)
    print_table(title(found), names, shown, right=names[1:-2], hidden=hidden)
    if rows := difference_rows(found):
        show()
        print_table("Differences between the studies", ["", "A", "B"], rows)
    show()
    for text in remarks(found):
        show(text)
    show(conclusion(found))
