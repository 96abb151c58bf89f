"""Divide the losses of all cells of a study into causes, for causes.csv, and find the late ranks of runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from analysis.causes.cells import CauseRow, CellDivision, divide_cell, mean_parts
from analysis.causes.claims import MUCH, Reference, RunEvidence, SlowAllReduces
from analysis.causes.divide import COMPUTING, LOST, NOT_EXPLAINED, NOT_VALID, WHOLE, Parts
from analysis.causes.evidence import RunFacts, read_facts
from analysis.checks.assessment import CheckedStudy
from analysis.checks.fabric import FabricRow, fabric_table, sweep_rows
from analysis.checks.scaling_table import Invalid, error_of, scaling_table
from analysis.checks.slow_ranks import Straggler, host_bound, stragglers, unequal_samples
from analysis.data.columns import PARTS, RunRow, ScalingRow, grouped, part_title
from analysis.data.load import RankOfRun, Study
from analysis.stats.decompose import USEFUL_PARTS, mean
from analysis.text import heading
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import clauses, count, known, short_percent

#: If the other parts of computation exceed the typical ones by less than this fraction of the largest excess,
#: the excess is in one part only.
_CONCENTRATED = 0.25
#: Smaller parts of a loss without a cause are not listed.
_SMALLEST_PART = 0.0005


class NotDivided(Finding, kind="not-divided"):
    """A loss that is not divided, because of an error of the cell or its baseline."""

    error: str
    title: str

    def _message(self) -> str:
        because = "because the values are not valid"
        return f"The loss is not divided among causes, {because}: see the error {self.title}."


class SeenIn(Finding, kind="seen-in"):
    """The number of the cell's runs that show a cause; the values are those of ``run_id``."""

    seen: int
    runs: int
    run_id: str | None

    def _message(self) -> str:
        present = f"present in {self.seen} of {count(self.runs, 'run')}"
        return f"{present} (values of {self.run_id})" if self.run_id else present


class AllDisturbed(Finding, kind="all-disturbed"):
    """A cell without an undisturbed run."""

    message = "all runs were disturbed"


class PartsUnknown(Finding, kind="parts-unknown"):
    """A cell whose parts of the step were not measured."""

    message = "the parts of the step were not measured"


@dataclass(frozen=True, kw_only=True)
class PartShare:
    """The share of a part of the step."""

    part: str
    share: float


class Rest(Finding, kind="rest"):
    """The parts of the loss that are not assigned to a cause, the largest first."""

    parts: tuple[PartShare, ...]

    def _message(self) -> str:
        parts = [f"{part_title(one.part)} {short_percent(one.share)}" for one in self.parts]
        return clauses(parts)


def late_ranks(ranks: Sequence[RankOfRun]) -> dict[str, list[Straggler]]:
    """Return the late ranks by run.

    If all ranks of a node with several ranks are late, the cause is the node; if only some are late, the
    cause is these ranks. If a rank is alone on its node, an excess in only one part of the computation means
    a late rank, because a slow node slows all parts. Otherwise, other runs decide: either the rank is also
    late on other nodes, or other ranks are late on this node. They may not decide.
    """
    found = stragglers(ranks)
    if not found:
        return {}
    samples = {(most.run_id, most.rank): ratio for most, _, ratio in unequal_samples(ranks)}
    one_part = _in_one_part(ranks)
    late_here = Counter((row.run_id, row.host) for row in found)
    hosts_of, ranks_on = defaultdict(set), defaultdict(set)
    for row in found:
        if row.host_ranks == 1:
            hosts_of[row.rank].add(row.host)
            ranks_on[row.host].add(row.rank)
    late: dict[str, list[Straggler]] = defaultdict(list)
    for row in found:
        whole = late_here[row.run_id, row.host] == row.host_ranks
        in_one_part = (row.cell_id, row.rank) in one_part
        of_node: bool | None = whole
        if row.host_ranks == 1:
            moves, several = len(hosts_of[row.rank]) > 1, len(ranks_on[row.host]) > 1
            of_node = False if in_one_part else several if several != moves else None
        more = samples.get((row.run_id, row.rank), 1.0)
        own = replace(row, whole_node=whole, of_node=of_node, samples=more, one_part=in_one_part)
        late[row.run_id].append(own)
    return late


