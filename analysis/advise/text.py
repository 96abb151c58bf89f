"""Advice as texts: a table of options, and what to choose in sentences."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from analysis.advise.options import Advice, first_of
from analysis.data.names import devices, layout
from analysis.text import MISSING, count, known, number, whole

HEADINGS = (
    *("study", "nodes", "ranks", "batch", "setting", "epoch", "wait", "training", "total", "hours"),
    *("succeeded", "choice", "remark"),
)
NUMERIC = ("nodes", "ranks", "batch", "epoch", "wait", "training", "total", "hours")
_MARKS = ("first", "cheapest", "safest")


def about(seconds: float | None, *, digits: int = 2) -> str:
    """Return a time in the unit that suits it: ``40 s``, ``25 min``, ``6.5 h``, ``3.2 d``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for unit_s, least_s, unit in ((86400, 172_800, "d"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least_s:
            value = seconds / unit_s
            return f"{value:,.0f} {unit}" if value >= 100 else f"{float(f'{value:.{digits}g}'):g} {unit}"
    return f"{float(f'{seconds:.{digits}g}'):g} s"


def table_rows(advice: Advice) -> list[list[str]]:
    """Return the texts of the table, in the order of :data:`HEADINGS`."""
    return [_row(row) for row in advice.options.to_dict("records")]


def _row(row: dict[Any, Any]) -> list[str]:
    gpu = row["device"] == "cuda"
    hours = row["gpu_hours"] if gpu else row["node_hours"]
    remark = f"predicted by {row['remark']}" if row["kind"] == "predicted" else row["remark"]
    if row["kind"] == "not measured":
        remark = remark or "not measured"
    return [
        row["study"],
        layout(row, times="x"),
        str(row["gpus"]),
        whole(row["global_batch"]) + (" *" if row["batch_differs"] else ""),
        row["setting"],
        about(row["epoch_s"], digits=3),
        _wait(row["wait_s"]),
        _with_interval(row),
        about(row["total_s"], digits=3),
        f"{number(hours, digits=3)} {'GPU-h' if gpu else 'node-h'}" if known(hours) else MISSING,
        _success(row),
        ", ".join(mark for mark in _MARKS if row[mark]),
        remark,
    ]


def _wait(seconds: float) -> str:
    return "none" if seconds == 0 else about(seconds, digits=3)


def _with_interval(row: dict[Any, Any]) -> str:
    low, high = row["training_low_s"], row["training_high_s"]
    text = about(row["training_s"], digits=3)
    return (
        f"{text} [{about(low, digits=3)} to {about(high, digits=3)}]" if known(low) and known(high) else text
    )


def _success(row: dict[Any, Any]) -> str:
    if not row["attempted"]:
        return "untried"
    return f"{row['completed']} of {row['attempted']}"


def summary(advice: Advice) -> list[str]:
    """Return the advice in sentences: first, the fastest training that waits, cheapest, safest."""
    first = advice.chosen("first")
    if first is None:
        return ["Nothing to advise: no option has been measured."]
    texts = [f"First: {_told(first)}{_close(advice, first)}."]
    fastest = _fastest(advice, first)
    if fastest is not None:
        texts.append(f"Faster once it runs: {_told(fastest)}{_other_batch(fastest)}.")
    told_already = {fastest["study"]} if fastest is not None else set()
    texts += [
        f"Soonest of {option['study']}: {_told(option)}{_other_batch(option)}."
        for option in _best_elsewhere(advice, first)
        if option["study"] not in told_already
    ]
    for mark in ("cheapest", "safest"):
        chosen = advice.chosen(mark)
        assert chosen is not None, "an option is first, so one is cheapest and one safest"
        if chosen["cell_id"] == first["cell_id"] and chosen["study"] == first["study"]:
            texts.append(f"{mark.capitalize()}: the same, {_because(chosen, mark)}.")
            continue
        told = f"{config(chosen)}, {_because(chosen, mark)}; {_when(chosen)}{_other_batch(chosen)}"
        texts.append(f"{mark.capitalize()}: {told}.")
    sooner = _sooner_predictions(advice, first)
    if sooner:
        texts.append(sooner)
    return texts


def config(option: dict[str, Any]) -> str:
    """Return ``2 nodes x 4 L40S (l40s)``, or ``8 H200 (h200)`` on one node; with the setting that varies."""
    what = option["gpu"] or ("GPUs" if option["device"] == "cuda" else "ranks")
    where = ", ".join(part for part in (option["study"], option["setting"]) if part)
    return f"{devices(option, what, counted=not option['gpu'])} ({where})"


def _told(option: dict[str, Any]) -> str:
    return f"{config(option)}: {_when(option)}"


def _start(option: dict[str, Any]) -> str:
    wait = option["wait_s"]
    if not known(wait):
        # Without any wait known, the total is the training.
        return "" if known(option["total_s"]) else ", its wait is not known"
    if wait == 0:
        return ", starts now"
    return f", but waits {about(wait)}: {about(option['total_s'], digits=3)} in all"


def _when(option: dict[str, Any]) -> str:
    return f"about {about(option['training_s'])}{_start(option)}"


def _because(option: dict[str, Any], mark: str) -> str:
    if mark == "safest":
        return f"{option['completed']} of {count(option['attempted'], 'attempt')} completed"
    if option["device"] == "cuda":
        return f"{number(option['gpu_hours'], digits=3)} GPU-hours"
    return f"{number(option['node_hours'], digits=3)} node-hours"


def _other_batch(option: dict[str, Any]) -> str:
    if not option["batch_differs"]:
        return ""
    return f" (global batch {whole(option['global_batch'])}: its convergence is not comparable)"


def _measured(advice: Advice) -> pd.DataFrame:
    options = advice.options
    return options[(options["kind"] == "measured") & options["training_s"].notna()]


def _fastest(advice: Advice, first: dict[str, Any]) -> dict[str, Any] | None:
    """Return the option that trains faster than the first one and waits longer, if any."""
    options = _measured(advice)
    faster = options[(options["training_s"] < first["training_s"]) & (options["total_s"] > first["total_s"])]
    return first_of(faster.sort_values("training_s", kind="stable"))


def _best_elsewhere(advice: Advice, first: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the soonest option of each other study."""
    options = _measured(advice)
    others = options[options["study"] != first["study"]]
    soonest = (first_of(own) for _, own in others.groupby("study", sort=False))
    return [option for option in soonest if option is not None]


def _close(advice: Advice, first: dict[str, Any]) -> str:
    """Return how many other options may be as soon, by their intervals."""
    options = _measured(advice)
    others = options[~options["first"] & options["training_low_s"].notna()]
    wait = others["total_s"] - others["training_s"]
    latest = first["total_s"] - first["training_s"] + first["training_high_s"]
    as_soon = int((others["training_low_s"] + wait <= latest).sum()) if known(latest) else 0
    if not as_soon:
        return ""
    return f"; {count(as_soon, 'other option')} may be as soon, by the intervals"


def _sooner_predictions(advice: Advice, first: dict[str, Any]) -> str:
    options = advice.options
    best = first_of(options[(options["kind"] == "predicted") & (options["total_s"] < first["total_s"])])
    if best is None:
        return ""
    told = f"{config(best)}, predicted {_with_interval(best)}{_other_batch(best)}"
    return f"Perhaps sooner, but never run: {told}."


def remarks(advice: Advice) -> list[str]:
    """Return what the figures count, and how to read them."""
    texts = [
        f"For {advice.samples:,} samples and {count(advice.epochs, 'epoch')}: whole steps of the global "
        "batch at the measured rate, and the checkpoint where the study wrote one; start-up and validation "
        "are not counted. Brackets: 90 % interval of one further run."
    ]
    if advice.options["batch_differs"].any():
        texts.append("* another global batch than the first option's: convergence is not comparable.")
    gpus = set(advice.options["gpu"]) - {""}
    if len(gpus) > 1:
        texts.append(f"GPU-hours of {' and '.join(sorted(gpus))} are counted alike, whatever they cost.")
    sources = advice.options[["study", "wait_source"]].drop_duplicates()
    sources = sources[sources["wait_source"] != ""]
    texts += [
        f"Wait of {study}: {source}."
        for study, source in zip(sources["study"], sources["wait_source"], strict=True)
    ]
    return texts + [f"{note}." for note in advice.notes]
