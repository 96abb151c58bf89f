"""Divide the losses of all cells of a study into causes, for causes.csv, and find the late ranks of runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.causes.catalogue import (
    NOT_EXPLAINED,
    NOT_VALID,
    OTHER,
    RESTS,
    TOGETHER,
    no_causes,
    remedy_of,
)
from analysis.causes.cells import Baseline, CellDivision, CellRun, Share, divide_cell, without_times
from analysis.causes.claims import MUCH_LOADING, LateRank, RunEvidence
from analysis.causes.divide import COMPUTING, WHOLE, Parts
from analysis.causes.evidence import RunFacts, read_facts
from analysis.checks.assessment import assess
from analysis.checks.fabric import fabric_table, sweep_rows
from analysis.checks.scaling_table import Invalid, invalid_reason, scaling_table
from analysis.checks.slow_ranks import PART_WORDS, stragglers, unequal_samples
from analysis.data.load import Study
from analysis.stats.columns import PARTS
from analysis.stats.decompose import USEFUL_PARTS
from analysis.stats.estimate import lower_median
from analysis.stats.measured import Frames, measure, ranks_sample
from analysis.text import listed, percent

_PART_OF_WORDS = {words: part for part, words in PART_WORDS.items()}
#: If the other parts of computation exceed the typical ones by less than this fraction of the largest excess,
#: the excess is in one part only.
_CONCENTRATED = 0.25
_BOTH = TOGETHER.join(("late-rank", "late-node"))
#: Columns of report/causes.csv. Shares are fractions of the cell's step time; those of a cell add up to its
#: loss. ``share`` is empty for a cause whose time is not known. ``run_id`` is a run that shows the cause.
CAUSE_COLUMNS = (
    *("series", "cell_id", "cause", "share", "share_low", "share_high", "run_id", "node", "rank", "part"),
    *("evidence", "remedy"),
)
#: Words for the parts of a step that are lost time at any size.
LOST_WORDS = {part: PART_WORDS[part] for part in ("data", "other")} | {
    "transfer": "exposed communication",
    "wait": "waiting for other ranks",
}


def late_ranks(ranks: pd.DataFrame) -> dict[str, list[LateRank]]:
    """Return the late ranks by run.

    If all ranks of a node with several ranks are late, the cause is the node; if only some are late, the
    cause is these ranks. If a rank is alone on its node, an excess in only one part of the computation means
    a late rank, because a slow node slows all parts. Otherwise, other runs decide: either the rank is also
    late on other nodes, or other ranks are late on this node. If they do not decide, both causes are named.
    ``ranks`` are rows of ranks.csv with ``run_id`` and ``cell_id``.
    """
    found = stragglers(ranks)
    if not len(found):
        return {}
    samples = {
        (row["run_id"], row["most"]): float(row["ratio"]) for row in unequal_samples(ranks).to_dict("records")
    }
    late_here = found.groupby(["run_id", "host"])["rank"].transform("size")
    found["whole"] = late_here == found["host_ranks"]
    one_part = _in_one_part(ranks)
    moves = _moves(found)
    late: dict[str, list[LateRank]] = defaultdict(list)
    for row in found.to_dict("records"):
        run_id, rank, host = str(row["run_id"]), int(row["rank"]), str(row["host"])
        in_one_part = (str(row["cell_id"]), rank) in one_part
        if row["host_ranks"] > 1:
            cause = "late-node" if row["whole"] else "late-rank"
        elif in_one_part:
            cause = "late-rank"
        else:
            cause = moves.get((rank, host), _BOTH)
        late[run_id].append(
            LateRank(
                rank,
                host,
                float(row["share_of_step"]),
                float(row["excess_sec"]),
                _PART_OF_WORDS.get(row["part"], row["part"]),
                bool(row["whole"]),
                cause,
                samples.get((run_id, rank), 1.0),
                in_one_part,
                float(row["part_share"]),
                int(row["ranks"]),
            )
        )
    return late


def _moves(found: pd.DataFrame) -> dict[tuple[int, str], str]:
    """Return the cause by (rank, host), for ranks that are alone on their hosts.

    It is ``late-rank`` if a rank is late on several hosts, ``late-node`` if a host has several late ranks.
    """
    names = {}
    alone = found[found["host_ranks"] == 1]
    for rank, host in alone[["rank", "host"]].drop_duplicates().itertuples(index=False):
        nodes = alone.loc[alone["rank"] == rank, "host"].nunique()
        ranks = alone.loc[alone["host"] == host, "rank"].nunique()
        if (nodes > 1) != (ranks > 1):
            names[(int(rank), str(host))] = "late-rank" if nodes > 1 else "late-node"
    return names


def _in_one_part(ranks: pd.DataFrame) -> set[tuple[str, int]]:
    """Return (cell, rank) of the ranks whose excess is in one part of the computation only.

    The means are over all runs of a cell, so that its runs agree on the cause.
    """
    computing = [USEFUL_PARTS[part] for part in COMPUTING]
    frame = ranks[ranks[computing].notna().all(axis=1)]
    keys = [frame["cell_id"].astype("str"), frame["rank"].astype("int64")]
    means = frame.groupby(keys)[list(USEFUL_PARTS.values())].mean().fillna(0)
    if not len(means):
        return set()
    typical = lower_median(means.groupby(level=0)).reindex(means.index, level=0)
    more_s = (means - typical).clip(lower=0)
    excess = ((means - typical) / typical.where(typical > 0)).fillna(0)
    both = excess[[USEFUL_PARTS["forward"], USEFUL_PARTS["backward"]]]
    optimizer = USEFUL_PARTS["optimizer"]
    # The optimizer is short, so its relative excess is noise unless it also is most of the excess in seconds.
    most = more_s[optimizer] > 0.5 * more_s[computing].sum(axis=1)
    alone = ~most & (both.min(axis=1) < _CONCENTRATED * both.max(axis=1))
    alone |= most & (both.max(axis=1) < _CONCENTRATED * excess[optimizer])
    # If most of the excess is in loading data or outside the timers, that of the computation is noise.
    alone &= more_s[computing].sum(axis=1) > 0.5 * more_s.sum(axis=1)
    return {(str(cell), int(rank)) for cell, rank in means.index[alone]}


@dataclass(frozen=True)
class StudyEvidence:
    """The evidence for causes in a study.

    Attributes:
        facts: the facts of each run that was read, by run_id.
        late: the late ranks of each run, by run_id.
        rings: the fitted rate of the network (bytes/s), by cell_id.
        comm_s: the total communication per step (s), by run_id; NaN if it was not measured.
    """

    facts: Mapping[str, RunFacts]
    late: Mapping[str, Sequence[LateRank]]
    rings: Mapping[str, float]
    comm_s: Mapping[str, float]


def read_evidence(study: Study, frames: Frames, *, fabric: pd.DataFrame | None = None) -> StudyEvidence:
    """Read a study's evidence from at most :data:`analysis.stats.measured.MAX_RANKS_FILES` of its runs."""
    sample = ranks_sample(frames.runs)
    attempts = dict(zip(study.runs["run_id"], study.attempts, strict=True))
    facts = {
        row["run_id"]: read_facts(
            attempt,
            steps=float(row["steps"]),
            step_s=float(row["step_time_sec"]),
            disturbed=row["disturbed"],
        )
        for row in sample[["run_id", "steps", "step_time_sec", "disturbed"]].to_dict("records")
        if (attempt := attempts.get(row["run_id"]))
    }
    ranks = study.ranks_of(sample["run_id"])
    table = fabric if fabric is not None else pd.DataFrame(columns=["cell_id", "ring_bytes_per_sec"])
    fitted = table[table["ring_bytes_per_sec"].notna()]
    rings = dict(zip(fitted["cell_id"], fitted["ring_bytes_per_sec"].astype(float), strict=True))
    by_run = study.epochs.groupby(study.epochs["run_id"].astype("str"))["comm_time_sec"].mean()
    comm_s = {str(run_id): float(value) for run_id, value in by_run.items()}
    return StudyEvidence(facts, late_ranks(ranks), rings, comm_s)


