"""`bench advise`: choose the configuration for a real training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddp_scaling_bench.errors import BenchError, UnavailableError
from ddp_scaling_bench.units import count, human_duration, parse_count, parse_duration_s

from ..jobs.engine import scheduler_for
from ..matrix.cell import Cell, value_text
from ..study.layout import StudyFolder
from ..study.plan_json import PlannedStudy, open_study
from ..terminal import SHOWN_ROWS, print_json, print_table, say, show
from .completion import complete_study
from .options import AllOption, JsonOption, ResultsOption, find_study, require_report, settle_study

if TYPE_CHECKING:
    from analysis.advise.options import Advice, Layout, Wait


StudiesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STUDY]...",
        help="Names, folders or archives of studies, one per cluster; default: the study planned last.",
        autocompletion=complete_study,
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


def advise_command(
    studies: StudiesArgument = None,
    samples: SamplesOption = "",
    epochs: EpochsOption = 1,
    wait: WaitOption = None,
    no_queue: NoQueueOption = False,
    everything: AllOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show which configuration of a training would finish first, cost least, and fail least often.

    For every measured configuration, the table lists queue wait, time per epoch, total time, GPU-hours and
    success rate. Example: bench advise l40s h200 --samples 1.3M --epochs 90 --wait l40s=0 --wait h200=6.5h
    """
    require_report("bench advise")
    amount = parse_samples(samples)
    names: Sequence[str | None] = studies or [None]
    folders = _by_name([find_study(name, results) for name in names])
    records = {name: settle_study(folder) for name, folder in folders.items()}
    given = parse_waits(wait or [], studies=list(folders))
    from analysis.advise.options import fastest_training_s, options_of, rank
    from analysis.data.load import load_study

    loaded = {name: load_study(folder.path, records=records[name]) for name, folder in folders.items()}
    options = options_of(loaded, samples=amount, epochs=epochs)
    planned = {name: open_study(folder) for name, folder in folders.items()}
    waits = waits_for(fastest_training_s(options.options), planned, given=given, ask=not no_queue)
    advice = rank(options, waits)
    if as_json:
        print_json(_as_content(advice))
    else:
        _show(advice, everything=everything)
    return 0 if advice.chosen("first") else 1


def parse_samples(text: str) -> int:
    """Parse the value of --samples; raise BenchError if the value is not a positive number."""
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
        name = folder.name if names.count(folder.name) == 1 else str(folder.source)
        if name in named:
            raise BenchError(f"study {name} is given twice", remedy="give each study once")
        named[name] = folder
    return named


def _as_content(advice: Advice) -> dict[str, Any]:
    """Return the output of `bench advise --json`; unknown values are None."""
    from analysis.advise.options import Option
    from analysis.advise.text import summary
    from analysis.data.columns import columns_of
    from analysis.text import plain

    names = columns_of(Option)
    return {
        "samples": advice.samples,
        "epochs": advice.epochs,
        "summary": summary(advice),
        "options": [{name: plain(getattr(row, name)) for name in names} for row in advice.options],
        "notes": advice.notes,
        "validity": {study: [fact.as_json() for fact in facts] for study, facts in advice.validity.items()},
    }


def _show(advice: Advice, *, everything: bool) -> None:
    from analysis.advise.text import HEADINGS, NUMERIC, remarks, summary, table_rows

    rows = table_rows(advice)
    shown = rows if everything else rows[:SHOWN_ROWS]
    title = "Options, shortest total time first"
    if len(advice.groups()) > 1:
        title = "Options by global batch, shortest total time first"
    print_table(title, HEADINGS, shown, right=NUMERIC, hidden=len(rows) - len(shown))
    show()
    for text in summary(advice):
        show(text)
    for text in remarks(advice):
        say(text)


def parse_waits(texts: Sequence[str], *, studies: Sequence[str]) -> dict[str, float]:
    """Parse values of --wait: ``6.5h`` (all studies) or ``l40s=0`` (one study) into seconds by study.

    If two values are for the same study, the later one is used.

    Raises:
        BenchError: a text is not a duration, or names an unknown study.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, duration = text.rpartition("=")
        if equals and name not in studies:
            remedy = f"the studies are: {', '.join(studies)}"
            raise BenchError(f"--wait {text}: no study {name!r} is given", remedy=remedy)
        try:
            seconds = 0 if duration == "0" else parse_duration_s(duration)
        except ValueError as wrong:
            raise BenchError(
                f"--wait {text}: {wrong}", remedy="for no wait, 0; for one study, STUDY=TIME"
            ) from None
        found |= dict.fromkeys([name] if equals else studies, float(seconds))
    return found


def waits_for(
    layouts: Mapping[Layout, float],
    planned: Mapping[str, PlannedStudy],
    *,
    given: Mapping[str, float],
    ask: bool,
) -> dict[Layout, Wait]:
    """Return the queue wait of each layout (study and size), as given or as estimated by Slurm.

    ``layouts`` has each layout's shortest training time in seconds, and ``given`` the waits of some studies.
    If ``ask`` is true, Slurm estimates the waits of the studies that are not in ``given``.
    """
    from analysis.advise.options import Wait

    found: dict[Layout, Wait] = {}
    for name, study in planned.items():
        own = {layout: training_s for layout, training_s in layouts.items() if layout[0] == name}
        if name in given:
            found |= dict.fromkeys(own, Wait(given[name], "as given (--wait)"))
        elif ask:
            found |= _estimated_waits(study, own)
    return found


def _estimated_waits(study: PlannedStudy, layouts: Mapping[Layout, float]) -> dict[Layout, Wait]:
    """Return the scheduler's estimate for each layout with a known training time (s).

    Slurm's estimate always counts the study's own queued or running jobs, but they will have ended when the
    training is submitted. If they may be part of a wait, it is unknown.
    """
    from analysis.advise.options import Wait

    if not study.scheduler.queues:
        return dict.fromkeys(layouts, Wait(0.0, f"no queue (executor {study.executor})"))
    if study.folder.archive:
        return dict.fromkeys(layouts, Wait(None, "not known: the study is an archive"))
    scheduler, found = scheduler_for(study), {}
    own = sum(record.state.active for record in study.records().values())
    jobs = f"{count(own, 'queued or running job')} of this study"
    try:
        for layout, training_s in layouts.items():
            if not math.isfinite(training_s):
                continue
            _, nodes, per_node = layout
            cell = _similar_cell(study, nodes, per_node)
            size = nodes * cell.requested_gpus or nodes
            script = study.script(cell.cell_id)
            wait_s, source, remark, refused = scheduler.estimate(
                script, nodes=nodes, size=size, training_s=training_s
            )
            remarks = [_one_line(remark)] if remark else []
            if own and wait_s:
                estimate = f"Slurm's estimate of {human_duration(math.ceil(wait_s))}"
                remarks.insert(0, f"{estimate} may include {jobs}, so the wait is not known")
                wait_s, source = None, ""
            found[layout] = Wait(wait_s, source, "; ".join(remarks), refused)
    except UnavailableError as absent:
        return dict.fromkeys(layouts, Wait(None, f"not known: {_one_line(absent.message)}"))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _similar_cell(study: PlannedStudy, nodes: int, per_node: str) -> Cell:
    """Return the cell on ``nodes`` nodes of ``per_node`` ranks, else of the largest such cell."""
    cells = [cell for cell in study.cells.values() if value_text(cell.tasks_per_node) == per_node]
    return min(cells, key=lambda cell: (cell.nodes != nodes, -cell.nodes, cell.cell_id))
