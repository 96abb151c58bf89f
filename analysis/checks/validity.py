"""List what limits the validity of a study's numbers: one list of findings, computed once, for all reports.

An error means that the results of the cells that it names are not valid. A warning means that they may be
affected, or that runs are missing. Every kind is described in docs/analysis.md, with its remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.checks.disturbed import disturbed_runs
from analysis.checks.drift import drift, drift_in_runs, wide_intervals
from analysis.checks.nodes import Environments, shared_cores, unequal_nodes, unequal_threads
from analysis.checks.reported_values import averages, uncounted_ranks, value_counts
from analysis.checks.resources import spans_partitions
from analysis.checks.samples import other_batches, paused_ranks, separate_trainings, uneven_samples
from analysis.checks.slow_ranks import (
    NodeAdvice,
    SlowNodes,
    late_nodes_of,
    slow_nodes_of,
    stragglers,
)
from analysis.data.differences import differences, observe
from analysis.data.environment import Environment, fact_title
from analysis.data.load import RankOfRun, Study
from analysis.stats.columns import RunRow, ScalingRow, distinct
from analysis.stats.measured import Frames, OutcomeCount, count_outcomes, ranks_sample
from analysis.text import one_line
from bench.matrix.schedulers import SCHEDULERS
from bench.study.found import findings_of_env
from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.finding import Finding, Severity, messages
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.measure.findings import NotStable
from ddp_scaling_bench.units import clauses, count, listed, names

#: Facts of the environment that ``runs-differ`` leaves out, because another kind reports them.
_OWN_KIND = frozenset({"threads_per_rank"})
#: In a shorter warm-up, each half (without the first 2 steps) has fewer than 3 steps.
_FEWEST_TO_TELL = 8
#: The strategies (``strategy`` in env.json) whose parts of a step are not measured, with their names.
_WITHOUT_PARTS = {name: one.untimed for name, one in STRATEGIES.items() if one.untimed}


class NoThroughput(Finding, kind="no-throughput"):
    """A study of which no run has a throughput; ``example`` is the reason of the first run that has one."""

    heading = "Nothing to compare"
    remedy = "`bench status` shows the reasons."
    severity: Severity = "error"
    runs: int
    missing: int
    outcomes: tuple[OutcomeCount, ...]
    example: str = ""

    def _message(self) -> str:
        states = f": {clauses([*map(str, self.outcomes)])}" if self.outcomes else ""
        return (
            f"None of the {count(self.runs, 'planned run')} has a throughput{states}.{_example(self.example)}"
        )


class IncompleteRuns(Finding, kind="incomplete"):
    """Runs that do not count; ``example`` is the reason of the first run that has one."""

    heading = "Incomplete"
    remedy = "`bench submit`, or `bench submit --retry-failed`."
    runs: int
    missing: int
    outcomes: tuple[OutcomeCount, ...]
    example: str = ""

    def _message(self) -> str:
        of_all = f"{self.missing:,} of {count(self.runs, 'run')} {'does' if self.missing == 1 else 'do'} not"
        outcomes = f"{clauses([*map(str, self.outcomes)])} ({names(self.subject)})"
        return f"{of_all} count: {outcomes}.{_example(self.example)}"


def _example(reason: str) -> str:
    return f" For example: {reason}." if reason else ""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A file that is not as its run wrote it, in words."""

    text: str


class DamagedFiles(Finding, kind="damaged-files"):
    """The first damaged file of each completed run that has one."""

    heading = "Damaged files"
    remedy = "Restore these files; `sha256sum -c SHA256SUMS` in a run's folder shows which ones differ."
    files: tuple[Damage, ...]

    def _message(self) -> str:
        return f"{listed([one.text for one in self.files], limit=3)}. The runs have no values."


