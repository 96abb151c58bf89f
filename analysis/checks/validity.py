"""List what limits the validity of a study's numbers: one list of facts, computed once, for all reports.

An error means that the results of the cells that it names are not valid. A warning means that they may be
affected, or that runs are missing. Every kind is described in docs/analysis.md, with its remedy.

:func:`anomalies` finds unexpected results; no run is dropped because of them. Thresholds are chosen so
that noise is rarely reported. If a value has an interval, the whole interval must be beyond the threshold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from analysis.checks.slow_ranks import (
    UnequalSamples,
    late_nodes_of,
    slow_nodes_of,
    stragglers,
    unequal_samples,
    unequal_windows,
)
from analysis.data.differences import differences, observe
from analysis.data.environment import Crowd, Environment, crowds, positive
from analysis.data.load import RankOfRun, Study, metrics_of_cells
from analysis.stats.columns import RunRow, ScalingRow, by_series, first_of_cells, grouped
from analysis.stats.decompose import mean
from analysis.stats.estimate import LEVEL, MIN_RUNS
from analysis.stats.measured import Frames, common_reasons, count_outcomes, ranks_sample
from analysis.stats.scaling import GUIDE, SAME_UNIT, is_wide
from analysis.text import clean, one_line
from bench.facts import Fact, facts_of_env
from bench.matrix.schedulers import SCHEDULERS
from bench.matrix.strategies import STRATEGIES
from bench.study.checksums import find_damage
from bench.study.conditions import Reason, by_reason, objects
from bench.study.processes import started_ranks
from bench.study.readings import AVERAGE_OF_RUN, has_readings, is_average
from bench.units import known

#: Facts of the environment that ``runs-differ`` leaves out, because another kind reports them.
_OWN_KIND = frozenset({"threads_per_rank"})
#: The env.json of each run, with the run's cell.
Environments = Sequence[tuple[str, dict[str, Any]]]
#: In a shorter warm-up, each half (without the first 2 steps) has fewer than 3 steps.
_FEWEST_TO_TELL = 8
#: The strategies (``strategy`` in env.json) whose parts of a step are not measured, with their names.
_WITHOUT_PARTS = {name: one.untimed for name, one in STRATEGIES.items() if one.untimed}
#: Without intervals, an efficiency must exceed 1, or the efficiency of the previous size, by this much.
MARGIN = 0.05
#: A cell is unstable if the standard deviation of its runs' log throughput is above this.
UNSTABLE = 0.05
#: Significance level of a drift, and its minimum relative change over the study.
DRIFT_LEVEL = 0.01
DRIFT_LEAST = 0.01
#: Minimum relative change of the throughput within a run, as between the halves of a warm-up (`not-stable`).
DRIFT_IN_RUN = 0.1


def cells_of(rows: Iterable[RunRow | ScalingRow | RankOfRun | UnequalSamples]) -> list[str]:
    """Return the cell of each row."""
    return [row.cell_id for row in rows]


def _error(kind: str, subject: Iterable[str], **values: Any) -> Fact:
    return Fact(kind, tuple(dict.fromkeys(subject)), values, "error")


def _warning(kind: str, subject: Iterable[str], **values: Any) -> Fact:
    return Fact(kind, tuple(dict.fromkeys(subject)), values)


def validity(
    study: Study, frames: Frames, rows: Sequence[ScalingRow], environment: Environment
) -> list[Fact]:
    """Return the findings of a study, errors first. Their subjects are cells."""
    envs = envs_by_cell(study, environment)
    runs = frames.run_rows
    measured = {run.run_id for run in runs if run.measured}
    ranks = study.ranks_of([run.run_id for run in ranks_sample(runs)])
    found = [
        *_shared_cores(envs),
        *_threads(envs, rows),
        *_samples(ranks),
        *_windows(ranks),
        *_batches(rows),
        *_disturbed(runs),
        *_incomplete(runs),
        *_damaged_files(study),
        *_unequal_nodes(envs),
        *_differing(study, environment),
        *_averages(study, runs, envs),
        *_uncounted_ranks(study, runs),
        *_value_counts(study, frames),
        *_not_stable(envs_by_cell(study, environment, measured)),
        *drift(runs),
        *_drift_in_runs(study, runs),
        *_wide_intervals(rows),
        *_without_parts(envs),
        *_late_and_slow(study, runs, ranks),
    ]
    return sorted(found, key=lambda fact: fact.severity != "error")


def invalid_cells(found: Sequence[Fact]) -> dict[str, str]:
    """Return the cells with an error, each with the kind of its first error."""
    errors = [fact for fact in found if fact.severity == "error"]
    return {cell: fact.kind for fact in reversed(errors) for cell in fact.subject}


def envs_by_cell(study: Study, environment: Environment, only: set[str] | None = None) -> Environments:
    """Return the env.json of each run that was read (or of the runs ``only``), with the run's cell."""
    cells = dict(zip(study.runs["run_id"], study.runs["cell_id"], strict=True))
    return [
        (cells[run_id], env) for run_id, env in environment.envs.items() if only is None or run_id in only
    ]