def _in_one_part(ranks: Iterable[RankOfRun]) -> set[tuple[str, int]]:
    """Return (cell, rank) of the ranks whose excess is in one part of the computation only.

    The means are over all runs of a cell, so that its runs agree on the cause.
    """
    timed = [row for row in ranks if all(known(getattr(row, USEFUL_PARTS[part])) for part in COMPUTING)]
    found = set()
    for cell, own in grouped(timed, lambda row: row.cell_id).items():
        by_rank = grouped(own, lambda row: row.rank)
        times_s = np.nan_to_num(
            [
                [mean(getattr(row, name) for row in rows) for name in USEFUL_PARTS.values()]
                for rows in by_rank.values()
            ]
        )
        typical_s = np.quantile(times_s, 0.5, axis=0, method="lower")
        more_s = (times_s - typical_s).clip(0)
        excess = np.divide(times_s - typical_s, typical_s, out=np.zeros_like(times_s), where=typical_s > 0)
        _, forward, backward, optimizer, _ = excess.T
        _, forward_s, backward_s, optimizer_s, _ = more_s.T
        low, high = np.minimum(forward, backward), np.maximum(forward, backward)
        computing_s = forward_s + backward_s + optimizer_s
        # The optimizer is short, so its relative excess is noise unless it also is most of the excess in
        # seconds.
        most = optimizer_s > 0.5 * computing_s
        alone = np.where(most, high < _CONCENTRATED * optimizer, low < _CONCENTRATED * high)
        # If most of the excess is in loading data or outside the timers, that of the computation is noise.
        alone &= computing_s > 0.5 * more_s.sum(axis=1)
        found |= {(cell, rank) for rank, is_alone in zip(by_rank, alone, strict=True) if is_alone}
    return found


def read_run_facts(about: CheckedStudy) -> dict[str, RunFacts]:
    """Read the facts of the runs that count, at most :data:`analysis.stats.measured.MAX_RANKS_FILES`."""
    ends = {run_id: record.end for run_id, record in about.study.records.items() if record.end}
    return {
        run.run_id: read_facts(
            run.folder,
            steps=run.steps,
            step_s=run.step_time_sec,
            disturbed=run.disturbed,
            warnings=ends[run.run_id].warnings if run.run_id in ends else None,
        )
        for run in about.sample
        if run.folder
    }


def read_evidence(
    about: CheckedStudy, facts: Mapping[str, RunFacts], *, fabric: Iterable[FabricRow]
) -> dict[str, list[RunEvidence]]:
    """Return the evidence of the runs that count, by cell.

    Runs that are not in ``facts`` get the facts of the first run of their cell that is.
    """
    late, slow_hosts = late_ranks(about.rank_rows), grouped(host_bound(about.rank_rows), attrgetter("run_id"))
    rings, epochs = {fit.cell_id: fit.ring_bytes_per_sec for fit in fabric}, about.study.epochs
    comm_s = epochs.groupby(epochs["run_id"].astype("str"))["comm_time_sec"].mean().to_dict()
    counted = [run for run in about.runs if run.measured and known(run.step_time_sec)]
    found = {}
    for cell, runs in grouped(counted, lambda run: run.cell_id).items():
        parts = [_parts(run) for run in runs]
        if any(WHOLE in one for one in parts):
            parts = [{WHOLE: 1.0}] * len(runs)
        much = frozenset(part for part, share in mean_parts(parts).items() if part in LOST and share >= MUCH)
        mean_s = float(np.mean([run.step_time_sec for run in runs]))
        first = next((run.run_id for run in runs if run.run_id in facts), "")
        limits = Counter(one.rank for run in runs for one in slow_hosts.get(run.run_id, ()))
        most = [rank for rank, number in limits.items() if 2 * number > len(runs)]
        found[cell] = [
            RunEvidence(
                one,
                run.step_time_sec,
                facts.get(source, RunFacts()),
                late.get(source, ()),
                run_id=run.run_id,
                factor=run.step_time_sec / mean_s,
                comm_s=comm_s.get(run.run_id, math.nan),
                ring_bytes_per_s=rings.get(cell, math.nan),
                much=much,
                slow_hosts=slow_hosts.get(source, ()),
                slow_host=most[0] if len(most) == 1 else None,
            )
            for run, one in zip(runs, parts, strict=True)
            for source in (run.run_id if run.run_id in facts else first,)
        ]
    return found


