"""`bench history`: the throughput of equal cells of many studies over time, and its changes."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddp_scaling_bench.errors import BenchError

from ..archive import is_archive, open_archive
from ..study.layout import studies
from ..terminal import SHOWN_ROWS, print_json, print_table, say, show
from .completion import complete_study
from .options import (
    AllOption,
    JsonOption,
    ResultsOption,
    find_study,
    no_study,
    require_report,
    results_folder,
)

if TYPE_CHECKING:
    from analysis.history.index import Source
    from analysis.history.series import History

StudiesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STUDY]...",
        help="Names, folders or archives of studies; default: all in the results folder.",
        show_default=False,
        autocompletion=complete_study,
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option("--check", help="Exit with 1 if a series is newly slower, and 3 if that cannot be told."),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="DATE",
        help="Changes first reported since DATE (2026-03-04) are new; default: those of the newest study.",
    ),
]
RebuildOption = Annotated[
    bool, typer.Option("--rebuild", help="Read all studies again, also unchanged ones.")
]


def history_command(
    named: StudiesArgument = None,
    check: CheckOption = False,
    since: SinceOption = None,
    rebuild: RebuildOption = False,
    everything: AllOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show how the throughput of equal cells changed over many studies.

    Cells are equal if everything that affects their runs is equal: sizes, batches, settings, partition,
    device. Versions, nodes and dates may differ. The page is history.html in the results folder. With
    --check, the exit code is 1 if a series became slower, as first reported with the newest study, and 3 if
    this cannot be told.
    """
    require_report("bench history")
    new_since = _date(since) if since else None
    from analysis.history.history_page import write_page
    from analysis.history.index import read_studies
    from analysis.history.series import history_of

    root = results_folder(results)
    sources = [_source(name, root, results) for name in dict.fromkeys(named or ())] or _all_sources(root)
    archives = [os.path.relpath(source.path, root) for source in sources if source.open]
    entries = read_studies(sources, root, rebuild=rebuild, say=say)
    found = history_of(entries, archives=archives, new_since=new_since)
    private = any(source.is_private for source in sources)
    page = write_page(found, root, private=private, say=say)
    if as_json:
        slower = [one.label for one in found.series if one.regression]
        print_json({**asdict(found), "newly_slower": slower, "page": page and str(page)})
    else:
        _print(found, page, everything=everything)
    if not check:
        return 0
    newest = max(sources, key=lambda source: source.plan.stat().st_mtime_ns)
    return _exit_code(found, newest, has_result=bool(entries[os.path.relpath(newest.path, root)].points))


def _print(found: History, page: Path | None, *, everything: bool) -> None:
    from analysis.history.show import HEADINGS, remarks, summary, table_rows, title

    rows = table_rows(found)
    hidden = 0 if everything else max(0, len(rows) - SHOWN_ROWS)
    if rows:
        print_table(title(found), HEADINGS, rows[: len(rows) - hidden], right=HEADINGS[1:3], hidden=hidden)
    for text in (*remarks(found), summary(found), *([f"page: {page}"] if page else [])):
        show(text)


def _exit_code(found: History, newest: Source, *, has_result: bool) -> int:
    """Return 1 if a series is newly slower, 3 with a message if that cannot be told, else 0.

    ``has_result`` says whether a cell of the study that was planned last is in a series.
    """
    if any(one.regression for one in found.series):
        return 1
    if found.searched and has_result:
        return 0
    lacking = f"the newest study, {newest.path.name}, has no result"
    say(f"cannot tell whether a series is slower: {lacking if found.searched else 'too few studies'}")
    return 3


def _all_sources(root: Path) -> list[Source]:
    """Return the studies and archives in the results folder; raise BenchError if there is none."""
    from analysis.history.index import Source

    archives = (path for path in sorted(root.glob("*")) if is_archive(path) and path.is_file())
    sources = [
        *(Source(folder.path) for folder in studies(root)),
        *(Source(p, open_archive) for p in archives),
    ]
    if not sources:
        raise no_study(root)
    return sources


def _source(name: str, root: Path, results: Path | None) -> Source:
    """Return a study by its name or folder, or an archive, which is unpacked if it is not in the index."""
    from analysis.history.index import Source

    for path in (Path(name), root / name):
        if is_archive(path) and path.is_file():
            return Source(path, open_archive)
    return Source(find_study(name, results).path)


def _date(text: str) -> str:
    """Return a date in the form of the times of points; raise BenchError for another text."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise BenchError(f"--since {text} is not a date", remedy="write it as 2026-03-04") from None
