"""List what limits the validity of a study's numbers: one list, computed once, for all reports.

`bench report` shows the list in its JSON output, at the top of the page, at the end of its own output and in
the proposal. Every code is described in docs/analysis.md, with its remedy.

:func:`anomalies` describes unexpected results; no run is dropped because of them. Thresholds are chosen so
that noise is rarely reported. If a value has an interval, the whole interval must be beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from scipy import special

from analysis.checks.slow_ranks import (
    excess_texts,
    late_nodes_of,
    slow_nodes_of,
    stragglers,
    unequal_samples,
    unequal_windows,
)
from analysis.data.environment import (
    Crowd,
    Environment,
    crowds,
    positive,
)
from analysis.data.load import Study, is_average, metrics_of_cells, reads_values
from analysis.data.names import ranks, size_paths, state_counts
from analysis.stats.estimate import LEVEL, MIN_RUNS
from analysis.stats.measured import Frames, common_reasons, ranks_sample
from analysis.stats.scaling import GUIDE, SAME_UNIT, is_wide
from analysis.text import capital, clean, count, fraction, known, listed, number, one_line, percent, seconds
from bench.facts import Fact
from bench.matrix.schedulers import SCHEDULERS
from bench.study.before_facts import facts_of_env
from bench.study.conditions import Disturbance, Reason, objects, summary
from bench.study.processes import started_ranks
from bench.study.run_json import AVERAGE_OF_RUN
from bench.words import words as fact_words

#: Facts of the environment that ``runs-differ`` leaves out, because another code reports them.
_OWN_CODE = frozenset({"Threads per rank"})
_MAX_CELLS = 4
_MAX_NAMED = 5
_MAX_RUNS = 3
_MAX_LATE = 2
#: The env.json of each run, with the run's cell.
Environments = Sequence[tuple[str, dict[str, Any]]]
#: In a shorter warm-up, each half (without the first 2 steps) has fewer than 3 steps.
_FEWEST_TO_TELL = 8
#: Facts of runs that a finding replaces.
_OWNED = frozenset({"shared-cores", "not-stable", "unequal-nodes", "threads-differ"})
#: The strategies (``strategy`` in env.json) whose parts of a step are not measured, with their names.
_WITHOUT_PARTS = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
#: Without intervals, an efficiency must exceed 1, or the efficiency of the previous size, by this much.
MARGIN = 0.05
#: A cell is unstable if the standard deviation of its runs' log throughput is above this.
UNSTABLE = 0.05
#: Significance level of a drift, and its minimum relative change over the study.
DRIFT_LEVEL = 0.01
DRIFT_LEAST = 0.01
#: Minimum relative change of the throughput within a run, as between the halves of a warm-up (`not-stable`).
DRIFT_IN_RUN = 0.1
_PATH_COLUMNS = [
    *("series", "nodes", "gpus_per_node", "gpus"),
    *("efficiency", "efficiency_low", "efficiency_high"),
]


class Code(NamedTuple):
    """The severity and the heading of a kind of finding.

    An error means that the results of the named cells are not valid. A warning means that they may be
    affected, or that runs are missing.
    """

    severity: Literal["error", "warning"]
    heading: str


#: All codes, in the order in which findings are listed.
CODES: dict[str, Code] = {
    "no-throughput": Code("error", "Nothing to compare"),
    "shared-cores": Code("error", "Shared cores"),
    "threads-differ": Code("error", "Threads differ"),
    "unequal-samples": Code("error", "Unequal samples"),
    "unequal-windows": Code("error", "A rank paused alone"),
    "other-batch": Code("error", "Other batch than planned"),
    "common-condition": Code("error", "Condition common to all runs of a cell"),
    "overlap": Code("warning", "Runs overlap"),
    "disturbed": Code("warning", "Disturbed runs"),
    "incomplete": Code("warning", "Incomplete"),
    "unequal-nodes": Code("warning", "Unequal nodes"),
    "runs-differ": Code("warning", "Runs differ"),
    "average-of-run": Code("warning", "Averages with start-up"),
    "ranks-not-counted": Code("warning", "Ranks not counted"),
    "value-counts": Code("warning", "Number of values differs"),
    "not-stable": Code("warning", "Not yet stable"),
    "drift": Code("warning", "Drift over the study"),
    "drift-in-run": Code("warning", "Drift within runs"),
    "wide-interval": Code("warning", "Wide intervals"),
    "parts-not-measured": Code("warning", "Parts of the step not measured"),
    "straggler": Code("warning", "Late ranks"),
    "slow-node": Code("warning", "Slow node"),
}


class ValidityFinding(NamedTuple):
    """One limit of the validity of the numbers.

    ``cells`` are the affected cells; empty if all are affected. ``values`` are the measured values, for
    programs.
    """

    code: str
    message: str
    cells: list[str]
    values: dict[str, Any]

    def affects(self, cell: str) -> bool:
        """Return whether the finding affects ``cell``."""
        return not self.cells or cell in self.cells

    @property
    def heading(self) -> str:
        """The heading on the page."""
        return CODES[self.code].heading

    @property
    def severity(self) -> str:
        """``error`` or ``warning``."""
        return CODES[self.code].severity

    @property
    def title(self) -> str:
        """Severity and heading: ``Error: Shared cores``."""
        return f"{self.severity.capitalize()}: {self.heading}"

    @property
    def fact(self) -> Fact:
        """The finding without words."""
        return Fact(self.code, tuple(self.cells), self.values, CODES[self.code].severity)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as ``bench report --json`` prints it."""
        rest = {"message": self.message, "cells": self.cells, "values": self.values}
        return {"code": self.code, "severity": self.severity, **rest}

    def __str__(self) -> str:
        return f"{self.severity}: {self.heading}. {self.message} [{self.code}]"


