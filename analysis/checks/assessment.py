"""Decide which cells of a study are valid: the one answer that all commands use.

:func:`assess` collects the findings of :mod:`analysis.checks.validity`. A cell is not valid if a finding with
the severity ``error`` names it. :attr:`Assessment.checks` says which checks the study's files made possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from analysis.checks.disturbed import CommonCondition, DisturbedRuns
from analysis.checks.drift import Drift, DriftInRun, WideIntervals, changes_in_runs, timed_runs
from analysis.checks.nodes import (
    CrowdedCores,
    DifferingNodes,
    Environments,
    UnequalThreads,
    facts_of_nodes,
    threads_of,
)
from analysis.checks.samples import OtherBatch, PausedRank, ReplicasApart, UnevenSamples
from analysis.checks.scaling_table import Invalid, scaling_table
from analysis.checks.slow_ranks import SlowNodes
from analysis.checks.validity import (
    DamagedFiles,
    IncompleteRuns,
    NoThroughput,
    RunsDiffer,
    UnstableWarmUp,
    envs_by_cell,
    invalid_cells,
    validity,
)
from analysis.data.environment import Environment, describe_environment, positive
from analysis.data.load import Study
from analysis.stats.columns import ScalingRow
from analysis.stats.measured import Frames, measure, ranks_sample
from analysis.text import clean
from bench.study.conditions import objects
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import known

#: The checks, each with the classes of its findings. A check is possible for a cell if its files contain the
#: values that the check compares.
CHECKS: dict[str, tuple[type[Finding], ...]] = {
    "throughput": (NoThroughput, IncompleteRuns, DamagedFiles),
    "batch": (OtherBatch,),
    "together": (ReplicasApart,),
    "disturbances": (CommonCondition, DisturbedRuns),
    "cores": (CrowdedCores,),
    "threads": (UnequalThreads,),
    "samples": (UnevenSamples,),
    "windows": (PausedRank,),
    "late-ranks": (SlowNodes,),
    "nodes": (DifferingNodes,),
    "environment": (RunsDiffer,),
    "warm-up": (UnstableWarmUp,),
    "drift": (Drift,),
    "drift-in-run": (DriftInRun,),
    "intervals": (WideIntervals,),
}


class Check(NamedTuple):
    """One check of a study: its name, the number of its findings, and the cells for which it is possible.

    ``cells`` is the number of cells to which the check applies; ``possible`` of them have the values that it
    needs.
    """

    name: str
    findings: int
    cells: int
    possible: int

    @property
    def passed(self) -> bool:
        """True if the check was possible for all cells and found nothing."""
        return not self.findings and self.possible == self.cells

    @property
    def missing(self) -> bool:
        """True if the check found nothing, but was not possible for all cells."""
        return not self.findings and self.possible < self.cells

    def as_json(self) -> dict[str, Any]:
        """Return the check as ``bench report --json`` prints it."""
        return {"check": self.name, "findings": self.findings, "cells": self.cells, "possible": self.possible}


@dataclass(frozen=True)
class Assessment:
    """What limits the validity of a study's numbers, and the checks that were possible."""

    findings: list[Finding]
    checks: Sequence[Check]

    @cached_property
    def invalid(self) -> Invalid:
        """The cells whose values are not valid, each with its first error."""
        return invalid_cells(self.findings)


def assess(
    study: Study,
    frames: Frames | None = None,
    rows: Sequence[ScalingRow] | None = None,
    environment: Environment | None = None,
) -> Assessment:
    """Assess a study. ``rows`` is the scaling table; arguments that are missing are computed."""
    frames = measure(study) if frames is None else frames
    rows = scaling_table(frames) if rows is None else rows
    environment = describe_environment(study) if environment is None else environment
    found = validity(study, frames, rows, environment)
    possible = _possible(study, frames, rows, environment)
    return Assessment(
        found,
        [
            Check(name, sum(isinstance(one, own) for one in found), *possible[name])
            for name, own in CHECKS.items()
            if possible[name][0]
        ],
    )


def _possible(
    study: Study, frames: Frames, rows: Sequence[ScalingRow], environment: Environment
) -> dict[str, tuple[int, int]]:
    """Return for each check the number of measured cells: all to which it applies, and the possible ones."""
    measured = [row for row in rows if row.n]
    every = {row.cell_id for row in measured}
    several = {row.cell_id for row in measured if row.gpus > 1}
    envs = [(cell, env) for cell, env in envs_by_cell(study, environment) if cell in every]
    ranks = study.ranks_of([run.run_id for run in ranks_sample(frames.run_rows)])
    finished = [run for run in frames.run_rows if run.measured or run.left_out]
    unknown = {run.cell_id for run in finished if run.disturbed is None}
    commands = {clean(cell.cell_id) for cell in study.planned if cell.reads_values}
    with_nodes = _cells(envs, lambda env: any(facts_of_nodes(env)))
    found = {
        "throughput": (every, every),
        "batch": (every, {row.cell_id for row in measured if known(row.unit)}),
        "together": (several, {cell for cell, known_of in frames.together.items() if known_of is not None}),
        "disturbances": (every, every - unknown),
        "cores": (every, _cells(envs, _has_cores)),
        "threads": (every, _cells(envs, threads_of)),
        "samples": (several, {row.cell_id for row in ranks if known(row.samples)}),
        "windows": (
            several,
            {row.cell_id for row in ranks if known(row.window_time_sec) and known(row.steps)},
        ),
        "late-ranks": (several, {row.cell_id for row in ranks if known(row.forward_time_sec)}),
        "nodes": (every, with_nodes),
        "environment": (every, {cell for cell, _ in envs}),
        "warm-up": (every, {cell for cell, _ in envs} - commands),
        "drift": (every, every if timed_runs(frames.run_rows) else set()),
        "drift-in-run": (every, set(changes_in_runs(study, frames.run_rows))),
        "intervals": (every, {row.cell_id for row in measured if known(row.throughput_low)}),
    }
    return {name: (len(applies), len(applies & possible)) for name, (applies, possible) in found.items()}


def _cells(envs: Environments, has: Callable[[dict[str, Any]], Any]) -> set[str]:
    """Return the cells of which each env.json that was read has certain values."""
    lacking = {cell for cell, env in envs if not has(env)}
    return {cell for cell, _ in envs} - lacking


def _has_cores(env: dict[str, Any]) -> bool:
    entries = [*objects(env.get("hosts")), *objects(env.get("cores"))]
    return any(positive(entry.get("cores")) for entry in entries)