def _incomplete(runs: Sequence[RunRow]) -> Iterator[Fact]:
    missing = [run for run in runs if not run.measured and not run.left_out]
    if len(missing) == len(runs):
        yield _error("no-throughput", **_missing(runs, runs))
    elif missing:
        yield _warning("incomplete", **_missing(missing, runs))


def _damaged_files(study: Study) -> Iterator[Fact]:
    """Yield the first file of each completed run that is not as the run wrote it."""
    runs = zip(study.runs["cell_id"], study.attempts, study.measured, strict=True)
    damaged = [(str(cell), attempt) for cell, attempt, measured in runs if attempt and not measured]
    if damaged:
        files = [{"text": find_damage(attempt)} for _, attempt in damaged]
        yield _warning("damaged-files", (cell for cell, _ in damaged), files=files)


def _missing(missing: Sequence[RunRow], runs: Sequence[RunRow]) -> dict[str, Any]:
    outcomes = count_outcomes(missing)
    return {"subject": cells_of(missing), "runs": len(runs), "missing": len(missing), "outcomes": outcomes}


# -- disturbed runs -------------------------------------------------------------------


def _disturbed(runs: Sequence[RunRow]) -> Iterator[Fact]:
    """Yield what disturbs all runs of a cell, the runs that overlap, and the other disturbed runs."""
    finished = [run for run in runs if run.measured or run.left_out]
    disturbed = [run for run in finished if run.disturbed]
    if not disturbed:
        return
    amounts = Counter(cells_of(finished))
    common = {
        cell: reasons - {Reason.STUDY_RUN}
        for cell, reasons in common_reasons(finished).items()
        if amounts[cell] > 1 and reasons - {Reason.STUDY_RUN}
    }
    if common:
        yield _common_condition(disturbed, common)
    for kind in ("overlap", "disturbed"):
        if entries := _entries(kind, disturbed, common):
            yield _disturbed_runs(kind, entries, finished, common if kind == "disturbed" else {})