def divide_study(frames: Frames, rows: pd.DataFrame, evidence: StudyEvidence) -> dict[int, CellDivision]:
    """Divide the loss of each cell in each series.

    Returns:
        The divisions by index label of ``rows``; rows without a run that counts are absent.
    """
    runs = _runs_by_cell(frames, evidence)
    found: dict[int, CellDivision] = {}
    bases: dict[str, CellDivision] = {}
    records = dict(zip(rows.index, rows.to_dict("records"), strict=True))
    for place, row in records.items():
        own = runs.get(row["cell_id"])
        if not own:
            continue
        if row["cell_id"] not in bases and (row["is_base"] or not _has_base(row)):
            bases[row["cell_id"]] = divide_cell(own)
        if not _has_base(row) or row["is_base"]:
            found[place] = bases[row["cell_id"]]
            continue
        base = records[int(row["base_place"])]
        base_runs = runs[base["cell_id"]]
        if base["cell_id"] not in bases:
            bases[base["cell_id"]] = divide_cell(base_runs)
        found[place] = _divide_larger(own, row, base_runs, base, bases[base["cell_id"]])
    return found


def _has_base(row: Mapping[Any, Any]) -> bool:
    return math.isfinite(row["efficiency"]) and not pd.isna(row["base_place"])


def _divide_larger(
    runs: Sequence[CellRun],
    row: Mapping[Any, Any],
    base_runs: Sequence[CellRun],
    base: Mapping[Any, Any],
    division: CellDivision,
) -> CellDivision:
    """Divide the loss of a cell that is not a baseline, relative to its baseline."""
    efficiency = float(row["efficiency"])
    reference = {part: efficiency * value for part, value in division.ideal.items()}
    if any(WHOLE in run.evidence.parts for run in runs):
        reference = {WHOLE: sum(reference.values())}
    batch = row["global_batch"] / row["gpus"] / (base["global_batch"] / base["gpus"])
    facts = base_runs[0].evidence.facts
    runs = [
        replace(run, evidence=replace(run.evidence, reference=facts, smaller_batch=float(batch)))
        for run in runs
    ]
    factors = [run.factor for run in base_runs]
    error = float(np.std(factors, ddof=1)) / math.sqrt(len(factors)) if len(factors) > 1 else math.nan
    found = divide_cell(runs, Baseline(reference, len(factors), error))
    if WHOLE not in found.ideal or any(one.key.cause not in RESTS for one in found.rows):
        return found
    # Without the parts of the step, the loss is 1 - E, and its interval is that of the efficiency.
    low, high = 1 - float(row["efficiency_high"]), 1 - float(row["efficiency_low"])
    whole = [
        replace(one, low=low, high=high) if one.key.cause == NOT_EXPLAINED else one for one in found.rows
    ]
    return replace(found, rows=whole)