def validity(
    study: Study, frames: Frames, rows: pd.DataFrame, environment: Environment
) -> list[ValidityFinding]:
    """Return the findings of a study, errors first."""
    envs = envs_by_cell(study, environment)
    ranks = study.ranks_of(ranks_sample(frames.runs)["run_id"])
    found = [
        *_without_throughput(frames.runs),
        *_disturbed(frames.runs),
        *_shared_cores(envs),
        *_threads(envs, rows),
        *_samples(ranks),
        *_windows(ranks),
        *_batches(rows),
        *_unequal_nodes(envs),
        *_differing(environment),
        *_averages(study, frames, envs),
        *_uncounted_ranks(study, frames),
        *_value_counts(study, frames),
        *_not_stable(
            envs_by_cell(study, environment, set(frames.runs.loc[frames.runs["measured"], "run_id"]))
        ),
        *drift(frames),
        *_drift_in_runs(study, frames),
        *_wide_intervals(rows),
        *_without_parts(envs),
        *_late_and_slow(study, frames, ranks),
    ]
    order = list(CODES)
    return sorted(found, key=lambda one: order.index(one.code))


def counted(found: Sequence[ValidityFinding]) -> str:
    """Return the number of findings of each severity: ``1 error and 2 warnings``."""
    severities = [finding.severity for finding in found]
    return listed([count(n, name) for name in ("error", "warning") if (n := severities.count(name))])


def invalid_cells(found: Sequence[ValidityFinding]) -> dict[str, str]:
    """Return the cells with an error, each with the heading of its first error."""
    cells: dict[str, str] = {}
    for finding in found:
        for cell in finding.cells if finding.severity == "error" else ():
            cells.setdefault(cell, finding.heading)
    return cells


def envs_by_cell(study: Study, environment: Environment, only: set[str] | None = None) -> Environments:
    """Return the env.json of each run that was read (or of the runs ``only``), with the run's cell."""
    cells = dict(zip(study.runs["run_id"], study.runs["cell_id"], strict=True))
    return [
        (cells[run_id], env) for run_id, env in environment.envs.items() if only is None or run_id in only
    ]


def _named(cells: Sequence[str]) -> str:
    return listed([one_line(cell, limit=60) for cell in cells], limit=_MAX_CELLS)


def _without_throughput(runs: pd.DataFrame) -> Iterator[ValidityFinding]:
    missing = runs[~runs["measured"] & ~runs["left_out"]]
    cells = list(dict.fromkeys(missing["cell_id"]))
    values = {"runs": len(runs), "missing": len(missing)}
    if len(missing) == len(runs):
        counts = f": {state_counts(runs)}" if len(runs) else ""
        words = f"None of the {count(len(runs), 'planned run')} has a throughput{counts}."
        yield ValidityFinding("no-throughput", words, cells, values)
    elif len(missing):
        of_all = f"{len(missing):,} of {count(len(runs), 'run')}"
        verb = "does" if len(missing) == 1 else "do"
        words = f"{of_all} {verb} not count: {state_counts(missing)} ({_named(cells)})."
        yield ValidityFinding("incomplete", words, cells, values)


# -- disturbed runs -------------------------------------------------------------------