def _as_json(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    return [fact.as_json() for fact in facts]


def _common_condition(disturbed: Iterable[RunRow], common: Mapping[str, frozenset[str]]) -> Fact:
    values, merged = {}, {}
    of_cells = grouped(disturbed, lambda run: run.cell_id)
    for cell, kinds in common.items():
        own = [one for run in of_cells[cell] for one in run.disturbed or () if one.kind in kinds]
        values[cell], merged[cell] = _as_json(own), _as_json(by_reason(own))
    return _error("common-condition", common, disturbed=values, conditions=merged)


def _entries(
    kind: str, disturbed: Iterable[RunRow], common: Mapping[str, frozenset[str]]
) -> list[tuple[RunRow, list[Fact]]]:
    """Return the runs that overlap, or the runs with another disturbance that is not ``common`` to a cell."""
    found = []
    for run in disturbed:
        others = [one for one in run.disturbed or () if one.kind not in common.get(run.cell_id, ())]
        if own := [one for one in others if (one.kind == Reason.STUDY_RUN) == (kind == "overlap")]:
            found.append((run, own))
    return found


def _disturbed_runs(
    kind: str,
    entries: Sequence[tuple[RunRow, list[Fact]]],
    finished: Sequence[RunRow],
    common: Container[str],
) -> Fact:
    """Return the fact about disturbed runs; others of cells with a ``common`` condition are only counted."""
    runs = [run for run, _ in entries]
    also = sum(run.cell_id in common for run in finished) - sum(run.cell_id in common for run in runs)
    return _warning(
        kind,
        cells_of(runs),
        runs=[
            {"run_id": run.run_id, "cell_id": run.cell_id, "left_out": run.left_out, "facts": _as_json(own)}
            for run, own in entries
        ],
        disturbed=len(runs) + also,
        finished=len(finished),
        left_out=sum(run.left_out for run in runs),
        **({"common": also} if also else {}),
    )


# -- cores, threads and nodes, from env.json ------------------------------------------


def _facts(envs: Environments, kind: str) -> list[tuple[str, Fact]]:
    """Return the facts of a kind in the env.json of the runs, each with its run's cell."""
    return [(cell, fact) for cell, env in envs for fact in facts_of_env(env) if fact.kind == kind]


def _shared_cores(envs: Environments) -> Iterator[Fact]:
    worst: dict[str, Crowd] = {}
    for cell, env in envs:
        if found := [*crowds(env), *([worst[cell]] if cell in worst else [])]:
            worst[cell] = max(found, key=lambda crowd: crowd.threads / crowd.cores)
    if worst:
        values = {cell: crowd._asdict() for cell, crowd in worst.items()}
        most = max(worst.values(), key=lambda crowd: crowd.threads / crowd.cores)
        yield _error(
            "shared-cores", worst, ranks=most.ranks, threads=most.threads, cores=most.cores, crowds=values
        )


def threads_of(env: dict[str, Any]) -> set[int]:
    """Return the numbers of threads that the ranks of a run have."""
    lists = [entry.get("threads_per_rank") for entry in objects(env.get("cores"))]
    own = [value for values in lists if isinstance(values, list) for value in values]
    return set(filter(None, map(positive, own or [env.get("threads_per_rank")])))


def _threads(envs: Environments, rows: Sequence[ScalingRow]) -> Iterator[Fact]:
    """Yield the cells whose ranks have different numbers of threads, or another number than the baseline."""
    threads: dict[str, set[int]] = {}
    for cell, env in envs:
        threads.setdefault(cell, set()).update(threads_of(env))
    pairs = {row.cell_id: row.base.cell_id for row in rows if row.base}
    found: dict[str, dict[str, Any]] = {}
    for cell, own in threads.items():
        reference = threads.get(pairs.get(cell, cell)) or own
        if len(own) > 1:
            found[cell] = {"cell": cell, "threads": sorted(own)}
        elif own and own != reference:
            base_threads = {"baseline": pairs[cell], "baseline_threads": sorted(reference)}
            found[cell] = {"cell": cell, "threads": sorted(own), **base_threads}
    if found:
        cells = {cell: one["threads"] for cell, one in found.items()}
        yield _error("threads-differ", found, threads_per_rank=cells, cells=list(found.values()))


def facts_of_nodes(env: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int], str]]:
    """Yield node, fact and value for the facts in which all nodes of a study should agree.

    A fact is a name and a number of ranks, which is 0 unless the fact depends on it.
    """
    for host in objects(env.get("hosts")):
        node = one_line(host.get("host"), limit=60)
        if isinstance(cpu := host.get("cpu_model"), str) and cpu:
            yield node, ("processor", 0), one_line(cpu, limit=60)
        ranks, cores = positive(host.get("ranks_here")), positive(host.get("cores"))
        if ranks and cores:
            yield node, ("cores_of_ranks", ranks), str(cores)
    for entry in objects(env.get("cores")):
        node, quota = one_line(entry.get("node"), limit=60), entry.get("quota")
        if node_cores := positive(entry.get("cores")):
            yield node, ("cores_of_node", 0), str(node_cores)
        yield node, ("quota", 0), f"{quota:g}" if isinstance(quota, int | float) else "none"