class RunsDiffer(Finding, kind="runs-differ"):
    """Facts of the environment (names as in env.json) in which runs differ, though the plan does not."""

    heading = "Runs differ"
    remedy = "Repeat all runs in one environment."
    differing: tuple[str, ...]

    def _message(self) -> str:
        return f"Not all runs had the same {listed([*map(fact_title, self.differing)])}."


class UnstableWarmUp(Finding, kind="not-stable"):
    """Runs whose step time was not yet stable after the warm-up.

    Attributes:
        runs: the number of these runs, of the ``of`` runs that count.
        fewest: the steps of warm-up that are enough to tell, if all these runs had fewer.
    """

    heading = "Not yet stable"
    remedy = "Raise warmup_steps."
    runs: int
    of: int
    fewest: int | None = None

    def _message(self) -> str:
        where = f"In {self.runs:,} of {count(self.of, 'run')} of the study ({names(self.subject)}), the"
        if self.fewest is not None:
            return (
                f"{where} step times at the end of the warm-up differ, but fewer than {self.fewest} steps of "
                "warm-up are too few to tell whether the step time is stable."
            )
        return (
            f"{where} medians of the step times in the two halves of the warm-up (without its first 2 steps) "
            "differ by more than 10 % on some rank."
        )


class PartsNotMeasured(Finding, kind="parts-not-measured"):
    """Cells with ``strategies`` whose parts of the step are not measured; ``titles`` are their names."""

    heading = "Parts of the step not measured"
    strategies: tuple[str, ...]
    titles: tuple[str, ...]

    def _message(self) -> str:
        return (
            f"The parts of the step are not measured with {names(self.titles)} yet; throughput, step times "
            "and data loading are."
        )


def validity(
    study: Study, frames: Frames, rows: Sequence[ScalingRow], environment: Environment
) -> list[Finding]:
    """Return the findings of a study, errors first. Their subjects are cells."""
    envs = envs_by_cell(study, environment)
    runs = frames.run_rows
    measured = {run.run_id for run in runs if run.measured}
    ranks = study.ranks_of([run.run_id for run in ranks_sample(runs)])
    found = [
        *shared_cores(envs),
        *unequal_threads(envs, rows),
        *uneven_samples(ranks),
        *paused_ranks(ranks),
        *other_batches(rows),
        *separate_trainings(frames, envs),
        *disturbed_runs(runs),
        *_incomplete(runs),
        *_damaged_files(study),
        *unequal_nodes(envs),
        *spans_partitions(study.planned, envs),
        *_differing(study, environment),
        *averages(study, runs, envs),
        *uncounted_ranks(study, frames, environment.envs),
        *value_counts(study, frames),
        *_not_stable(envs_by_cell(study, environment, measured)),
        *drift(runs),
        *drift_in_runs(study, runs),
        *wide_intervals(rows),
        *_without_parts(envs),
        *_late_and_slow(study, runs, ranks),
    ]
    return sorted(found, key=lambda fact: fact.severity != "error")


def invalid_cells(found: Sequence[Finding]) -> dict[str, Finding]:
    """Return the cells with an error, each with its first error."""
    errors = [one for one in found if one.severity == "error"]
    return {cell: error for error in reversed(errors) for cell in error.subject}


def envs_by_cell(study: Study, environment: Environment, only: set[str] | None = None) -> Environments:
    """Return the env.json of each run that was read (or of the runs ``only``), with the run's cell."""
    cells = dict(zip(study.runs["run_id"], study.runs["cell_id"], strict=True))
    return [
        (cells[run_id], env) for run_id, env in environment.envs.items() if only is None or run_id in only
    ]


def _incomplete(runs: Sequence[RunRow]) -> Iterator[Finding]:
    missing = [run for run in runs if not run.measured and not run.left_out]
    finding = NoThroughput if len(missing) == len(runs) else IncompleteRuns
    if missing or not runs:
        yield finding(
            subject=distinct(run.cell_id for run in missing),
            runs=len(runs),
            missing=len(missing),
            outcomes=count_outcomes(missing),
            example=one_line(next((messages(run.facts) for run in missing if run.facts), ""), limit=200),
        )