def _parts(run: RunRow) -> Parts:
    """Return each part's fraction of the run's step; if any part is unknown, one part for the whole step."""
    values: dict[str, float] = {part: getattr(run, part) for part in PARTS}
    if math.isnan(run.wait):
        values |= {"wait": 0.0, "transfer": run.exposed}
    total = sum(values.values())
    if not run.parts_known or not (math.isfinite(total) and total > 0):
        return {WHOLE: 1.0}
    return {part: value / total for part, value in values.items()}


def divide_study(
    rows: Sequence[ScalingRow], runs: Mapping[str, Sequence[RunEvidence]]
) -> dict[int, CellDivision]:
    """Divide the loss of each cell in each series.

    Returns:
        The divisions by :attr:`ScalingRow.place`; rows without a run that counts are absent.
    """
    found: dict[int, CellDivision] = {}
    for row in rows:
        if own := runs.get(row.cell_id):
            base = _base_of(row)
            found[row.place] = (
                divide_cell(own) if base is row else _divide_larger(own, row, runs[base.cell_id])
            )
    return found


def _base_of(row: ScalingRow) -> ScalingRow:
    """Return the row of the baseline; the row itself if it has no efficiency."""
    return row.base if row.base and known(row.efficiency) and not row.is_base else row


def _divide_larger(
    runs: Sequence[RunEvidence], row: ScalingRow, base_runs: Sequence[RunEvidence]
) -> CellDivision:
    """Divide the loss of a cell that is not a baseline, relative to its baseline."""
    assert row.base
    if any(WHOLE in run.parts for run in (*runs, *base_runs)):
        runs, base_runs = ([replace(run, parts={WHOLE: 1.0}) for run in own] for own in (runs, base_runs))
    parts = mean_parts([run.relative_parts for run in base_runs])
    waits, base_waits = (mean(run.facts.cpu_wait for run in own) for own in (runs, base_runs))
    reference = Reference(
        facts=base_runs[0].facts,
        parts={part: row.efficiency * value for part, value in parts.items()},
        cpu_wait=base_waits,
        waits_more=not waits <= base_waits,
        batch=row.batch_per_replica / row.base.batch_per_replica,
    )
    found = divide_cell([replace(run, reference=reference) for run in runs], base_runs)
    if WHOLE not in found.parts or not all(one.is_rest for one in found.rows):
        return found
    # Without the parts of the step, the loss is 1 - E, and its interval is that of the efficiency.
    low, high = 1 - row.efficiency_high, 1 - row.efficiency_low
    return replace(found, rows=[replace(one, share_low=low, share_high=high) for one in found.rows])


def cause_rows(
    rows: Sequence[ScalingRow], divisions: Mapping[int, CellDivision], *, invalid: Invalid
) -> list[CauseRow]:
    """Return the content of causes.csv: the rows of each division, in the order of the scaling table.

    A cell that is in ``invalid``, or whose baseline is, has the row ``not-valid``, and the causes that do not
    depend on times, without shares.
    """
    found = []
    for row in rows:
        if (division := divisions.get(row.place)) is None:
            continue
        own = division.rows
        if error := error_of(row, _base_of(row), invalid):
            nan = math.nan
            timeless = [one for one in own if one.timeless]
            own = [CauseRow(NOT_VALID, evidence=(NotDivided(error=error.kind, title=heading(error)),))]
            own += [replace(one, share=nan, share_low=nan, share_high=nan, timed=False) for one in timeless]
        for one in own:
            evidence = _evidence(one, division, row)
            found.append(replace(one, series=row.series, cell_id=row.cell_id, evidence=evidence))
    return found


