"""What the commands share: options, the study that is meant, and how things are printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.errors import BenchError
from bench.executors import executor_for
from bench.executors.base import note_standing
from bench.slurm.client import SlurmUnavailableError
from bench.study.layout import StudyFolder, latest_first, results_root, studies
from bench.study.ledger import RunRecord
from bench.study.plan_json import PlannedStudy, open_study

#: Slurm's accounting of a job comes in within a second or some after its end.
PATIENCE_S = 4.0

ResultsOption = Annotated[
    Path | None,
    typer.Option(
        "--results", envvar="BENCH_RESULTS", help="The folder that studies land in.", show_default="results"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
MatrixArgument = Annotated[
    str, typer.Argument(help="A matrix file, or the name of a shipped example.", show_default=False)
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        help="The site file that the matrix inherits from; empty: none. [env var: BENCH_SITE]",
        show_default="~/.config/ddp-scaling-bench/site.yaml",
    ),
]
StudyArgument = Annotated[
    str | None,
    typer.Argument(help="A study's name or folder; left out: the one planned last.", show_default=False),
]


def root_of(results: Path | None) -> Path:
    """Return the folder that studies land in."""
    return results if results is not None else results_root()


def find_study(name: str | None, results: Path | None) -> StudyFolder:
    """Return the study that is meant: by name, by folder, or the one planned last.

    Raises:
        BenchError: there is none; the message lists those that there are.
    """
    root = root_of(results)
    known = list(studies(root))
    if name is None:
        if not known:
            raise BenchError(f"no study is planned below {root}", remedy="plan one: bench plan MATRIX")
        return latest_first(root)[0]
    for path in (Path(name), root / name):
        if StudyFolder(path).is_planned:
            return StudyFolder(path)
    if Path(name).suffix in (".yaml", ".yml"):
        raise BenchError(f"{name} is a matrix, not a study", remedy=f"plan it first: bench plan {name}")
    listed = ", ".join(study.name for study in known) or "none"
    raise BenchError(
        f"no study {name!r} is planned below {root} (there: {listed})", remedy="plan it: bench plan MATRIX"
    )


def settled_records(planned: PlannedStudy) -> dict[str, RunRecord]:
    """Return where each run stands; a few seconds are given to what has ended just now."""
    executor = executor_for(planned)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        records = executor.refresh()
        ending = any(record.details.get("ending") for record in records.values())
        if not ending or time.monotonic() > deadline:
            return records
        time.sleep(0.4)


def settled(folder: StudyFolder) -> StudyFolder:
    """Settle what has ended in a study and return it; where Slurm cannot be asked, it is as it lies there."""
    try:
        planned = open_study(folder)
        note_standing(planned, settled_records(planned))
    except SlurmUnavailableError as absent:
        say(f"{folder.path}: runs under way are left open: {absent.message}")
    return folder


def print_json(content: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def say(words: str) -> None:
    """Print a diagnostic line on standard error."""
    typer.echo(words, err=True)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()
) -> None:
    """Print a table: ruled on a terminal, plain columns elsewhere. Text is never read as markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, highlight=False, soft_wrap=not terminal, width=None if terminal else 10_000
    )
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD if terminal else None, pad_edge=False
    )
    for name in columns:
        table.add_column(name, justify="right" if name in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    console.print(table)


# What a run's name or a job's id stands for, among all studies.


def attempts_meant(target: str, root: Path) -> Iterator[tuple[PlannedStudy, list[tuple[str, int]]]]:
    """Yield the studies below ``root`` that know ``target``, the one planned last first.

    With each come run and attempt of what is meant: of a run's name the latest attempt (0 where it
    was never started), of a job's id all that the job ran, older attempts included.
    """
    for folder in latest_first(root):
        try:
            planned = open_study(folder)
        except BenchError:  # another version's: what is meant may be elsewhere
            continue
        records = planned.records()
        if target in records:
            yield planned, [(target, records[target].attempt)]
        elif of_job := [one for one in planned.ledger.attempts_of_job(target) if one[0] in records]:
            yield planned, of_job
