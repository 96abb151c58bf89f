"""List the configurations that can run a training, with their times, costs and success rates.

Options are measured cells (combinations of settings) and larger sizes predicted by scaling laws. The time per
epoch is ceil(samples / global batch) x the time per step, plus a checkpoint if the study wrote one. Start-up
and validation are not included. Intervals (90 %) are those of one further run, because a training is one job:
Student's t on the logarithms of the runs with sqrt(1 + 1/n) for measured cells, and the intervals of the
scaling law for predicted sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from analysis.checks.assessment import assess
from analysis.checks.fabric import fabrics
from analysis.checks.scaling_table import scaling_table
from analysis.compare.matching import SIZES, settings_of
from analysis.data.load import Study, is_average, metrics_of_cells
from analysis.stats.attempts import cell_success
from analysis.stats.columns import SIZE_COLUMNS
from analysis.stats.estimate import (
    MIN_RUNS,
    LogMoments,
    log_moments,
    ratio_interval,
    runs_to_decide,
    welch,
)
from analysis.stats.law_fit import forecasts
from analysis.stats.measured import Frames, measure
from analysis.text import clean, one_line
from bench.facts import Fact

#: Columns of the options, one row per option; times in seconds. Options of one ``group`` (from 1) have the
#: same global batch. Three columns mark one option of each group: ``first`` (ends first), ``cheapest`` (least
#: hours) and ``safest`` (best lower bound of the success rate). ``distinguishable`` compares the total time
#: with that of the group's first option; ``runs_needed`` is the number of runs of each that would decide.
#: ``not_valid`` says why a cell is not valid (:mod:`analysis.checks.assessment`); it then has no mark.
COLUMNS = (
    *("study", "kind", "cell_id", "launcher", "backend", "setting", "nodes", "gpus_per_node", "gpus"),
    *("device", "gpu", "global_batch", "per_gpu_batch", "n", "throughput_samples_per_sec", "step_time_s"),
    *("steps_per_epoch", "checkpoint_s", "epoch_s", "wait_s", "wait_source", "training_s", "training_low_s"),
    *("training_high_s", "total_s", "gpu_hours", "node_hours", "completed", "attempted", "success_rate"),
    *("success_low", "group", "first", "cheapest", "safest", "distinguishable", "runs_needed"),
    *("state", "not_valid", "remark"),
)

#: Study, number of nodes and ranks per node. Jobs with the same layout have the same queue wait.
Layout = tuple[str, int, str]


@dataclass(frozen=True)
class Wait:
    """The queue wait of a layout in seconds (None if unknown), the source of the wait, and a remark on it."""

    seconds: float | None
    source: str
    remark: str = ""


@dataclass(frozen=True)
class Advice:
    """The options in the order of their group and total time, and notes for the reader.

    The options are for a training of ``epochs`` epochs with ``samples`` samples each. ``validity`` contains
    the findings about each study.
    """

    samples: int
    epochs: int
    options: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    validity: Mapping[str, Sequence[Fact]] = field(default_factory=dict)

    def groups(self) -> list[Advice]:
        """Return the advice for each group of options with the same global batch."""
        parts = self.options.groupby("group", sort=True)
        return [replace(self, options=own.reset_index(drop=True)) for _, own in parts]

    def chosen(self, mark: str) -> dict[str, Any] | None:
        """Return the first option marked ``first``, ``cheapest`` or ``safest``; None if there is none."""
        marked = self.options[self.options[mark]]
        return {str(name): marked[name].iloc[0] for name in marked} if len(marked) else None


def options_of(
    studies: Mapping[str, Study], *, samples: int, epochs: int, beyond: bool = False
) -> tuple[pd.DataFrame, list[str], dict[str, list[Fact]]]:
    """Return the options of all studies, notes on sizes that cannot be predicted, and the studies' findings.

    The options do not yet have a queue wait and a total time. ``samples`` are training samples per epoch.
    With ``beyond``, sizes above twice the largest measured one are predicted, too.
    """
    parts, notes, validity = [], [], {}
    for name, study in studies.items():
        frames = measure(study)
        rows = scaling_table(frames)
        assessment = assess(study, frames, rows)
        validity[name] = assessment.facts
        measured = _measured(study, frames, rows)
        measured["not_valid"] = [assessment.invalid.get(cell, "") for cell in measured["cell_id"]]
        # As on the page, laws are fitted to valid sizes only.
        is_valid = ~rows[["cell_id", "base_cell"]].isin(list(assessment.invalid)).any(axis=1)
        valid = rows[is_valid]
        predicted, reasons = forecasts(frames, valid, fabrics=fabrics(study, valid), beyond=beyond)
        notes += [f"{name}: {reason}" for reason in reasons]
        if any(map(is_average, metrics_of_cells(study.plan).values())):
            notes.append(
                f"{name}: rates are averages of whole runs, so times do include start-up, and validation if "
                "the command counts it, in proportion to the samples"
            )
        part = pd.concat([measured, _predicted(predicted, measured)], ignore_index=True)
        parts.append(part.assign(study=name, gpu=_gpu(study)))
    options = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return _with_times(options, samples=samples, epochs=epochs), notes, validity


def rank(
    options: pd.DataFrame,
    waits: Mapping[Layout, Wait],
    *,
    samples: int,
    epochs: int,
    notes: Iterable[str] = (),
    validity: Mapping[str, Sequence[Fact]] | None = None,
) -> Advice:
    """Return the options with their queue waits, in groups, and in the order of their total time.

    The options of a group have the same global batch: other batches converge differently, so their times
    cannot be compared. The group with the option that ends first is group 1. Three valid options of each
    group are marked: the one that ends first, the cheapest one and the safest one. If no wait is known, the
    total time is the training time.
    """
    options = options.copy()
    found = [waits.get(layout, Wait(None, "")) for layout in layouts_of(options)]
    options["wait_s"] = np.array([wait.seconds for wait in found], dtype=float)
    options["wait_source"] = [wait.source for wait in found]
    remarks = zip(options["remark"], [wait.remark for wait in found], strict=True)
    options["remark"] = ["; ".join(filter(None, pair)) for pair in remarks]
    none_known = options["wait_s"].isna().all()
    notes = list(notes)
    if none_known:
        notes.append("No queue wait is known, so totals are training times only")
    elif options["wait_s"].isna().any():
        notes.append("Options with an unknown queue wait have no total and are listed last")
    options["total_s"] = options["training_s"] + (0.0 if none_known else options["wait_s"])
    options["group"] = _groups(options)
    _mark(options)
    _compare_with_first(options, samples=samples, epochs=epochs)
    order = ["group", "total_s", "training_s", "node_hours", "study", "cell_id"]
    options = options.sort_values(order, kind="stable", ignore_index=True, na_position="last")
    return Advice(samples, epochs, options[list(COLUMNS)], notes, validity or {})


def layouts_of(options: pd.DataFrame) -> list[Layout]:
    """Return the layout of each option: study, nodes and ranks per node."""
    table = zip(options["study"], options["nodes"], options["gpus_per_node"], strict=True)
    return [(str(study), int(nodes), str(per_node)) for study, nodes, per_node in table]


def fastest_training_s(options: pd.DataFrame) -> dict[Layout, float]:
    """Return the shortest training time of each layout; infinite if unknown."""
    found: dict[Layout, float] = {}
    for layout, training_s in zip(layouts_of(options), options["training_s"], strict=True):
        known_s = float(training_s) if math.isfinite(training_s) else math.inf
        found[layout] = min(found.get(layout, math.inf), known_s)
    return found


def _measured(study: Study, frames: Frames, rows: pd.DataFrame) -> pd.DataFrame:
    """Return one option per planned cell, measured or not."""
    options = rows.drop_duplicates("cell_id").set_index("cell_id", drop=False)
    options = options.rename(columns={"step_time_sec": "step_time_s"})
    own = ("cell_id", "launcher", "backend", *SIZE_COLUMNS)
    options = options[[*own, "n", "throughput_samples_per_sec", "step_time_s", "state", "reason"]]
    options["kind"] = np.where(options["n"] > 0, "measured", "not measured")
    planned = frames.runs.groupby("cell_id").size().reindex(options.index).fillna(0)
    options["remark"] = options.pop("reason").where(options["n"] < planned, "")
    options["device"] = study.cells.set_index("cell_id")["device"].reindex(options.index)
    options["setting"] = pd.Series(_settings(study)).reindex(options.index).fillna("")
    options["low_s"], options["high_s"] = _further_run(frames, options.index)
    options["checkpoint_s"] = _checkpoints(study, frames).reindex(options.index)
    options["run_step_times"] = pd.Series(_step_times(frames)).reindex(options.index)
    return options.join(cell_success(study)).reset_index(drop=True)


def _settings(study: Study) -> dict[str, str]:
    """Return, by cell, a text with the settings (except for size and batch) that vary between cells."""
    cells = {clean(cell["cell_id"]): settings_of(cell) for cell in study.plan["cells"]}
    names = {name for cell in cells.values() for name in cell}.difference(SIZES)
    varying = sorted(name for name in names if len({cell.get(name) for cell in cells.values()}) > 1)
    return {
        cell_id: ", ".join(f"{name.removeprefix('env.')} {cell.get(name, 'not set')}" for name in varying)
        for cell_id, cell in cells.items()
    }


def _further_run(frames: Frames, cells: pd.Index[Any]) -> tuple[Any, Any]:
    """Return both ends of the 90 % interval of a further run's time per step, by cell; NaN below 3 runs."""
    measured = frames.runs[frames.runs["measured"]]
    places = cells.get_indexer(pd.Index(measured["cell_id"]))
    values = measured["step_time_sec"].to_numpy(dtype=float)
    moments = log_moments(values, groups=places, size=len(cells))
    with np.errstate(divide="ignore", invalid="ignore"):
        quantile = special.stdtrit(np.where(moments.n > 1, moments.n - 1, np.nan), 0.95)
        half = quantile * np.sqrt(moments.variance * (1 + 1 / moments.n))
    half = np.where(moments.n >= MIN_RUNS, half, np.nan)
    return np.exp(moments.mean - half), np.exp(moments.mean + half)