def _runs_by_cell(frames: Frames, evidence: StudyEvidence) -> dict[str, list[CellRun]]:
    """Return the runs of each cell; a run whose files were not read gets the facts of another run."""
    counted = frames.runs[frames.runs["measured"] & frames.runs["step_time_sec"].notna()]
    columns = ["run_id", "cell_id", "step_time_sec", "exposed", "parts_known", *PARTS]
    grouped: dict[str, list[dict[Any, Any]]] = defaultdict(list)
    for row in counted[columns].to_dict("records"):
        grouped[str(row["cell_id"])].append(row)
    found = {}
    for cell, own in grouped.items():
        parts = [_parts(row) for row in own]
        if any(WHOLE in one for one in parts):
            parts = [{WHOLE: 1.0}] * len(own)
        loading = float(np.mean([one.get("data", 0.0) for one in parts])) >= MUCH_LOADING
        mean_s = float(np.mean([row["step_time_sec"] for row in own]))
        first = next((row["run_id"] for row in own if row["run_id"] in evidence.facts), own[0]["run_id"])
        found[cell] = [
            CellRun(
                str(row["run_id"]),
                RunEvidence(
                    one,
                    float(row["step_time_sec"]),
                    evidence.facts.get(row["run_id"]) or evidence.facts.get(first, RunFacts()),
                    evidence.late.get(row["run_id"] if row["run_id"] in evidence.facts else first, ()),
                    comm_s=evidence.comm_s.get(row["run_id"], math.nan),
                    ring_bytes_per_s=evidence.rings.get(cell, math.nan),
                    loading=loading,
                ),
                float(row["step_time_sec"]) / mean_s,
            )
            for row, one in zip(own, parts, strict=True)
        ]
    return found


def _parts(row: Mapping[Any, Any]) -> Parts:
    """Return each part's fraction of the run's step; if any part is unknown, one part for the whole step."""
    values = {part: float(row[part]) for part in PARTS}
    if math.isnan(values["wait"]):
        values |= {"wait": 0.0, "transfer": float(row["exposed"])}
    total = sum(values.values())
    if not row["parts_known"] or not (math.isfinite(total) and total > 0):
        return {WHOLE: 1.0}
    return {part: value / total for part, value in values.items()}


