"""Convert measured points to the frames of a study, for tests of formulas without files."""

import numpy as np
import pandas as pd

from analysis.stats.columns import PARTS, READINGS, CellRow, records_of
from analysis.stats.decompose import TIMES
from analysis.stats.estimate import outliers
from analysis.stats.measured import Frames
from bench.study.ledger import RunState


def frames_of_points(points: pd.DataFrame) -> Frames:
    """Return the frames of measured points.

    Args:
        points: one row per run with ``gpus``; ``global_batch`` or ``per_gpu_batch``;
            ``throughput`` (samples/s) or ``time`` (s per step). Optional: ``nodes`` (1),
            ``series``, ``mode``, ``cell_id`` (if cells of one size differ), ``launcher``,
            ``backend``.
    """
    frame = points.reset_index(drop=True).copy()
    for name, default in {"nodes": 1, "series": "points", "mode": "", "launcher": "", "backend": ""}.items():
        frame[name] = frame.get(name, default)
    if "global_batch" not in frame:
        frame["global_batch"] = frame["per_gpu_batch"] * frame["gpus"]
    if "per_gpu_batch" not in frame:
        frame["per_gpu_batch"] = frame["global_batch"] / frame["gpus"]
    if "throughput" not in frame:
        frame["throughput"] = frame["global_batch"] / frame["time"]
    frame["gpus_per_node"] = (frame["gpus"] // frame["nodes"]).astype("str")
    if "cell_id" not in frame:
        size = frame["nodes"].astype("str") + "x" + frame["gpus_per_node"]
        frame["cell_id"] = frame["series"] + "-" + size + "-b" + frame["per_gpu_batch"].astype("str")
    cells = records_of(CellRow, frame.drop_duplicates("cell_id").assign(ddp=True))
    members = frame.drop_duplicates(["cell_id", "series"])[["cell_id", "series", "mode"]]
    return Frames(cells, members.reset_index(drop=True), _runs_of_points(frame))


def _runs_of_points(frame: pd.DataFrame) -> pd.DataFrame:
    runs = pd.DataFrame({"run_id": [f"row-{place}" for place in range(1, len(frame) + 1)]})
    runs["cell_id"] = frame["cell_id"]
    runs["state"] = str(RunState.COMPLETED)
    runs["reason"] = runs["failure_class"] = ""
    runs["throughput_samples_per_sec"] = frame["throughput"].astype(float)
    runs["measured"] = (runs["throughput_samples_per_sec"] > 0) & np.isfinite(
        runs["throughput_samples_per_sec"]
    )
    runs["step_time_sec"] = frame["global_batch"] / runs["throughput_samples_per_sec"]
    runs["rate"] = runs["throughput_samples_per_sec"]
    runs["outlier"] = outliers(runs["throughput_samples_per_sec"], by=runs["cell_id"])
    missing = pd.DataFrame(
        np.nan, index=runs.index, columns=["unit", "wall_s", *PARTS, "exposed", *TIMES, *READINGS]
    )
    return pd.concat([runs, missing], axis=1).assign(parts_known=False, left_out=False, disturbed=None)