def _disturbed(runs: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield what disturbs all runs of a cell, the runs that overlap, and the other disturbed runs."""
    finished = runs[runs["measured"] | runs["left_out"]]
    if not finished["disturbed"].map(bool).any():
        return
    several = finished["cell_id"].value_counts() > 1
    common = {
        cell: reasons - {Reason.STUDY_RUN}
        for cell, reasons in common_reasons(finished).items()
        if several[cell] and reasons - {Reason.STUDY_RUN}
    }
    if common:
        yield _common(finished, common)
    entries = [
        (run_id, cell, bool(out), one)
        for run_id, cell, out, found in zip(
            *(finished[name] for name in ("run_id", "cell_id", "left_out", "disturbed")), strict=True
        )
        for one in found or ()
        if one.reason not in common.get(cell, ())
    ]
    for code in ("overlap", "disturbed"):
        own = [entry for entry in entries if (entry[3].reason == Reason.STUDY_RUN) == (code == "overlap")]
        if own:
            yield _disturbed_runs(code, own, finished, common if code == "disturbed" else {})


def _common(finished: pd.DataFrame, common: Mapping[str, frozenset[Reason]]) -> ValidityFinding:
    texts, values = [], {}
    for cell, reasons in common.items():
        found = finished.loc[finished["cell_id"] == cell, "disturbed"]
        own = [one for entries in found for one in entries if one.reason in reasons]
        texts.append(
            f"{one_line(cell, limit=60)} ({summary(list({(o.reason, o.node): o for o in own}.values()))})"
        )
        values[cell] = [one.as_json() for one in own]
    words = f"All runs of these cells were disturbed: {listed(texts, limit=_MAX_CELLS)}. "
    words += "None of these runs is left out."
    return ValidityFinding("common-condition", words, list(common), {"disturbed": values})


def _disturbed_runs(
    code: str,
    entries: Sequence[tuple[str, str, bool, Disturbance]],
    finished: pd.DataFrame,
    common: Mapping[str, frozenset[Reason]],
) -> ValidityFinding:
    """Describe the disturbed runs; those of cells with a ``common`` condition are counted, but not named."""
    runs = {run_id: out for run_id, _, out, _ in entries}
    texts = [f"{one_line(run_id, limit=60)}: {one}" for run_id, _, _, one in entries]
    left_out = sum(runs.values())
    also = finished[finished["cell_id"].isin(list(common)) & ~finished["run_id"].isin(list(runs))]
    disturbed = len(runs) + len(also)
    outcome = "left out" if left_out == disturbed else f"{left_out} of them left out"
    others = f"; and {len(also):,} with a condition common to all runs of their cell" if len(also) else ""
    return ValidityFinding(
        code,
        f"{disturbed:,} of {count(len(finished), 'run')}, {outcome}: "
        f"{listed(texts, limit=_MAX_RUNS)}{others}.",
        list(dict.fromkeys(cell for _, cell, _, _ in entries)),
        {"runs": [{"run_id": run_id, "left_out": out, **one.as_json()} for run_id, _, out, one in entries]},
    )


# -- cores, threads and nodes, from env.json ------------------------------------------


def other_warnings(environment: Environment) -> list[str]:
    """Return what the runs warn of, except the facts that findings report more precisely."""
    return [text for kind, text in environment.warnings if kind not in _OWNED]


def _facts(envs: Environments, kind: str) -> list[tuple[str, Fact]]:
    """Return the facts of a kind in the env.json of the runs, each with its run's cell."""
    return [(cell, fact) for cell, env in envs for fact in facts_of_env(env) if fact.kind == kind]


def _shared_cores(envs: Environments) -> Iterator[ValidityFinding]:
    worst: dict[str, Crowd] = {}
    for cell, env in envs:
        found = [*crowds(env), *([worst[cell]] if cell in worst else [])]
        if found:
            worst[cell] = max(found, key=lambda crowd: crowd.threads / crowd.cores)
    if not worst:
        return
    texts = [f"{one_line(cell, limit=60)} ({crowd})" for cell, crowd in worst.items()]
    most = max(worst.values(), key=lambda crowd: crowd.threads / crowd.cores)
    yield ValidityFinding(
        "shared-cores",
        f"In {listed(texts, limit=_MAX_CELLS)}, ranks share cores: times of such runs do not show scaling.",
        list(worst),
        {"ranks": most.ranks, "threads": most.threads, "cores": most.cores},
    )


def threads_of(env: dict[str, Any]) -> set[int]:
    """Return the numbers of threads that the ranks of a run have."""
    lists = [entry.get("threads_per_rank") for entry in objects(env.get("cores"))]
    own = [value for values in lists if isinstance(values, list) for value in values]
    return set(filter(None, map(positive, own or [env.get("threads_per_rank")])))


def _threads(envs: Environments, rows: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield the cells whose ranks have different numbers of threads, or another number than the baseline."""
    threads: dict[str, set[int]] = {}
    for cell, env in envs:
        threads.setdefault(cell, set()).update(threads_of(env))
    base = rows[["cell_id", "base_cell"]].dropna()
    pairs = dict(zip(base["cell_id"], base["base_cell"], strict=True))
    texts, cells = [], {}
    for cell, own in threads.items():
        reference = threads.get(pairs.get(cell, cell)) or own
        if len(own) > 1:
            texts.append(f"{_named([cell])} has ranks with {listed([str(value) for value in sorted(own)])}")
        elif own and own != reference:
            texts.append(
                f"{_named([cell])} has {_values(own)} per rank, but its baseline {_named([pairs[cell]])} has "
                f"{_values(reference)}"
            )
        else:
            continue
        cells[cell] = sorted(own)
    if texts:
        words = f"Threads: {'; '.join(texts[:_MAX_NAMED])}{_and_more(len(texts) - _MAX_NAMED)}."
        yield ValidityFinding("threads-differ", words, list(cells), {"threads_per_rank": cells})


def _values(values: set[int]) -> str:
    return " or ".join(str(value) for value in sorted(values))


def _and_more(cells: int) -> str:
    return f"; and {count(cells, 'more cell')}" if cells > 0 else ""


def facts_of_nodes(env: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield node, fact and value for the facts in which all nodes of a study should agree."""
    for host in objects(env.get("hosts")):
        node = one_line(host.get("host"), limit=60)
        if isinstance(cpu := host.get("cpu_model"), str) and cpu:
            yield node, "processor", one_line(cpu, limit=60)
        ranks, cores = positive(host.get("ranks_here")), positive(host.get("cores"))
        if ranks and cores:
            yield node, f"cores that {count(ranks, 'rank')} may use", str(cores)
    for entry in objects(env.get("cores")):
        node, quota = one_line(entry.get("node"), limit=60), entry.get("quota")
        if node_cores := positive(entry.get("cores")):
            yield node, "cores of the node", str(node_cores)
        yield node, "quota of cores", f"{quota:g}" if isinstance(quota, int | float) else "none"


def _unequal_nodes(envs: Environments) -> Iterator[ValidityFinding]:
    """Yield the facts in which the nodes of a study differ, with the nodes that have each value."""
    facts = [(cell, *fact) for cell, env in envs for fact in facts_of_nodes(env)]
    frame = pd.DataFrame(facts, columns=["cell", "node", "fact", "value"])
    texts, odd, values = [], [], {}
    for fact, own in frame.groupby("fact", sort=False):
        counts = own["value"].value_counts()
        if len(counts) < 2:
            continue
        nodes = {str(value): list(own.loc[own["value"] == value, "node"].unique()) for value in counts.index}
        shown = [f"{value} ({listed(names, limit=3)})" for value, names in nodes.items()]
        texts.append(f"{fact}: {listed(shown, limit=_MAX_CELLS)}")
        odd += own.loc[own["value"] != counts.index[0], "cell"].to_list()
        values[str(fact)] = nodes
    # The ranks compare more than these facts, such as the cores of each rank.
    seen = _facts(envs, "unequal-nodes")
    if seen and not texts:
        texts = list(dict.fromkeys(f"nodes: {one_line(fact_words(fact))}" for _, fact in seen))[:_MAX_CELLS]
        odd = [cell for cell, _ in seen]
    if texts:
        words, cells = capital("; ".join(texts)), list(dict.fromkeys(odd))
        yield ValidityFinding("unequal-nodes", f"{words}.", cells, values)


def _differing(environment: Environment) -> Iterator[ValidityFinding]:
    names = [name for name in environment.differing if name not in _OWN_CODE]
    if names:
        words = f"Not all runs had the same {listed(names)}."
        yield ValidityFinding("runs-differ", words, [], {"differing": names})


def _not_stable(envs: Environments) -> Iterator[ValidityFinding]:
    odd = _facts(envs, "not-stable")
    if odd:
        cells = list(dict.fromkeys(cell for cell, _ in odd))
        steps = [positive(fact.values.get("steps")) for _, fact in odd]
        text = (
            "the medians of the step times in the two halves of the warm-up (without its first 2 steps) "
            "differ by more than 10 % on some rank"
        )
        if all(number is not None and number < _FEWEST_TO_TELL for number in steps):
            text = (
                "the step times at the end of the warm-up differ, but fewer than "
                f"{_FEWEST_TO_TELL} steps of warm-up are too few to tell whether the step time is stable"
            )
        words = f"In {len(odd):,} of {count(len(envs), 'run')} ({_named(cells)}), {text}: raise warmup_steps."
        yield ValidityFinding("not-stable", words, cells, {"runs": len(odd), "of": len(envs)})


def _without_parts(envs: Environments) -> Iterator[ValidityFinding]:
    cells: dict[str, list[str]] = {}
    for cell, env in envs:
        strategy = env.get("strategy")
        if isinstance(strategy, str) and strategy in _WITHOUT_PARTS:
            cells.setdefault(strategy, []).append(cell)
    if cells:
        names = listed([name for strategy, name in _WITHOUT_PARTS.items() if strategy in cells])
        yield ValidityFinding(
            "parts-not-measured",
            f"The parts of the step are not measured with {names} yet; throughput, step times and data "
            "loading are.",
            list(dict.fromkeys(cell for own in cells.values() for cell in own)),
            {"strategies": list(cells)},
        )


# -- drift and width of intervals -----------------------------------------------------


def timed_runs(frames: Frames) -> pd.DataFrame:
    """Return the measured runs if the drift over the study can be estimated from them, else none of them."""
    runs = frames.runs[frames.runs["measured"]]
    if "started_at" not in runs or runs["started_at"].isna().any():
        return runs.iloc[:0]
    started = runs["started_at"].groupby(runs["cell_id"])
    freedom = len(runs) - runs["cell_id"].nunique() - 1
    possible = freedom >= MIN_RUNS and bool((started.max() > started.min()).any())
    return runs if possible else runs.iloc[:0]


def drift(frames: Frames) -> Iterator[ValidityFinding]:
    """Yield a trend of the throughput over time, from a regression with a separate level for each cell."""
    runs = timed_runs(frames)
    if not len(runs):
        return
    hours = (runs["started_at"] - runs["started_at"].min()).dt.total_seconds() / 3600
    logs = runs["rate"].astype(float).map(math.log)
    time = hours - hours.groupby(runs["cell_id"]).transform("mean")
    change = logs - logs.groupby(runs["cell_id"]).transform("mean")
    freedom = len(runs) - runs["cell_id"].nunique() - 1
    spread = float((time**2).sum())
    slope = float((time * change).sum()) / spread
    error = math.sqrt(float(((change - slope * time) ** 2).sum()) / freedom / spread)
    span = float(hours.max())
    p_value = 2 * float(special.stdtr(freedom, -abs(slope) / error)) if error > 0 else 0.0
    if p_value > DRIFT_LEVEL or abs(slope * span) < DRIFT_LEAST:
        return
    half = float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * error
    ends = [math.expm1(bound * span) for bound in (slope - half, slope + half)]
    low, high = sorted(map(abs, ends))
    direction, whole = ("falls" if slope < 0 else "rises"), math.expm1(slope * span)
    yield ValidityFinding(
        "drift",
        f"The throughput of repeats of the same cell {direction} by {percent(abs(whole), decimals=1)} "
        f"[{percent(low, decimals=1)}, {percent(high, decimals=1)}] over the {span:.1f} h of the study "
        f"(p = {p_value:.2g}). Repeats are spread over the study, so a drift mainly widens confidence "
        "intervals and changes efficiencies less. Check temperatures, other users and disk space.",
        [],
        {"change": whole, "change_low": ends[0], "change_high": ends[1], "hours": span, "p": p_value},
    )


def changes_in_runs(study: Study, frames: Frames) -> pd.Series:
    """Return by cell the median of log(last / first third of the epochs) over the throughputs of its runs."""
    epochs = study.epochs[study.epochs["throughput_samples_per_sec"] > 0]
    counted = frames.runs.loc[frames.runs["measured"], "run_id"]
    epochs = epochs[epochs["run_id"].astype("str").isin(list(counted))]
    if not len(epochs):
        return pd.Series(dtype=float)
    keys = epochs["run_id"].astype("str")
    size, place = keys.map(keys.value_counts()), epochs.groupby(keys).cumcount()
    several, third = size > 1, (size // 3).clip(lower=1)
    logs = epochs["throughput_samples_per_sec"].astype(float).map(math.log)
    first, last = (logs[several & own].groupby(keys).mean() for own in (place < third, place >= size - third))
    cells = frames.runs.set_index("run_id")["cell_id"]
    change = last - first
    return change.groupby(cells.reindex(change.index)).median()


def _drift_in_runs(study: Study, frames: Frames) -> Iterator[ValidityFinding]:
    changes = changes_in_runs(study, frames)
    odd = changes[changes.abs() > math.log1p(DRIFT_IN_RUN)]
    if not len(odd):
        return
    values = {str(cell): math.expm1(change) for cell, change in odd.items()}
    texts = [f"{one_line(cell, limit=60)} by {_signed(value)}" for cell, value in values.items()]
    words = (
        f"From the first to the last third of the epochs, the throughput changes: "
        f"{listed(texts, limit=_MAX_CELLS)} (median over the runs). The mean depends on the length of the "
        "runs: use a longer warm-up or longer runs, and check clocks and temperatures."
    )
    yield ValidityFinding("drift-in-run", words, list(values), {"change": values})


def _wide_intervals(rows: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield the cells whose intervals of throughput or efficiency are wide (:func:`is_wide`)."""
    texts: dict[str, str] = {}
    values: dict[str, dict[str, list[float]]] = {}
    for name, column in (("efficiency", "efficiency"), ("throughput", "throughput_samples_per_sec")):
        odd = rows[is_wide(rows[f"{name}_low"], rows[f"{name}_high"])]
        for cell, value, low, high in odd[["cell_id", column, f"{name}_low", f"{name}_high"]].itertuples(
            index=False
        ):
            ends = f"{_signed(low / value - 1)} to {_signed(high / value - 1)}"
            texts.setdefault(str(cell), f"{one_line(cell, limit=60)} ({name} {ends})")
            values.setdefault(str(cell), {}).setdefault(name, [float(low), float(high)])
    if texts:
        words = (
            f"The 95 % intervals of these cells are too wide to tell ideal scaling from an efficiency of "
            f"{GUIDE}: {listed(list(texts.values()), limit=_MAX_CELLS)}. Use more repeats."
        )
        yield ValidityFinding("wide-interval", words, list(texts), {"intervals": values})


def _signed(change: float) -> str:
    return f"{'-' if change < 0 else '+'}{percent(abs(change))}"


# -- values that a command reports ----------------------------------------------------


def _averages(study: Study, frames: Frames, envs: Environments) -> Iterator[ValidityFinding]:
    """Yield the cells whose throughput is one average of the whole run."""
    measured = set(frames.runs.loc[frames.runs["measured"], "cell_id"])
    kinds = metrics_of_cells(study.plan)
    cells = [cell for cell in kinds if cell in measured and is_average(kinds[cell])]
    if not cells:
        return
    reported: dict[str, list[dict[str, Any]]] = {}
    for cell, fact in _facts(envs, AVERAGE_OF_RUN):
        reported.setdefault(cell, []).append(dict(fact.values))
    numbers = [positive(values.get("reported")) or 1 for own in reported.values() for values in own]
    several = (
        f" The commands report it up to {max(numbers)} times per run, and the lowest rate counts."
        if max(numbers, default=1) > 1
        else ""
    )
    words = (
        f"The throughput of {_named(cells)} is one average of the whole run, including start-up, and "
        "evaluation if the command counts it. The efficiency and the time per step, which is the global "
        "batch of the plan divided by the throughput, are therefore those of whole runs."
        f"{several} Train longer, or let the command report values of single steps."
    )
    yield ValidityFinding("average-of-run", words, cells, {"reported": reported})


def _uncounted_ranks(study: Study, frames: Frames) -> Iterator[ValidityFinding]:
    """Yield the cells whose command started an unknown number of ranks."""
    sizes = {
        clean(cell["cell_id"]): int(cell["world_size"])
        for cell in study.plan.get("cells") or []
        if (cell.get("workload") or {}).get("command")
    }
    measured = set(frames.runs.loc[frames.runs["measured"], "run_id"])
    cells = [
        cell
        for run, cell, attempt in zip(
            study.runs["run_id"], study.runs["cell_id"], study.attempts, strict=True
        )
        if run in measured and cell in sizes and attempt
        if started_ranks(Path(attempt), sizes[cell]).as_planned is None
    ]
    if cells:
        own = list(dict.fromkeys(cells))
        yield ValidityFinding(
            "ranks-not-counted",
            f"It is not known how many ranks the commands of {_named(own)} started, because not all "
            "processes with RANK and WORLD_SIZE were seen. If a command contains a launcher, its rate is "
            "that of separate trainings.",
            own,
            {"runs": len(cells)},
        )


def _value_counts(study: Study, frames: Frames) -> Iterator[ValidityFinding]:
    """Yield the cells of a series, and runs of a cell, that reported different numbers of values."""
    read = {
        cell
        for cell, metrics in metrics_of_cells(study.plan).items()
        if reads_values(metrics) and not is_average(metrics)
    }
    runs = frames.runs[frames.runs["measured"] & frames.runs["cell_id"].isin(list(read))]
    counts = {
        str(cell): sorted(set(own["epochs"].astype(int))) for cell, own in runs.groupby("cell_id", sort=False)
    }
    known = frames.members[frames.members["cell_id"].isin(list(counts))]
    odd: dict[str, list[int]] = {}
    for _, cells in known.groupby("series", sort=False)["cell_id"]:
        own = {cell: counts[cell] for cell in dict.fromkeys(cells)}
        if len({number for numbers in own.values() for number in numbers}) > 1:
            odd |= own
    if odd:
        texts = [
            f"{one_line(cell, limit=60)} {' or '.join(str(number) for number in numbers)}"
            for cell, numbers in odd.items()
        ]
        words = (
            f"Values per run: {listed(texts, limit=_MAX_CELLS)}. Either the runs trained different numbers "
            "of steps, or several ranks reported values: let only rank 0 report them."
        )
        yield ValidityFinding("value-counts", words, list(odd), {"values_per_run": odd})


# -- samples and batches --------------------------------------------------------------


def _samples(ranks: pd.DataFrame) -> Iterator[ValidityFinding]:
    odd = unequal_samples(ranks)
    if not len(odd):
        return
    cells = list(dict.fromkeys(odd["cell_id"]))
    worst = odd.iloc[int(odd["ratio"].to_numpy().argmax())]
    most, least, times = int(worst["most"]), int(worst["least"]), number(worst["ratio"], digits=2)
    yield ValidityFinding(
        "unequal-samples",
        f"Rank {most} processes {times} times the samples of rank {least} ({_named(cells)}): the load "
        "balance measures this split of the data.",
        cells,
        {"rank": most, "other_rank": least, "ratio": float(worst["ratio"])},
    )


def _windows(ranks: pd.DataFrame) -> Iterator[ValidityFinding]:
    odd = unequal_windows(ranks)
    if not len(odd):
        return
    cells = list(dict.fromkeys(odd["cell_id"]))
    worst = odd.iloc[0]
    shortest, longest = int(worst["shortest"]), int(worst["longest"])
    yield ValidityFinding(
        "unequal-windows",
        f"For the same steps, rank {shortest} measured {seconds(worst['shortest_sec'])} and rank {longest} "
        f"{seconds(worst['longest_sec'])} ({_named(cells)}): rank {shortest} stopped its clock, for example "
        "to evaluate or write a checkpoint, and the others waited for it. Pause all ranks: call the "
        "recorder's pause() on each rank, with a barrier at the end of the pause (docs/recorder.md).",
        cells,
        {
            "rank": shortest,
            "other_rank": longest,
            "seconds": [float(worst["shortest_sec"]), float(worst["longest_sec"])],
            "runs": list(odd["run_id"]),
        },
    )


def _batches(rows: pd.DataFrame) -> Iterator[ValidityFinding]:
    other = (rows["unit"] - 1).abs() > SAME_UNIT
    odd = rows[other & (rows["n"] > 0)].drop_duplicates("cell_id")
    if not len(odd):
        return
    cells = odd["cell_id"].to_list()
    samples = {
        row["cell_id"]: {"planned": int(row["global_batch"]), "measured": _per_step(row)}
        for row in odd.to_dict("records")
    }
    shown = [
        f"{one_line(cell, limit=60)} ({_measured(own['measured'])}, planned {own['planned']:,})"
        for cell, own in samples.items()
    ]
    yield ValidityFinding(
        "other-batch",
        f"Samples per step: {listed(shown, limit=_MAX_CELLS)}. The reported batch and time per step of these "
        "cells are for the planned batch. A cell has an efficiency only if measured / planned is the same "
        "for its baseline.",
        cells,
        {"samples_per_step": samples},
    )


def _per_step(row: Mapping[Any, Any]) -> float | None:
    """Return the samples per step of a cell's runs; None if its runs differ or the number is unknown."""
    samples = float(row["unit"]) * float(row["global_batch"])
    return samples if abs(samples) < float("inf") else None


def _measured(samples: float | None) -> str:
    return "runs differ" if samples is None else f"measured {number(samples)}"


# -- late and slow nodes --------------------------------------------------------------


def _late_and_slow(study: Study, frames: Frames, ranks: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield the nodes on which ranks are late, and the nodes that are slow over all their runs."""
    sample = ranks_sample(frames.runs)
    late = late_nodes_of(stragglers(ranks), sample["cell_id"])
    slow = slow_nodes_of(ranks)
    advice = _advice(study, ranks, slow["host"].to_list()) if len(slow) else ""
    slow_text = f"slower than the other nodes of the same runs: {listed(excess_texts(slow))}"
    both = slow["host"].isin(list(late.sentences))
    excess = {str(host): float(value) for host, value in zip(slow["host"], slow["excess"], strict=True)}
    if late.sentences:
        named = capital(listed(late.texts, limit=_MAX_LATE))
        text = f"{named}. The others wait for these ranks; such waiting is not slow communication."
        if both.any():
            text += f" {capital(slow_text)}. {advice}"
        values = {"nodes": list(late.sentences), "excess": excess}
        yield ValidityFinding("straggler", text, late.cells, values)
    if len(slow) and not both.any():
        cells = list(dict.fromkeys(ranks.loc[ranks["host"].isin(slow["host"]), "cell_id"].astype("str")))
        yield ValidityFinding("slow-node", f"{capital(slow_text)}. {advice}", cells, {"excess": excess})


def _advice(study: Study, ranks: pd.DataFrame, slow: Sequence[str]) -> str:
    """Return advice about slow nodes; it names ``exclude`` only if the matrix can leave them out."""
    plan = study.plan
    which, it = ("this node", "it") if len(slow) == 1 else ("these nodes", "them")
    scheduler = SCHEDULERS.get(str(plan.get("executor")))
    if scheduler is None or "exclude" not in scheduler.keys or plan.get("nodelist"):
        return f"Have {which} checked. The matrix names its nodes, so none can be left out."
    largest = int(study.cells["nodes"].max())
    if ranks["host"].nunique() - len(slow) < largest:
        others = count(largest, "other node")
        return f"Have {which} checked. Leave {it} out (exclude) only if {others} remain for the largest cell."
    return f"Leave {which} out (exclude) or have {it} checked."


class Anomaly(NamedTuple):
    """An anomaly: a heading of a few words, and one or more sentences."""

    heading: str
    words: str


def anomalies(rows: pd.DataFrame, frames: Frames, *, whole_nodes: bool = False) -> list[Anomaly]:
    """Return the anomalies of a study; those that affect most numbers come first.

    With ``whole_nodes``, no other job can share the nodes of the runs.
    """
    return [
        *_baselines_with_outliers(rows, frames),
        *_superlinear(rows),
        *_recoveries(rows),
        *_unstable(frames, whole_nodes=whole_nodes),
    ]


def _baselines_with_outliers(rows: pd.DataFrame, frames: Frames) -> Iterator[Anomaly]:
    bases = set(rows["base_cell"].dropna())
    odd = frames.runs[frames.runs["outlier"] & frames.runs["cell_id"].isin(bases)]
    if len(odd):
        cells = [one_line(cell, limit=60) for cell in dict.fromkeys(odd["cell_id"])]
        yield Anomaly(
            "Baseline with an outlier",
            f"{listed(cells)}: {count(len(odd), 'run')} {'is' if len(odd) == 1 else 'are'} far from the "
            "baseline's other runs. This affects every efficiency relative to this baseline: run the "
            "baseline again.",
        )


def _superlinear(rows: pd.DataFrame) -> Iterator[Anomaly]:
    beyond = rows[(rows["gpus"] > rows["base_gpus"]) & rows["ddp"] & (rows["mode"] != "")]
    clear = beyond[beyond["efficiency_low"] > 1]
    apart = beyond[beyond["efficiency_low"].isna() & (beyond["efficiency"] > 1 + MARGIN)]
    found = pd.concat([clear, apart])
    if len(found):
        cells = [f"{fraction(row['efficiency'])} at {ranks(row)}" for row in found.to_dict("records")]
        sure = "the interval excludes 1" if len(apart) == 0 else "no interval: fewer than 3 runs"
        yield Anomaly(
            "Efficiency above 1",
            f"{listed(cells)} ({sure}). Either the baseline is slower than it should be (fewer threads, "
            "another node, a slow first run), or the smaller share of the work fits into a cache.",
        )


def _recoveries(rows: pd.DataFrame) -> Iterator[Anomaly]:
    """Yield the sizes with a lower efficiency than the next smaller and the next larger size."""
    found = []
    measured = rows.loc[rows["efficiency"].notna() & rows["ddp"], _PATH_COLUMNS]
    cells = dict(zip(measured.index, measured.to_dict("records"), strict=True))
    for _, own in size_paths(measured):
        path = [cells[place] for place in own.index]
        for before, low, after in zip(path, path[1:], path[2:], strict=False):
            if low["efficiency"] < before["efficiency"] and _clearly_above(after, low):
                three = (before, low, after)
                values = ", ".join(fraction(row["efficiency"]) for row in three)
                found.append(f"{values} at {', '.join(str(row['gpus']) for row in three)} ranks")
    if found:
        yield Anomaly(
            "Efficiency falls, then rises again",
            f"{listed(list(dict.fromkeys(found)))}. A loss should not disappear at larger sizes: check "
            "the nodes, the order of the runs and the batch per rank of the middle size.",
        )


def _clearly_above(upper: dict[Hashable, Any], lower: dict[Hashable, Any]) -> bool:
    if known(upper["efficiency_low"]) and known(lower["efficiency_high"]):
        return bool(upper["efficiency_low"] > lower["efficiency_high"])
    return bool(upper["efficiency"] > lower["efficiency"] * (1 + MARGIN))


def unstable_cells(runs: pd.DataFrame) -> dict[str, float]:
    """Return the cells whose runs differ, the least stable first, with the deviation of log rates."""
    runs = runs[runs["measured"]]
    logs = runs["rate"].astype(float).map(math.log).groupby(runs["cell_id"])
    spread = logs.std()[logs.size() >= MIN_RUNS].sort_values(ascending=False)
    return {str(cell): float(value) for cell, value in spread[spread > UNSTABLE].items()}


def _unstable(frames: Frames, *, whole_nodes: bool) -> Iterator[Anomaly]:
    if wide := unstable_cells(frames.runs):
        cells = [f"{one_line(cell, limit=60)} by {percent(value)}" for cell, value in wide.items()]
        shared, advice = "shared nodes, ", "Use more repeats, or whole nodes (exclusive: true)."
        if whole_nodes:
            shared, advice = "", "Use more repeats."
        yield Anomaly(
            "Runs of a cell differ",
            f"{listed(cells)} (standard deviation between runs). Possible causes: {shared}a shared network "
            f"or file system, changing clock rates. {advice}",
        )
