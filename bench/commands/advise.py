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
from .compare import show_strategies
from .console import SHOWN_ROWS, print_json, print_table, say, show
from .options import AllOption, JsonOption, ResultsOption, find_study, require_report, settle_study

if TYPE_CHECKING:
    from analysis.advise.options import Advice, Layout, Wait


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
    from analysis.report.results import Results

    loaded = {name: load_study(folder.path, records=records[name]) for name, folder in folders.items()}
    options, notes, validity = options_of(loaded, samples=amount, epochs=epochs)
    planned = {name: open_study(folder) for name, folder in folders.items()}
    waits = waits_for(fastest_training_s(options), planned, given=given, ask=not no_queue)
    advice = rank(options, waits, samples=amount, epochs=epochs, notes=notes, validity=validity)
    strategies = {name: rows for name, study in loaded.items() if (rows := Results.of(study).strategies())}
    if as_json:
        own = {name: [one.as_json() for one in rows] for name, rows in strategies.items()}
        print_json({**_as_content(advice), **({"strategies": own} if own else {})})
    else:
        _show(advice, everything=everything)
        for name, rows in strategies.items():
            show_strategies(rows, study=f"of study {name}")
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
        name = folder.name if names.count(folder.name) == 1 else str(folder.path)
        if name in named:
            raise BenchError(f"study {name} is given twice", remedy="give each study once")
        named[name] = folder
    return named


def _as_content(advice: Advice) -> dict[str, Any]:
    """Return the output of `bench advise --json`; unknown values are None."""
    from analysis.advise.options import Option
    from analysis.advise.text import summary
    from analysis.stats.columns import columns_of
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
            raise BenchError(f"--wait {text}: {wrong}", remedy="for no wait, write 0") from None
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
    """Return the scheduler's estimate for each layout with a known training time (s)."""
    from analysis.advise.options import Wait

    if not study.scheduler.queues:
        return dict.fromkeys(layouts, Wait(0.0, f"no queue (executor {study.executor})"))
    known = {layout: training_s for layout, training_s in layouts.items() if math.isfinite(training_s)}
    scheduler, found = scheduler_for(study), {}
    try:
        for layout, training_s in known.items():
            _, nodes, per_node = layout
            cell = _similar_cell(study, nodes, per_node)
            size = nodes * cell.requested_gpus or nodes
            script = study.script(cell.cell_id)
            seconds, source, remark = scheduler.estimate(
                script, nodes=nodes, size=size, training_s=training_s
            )
            found[layout] = Wait(seconds, source, _one_line(remark))
    except UnavailableError as absent:
        return dict.fromkeys(layouts, Wait(None, f"not known: {_one_line(absent.message)}"))
    own = sum(record.state.active for record in study.records().values())
    return {layout: _without_own_jobs(wait, own) for layout, wait in found.items()}


def _without_own_jobs(wait: Wait, own: int) -> Wait:
    """Return an unknown wait if the study's own queued or running jobs may be part of Slurm's estimate.

    Slurm's estimate always counts these jobs, but they will have ended when the training is submitted.
    """
    from analysis.advise.options import Wait

    if not own or not wait.seconds:
        return wait
    remark = (
        f"Slurm's estimate of {human_duration(math.ceil(wait.seconds))} may include "
        f"{count(own, 'queued or running job')} of this study, so the wait is not known"
    )
    return Wait(None, "", "; ".join(filter(None, (remark, wait.remark))))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _similar_cell(study: PlannedStudy, nodes: int, per_node: str) -> Cell:
    """Return the cell on ``nodes`` nodes of ``per_node`` ranks, else of the largest such cell."""
    cells = [cell for cell in study.cells.values() if value_text(cell.tasks_per_node) == per_node]
    return min(cells, key=lambda cell: (cell.nodes != nodes, -cell.nodes, cell.cell_id))