def _damaged_files(study: Study) -> Iterator[Finding]:
    """Yield the first file of each completed run that is not as the run wrote it."""
    runs = zip(study.runs["cell_id"], study.attempts, study.measured, strict=True)
    damaged = [(str(cell), attempt) for cell, attempt, measured in runs if attempt and not measured]
    if damaged:
        files = tuple(Damage(text=find_damage(attempt)) for _, attempt in damaged)
        yield DamagedFiles(subject=distinct(cell for cell, _ in damaged), files=files)


def _differing(study: Study, environment: Environment) -> Iterator[Finding]:
    facts = [name for name in environment.differing if name not in _OWN_KIND]
    unplanned = (
        [one for one in differences(observe(study, environment.envs)) if not one.planned] if facts else []
    )
    if odd := tuple(one.name for one in unplanned if one.kind == "environment" and one.name in facts):
        yield RunsDiffer(differing=odd)


def _not_stable(envs: Environments) -> Iterator[Finding]:
    # A run can have several of these findings.
    by_run = [
        (cell, [one.steps for one in findings_of_env(env) if isinstance(one, NotStable)])
        for cell, env in envs
    ]
    if odd := [(cell, steps) for cell, steps in by_run if steps]:
        is_short = all(number < _FEWEST_TO_TELL for _, steps in odd for number in steps)
        fewest = _FEWEST_TO_TELL if is_short else None
        subject = distinct(cell for cell, _ in odd)
        yield UnstableWarmUp(subject=subject, runs=len(odd), of=len(envs), fewest=fewest)


def _without_parts(envs: Environments) -> Iterator[Finding]:
    found = [(cell, name) for cell, env in envs if (name := str(env.get("strategy"))) in _WITHOUT_PARTS]
    if found:
        strategies = tuple(name for name in _WITHOUT_PARTS if name in {strategy for _, strategy in found})
        cells = [cell for name in strategies for cell, strategy in found if strategy == name]
        titles = tuple(_WITHOUT_PARTS[name] for name in strategies)
        yield PartsNotMeasured(subject=distinct(cells), strategies=strategies, titles=titles)


# -- late and slow nodes --------------------------------------------------------------


def _late_and_slow(study: Study, runs: Sequence[RunRow], ranks: Sequence[RankOfRun]) -> Iterator[Finding]:
    """Yield the nodes on which ranks are late, and the nodes that are slow over all their runs."""
    late = late_nodes_of(stragglers(ranks), [run.cell_id for run in ranks_sample(runs)])
    slow = slow_nodes_of(ranks)
    hosts = {node.host for node in slow}
    advice, needed = _advice(study, ranks, hosts) if hosts else (None, None)
    found = SlowNodes(
        subject=distinct(row.cell_id for row in ranks if row.host in hosts),
        excess={node.host: node.excess for node in slow},
        slow=tuple(slow),
        hosts=len(hosts),
        advice=advice,
        needed=needed,
    )
    if late is not None and hosts & {*late.nodes}:
        own = ("excess", "slow", "hosts", "advice", "needed")
        yield replace(late, **{name: getattr(found, name) for name in own})
        return
    if late is not None:
        yield replace(late, excess=found.excess)
    if hosts:
        yield found


def _advice(study: Study, ranks: Sequence[RankOfRun], slow: Collection[str]) -> tuple[NodeAdvice, int | None]:
    """Return advice about slow nodes (whether the matrix can leave them out), and the nodes it needs."""
    scheduler = SCHEDULERS.get(str(study.plan.get("executor")))
    if scheduler is None or "exclude" not in scheduler.keys or study.plan.get("nodelist"):
        return NodeAdvice.NAMED, None
    largest = int(study.cells["nodes"].max())
    if len({row.host for row in ranks}) - len(slow) < largest:
        return NodeAdvice.FEW, largest
    return NodeAdvice.ENOUGH, None