def causes_frame(
    rows: pd.DataFrame, divisions: Mapping[int, CellDivision], *, invalid: Invalid | None = None
) -> pd.DataFrame:
    """Return the content of causes.csv: the rows of each division, in the order of the scaling table.

    A cell that is in ``invalid``, or whose baseline is, has the row ``not-valid``, and the causes that do not
    depend on times, without shares.
    """
    lines = []
    records = dict(zip(rows.index, rows.to_dict("records"), strict=True))
    for place, division in divisions.items():
        row = records[place]
        base = records[int(row["base_place"])] if _has_base(row) else row
        if error := invalid_reason(row, base, invalid or {}):
            names = {"series": row["series"], "cell_id": row["cell_id"], "cause": NOT_VALID}
            lines.append(names | {"evidence": no_causes(error), "remedy": remedy_of(NOT_VALID)})
            division = without_times(division)
        for share in division.rows:
            claim = share.claim
            lines.append(
                {
                    "series": row["series"],
                    "cell_id": row["cell_id"],
                    "cause": share.key.cause,
                    "share": share.share,
                    "share_low": share.low,
                    "share_high": share.high,
                    "run_id": share.run_id,
                    "node": claim.node if claim else "",
                    "rank": share.key.rank,
                    "part": claim.part if claim else "",
                    "evidence": evidence_text(share, division, row),
                    "remedy": remedy_of(share.key.cause),
                }
            )
    frame = pd.DataFrame(lines, columns=list(CAUSE_COLUMNS))
    return frame.astype({"rank": "Int64", "share": float, "share_low": float, "share_high": float})


def evidence_text(share: Share, division: CellDivision, row: Mapping[Any, Any] | pd.Series) -> str:
    """Return the evidence of a row in one line."""
    if share.key.cause == OTHER:
        text = f"{percent(share.share, decimals=1)} of the step is outside all timers"
        return text if share.share > 0 else ""
    if share.key.cause == NOT_EXPLAINED:
        return _rest_text(division)
    assert share.claim is not None
    n = int(row["n"])
    values = "" if share.key.cause == "slow-fabric" else f"values of {share.run_id}; "
    runs = f" ({values}present in {share.runs} of {n} runs)" if n > 1 else ""
    disturbed = "; all runs were disturbed" if row["n_undisturbed"] == 0 else ""
    return f"{share.claim.evidence}{runs}{disturbed}"


def _rest_text(division: CellDivision) -> str:
    """Describe the parts of the loss that are not assigned to a cause, the largest first."""
    if WHOLE in division.rests:
        return "the parts of the step were not measured"
    texts = [
        f"{name} {percent(value, decimals=1)}" for name, value in rest_parts(division) if abs(value) >= 0.0005
    ]
    return f"of the step: {listed(texts)}" if texts else ""


def rest_parts(division: CellDivision) -> list[tuple[str, float]]:
    """Return the parts of a loss not assigned to a cause, in words, with their shares; the largest first."""
    rests = {part: value for part, value in division.rests.items() if part not in COMPUTING}
    slower = sum(division.rests.get(part, 0.0) for part in COMPUTING)
    words = {LOST_WORDS.get(part, part): value for part, value in rests.items()}
    words[f"{'longer' if slower >= 0 else 'shorter'} computation per sample"] = slower
    return sorted(words.items(), key=lambda one: -abs(one[1]))


# -- the causes of a study or a run, read from its folder -----------------------------


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of causes.csv that name a cause."""
    return frame[~frame["cause"].isin(RESTS)]


def study_causes(study: Study, *, also_invalid: bool = False) -> pd.DataFrame:
    """Return the content of causes.csv of a study; with ``also_invalid``, cells with an error are divided."""
    frames = measure(study)
    rows = scaling_table(frames)
    evidence = read_evidence(study, frames, fabric=fabric_table(sweep_rows(study)))
    invalid = {} if also_invalid else assess(study, frames, rows).invalid
    return causes_frame(rows, divide_study(frames, rows, evidence), invalid=invalid)


def run_causes(study: Study, run_id: str) -> pd.DataFrame:
    """Return the causes of one run, in the form of causes.csv, relative to the baseline of its cell.

    The frame is empty if the run has no throughput. Disturbed runs are included.
    """
    frames = measure(study, include_disturbed=True)
    every = scaling_table(frames)
    own = frames.runs[(frames.runs["run_id"] == run_id) & frames.runs["measured"]]
    rows = every[every["cell_id"].isin(own["cell_id"])].head(1)
    if not len(rows):
        return causes_frame(rows, {})
    row = rows.iloc[0]
    invalid = assess(study, frames, every).invalid
    runs = frames.runs
    kept = (runs["run_id"] == run_id) | ((runs["cell_id"] == row["base_cell"]) & ~row["is_base"])
    alone = replace(frames, runs=runs[kept].reset_index(drop=True))
    table = scaling_table(alone)
    table = table[table["n"] > 0]
    evidence = read_evidence(study, alone, fabric=fabric_table(sweep_rows(study)))
    divisions = divide_study(alone, table, evidence)
    place = table.index[table["cell_id"] == row["cell_id"]][0]
    return causes_frame(table, {place: divisions[place]}, invalid=invalid)