def _unequal_nodes(envs: Environments) -> Iterator[Fact]:
    """Yield the facts in which the nodes of a study differ, with the nodes that have each value."""
    facts = [(cell, *fact) for cell, env in envs for fact in facts_of_nodes(env)]
    differing, odd = [], []
    for (name, ranks), own in grouped(facts, lambda one: one[2]).items():
        counts = Counter(value for *_, value in own)
        if len(counts) < 2:
            continue
        of_values = {value: [one for one in own if one[3] == value] for value, _ in counts.most_common()}
        nodes = {
            value: list(dict.fromkeys(node for _, node, *_ in same)) for value, same in of_values.items()
        }
        differing.append({name: nodes, **({"ranks": ranks} if ranks else {})})
        odd += [cell for cell, *_, value in own if value != next(iter(nodes))]
    if differing:
        yield _warning("unequal-nodes", odd, facts=differing)
    # The ranks compare more than these facts, such as the cores of each rank.
    elif seen := _facts(envs, "unequal-nodes"):
        values = [dict(fact.values) for _, fact in seen]
        different = [one for place, one in enumerate(values) if one not in values[:place]]
        yield _warning("unequal-nodes", [cell for cell, _ in seen], seen=different)


def _differing(study: Study, environment: Environment) -> Iterator[Fact]:
    facts = [name for name in environment.differing if name not in _OWN_KIND]
    unplanned = (
        [one for one in differences(observe(study, environment.envs)) if not one.planned] if facts else []
    )
    if names := [one.name for one in unplanned if one.kind == "environment" and one.name in facts]:
        yield _warning("runs-differ", [], differing=names)


def _not_stable(envs: Environments) -> Iterator[Fact]:
    # A run can have several of these facts.
    if odd := [facts for one in envs if (facts := _facts([one], "not-stable"))]:
        steps = [positive(fact.values.get("steps")) for facts in odd for _, fact in facts]
        is_short = all(number is not None and number < _FEWEST_TO_TELL for number in steps)
        short = {"fewest": _FEWEST_TO_TELL} if is_short else {}
        yield _warning("not-stable", [facts[0][0] for facts in odd], runs=len(odd), of=len(envs), **short)


def _without_parts(envs: Environments) -> Iterator[Fact]:
    found = [(cell, name) for cell, env in envs if (name := str(env.get("strategy"))) in _WITHOUT_PARTS]
    if found:
        strategies = [name for name in _WITHOUT_PARTS if name in {strategy for _, strategy in found}]
        cells = [cell for name in strategies for cell, strategy in found if strategy == name]
        titles = [_WITHOUT_PARTS[name] for name in strategies]
        yield _warning("parts-not-measured", cells, strategies=strategies, titles=titles)


# -- drift and width of intervals -----------------------------------------------------


def timed_runs(runs: Iterable[RunRow]) -> list[RunRow]:
    """Return the measured runs if the drift over the study can be estimated from them, else none of them."""
    counted = [run for run in runs if run.measured]
    starts = grouped(counted, lambda run: run.cell_id)
    if any(pd.isna(run.started_at) for run in counted) or len(counted) - len(starts) - 1 < MIN_RUNS:
        return []
    return counted if any(len({run.started_at for run in own}) > 1 for own in starts.values()) else []


def drift(runs: Iterable[RunRow]) -> Iterator[Fact]:
    """Yield a trend of the throughput over time, from a regression with a separate level for each cell."""
    timed = timed_runs(runs)
    if not timed:
        return
    first = min(run.started_at for run in timed)
    times, changes, span = [], [], 0.0
    cells = grouped(timed, lambda run: run.cell_id).values()
    for own in cells:
        hours = [(run.started_at - first).total_seconds() / 3600 for run in own]
        logs = [math.log(run.rate) for run in own]
        times += [value - mean(hours) for value in hours]
        changes += [value - mean(logs) for value in logs]
        span = max(span, *hours)
    time, change = np.array(times), np.array(changes)
    freedom = len(timed) - len(cells) - 1
    spread = float((time**2).sum())
    slope = float((time * change).sum()) / spread
    error = math.sqrt(float(((change - slope * time) ** 2).sum()) / freedom / spread)
    p_value = 2 * float(special.stdtr(freedom, -abs(slope) / error)) if error > 0 else 0.0
    if p_value > DRIFT_LEVEL or abs(slope * span) < DRIFT_LEAST:
        return
    half = float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * error
    low, value, high = (math.expm1(bound * span) for bound in (slope - half, slope, slope + half))
    yield _warning("drift", [], change=value, change_low=low, change_high=high, hours=span, p=p_value)


