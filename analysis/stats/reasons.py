"""Why a cell has no number, or fewer runs than planned: in words, for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pandas as pd

from analysis.data.names import sizes_of
from analysis.data.runs import row_state
from analysis.stats.baselines import asked_for
from analysis.stats.measured import Frames
from analysis.text import count, listed, one_line
from bench.study.ledger import RunState

#: Why a ratio of times to train is called a speedup only.
TO_TRAIN = (
    "no efficiency: a time to train includes convergence, which changes with the global batch; its ratio is "
    "a speedup, not a parallel efficiency"
)

#: Why work that was counted otherwise is not compared.
OTHER_UNIT = (
    "no efficiency: its runs count another unit of work than the plan's samples, or than those of the "
    "baseline"
)

#: What a cell is called when its runs differ: the first of these that one of them has.
_STATE_ORDER = (
    RunState.RUNNING,
    RunState.QUEUED,
    RunState.FAILED,
    RunState.UNKNOWN,
    RunState.CANCELLED,
    RunState.COMPLETED,
    RunState.PLANNED,
)


def cell_states(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one ``state`` per cell_id: completed as soon as one of its runs counts.

    Otherwise running, queued, failed, unknown, cancelled, completed (without a throughput),
    planned, whichever one of its runs has first in this order.
    """
    rank = {str(state): place for place, state in enumerate(_STATE_ORDER)}
    places = runs["state"].map(rank).where(~runs["measured"], -1)
    first = places.groupby(runs["cell_id"]).min()
    names = {-1: str(RunState.COMPLETED), **{place: state for state, place in rank.items()}}
    return pd.DataFrame({"state": first.map(names).astype("str")})


def row_reasons(rows: pd.DataFrame, frames: Frames, *, asked: str | None = None) -> pd.Series:
    """Return each row's reason: missing runs, the baseline, the regime; empty where all is well."""
    runs = _about_runs(frames.runs)
    base = _about_baselines(rows, asked)
    regime = _about_regimes(rows, frames)
    words = []
    for cell_id, place, n in zip(rows["cell_id"], rows["series_place"], rows["n"], strict=True):
        parts = (runs.get(cell_id), regime.get(place), base.get(place) if n else None)
        words.append("; ".join(part for part in parts if part))
    for at in rows.index[rows["other_unit"]]:
        words[at] = "; ".join(filter(None, (words[at], OTHER_UNIT)))
    return pd.Series(words, index=rows.index, dtype="str")


@dataclass
class _Tally:
    """What became of the runs of one cell."""

    total: int = 0
    done: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reason: str = ""

    def __str__(self) -> str:
        told = (
            "no run completed" if self.done == 0 else f"{self.done} of {count(self.total, 'run')} completed"
        )
        what = listed([f"{amount} {kind}" for kind, amount in self.kinds.most_common()], limit=4)
        return f"{told}: {what}" + (f" ({self.reason})" if self.reason else "")


def _about_runs(runs: pd.DataFrame) -> dict[str, str]:
    """Return what is to be said of the runs of each cell in which not all count."""
    tallies: dict[str, _Tally] = {}
    columns = ("cell_id", "measured", "state", "failure_class", "reason")
    for cell_id, measured, state, failure, reason in zip(*(runs[name] for name in columns), strict=True):
        tally = tallies.setdefault(cell_id, _Tally())
        tally.total += 1
        if measured:
            tally.done += 1
            continue
        tally.kinds[_kind(state, failure)] += 1
        tally.reason = tally.reason or one_line(reason, limit=160)
    return {cell_id: str(tally) for cell_id, tally in tallies.items() if tally.kinds}


def _kind(state: str, failure: object) -> str:
    if state == RunState.FAILED and isinstance(failure, str) and failure:
        return f"failed by {failure}"
    return row_state(state)


def _about_baselines(rows: pd.DataFrame, asked: str | None) -> dict[int, str]:
    """Return by series that its baseline is not the smallest planned size, or not the one asked for."""
    based = rows.assign(size=sizes_of(rows))[rows["base_place"].notna()]
    words: dict[int, str] = {}
    if asked:
        base = based[~based["base_place"].isin(rows.index[asked_for(rows, asked)])]
        told = f"the baseline asked for, {one_line(asked, limit=80)}, was not measured in this series"
        return dict.fromkeys(base["series_place"], told)
    smaller = based[(based["gpus"] < based["base_gpus"]) & (based["n"] == 0) & based["ddp"]]
    missing: dict[int, list[str]] = {}
    for place, size in zip(smaller["series_place"], smaller["size"], strict=True):
        missing.setdefault(place, []).append(size)
    names = dict(zip(based["series_place"], based["baseline"], strict=True))
    for place, found in missing.items():
        verb = "has" if len(found) == 1 else "have"
        words[place] = f"the baseline is {names[place]}: {listed(found)} {verb} no completed run"
    return words


def _about_regimes(rows: pd.DataFrame, frames: Frames) -> dict[int, str]:
    """Return by series why it has no efficiency, or another regime than its label says."""
    words: dict[int, str] = {}
    first = rows.drop_duplicates("series_place")
    sizes = rows["series_place"].value_counts()
    table = zip(first["series_place"], first["mode"], first["label_mode"], strict=True)
    whole = set(rows.loc[rows["to_train"], "series_place"])
    for place, mode, label in _odd(table, sizes):
        if place in whole:
            words[place] = TO_TRAIN
        elif mode and not label:
            continue
        elif sizes[place] == 1:
            words[place] = "no efficiency: the series has one cell only"
        elif not mode:
            told = (
                "no efficiency: neither the global batch nor the batch per rank is constant over the series"
            )
            own = rows[rows["series_place"] == place]
            remedy = frames.regime_remedy if _holds_several(own) else ""
            words[place] = "; ".join(filter(None, (told, remedy)))
        else:
            constant = "global batch" if mode == "strong" else "batch per rank"
            words[place] = (
                f"called {label} by {frames.labelled_by}, but its {constant} is constant: {mode} scaling"
            )
    return words


def _holds_several(rows: pd.DataFrame) -> bool:
    """Return whether some rows of a series of neither regime make one of their own: a batch of two sizes."""
    per_rank = rows["global_batch"] / rows["gpus"]
    batches = (rows["global_batch"], per_rank.map(lambda value: f"{value:.9g}"))
    return any(rows["gpus"].groupby(batch).nunique().max() > 1 for batch in batches)


def _odd(table: Iterable[tuple[int, str, str]], sizes: pd.Series) -> list[tuple[int, str, str]]:
    return [row for row in table if row[1] != row[2] or sizes[row[0]] == 1 or not row[1]]