def _evidence(cause: CauseRow, division: CellDivision, row: ScalingRow) -> tuple[Finding, ...]:
    """Return the evidence for a row of causes.csv, with the number of runs that show it."""
    if cause.cause == NOT_EXPLAINED:
        if WHOLE in division.parts:
            return (PartsUnknown(),)
        parts = tuple(one for one in rest_parts(division) if abs(one.share) >= _SMALLEST_PART)
        return (Rest(parts=parts),) if parts else ()
    if cause.is_rest:
        return cause.evidence
    found = [*cause.evidence]
    if row.n > 1:
        # The rate of the network is that of all runs.
        run_id = None if any(isinstance(one, SlowAllReduces) for one in cause.evidence) else cause.run_id
        found.append(SeenIn(seen=cause.runs, runs=row.n, run_id=run_id))
    if row.n_undisturbed == 0:
        found.append(AllDisturbed())
    return tuple(found)


def rest_parts(division: CellDivision) -> list[PartShare]:
    """Return the parts of a loss not assigned to a cause, the largest first."""
    rests = {part: value for part, value in division.rests.items() if part not in COMPUTING}
    slower = sum(division.rests.get(part, 0.0) for part in COMPUTING)
    rests["longer" if slower >= 0 else "shorter"] = slower
    parts = [PartShare(part=part, share=share) for part, share in rests.items()]
    return sorted(parts, key=lambda one: -abs(one.share))


# -- the causes of a study or a run, read from its folder -----------------------------


def named(rows: Iterable[CauseRow]) -> list[CauseRow]:
    """Return the rows that name a cause; of a cell in several series, those of the first."""
    found: dict[tuple[Any, ...], CauseRow] = {}
    for row in rows:
        if not row.is_rest:
            found.setdefault((row.cell_id, row.cause, row.node, row.rank), row)
    return list(found.values())


def study_causes(study: Study, *, also_invalid: bool = False) -> list[CauseRow]:
    """Return the content of causes.csv of a study; with ``also_invalid``, cells with an error are divided."""
    about = CheckedStudy.of(study)
    return causes_of(about, {} if also_invalid else about.invalid)


def run_causes(study: Study, run_id: str) -> list[CauseRow]:
    """Return the causes of one run, in the form of causes.csv, relative to the baseline of its cell.

    The list is empty if the run has no throughput. Disturbed runs are included.
    """
    about = CheckedStudy.of(study, include_disturbed=True)
    own = {run.cell_id for run in about.runs if run.run_id == run_id and run.measured}
    row = next((row for row in about.rows if row.cell_id in own), None)
    if row is None:
        return []
    cells = () if row.is_base or not row.base else (row.base.cell_id,)
    runs = [run for run in about.runs if run.run_id == run_id or run.cell_id in cells]
    alone = replace(about.frames, runs=runs)
    rows = [row for row in scaling_table(alone) if row.n]
    found = causes_of(CheckedStudy(study, alone, rows), about.invalid)
    series = next(one.series for one in rows if one.cell_id == row.cell_id)
    return [one for one in found if (one.series, one.cell_id) == (series, row.cell_id)]


def causes_of(about: CheckedStudy, invalid: Invalid) -> list[CauseRow]:
    """Return the content of causes.csv; the losses of the cells in ``invalid`` are not divided."""
    runs = read_evidence(about, read_run_facts(about), fabric=fabric_table(sweep_rows(about.study)))
    return cause_rows(about.rows, divide_study(about.rows, runs), invalid=invalid)