def changes_in_runs(study: Study, runs: Iterable[RunRow]) -> dict[str, float]:
    """Return by cell the median of log(last / first third of the epochs) over the throughputs of its runs."""
    logs: dict[str, list[float]] = {}
    epochs = study.epochs[study.epochs["throughput_samples_per_sec"] > 0]
    for run_id, rate in zip(epochs["run_id"], epochs["throughput_samples_per_sec"], strict=True):
        logs.setdefault(run_id, []).append(math.log(rate))
    changes: dict[str, list[float]] = {}
    for run in runs:
        own = logs.get(run.run_id, ())
        if run.measured and len(own) > 1:
            third = max(len(own) // 3, 1)
            changes.setdefault(run.cell_id, []).append(mean(own[-third:]) - mean(own[:third]))
    return {cell: median(own) for cell, own in sorted(changes.items())}


def _drift_in_runs(study: Study, runs: Iterable[RunRow]) -> Iterator[Fact]:
    changes = changes_in_runs(study, runs).items()
    values = {cell: math.expm1(log) for cell, log in changes if abs(log) > math.log1p(DRIFT_IN_RUN)}
    if values:
        yield _warning("drift-in-run", values, change=values)


def _wide_intervals(rows: Sequence[ScalingRow]) -> Iterator[Fact]:
    """Yield the cells whose intervals of throughput or efficiency are wide (:func:`is_wide`).

    A cell whose interval of the efficiency does not contain the guide is not among them.
    """
    decided = {row.cell_id for row in rows if row.efficiency_high < GUIDE or row.efficiency_low >= GUIDE}
    widths: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, list[float]]] = {}
    for name, column in (("efficiency", "efficiency"), ("throughput", "throughput_samples_per_sec")):
        for row in rows:
            value, low, high = (getattr(row, one) for one in (column, f"{name}_low", f"{name}_high"))
            if is_wide(low, high) and row.cell_id not in decided:
                ends = {"low": low / value - 1, "high": high / value - 1}
                widths.setdefault(row.cell_id, {"quantity": name, **ends})
                values.setdefault(row.cell_id, {}).setdefault(name, [low, high])
    if widths:
        yield _warning("wide-interval", widths, intervals=values, widths=widths, guide=GUIDE)


# -- values that a command reports ----------------------------------------------------


def _averages(study: Study, runs: Iterable[RunRow], envs: Environments) -> Iterator[Fact]:
    """Yield the cells whose throughput is one average of the whole run."""
    measured = {run.cell_id for run in runs if run.measured}
    kinds = metrics_of_cells(study.plan)
    cells = [cell for cell in kinds if cell in measured and is_average(kinds[cell])]
    if not cells:
        return
    reported: dict[str, list[dict[str, Any]]] = {}
    for cell, fact in _facts(envs, AVERAGE_OF_RUN):
        reported.setdefault(cell, []).append(dict(fact.values))
    numbers = [positive(values.get("reported")) or 1 for own in reported.values() for values in own]
    several = {"most": max(numbers)} if max(numbers, default=1) > 1 else {}
    yield _warning("average-of-run", cells, reported=reported, **several)


