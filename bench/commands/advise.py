"""`bench advise`: choose the configuration for a real training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.commands.console import print_json, print_table, say
from bench.commands.options import JsonOption, ResultsOption, find_study, settle_study
from bench.commands.queue_wait import parse_waits, waits_for
from bench.errors import BenchError
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from bench.units import parse_count

if TYPE_CHECKING:
    from analysis.advise.options import Advice

SHOWN_OPTIONS = 30


StudiesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STUDY]...",
        help="Names or folders of studies, one per cluster; default: the study planned last.",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    str, typer.Option("--samples", help="Training samples per epoch, such as 1281167 or 1.3M.")
]
EpochsOption = Annotated[int, typer.Option("--epochs", min=1, help="Epochs of the training.")]
WaitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--wait",
        metavar="[STUDY=]TIME",
        help="Queue wait of a job in all studies (6.5h), or in one study (h200=6.5h); repeatable.",
    ),
]
NoQueueOption = Annotated[bool, typer.Option("--no-queue", help="Do not ask Slurm to estimate queue waits.")]
BeyondOption = Annotated[
    bool, typer.Option("--beyond", help="Also predict sizes beyond twice the largest measured size.")
]
AllOption = Annotated[
    bool, typer.Option("--all", help=f"List every option, not only the first {SHOWN_OPTIONS}.")
]


def advise_command(
    studies: StudiesArgument = None,
    samples: SamplesOption = "",
    epochs: EpochsOption = 1,
    wait: WaitOption = None,
    no_queue: NoQueueOption = False,
    beyond: BeyondOption = False,
    everything: AllOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show which configuration of a training would finish first, cost least, and fail least often.

    It lists queue wait, time per epoch, total time, GPU-hours and success rate of every measured
    configuration and of larger sizes, which are predicted by a scaling law. Example:
    bench advise l40s h200 --samples 1.3M --epochs 90 --wait l40s=0 --wait h200=6.5h
    """
    amount = parse_samples(samples)
    names: Sequence[str | None] = studies or [None]
    folders = _by_name([settle_study(find_study(name, results)) for name in names])
    given = parse_waits(wait or [], studies=list(folders))
    from analysis.advise.options import fastest_training_s, options_of, rank
    from analysis.data.load import load_study

    loaded = {name: load_study(folder.path) for name, folder in folders.items()}
    options, notes = options_of(loaded, samples=amount, epochs=epochs, beyond=beyond)
    planned = {name: open_study(folder) for name, folder in folders.items()}
    waits = waits_for(fastest_training_s(options), planned, given=given, ask=not no_queue)
    advice = rank(options, waits, samples=amount, epochs=epochs, notes=notes)
    if as_json:
        print_json(_as_content(advice))
    else:
        _show(advice, everything=everything)
    return 0


def parse_samples(text: str) -> int:
    """Parse the value of --samples; raise BenchError if it is no positive number."""
    if not text:
        raise BenchError("--samples is missing", remedy="give the samples per epoch: --samples 1.3M")
    try:
        amount = parse_count(text)
    except ValueError as wrong:
        raise BenchError(f"--samples: {wrong}") from None
    if amount < 1:
        raise BenchError(f"--samples {text} is less than one sample", remedy="give a count such as 1.3M")
    return amount


def _by_name(folders: list[StudyFolder]) -> dict[str, StudyFolder]:
    """Return a dictionary from names to studies; studies with equal names are named by their paths."""
    names = [folder.name for folder in folders]
    named: dict[str, StudyFolder] = {}
    for folder in folders:
        name = folder.name if names.count(folder.name) == 1 else str(folder.path)
        if name in named:
            raise BenchError(f"study {name} is given twice", remedy="give each study once")
        named[name] = folder
    return named


def _as_content(advice: Advice) -> dict[str, Any]:
    """Return the output of `bench advise --json`; unknown values are None."""
    from analysis.advise.text import summary
    from analysis.text import plain

    rows = advice.options.to_dict("records")
    return {
        "samples": advice.samples,
        "epochs": advice.epochs,
        "summary": summary(advice),
        "options": [{str(name): plain(value) for name, value in row.items()} for row in rows],
        "notes": advice.notes,
    }


def _show(advice: Advice, *, everything: bool) -> None:
    from analysis.advise.text import HEADINGS, NUMERIC, remarks, summary, table_rows

    rows = table_rows(advice)
    shown = rows if everything else rows[:SHOWN_OPTIONS]
    title = "Options, shortest total time first"
    if advice.options["group"].nunique() > 1:
        title = "Options by global batch, shortest total time first"
    print_table(title, HEADINGS, shown, right=NUMERIC)
    if len(shown) < len(rows):
        print(f"... and {len(rows) - len(shown)} more options (--all lists them)")
    print()
    for text in summary(advice):
        print(text)
    for text in remarks(advice):
        say(text)
