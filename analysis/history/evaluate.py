"""Evaluate a study for the history: its points are rows of its scaling table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.checks.assessment import CheckedStudy
from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import RunRow, ScalingRow, grouped
from analysis.data.environment import facts_of_run, value_of
from analysis.data.load import Study, load_study
from analysis.history.key import cell_settings, key_of, shown_settings
from analysis.history.series import Point
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import measure, run_values
from analysis.stats.rates import RATES, rate_unit
from analysis.text import clean, heading, one_line, plain
from bench.study.layout import StudyFolder
from bench.study.ledger import RunState
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, known, listed, slurm_time

#: The number of studies whose tables are grouped together.
_AT_ONCE = 50
#: Facts of runs that are settings of the cell or follow from them; hosts are nodes.
_NOT_FACTS = ("backend", "launcher", "strategy", "device_name", "parameters", "gradient_bytes", "hosts")


Evaluated = tuple[list[Point], dict[str, str]]


def evaluate(folders: Mapping[str, StudyFolder]) -> dict[str, Evaluated]:
    """Return the points of studies, and why cells, or ``""`` for the whole study, are left out."""
    found: dict[str, Evaluated] = {}
    for start in range(0, len(folders), _AT_ONCE):
        studies = {}
        for name, folder in [*folders.items()][start : start + _AT_ONCE]:
            try:
                studies[name] = load_study(folder.path)
            except (BenchError, OSError) as error:
                found[name] = [], {"": str(error)}
        for (name, study), values in zip(studies.items(), _values_of([*studies.values()]), strict=True):
            found[name] = _evaluate(study, values, name)
    return found


def _values_of(studies: Sequence[Study]) -> list[dict[str, dict[str, float]]]:
    """Return the measurements of the runs of each study: pandas is slow for many small tables."""
    found: list[dict[str, dict[str, float]]] = [{} for _ in studies]
    frames = [
        one.epochs.assign(run_id=f"{place}/" + one.epochs["run_id"].astype("str"), cell_id="")
        for place, one in enumerate(studies)
    ]
    for name, values in run_values(pd.concat(frames, ignore_index=True)).items() if frames else ():
        place, _, run_id = name.partition("/")
        found[int(place)][run_id] = values
    return found


def _evaluate(study: Study, values: Mapping[str, Mapping[str, float]], name: str) -> Evaluated:
    states = [record.state for record in study.records.values()]
    if active := sum(state.active for state in states):
        return [], {"": f"{count(active, 'run')} not ended"}
    if RunState.COMPLETED not in states:
        return [], {"": "no run completed"}
    frames = measure(study, values=values)
    about = CheckedStudy(study, frames, scaling_table(frames))
    points, left_out = [], {}
    for cell_id, rows in grouped(rate_unit(about.rows).rows(about.rows), lambda row: row.cell_id).items():
        runs = frames.measured_in(cell_id)
        if error := about.invalid.get(cell_id):
            left_out[cell_id] = f"not valid: {heading(error)}"
        elif len(runs) < MIN_RUNS:
            left_out[cell_id] = f"fewer than {MIN_RUNS} measured runs"
        elif not all(run.ended_at for run in runs):
            left_out[cell_id] = "the time of a run is not known"
        else:
            row = next((row for row in rows if known(row.efficiency)), rows[0])
            points.append(_point(about, row, runs, name))
    return points, left_out


def _point(about: CheckedStudy, row: ScalingRow, runs: Sequence[RunRow], study: str) -> Point:
    """Return the point of a cell with its measured runs."""
    plan = about.study.plan
    cell = next(one for one in plan["cells"] if clean(one["cell_id"]) == row.cell_id)
    envs = [about.environment.envs.get(run.run_id, {}) for run in runs]
    devices = sorted({name for env in envs if (name := value_of(env, "device_name"))})
    settings = cell_settings(cell, executor=plan["executor"], device_name=listed(devices))
    names = ("efficiency", "efficiency_low", "efficiency_high")
    efficiency = {name: plain(getattr(row, name)) for name in names if not about.error_of(row)}
    rate, low, high = (plain(getattr(row, name)) for name in RATES)
    return Point(
        key=key_of(settings),
        settings=shown_settings(settings, cell["swept"]),
        study=study,
        cell=row.cell_id,
        date=max(f"{run.ended_at:%Y-%m-%dT%H:%M:%SZ}" for run in runs),
        runs=[_digest([plan.get("key"), run.run_id, run.attempt, str(run.ended_at)]) for run in runs],
        log_mean=row.log_mean,
        rate=rate,
        low=low,
        high=high,
        unit=rate_unit(about.rows).name,
        **dict.fromkeys(names) | efficiency,
        exposed=plain(1 - row.pop_parallel_efficiency) if row.ddp else None,
        memory_bytes=plain(row.peak_mem_bytes),
        facts=_facts(plan, cell, runs, envs),
    )


def _facts(
    plan: Mapping[str, Any], cell: Mapping[str, Any], runs: Sequence[RunRow], envs: Sequence[dict[str, Any]]
) -> dict[str, str]:
    setup = [own for own in (plan.get("setup"), plan.get("env_from")) if own]
    found = {
        "package": {clean(plan.get("package")).removesuffix(".zip").rpartition("-")[2][:8]},
        "image": {one_line(plan.get("image"), limit=120)},
        "setup": {_digest(setup)[:8]} if setup else set(),
        "time limit": {slurm_time(cell["resources"]["time_limit_s"])},
        "script": {clean(env.get("script_sha256"))[:8] for env in envs},
        "nodes": {run.hosts or "" for run in runs},
    }
    for env in envs:
        for _, name, value in facts_of_run(env):
            if name == "hosts" and not any(run.hosts for run in runs):
                found["nodes"].add(value)
            elif name not in _NOT_FACTS and name not in cell["env"]:
                found.setdefault(name, set()).add(value)
    texts = {name: listed(sorted(values - {""}), limit=8) for name, values in found.items()}
    return {name: text for name, text in texts.items() if text}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