def _uncounted_ranks(study: Study, runs: Iterable[RunRow]) -> Iterator[Fact]:
    """Yield the cells whose command started an unknown number of ranks."""
    sizes = {
        clean(cell["cell_id"]): int(cell["world_size"])
        for cell in study.plan.get("cells") or []
        if (cell.get("workload") or {}).get("command")
    }
    cells = [
        run.cell_id
        for run, attempt in zip(runs, study.attempts, strict=True)
        if run.measured and run.cell_id in sizes and attempt
        if started_ranks(Path(attempt), sizes[run.cell_id]).as_planned is None
    ]
    if cells:
        yield _warning("ranks-not-counted", cells, runs=len(cells))


def _value_counts(study: Study, frames: Frames) -> Iterator[Fact]:
    """Yield the cells of a series, and runs of a cell, that reported different numbers of values."""
    metrics = metrics_of_cells(study.plan)
    read = {cell for cell, own in metrics.items() if has_readings(own) and not is_average(own)}
    counts = {
        cell: sorted({int(run.epochs) for run in frames.measured_in(cell)})
        for cell in frames.runs_of_cells
        if cell in read and frames.measured_in(cell)
    }
    series: dict[str, dict[str, list[int]]] = {}
    for name, cell in zip(frames.members["series"], frames.members["cell_id"], strict=True):
        if cell in counts:
            series.setdefault(name, {})[cell] = counts[cell]
    odd = {
        cell: numbers
        for own in series.values()
        if len({number for numbers in own.values() for number in numbers}) > 1
        for cell, numbers in own.items()
    }
    if odd:
        yield _warning("value-counts", odd, values_per_run=odd)


# -- samples and batches --------------------------------------------------------------


def _samples(ranks: Sequence[RankOfRun]) -> Iterator[Fact]:
    if odd := unequal_samples(ranks):
        worst = max(odd, key=lambda one: one.ratio)
        values = {"rank": worst.most, "other_rank": worst.least, "ratio": worst.ratio}
        yield _error("unequal-samples", cells_of(odd), **values)


def _windows(ranks: Sequence[RankOfRun]) -> Iterator[Fact]:
    if odd := unequal_windows(ranks):
        rank, other = odd[0]
        yield _error(
            "unequal-windows",
            cells_of(one.shortest for one in odd),
            rank=rank.rank,
            other_rank=other.rank,
            seconds=[rank.window_time_sec, other.window_time_sec],
            runs=[one.shortest.run_id for one in odd],
        )


def _batches(rows: Sequence[ScalingRow]) -> Iterator[Fact]:
    odd = first_of_cells(row for row in rows if row.n and abs(row.unit - 1) > SAME_UNIT)
    if odd:
        samples = {
            # The unit is infinite if the runs of a cell differ.
            row.cell_id: {
                "planned": int(row.global_batch),
                "measured": row.unit * row.global_batch if math.isfinite(row.unit) else None,
            }
            for row in odd
        }
        yield _error("other-batch", samples, samples_per_step=samples)


# -- late and slow nodes --------------------------------------------------------------


def _late_and_slow(study: Study, runs: Sequence[RunRow], ranks: Sequence[RankOfRun]) -> Iterator[Fact]:
    """Yield the nodes on which ranks are late, and the nodes that are slow over all their runs."""
    late = late_nodes_of(stragglers(ranks), [run.cell_id for run in ranks_sample(runs)])
    slow = slow_nodes_of(ranks)
    hosts = [node.host for node in slow]
    excess = {"excess": {node.host: node.excess for node in slow}}
    about: dict[str, Any] = {"slow": [node._asdict() for node in slow], "hosts": len(hosts)}
    about |= _advice(study, ranks, hosts) if hosts else {}
    is_both = late is not None and bool({*hosts} & {*late.values["nodes"]})
    if late is not None:
        yield replace(late, values={**late.values, **excess, **(about if is_both else {})})
    if hosts and not is_both:
        yield _warning("slow-node", cells_of(row for row in ranks if row.host in hosts), **excess, **about)


def _advice(study: Study, ranks: Sequence[RankOfRun], slow: Sequence[str]) -> dict[str, Any]:
    """Return advice about slow nodes: whether the matrix can leave them out."""
    scheduler = SCHEDULERS.get(str(study.plan.get("executor")))
    if scheduler is None or "exclude" not in scheduler.keys or study.plan.get("nodelist"):
        return {"advice": "advice-named"}
    largest = int(study.cells["nodes"].max())
    if len({row.host for row in ranks}) - len(slow) < largest:
        return {"advice": "advice-few", "needed": largest}
    return {"advice": "advice-enough"}


