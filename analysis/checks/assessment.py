"""Decide which cells of a study are valid: the one answer that all commands use.

A check is a function that yields findings about a study; :func:`check` registers it, and
:attr:`CheckedStudy.assessment` calls all checks of the modules in this package. A cell is not valid if a
finding with the severity ``error`` names it. A warning means that results may be affected, or that runs are
missing; a finding with the severity ``info`` is an unexpected result. Every kind is described in
docs/analysis.md, with its remedy.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np

from analysis.checks.scaling_table import Invalid, error_of, scaling_table
from analysis.data.columns import RunRow, ScalingRow
from analysis.data.environment import Environment, describe_environment
from analysis.data.load import RankOfRun, Study
from analysis.stats.measured import Measured, measure, ranks_sample
from ddp_scaling_bench.finding import Finding


@dataclass(frozen=True)
class CheckedStudy:
    """A study with its measurements, its scaling table ``rows``, and what limits their validity."""

    study: Study
    frames: Measured
    rows: Sequence[ScalingRow]

    @classmethod
    def of(
        cls, study: Study, *, baseline: str | None = None, include_disturbed: bool = False, **more: Any
    ) -> Self:
        """Measure a study and compute its scaling table; ``more`` are the other fields of a subclass."""
        frames = measure(study, include_disturbed=include_disturbed)
        return cls(study, frames, scaling_table(frames, baseline=baseline), **more)

    @cached_property
    def environment(self) -> Environment:
        """Software and hardware of the runs."""
        return describe_environment(self.study)

    @cached_property
    def assessment(self) -> Assessment:
        """What limits the validity of the numbers."""
        found: list[Finding] = []
        checks = []
        for rule in rules():
            own = list(rule.find(self))
            found += own
            applies = {row.cell_id for row in self.measured if row.gpus >= rule.least_ranks}
            if rule.name and applies:
                checks.append(Check(rule.name, len(own), len(applies), len(applies & rule.possible(self))))
        ordered = [[one for one in found if one.severity == level] for level in ("error", "warning", "info")]
        return Assessment(ordered[0] + ordered[1], checks, ordered[2])

    @property
    def invalid(self) -> Invalid:
        """The cells whose values are not valid."""
        return self.assessment.invalid

    def error_of(self, row: ScalingRow) -> Finding | None:
        """Return the error of a row or of its baseline; None if their values are valid."""
        return error_of(row, row.base, self.invalid)

    @property
    def runs(self) -> Sequence[RunRow]:
        """All runs."""
        return self.frames.runs

    @cached_property
    def finished(self) -> list[RunRow]:
        """The runs that completed with a throughput."""
        return [run for run in self.runs if run.measured or run.left_out]

    @cached_property
    def measured(self) -> list[ScalingRow]:
        """The rows with a run that counts."""
        return [row for row in self.rows if row.n]

    @cached_property
    def sample(self) -> list[RunRow]:
        """The runs whose ranks.csv is read."""
        return ranks_sample(self.runs)

    @cached_property
    def rank_rows(self) -> Sequence[RankOfRun]:
        """The rows of ranks.csv of these runs."""
        return self.study.ranks_of([run.run_id for run in self.sample])

    @cached_property
    def envs(self) -> list[tuple[RunRow, dict[str, Any]]]:
        """Each run whose env.json was read, with its content."""
        runs = {run.run_id: run for run in self.runs}
        return [(runs[run_id], env) for run_id, env in self.environment.envs.items()]

    @cached_property
    def changes_in_runs(self) -> dict[str, float]:
        """By cell, the median of log(last / first third of the epochs) over the throughputs of its runs."""
        epochs = self.study.epochs[self.study.epochs["throughput_samples_per_sec"] > 0]
        logs = np.log(epochs["throughput_samples_per_sec"].to_numpy())
        places = epochs.groupby("run_id", observed=True).indices
        changes: dict[str, list[float]] = {}
        for run in self.runs:
            own = logs[places[run.run_id]] if run.measured and run.run_id in places else logs[:0]
            if len(own) > 1:
                third = max(len(own) // 3, 1)
                last, first = (np.add.reduce(one) / third for one in (own[-third:], own[:third]))
                changes.setdefault(run.cell_id, []).append(float(last - first))
        return {cell: median(own) for cell, own in sorted(changes.items())}

    def cells_with(self, has: Callable[[dict[str, Any]], Any]) -> set[str]:
        """Return the cells of which each env.json that was read has certain values."""
        lacking = {run.cell_id for run, env in self.envs if not has(env)}
        return {run.cell_id for run, _ in self.envs} - lacking


class Rule(NamedTuple):
    """A registered check; one without a name is not counted among the checks of a study."""

    name: str
    find: Callable[[CheckedStudy], Iterator[Finding]]
    possible: Callable[[CheckedStudy], set[str]]
    least_ranks: int


_RULES: list[Rule] = []


def check(
    name: str = "",
    *,
    possible: Callable[[CheckedStudy], set[str]] = lambda _: set(),
    least_ranks: int = 1,
) -> Callable[[Callable[[CheckedStudy], Iterator[Finding]]], Callable[[CheckedStudy], Iterator[Finding]]]:
    """Register a function that yields findings about a study.

    ``possible`` returns the cells whose files contain the values that the check compares. It applies to the
    measured cells with at least ``least_ranks`` ranks.
    """

    def register(find: Callable[[CheckedStudy], Iterator[Finding]]) -> Any:
        _RULES.append(Rule(name, find, possible, least_ranks))
        return find

    return register


def rules() -> list[Rule]:
    """Return the checks of all modules of this package, in the order of the modules' names."""
    package = import_module("analysis.checks")
    for module in pkgutil.iter_modules(package.__path__, "analysis.checks."):
        import_module(module.name)
    return sorted(_RULES, key=lambda rule: rule.find.__module__)


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
    """What limits the validity of a study's numbers (errors first), the checks, and unexpected results."""

    findings: Sequence[Finding]
    checks: Sequence[Check]
    anomalies: Sequence[Finding] = ()

    @cached_property
    def invalid(self) -> Invalid:
        """The cells whose values are not valid, each with its first error."""
        errors = [one for one in self.findings if one.severity == "error"]
        return {cell: error for error in reversed(errors) for cell in error.subject}
