"""Format advice as a table of options and as sentences."""

from __future__ import annotations

import math

from analysis.advise.options import Advice, Option
from analysis.data.names import devices, layout
from analysis.stats.estimate import MIN_RUNS, MOST_RUNS
from analysis.text import heading
from ddp_scaling_bench.units import MISSING, count, known, listed, number, whole

HEADINGS = (
    *("study", "nodes", "ranks", "batch", "setting", "epoch", "wait", "training", "total", "hours"),
    *("succeeded", "choice", "remark"),
)
NUMERIC = ("nodes", "ranks", "batch", "epoch", "wait", "training", "total", "hours")
_MARKS = ("first", "cheapest", "safest")


def about(seconds: float | None, *, digits: int = 2) -> str:
    """Return a time in a suitable unit: ``40 s``, ``25 min``, ``6.5 h`` or ``3.2 d``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for unit_s, least_s, unit in ((86400, 172_800, "d"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least_s:
            value = seconds / unit_s
            return f"{value:,.0f} {unit}" if value >= 100 else f"{float(f'{value:.{digits}g}'):g} {unit}"
    return f"{float(f'{seconds:.{digits}g}'):g} s"


def table_rows(advice: Advice) -> list[list[str]]:
    """Return the rows of the table, with the columns :data:`HEADINGS`."""
    return list(map(_row, advice.options))


def _row(row: Option) -> list[str]:
    gpu = row.device == "cuda"
    hours = row.gpu_hours if gpu else row.node_hours
    remark = row.remark
    if row.kind == "not measured":
        remark = remark or "not measured"
    else:
        not_valid = f"not valid: {heading(row.error)}" if row.error else ""
        remark = "; ".join(filter(None, (not_valid, remark, _undecided(row))))
    return [
        row.study,
        layout(row, times="x"),
        str(row.gpus),
        whole(row.global_batch),
        row.setting,
        about(row.epoch_s, digits=3),
        "none" if row.wait_s == 0 else about(row.wait_s, digits=3),
        _with_interval(row),
        about(row.total_s, digits=3),
        f"{number(hours, digits=3)} {'GPU-h' if gpu else 'node-h'}" if known(hours) else MISSING,
        f"{row.completed} of {row.attempted}" if row.attempted else "untried",
        ", ".join(mark for mark in _MARKS if getattr(row, mark)),
        remark,
    ]


def _with_interval(row: Option) -> str:
    low, high = row.training_low_s, row.training_high_s
    text = about(row.training_s, digits=3)
    return (
        f"{text} [{about(low, digits=3)} to {about(high, digits=3)}]" if known(low) and known(high) else text
    )


def summary(advice: Advice) -> list[str]:
    """Return the advice as sentences, below a line with the global batch if there are several.

    For each global batch with a measured option, the sentences describe the option that ends first, those
    that may end as early, the cheapest one, and the safest one.
    """
    groups = [group for group in advice.groups() if group.chosen("first")]
    not_valid = _not_valid(advice)
    if not groups:
        why = "no measured option is valid" if not_valid else "no option has been measured"
        if any(option.eligible for option in advice.options):
            why = "Slurm would start none of the measured options"
        return [f"No advice: {why}.", *not_valid]
    texts = not_valid
    for group in groups:
        if len(groups) > 1:
            texts.append(f"With a global batch of {whole(group.options[0].global_batch)}:")
        texts += _summary_of_group(group)
    return texts


def _not_valid(advice: Advice) -> list[str]:
    """Return a sentence about the options that are not recommended because their values are not valid."""
    odd = [
        f"{config(option)}, {heading(option.error)}"
        for option in advice.options
        if option.error and option.kind == "measured"
    ]
    if not odd:
        return []
    named = listed(odd, limit=4)
    return [f"Not valid, so not recommended: {named}. `bench report` shows the errors."]


def _summary_of_group(advice: Advice) -> list[str]:
    # If there is a first option, there are a cheapest and a safest one.
    first, *others = (one for mark in _MARKS if (one := advice.chosen(mark)))
    texts = [f"Ends first: {config(first)}: {_duration(first)}.", *_indistinct(advice)]
    for mark, chosen in zip(_MARKS[1:], others, strict=True):
        reason = _reason(chosen, mark)
        described = f"{config(chosen)}, {reason}; {_duration(chosen)}"
        if chosen is first:
            described = f"the option that ends first, {reason}"
        texts.append(f"{mark.capitalize()}: {described}.")
    return texts


def config(option: Option) -> str:
    """Describe an option by size, study and varying settings: ``2 nodes x 4 L40S (l40s)``."""
    what = option.gpu or ("GPUs" if option.device == "cuda" else "ranks")
    details = ", ".join(part for part in (option.study, option.setting) if part)
    return f"{devices(option, what, counted=not option.gpu)} ({details})"


def _duration(option: Option) -> str:
    training, wait = f"about {about(option.training_s)}", option.wait_s
    if not known(wait):
        # If no queue wait is known, totals are training times.
        return training if known(option.total_s) else f"{training}, queue wait unknown"
    if wait == 0:
        return f"{training}, can start now"
    return f"{training} after a wait of {about(wait)}: {about(option.total_s, digits=3)} in total"


def _reason(option: Option, mark: str) -> str:
    if mark == "safest":
        return f"{option.completed} of {count(option.attempted, 'attempt')} completed"
    if option.device == "cuda":
        return f"{number(option.gpu_hours, digits=3)} GPU-hours"
    return f"{number(option.node_hours, digits=3)} node-hours"


def _undecided(option: Option) -> str:
    """Return why an option is not distinguishable from the first of its group; empty if distinguishable."""
    if math.isnan(option.runs_needed):
        return ""
    if option.distinguishable is None:
        return f"not compared with the first: fewer than {MIN_RUNS} runs"
    return f"not distinguishable from the first: {_needed(option)}"


def _needed(option: Option) -> str:
    if option.runs_needed > MOST_RUNS:
        return f"more than {MOST_RUNS} runs of each option would be needed"
    return f"about {count(int(option.runs_needed), 'run')} of each option would probably decide"


def _indistinct(advice: Advice) -> list[str]:
    """Return sentences about the options that may end as early as the first one."""
    options = [option for option in advice.options if not math.isnan(option.runs_needed)]
    same = [option for option in options if option.distinguishable is not None]
    texts = []
    if same:
        named = listed([f"{config(option)}, {_needed(option)}" for option in same], limit=3)
        texts.append(
            "Not distinguishable from this option (the 95 % interval of the ratio of total times contains "
            f"1): {named}."
        )
    if few := len(options) - len(same):
        texts.append(
            f"{count(few, 'other option')} cannot be compared with this option: fewer than {MIN_RUNS} runs."
        )
    return texts


def remarks(advice: Advice) -> list[str]:
    """Explain the numbers, and list the sources of the waits and the notes."""
    texts = [
        f"Times are for {advice.samples:,} samples and {count(advice.epochs, 'epoch')}: whole steps at the "
        "measured rate, plus checkpoints if the study wrote them. Start-up and validation are not included. "
        "Brackets: 90 % prediction interval for one further run."
    ]
    if len(advice.groups()) > 1:
        texts.append(
            "Options with different global batches are ranked separately: their convergence is not "
            "comparable."
        )
    sources = dict.fromkeys((option.study, option.wait_source) for option in advice.options)
    texts += [f"Queue wait of {study}: {source}." for study, source in sources if source]
    return texts + [f"{note}." for note in advice.notes]
