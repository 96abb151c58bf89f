"""Settings, software, hosts and clocks in which runs differ: within a study, or between two studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from analysis.data.environment import TRANSPORT, fact_title, facts_of_run
from analysis.data.load import Study
from analysis.data.settings import NOT_SET, spelled
from analysis.text import clean
from ddp_scaling_bench.units import count, listed

#: Settings that define the work of a sample: with different work, throughputs are not comparable.
WORK = ("model", "parameters", "seq_len", "image_size", "data")
NOT_KNOWN = "not known"
#: Facts that follow from settings: if one of these settings varies, so may the fact, from cell to cell.
_LAUNCH = ("nodes", "tasks_per_node", "backend", "launcher")
_FOLLOWS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("parameters", "gradient_bytes"), (*WORK, "strategy", "command")),
    **dict.fromkeys((*TRANSPORT, "hosts", "cores", "threads_per_rank"), _LAUNCH),
}
#: Clocks are equal if the lowest is at least this share of the highest.
SAME_CLOCK = 0.95


@dataclass
class Observed:
    """What describes the runs of a study: the number of runs of each cell that have a value of a quantity.

    ``values`` maps (kind, name) -> value -> cell -> runs. ``read`` is the number of runs of each cell whose
    env.json was read, and ``mhz`` are the clocks of the runs.
    """

    values: dict[tuple[str, str], dict[str, Counter[str]]]
    read: Counter[str]
    mhz: list[float] = field(default_factory=list)

    def add(self, kind: str, name: str, text: str, cell: str, runs: int = 1) -> None:
        """Count runs that have a value."""
        values = self.values.setdefault((kind, name), {})
        if text not in values:
            values[text] = Counter()
        values[text][cell] += runs

    def add_missing(self, kind: str, runs: Counter[str]) -> None:
        """Count the runs without a value of a quantity that other runs have."""
        for (other, _), values in self.values.items():
            if other != kind:
                continue
            lacking = runs.copy()
            for cells in values.values():
                lacking.subtract(cells)
            if lacking := +lacking:
                values[NOT_SET] = values.get(NOT_SET, Counter()) + lacking

    def is_constant(self, key: tuple[str, str]) -> bool:
        """Return whether all runs of each cell have the same values of a fact."""
        values = self.values.get(key, {}).values()
        return all(runs == self.read[cell] for cells in values for cell, runs in cells.items())


class Value(NamedTuple):
    """A value of a quantity, with the number of runs and cells that have it."""

    text: str
    runs: int
    cells: int


@dataclass(frozen=True)
class Difference:
    """A quantity in which the runs of a study, or two studies, differ.

    Attributes:
        kind: ``setting`` or text of a named ``command`` of the matrix; ``environment``, ``variable`` or
            ``clock`` as recorded by the runs.
        planned: True for a setting, and for a fact that follows from one.
        sides: the values in the study, or in each of the two studies.
    """

    kind: str
    name: str
    planned: bool
    sides: tuple[tuple[Value, ...], ...]

    @property
    def what(self) -> str:
        """The name for people."""
        return fact_title(self.name) if self.kind == "environment" else self.name

    def text(self, side: int, *, counts: bool = False) -> str:
        """Return the values of one study, on request with their numbers of runs and cells."""
        texts = [
            f"{one.text} ({count(one.runs, 'run')} of {count(one.cells, 'cell')})" if counts else one.text
            for one in self.sides[side]
        ]
        missing = NOT_SET if self.kind in ("setting", "variable") else NOT_KNOWN
        return listed(texts, limit=8 if counts else 4) or missing


def differences(*studies: Observed) -> list[Difference]:
    """Return the quantities of which one study has several values, or which differ between two studies."""
    found = []
    for key in dict.fromkeys(key for observed in studies for key in observed.values):
        sides = [observed.values.get(key, {}) for observed in studies]
        if key[0] == "command" and not all(sides):
            continue  # it has another name in the other study
        if key[0] == "clock" and not _clocks_differ(studies):
            continue
        if len(sides[0]) > 1 if len(sides) == 1 else sides[0].keys() != sides[1].keys():
            planned = key[0] in ("setting", "command") or _follows(key, studies)
            found.append(Difference(*key, planned, tuple(tuple(_values(side)) for side in sides)))
    return found


def _clocks_differ(studies: Sequence[Observed]) -> bool:
    """Return whether the clocks of one study's runs differ, or the medians of two studies."""
    mhz = studies[0].mhz if len(studies) == 1 else [median(one.mhz) for one in studies if one.mhz]
    return min(mhz) < SAME_CLOCK * max(mhz)


def _follows(key: tuple[str, str], studies: Sequence[Observed]) -> bool:
    """Return whether a fact is equal within each cell, and a setting varies from which it may follow."""
    names = _LAUNCH if key[0] == "variable" else _FOLLOWS.get(key[1], ())
    settings = [("setting", name) for name in names]
    varying = (len({text for one in studies for text in one.values.get(name, ())}) > 1 for name in settings)
    return any(varying) and all(one.is_constant(key) for one in studies)


def _values(side: Mapping[str, Counter[str]]) -> Iterator[Value]:
    # Shorter texts first: numbers are then in the order of their values.
    for text in sorted(side, key=lambda text: (len(text), text)):
        yield Value(text, side[text].total(), len(side[text]))


def observe(
    study: Study, envs: Mapping[str, dict[str, Any]], clocks: Mapping[str, float] | None = None
) -> Observed:
    """Return what describes the runs of a study.

    ``envs`` are the env.json of some runs, and ``clocks`` the clocks (MHz) of some runs, by run_id.
    """
    cells = {run.run_id: run.cell_id for run in study.runs}
    planned, found = Counter(cells.values()), Observed({}, Counter(cells[run_id] for run_id in envs))
    for cell in study.planned:
        own = clean(cell.cell_id)
        for setting, value in study.settings[own].items():
            found.add("setting", setting, value, own, planned[own])
        if cell.name:
            found.add("command", f"command {clean(cell.name)}", spelled(cell.argv), own)
    found.add_missing("setting", planned)
    for run_id, env in envs.items():
        # Backend and launcher are settings, and so is the strategy of the built-in training.
        settings = {"backend", "launcher", *(["strategy"] if "workload" in env else [])}
        for kind, name, value in dict.fromkeys(facts_of_run(env)):
            if name not in settings and ("setting", f"env.{name}") not in found.values:
                found.add(kind, name, value, cells[run_id])
    found.add_missing("variable", found.read)
    for run_id, mhz in (clocks or {}).items():
        found.mhz.append(mhz)
        found.add("clock", "clock", f"{mhz / 1000:.1f} GHz", cells[run_id])
    return found


def difference_rows(found: Sequence[Difference]) -> dict[str, list[Any]]:
    """Return the columns of what-differs.csv: one row per value of a quantity."""
    rows = [(one.name, one.kind, one.planned, *value) for one in found for value in one.sides[0]]
    names = ("quantity", "kind", "planned", "value", "runs", "cells")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}