# -- anomalies ------------------------------------------------------------------------


def anomalies(rows: Sequence[ScalingRow], frames: Frames, *, whole_nodes: bool = False) -> list[Fact]:
    """Return the anomalies of a study; those that affect most numbers come first.

    With ``whole_nodes``, no other job can share the nodes of the runs.
    """
    return [
        *_baselines_with_outliers(rows, frames),
        *_superlinear(rows),
        *_recoveries(rows),
        *_unstable(frames, whole_nodes=whole_nodes),
    ]


def _baselines_with_outliers(rows: Sequence[ScalingRow], frames: Frames) -> Iterator[Fact]:
    bases = {row.base.cell_id for row in rows if row.base}
    if odd := [run for run in frames.run_rows if run.outlier and run.cell_id in bases]:
        yield _anomaly("baseline-outlier", cells_of(odd), runs=len(odd))


def _anomaly(kind: str, subject: Iterable[str], **values: Any) -> Fact:
    return Fact(kind, tuple(dict.fromkeys(subject)), values, "info")


def _superlinear(rows: Sequence[ScalingRow]) -> Iterator[Fact]:
    beyond = [row for row in rows if row.base and row.gpus > row.base.gpus and row.ddp and row.mode]
    clear = [row for row in beyond if row.efficiency_low > 1]
    apart = [row for row in beyond if not known(row.efficiency_low) and row.efficiency > 1 + MARGIN]
    if found := [*clear, *apart]:
        sizes = [{"efficiency": row.efficiency, "ranks": row.gpus} for row in found]
        certainty = "few-runs" if apart else "interval"
        yield _anomaly("superlinear", cells_of(found), sizes=sizes, certainty=certainty)


def _recoveries(rows: Sequence[ScalingRow]) -> Iterator[Fact]:
    """Yield the sizes with a lower efficiency than the next smaller and the next larger size."""
    found, odd = [], []
    for path in _paths([row for row in rows if known(row.efficiency) and row.ddp]):
        for before, low, after in zip(path, path[1:], path[2:], strict=False):
            if low.efficiency < before.efficiency and _clearly_above(after, low):
                three = (before, low, after)
                found.append(
                    {"efficiencies": [row.efficiency for row in three], "ranks": [row.gpus for row in three]}
                )
                odd.append(low.cell_id)
    if found:
        different = [one for place, one in enumerate(found) if one not in found[:place]]
        yield _anomaly("recovery", odd, sizes=different)


def _paths(rows: Sequence[ScalingRow]) -> Iterator[list[ScalingRow]]:
    """Yield the sizes of each series within one node, and those with the same number of ranks per node."""
    for own in by_series(rows).values():
        layouts = grouped(own, lambda row: row.gpus_per_node)
        within = [row for row in own if row.nodes == 1]
        yield from [own] if len(layouts) == 1 or len(within) == len(own) else [within, *layouts.values()]


def _clearly_above(upper: ScalingRow, lower: ScalingRow) -> bool:
    if known(upper.efficiency_low) and known(lower.efficiency_high):
        return upper.efficiency_low > lower.efficiency_high
    return upper.efficiency > lower.efficiency * (1 + MARGIN)


def _unstable(frames: Frames, *, whole_nodes: bool) -> Iterator[Fact]:
    """Yield the cells whose runs differ, the least stable first, with the deviation of log rates."""
    runs = frames.runs[frames.runs["measured"]]
    logs = runs["rate"].astype(float).map(math.log).groupby(runs["cell_id"])
    spread = logs.std()[logs.size() >= MIN_RUNS].sort_values(ascending=False)
    if wide := {str(cell): float(value) for cell, value in spread[spread > UNSTABLE].items()}:
        advice = "whole-nodes" if whole_nodes else "shared-nodes"
        yield _anomaly("unstable", wide, spread=wide, advice=advice)