def _step_times(frames: Frames) -> dict[str, list[float]]:
    """Return the time per step of each measured run, by cell."""
    measured = frames.runs[frames.runs["measured"]]
    return {str(cell): own.to_list() for cell, own in measured.groupby("cell_id")["step_time_sec"]}


def _checkpoints(study: Study, frames: Frames) -> pd.Series:
    """Return the mean seconds per checkpoint by cell, over the epochs of measured runs."""
    counted = set(frames.runs.loc[frames.runs["measured"], "run_id"])
    epochs = study.epochs[study.epochs["run_id"].isin(counted)]
    means = epochs.groupby("cell_id", observed=True)["checkpoint_time_sec"].mean()
    means.index = means.index.astype("str")
    return means


def _gpu(study: Study) -> str:
    """Return the name of the study's GPUs from env.json without the vendor; empty if unknown."""
    started = [run_id for run_id, path in zip(study.runs["run_id"], study.attempts, strict=True) if path]
    for run_id in started[:50]:
        env = study.envs_of([run_id]).get(run_id)
        if env and env.get("device") == "cuda" and env.get("device_name"):
            return one_line(env["device_name"], limit=60).removeprefix("NVIDIA ")
    return ""


def _predicted(predicted: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Return predicted sizes as options, each with the settings of the measured cell that it extrapolates."""
    if not len(predicted):
        return measured.iloc[:0]
    extrapolated = measured.set_index("cell_id").loc[predicted["like"]].reset_index(drop=True)
    frame = predicted.drop(columns="like").reset_index(drop=True)
    for name in ("launcher", "backend", "device", "setting", "checkpoint_s"):
        frame[name] = extrapolated[name]
    return frame.assign(cell_id="", n=0, kind="predicted", state="", not_valid="", completed=0, attempted=0)


def _with_times(options: pd.DataFrame, *, samples: int, epochs: int) -> pd.DataFrame:
    if not len(options):
        return options
    options["steps_per_epoch"] = [math.ceil(samples / batch) for batch in options["global_batch"]]
    extra = options["checkpoint_s"].astype(float).fillna(0.0)
    for name, step in (("", "step_time_s"), ("_low", "low_s"), ("_high", "high_s")):
        epoch_s = options["steps_per_epoch"] * options[step].astype(float) + extra
        options[f"training{name}_s"] = epochs * epoch_s
    options["epoch_s"] = options["training_s"] / epochs
    hours = options["training_s"] / 3600
    options["gpu_hours"] = (hours * options["gpus"]).where(options["device"] == "cuda")
    options["node_hours"] = hours * options["nodes"]
    options["success_rate"] = options["completed"] / options["attempted"].where(options["attempted"] > 0)
    return options


def _groups(options: pd.DataFrame) -> pd.Series:
    """Return the number of each option's group: groups are ordered by their shortest total time."""
    measured = options["total_s"].where(_eligible(options))
    shortest = measured.groupby(options["global_batch"]).min()
    order = shortest.sort_values(kind="stable", na_position="last").index
    return options["global_batch"].map({batch: place for place, batch in enumerate(order, start=1)})


def _eligible(options: pd.DataFrame) -> pd.Series:
    """Return a mask of the measured options whose values are valid."""
    return (options["kind"] == "measured") & (options["not_valid"] == "")


def _mark(options: pd.DataFrame) -> None:
    """Mark the first, the cheapest and the safest option of each group."""
    own = options[_eligible(options) & options["total_s"].notna()]
    cost = "gpu_hours" if own["gpu_hours"].notna().all() else "node_hours"
    ranked = {
        "first": (["total_s", cost], [True, True]),
        "cheapest": ([cost, "total_s"], [True, True]),
        "safest": (["success_low", "total_s"], [False, True]),
    }
    for mark, (keys, ascending) in ranked.items():
        options[mark] = False
        best = own.sort_values(keys, ascending=ascending, kind="stable").drop_duplicates("group")
        options.loc[best.index, mark] = True


def _compare_with_first(options: pd.DataFrame, *, samples: int, epochs: int) -> None:
    """Set ``distinguishable`` and ``runs_needed`` of valid options with a total time.

    Each option is compared with the first one of its group. It is distinguishable if Welch's 95 % interval of
    the ratio of their total times excludes 1; a queue wait counts as a constant. ``distinguishable`` is None
    below three runs.
    """
    options["distinguishable"] = pd.Series([None] * len(options), index=options.index, dtype=object)
    options["runs_needed"] = np.nan
    for _, own in options[_eligible(options)].groupby("group"):
        first = own.index[own["first"]]
        others = own.index[~own["first"] & own["total_s"].notna()]
        if not len(first) or not len(others):
            continue
        base = _total_moments(options.loc[first[0]], samples=samples, epochs=epochs)
        for place in others:
            other = _total_moments(options.loc[place], samples=samples, epochs=epochs)
            distinct, needed = _decided(other, base)
            options.at[place, "distinguishable"] = distinct
            options.at[place, "runs_needed"] = needed


def _total_moments(option: pd.Series, *, samples: int, epochs: int) -> LogMoments:
    """Return the moments of an option's total time over its runs."""
    extra = option["checkpoint_s"] if math.isfinite(option["checkpoint_s"]) else 0.0
    steps = math.ceil(samples / option["global_batch"])
    training = epochs * (steps * np.array(option["run_step_times"], dtype=float) + extra)
    totals = training + (option["total_s"] - option["training_s"])
    return log_moments(totals, groups=np.zeros(len(totals), dtype=np.intp), size=1)


def _decided(other: LogMoments, first: LogMoments) -> tuple[bool | None, float]:
    """Return whether two total times are distinguishable; if not, also the runs per option to decide."""
    low, high = (float(bound[0]) for bound in ratio_interval(other, first))
    if not math.isfinite(low):
        return None, MIN_RUNS
    if not low <= 1 <= high:
        return True, math.nan
    centre, error, _ = (float(value[0]) for value in welch(other, first))
    fewer = min(other.n[0], first.n[0])
    if centre == 0:
        return False, math.inf
    runs = runs_to_decide(centre, error=error, top_n=other.n[0], bottom_n=first.n[0])
    return False, max(runs, fewer + 1)
