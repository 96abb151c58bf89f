"""Sizes that were not measured: what a series' law expects of them, or why there is no forecast."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.stats.laws.choose import REACH, LawFit, fit_laws
from analysis.stats.laws.communication import Fabric
from analysis.stats.laws.path import Refusal, runs_of
from analysis.stats.measured import Frames
from analysis.text import count, one_line

#: Beyond twice the largest measured size, and only when asked for, up to this many times it.
FAR = 8
#: Of many series with reasons of their own, so many are told.
_MAX_REASONS = 3
_COLUMNS = (
    *("like", "nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch"),
    *("step_time_s", "low_s", "high_s", "throughput_samples_per_sec", "remark"),
)


def forecasts(
    frames: Frames, rows: pd.DataFrame, *, fabrics: Mapping[str, Fabric], beyond: bool = False
) -> tuple[pd.DataFrame, list[str]]:
    """Return larger sizes of each series with the time per step that its law expects, and refusals.

    Only over nodes with the ranks per node of the largest measured cell: what a first node more
    costs cannot be known from one node. Sizes double from the largest measured one; up to
    twice, or up to 8 times with ``beyond``.

    Args:
        frames: from :func:`analysis.stats.measured.measure`.
        rows: from :func:`analysis.stats.scaling.scale`; cells without DDP take no part.
        fabrics: by series, the all-reduce as probed: the law is then the page's.
        beyond: predict beyond twice the largest measured size, too.

    Returns:
        One row per size: the ``cell_id`` it is ``like`` (all but the size), seconds per step with
        the interval of one further run (90 %); and in words why series have none.
    """
    parts: list[pd.DataFrame] = []
    refusals: dict[str, list[str]] = {}
    for series, own in rows[(rows["n"] > 0) & rows["ddp"]].groupby("series", sort=False):
        found = _forecast(frames, own, fabrics.get(str(series)), beyond=beyond)
        if isinstance(found, Refusal):
            refusals.setdefault(str(found), []).append(one_line(series, limit=60))
        else:
            parts.append(found)
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(_COLUMNS))
    return frame, _told(refusals)


def _told(refusals: dict[str, list[str]]) -> list[str]:
    """Return in words why series have no forecast, the reasons of the most series first."""
    ranked = sorted(refusals.items(), key=lambda item: -len(item[1]))
    words = [f"no size is predicted for {_named(names)}: {why}" for why, names in ranked[:_MAX_REASONS]]
    rest = sum(len(names) for _, names in ranked[_MAX_REASONS:])
    if rest:
        words.append(
            f"no size is predicted for {count(rest, 'more series', 'more series')}, for such reasons"
        )
    return words


def _named(series: list[str]) -> str:
    return series[0] if len(series) == 1 else count(len(series), "series", "series")


def _forecast(
    frames: Frames, rows: pd.DataFrame, fabric: Fabric | None, *, beyond: bool
) -> pd.DataFrame | Refusal:
    largest = rows.sort_values(["gpus", "nodes"], ascending=[False, True], kind="stable").iloc[0]
    if rows["mode"].iloc[0] not in ("strong", "weak"):
        return Refusal("neither the global batch nor the batch per rank is constant")
    if largest["nodes"] < 2 or not str(largest["gpus_per_node"]).isdecimal():
        return Refusal("larger sizes need more nodes, and the series was not measured over equal nodes")
    fit = fit_laws(runs_of(rows, frames), mode=str(largest["mode"]), probes=fabric)
    if isinstance(fit, Refusal):
        return fit
    if fit.largest < largest["gpus"]:
        return Refusal(f"its law holds {fit.path}, and the largest size was measured otherwise")
    return _predicted(fit, largest, beyond=beyond)


def _predicted(fit: LawFit, largest: pd.Series, *, beyond: bool) -> pd.DataFrame | Refusal:
    strong = largest["mode"] == "strong"
    batch = int(largest["global_batch"])
    reach = FAR if beyond else REACH
    factors = [2**power for power in range(1, 4) if 2**power <= reach]
    factors = [factor for factor in factors if not strong or largest["per_gpu_batch"] % factor == 0]
    if not factors:
        return Refusal("the batch per rank of the largest size cannot be halved")
    law = fit.predict([factor * int(largest["gpus"]) for factor in factors], beyond=beyond)
    growth = law["gpus"] / int(largest["gpus"])
    per_rank = largest["per_gpu_batch"]
    frame = pd.DataFrame({"gpus": law["gpus"], "nodes": (growth * int(largest["nodes"])).astype("int64")})
    frame["like"], frame["gpus_per_node"] = largest["cell_id"], largest["gpus_per_node"]
    frame["global_batch"] = batch if strong else (growth * batch).astype("int64")
    frame["per_gpu_batch"] = (per_rank / growth).astype("int64") if strong else per_rank
    frame["step_time_s"], frame["low_s"], frame["high_s"] = law["step_time_sec"], law["low"], law["high"]
    frame["throughput_samples_per_sec"] = frame["global_batch"] / frame["step_time_s"]
    frame["remark"] = [
        f"{fit.chosen.law.title}; beyond twice the largest measured size" if far else fit.chosen.law.title
        for far in law["beyond"]
    ]
    return frame[list(_COLUMNS)]
