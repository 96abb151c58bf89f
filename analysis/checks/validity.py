"""List what limits the validity of a study's numbers: one list, computed once, for all reports.

`bench report` shows the list in its JSON output, at the top of the page, at the end of its own output and in
the proposal. Every code is described in docs/analysis.md, with its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd

from analysis.checks.slow_ranks import (
    excess_texts,
    late_nodes_of,
    slow_nodes_of,
    stragglers,
    unequal_samples,
)
from analysis.data.environment import Environment, hosts_of
from analysis.data.load import Study
from analysis.data.names import state_counts
from analysis.stats.measured import Frames, ranks_sample
from analysis.text import capital, count, listed, number, one_line


class Code(NamedTuple):
    """The severity and the heading of a kind of finding.

    An error means that the values of the named cells do not measure what they are meant to measure. A warning
    means that they may be affected, or that runs are missing.
    """

    severity: Literal["error", "warning"]
    heading: str


#: All codes, in the order in which findings are listed.
CODES: dict[str, Code] = {
    "no-throughput": Code("error", "Nothing to compare"),
    "shared-cores": Code("error", "Shared cores"),
    "threads-differ": Code("error", "Threads differ"),
    "unequal-samples": Code("error", "Unequal samples"),
    "other-batch": Code("error", "Other batch than planned"),
    "common-condition": Code("error", "Condition common to all runs"),
    "overlap": Code("warning", "Runs overlap"),
    "disturbed": Code("warning", "Disturbed runs"),
    "incomplete": Code("warning", "Incomplete"),
    "unequal-nodes": Code("warning", "Unequal nodes"),
    "runs-differ": Code("warning", "Runs differ"),
    "not-stable": Code("warning", "Not yet stable"),
    "straggler": Code("warning", "Straggler nodes"),
    "slow-node": Code("warning", "Slow node"),
}
#: Facts of the environment that have a code of their own.
_OWN_CODE = frozenset({"Threads per rank"})
_MAX_CELLS = 4
_MAX_NAMED = 5


class ValidityFinding(NamedTuple):
    """One limit of the validity of the numbers.

    ``cells`` are the affected cells; empty if all are affected. ``values`` are the measured values, for
    programs.
    """

    code: str
    message: str
    cells: list[str]
    values: dict[str, Any]

    @property
    def heading(self) -> str:
        """The heading on the page."""
        return CODES[self.code].heading

    @property
    def severity(self) -> str:
        """``error`` or ``warning``."""
        return CODES[self.code].severity

    def as_json(self) -> dict[str, Any]:
        """Return the finding as ``bench report --json`` prints it."""
        rest = {"message": self.message, "cells": self.cells, "values": self.values}
        return {"code": self.code, "severity": self.severity, **rest}

    def __str__(self) -> str:
        return f"{self.severity}: {self.heading}. {self.message} [{self.code}]"


def validity(
    study: Study, frames: Frames, rows: pd.DataFrame, environment: Environment
) -> list[ValidityFinding]:
    """Return the findings of a study, errors first.

    Args:
        study: the study.
        frames: its frames.
        rows: its scaling table.
        environment: the runs' environment.
    """
    envs = _by_cell(study, environment)
    ranks = study.ranks_of(ranks_sample(frames.runs)["run_id"])
    found = [
        *_without_throughput(frames.runs),
        *_shared_cores(envs),
        *_threads(envs, rows),
        *_samples(ranks),
        *_batches(rows),
        *_unequal_nodes(envs),
        *_differing(environment),
        *_not_stable(envs),
        *_late_and_slow(study, frames, ranks),
    ]
    order = list(CODES)
    return sorted(found, key=lambda one: order.index(one.code))


#: The env.json of each run, with the run's cell.
_Environments = Sequence[tuple[str, dict[str, Any]]]


def _by_cell(study: Study, environment: Environment) -> _Environments:
    cells = dict(zip(study.runs["run_id"], study.runs["cell_id"], strict=True))
    return [(cells[run_id], env) for run_id, env in environment.envs.items()]


def _named(cells: Sequence[str]) -> str:
    return listed([one_line(cell, limit=60) for cell in cells], limit=_MAX_CELLS)


def _without_throughput(runs: pd.DataFrame) -> Iterator[ValidityFinding]:
    missing = runs[~runs["measured"]]
    cells = list(dict.fromkeys(missing["cell_id"]))
    values = {"runs": len(runs), "missing": len(missing)}
    if len(missing) == len(runs):
        counts = f": {state_counts(runs)}" if len(runs) else ""
        words = f"None of the {count(len(runs), 'planned run')} has a throughput{counts}."
        yield ValidityFinding("no-throughput", words, cells, values)
    elif len(missing):
        words = f"{len(missing):,} of {count(len(runs), 'run')} do not count: {state_counts(missing)}."
        yield ValidityFinding("incomplete", words, cells, values)


# -- cores, threads and nodes, from env.json ------------------------------------------

_SHARED = re.compile(r"([0-9]+) ranks share ([0-9]+) cores")
_NOT_STABLE = re.compile(r"the step time was not yet stable")
#: Warnings in env.json that a finding replaces.
_OWNED_WARNINGS = (_SHARED, _NOT_STABLE)


def other_warnings(environment: Environment) -> list[str]:
    """Return the warnings of the runs that no finding replaces."""
    return [
        text for text in environment.warnings if not any(pattern.search(text) for pattern in _OWNED_WARNINGS)
    ]


def _texts(env: dict[str, Any]) -> list[str]:
    warnings = env.get("warnings")
    return [one_line(text) for text in warnings] if isinstance(warnings, list) else []


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _crowds(env: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, threads and cores of each machine whose ranks have more threads than cores."""
    for host in hosts_of(env):
        ranks, cores = _positive(host.get("ranks_here")), _positive(host.get("cores"))
        if ranks and cores and ranks > cores:
            yield ranks, ranks, cores
    for text in _texts(env):
        if match := _SHARED.search(text):
            yield int(match[1]), int(match[1]), int(match[2])


def _shared_cores(envs: _Environments) -> Iterator[ValidityFinding]:
    crowded = [(cell, *crowd) for cell, env in envs for crowd in _crowds(env)]
    if not crowded:
        return
    cells = list(dict.fromkeys(cell for cell, *_ in crowded))
    _, ranks, threads, cores = max(crowded, key=lambda crowd: crowd[2] / crowd[3])
    several = f" with {threads} threads" if threads > ranks else ""
    yield ValidityFinding(
        "shared-cores",
        f"{count(ranks, 'rank')}{several} on {count(cores, 'core')}: {_named(cells)} "
        f"{'measures' if len(cells) == 1 else 'measure'} shared cores, not scaling.",
        cells,
        {"ranks": ranks, "threads": threads, "cores": cores},
    )


def _threads(envs: _Environments, rows: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield the cells whose ranks have another number of threads than those of the baseline."""
    threads: dict[str, set[int]] = {}
    for cell, env in envs:
        if own := _positive(env.get("threads_per_rank")):
            threads.setdefault(cell, set()).add(own)
    base = rows[["cell_id", "base_cell"]].dropna()
    pairs = dict.fromkeys(zip(base["cell_id"], base["base_cell"], strict=True))
    odd = [
        (cell, reference)
        for cell, reference in pairs
        if threads.get(cell) and threads.get(reference) and threads[cell] != threads[reference]
    ]
    if not odd:
        return
    cells = list(dict.fromkeys(cell for cell, _ in odd))
    shown = {name: sorted(threads[name]) for name in dict.fromkeys(name for pair in odd for name in pair)}
    (first, reference), more = odd[0], len(cells) - 1
    others = f"; so do {count(more, 'more cell')}" if more else ""
    yield ValidityFinding(
        "threads-differ",
        f"{_thread_count(threads[first])} per rank in {_named([first])}, "
        f"{_thread_count(threads[reference])} in its baseline {_named([reference])}{others}: the efficiency "
        "compares different programs.",
        cells,
        {"threads_per_rank": shown},
    )


def _thread_count(threads: set[int]) -> str:
    return count(min(threads), "thread") if len(threads) == 1 else f"{min(threads)} to {max(threads)} threads"


def _unequal_nodes(envs: _Environments) -> Iterator[ValidityFinding]:
    """Yield the kinds of nodes of a study, if there is more than one kind."""
    kinds: dict[str, dict[str, None]] = {}
    cells: dict[str, None] = {}
    for cell, env in envs:
        own = {}
        for host in hosts_of(env):
            own[one_line(host.get("host"), limit=60)] = one_line(host.get("cpu_model"), limit=60)
        for node, kind in own.items():
            if kind:
                kinds.setdefault(kind, {})[node] = None
        if len(set(filter(None, own.values()))) > 1:
            cells[cell] = None
    if len(kinds) < 2:
        return
    shown = [f"{kind} ({listed(list(nodes), limit=3)})" for kind, nodes in kinds.items()]
    yield ValidityFinding(
        "unequal-nodes",
        f"The processors differ: {listed(shown, limit=_MAX_CELLS)}.",
        list(cells),
        {"nodes": {kind: list(nodes) for kind, nodes in kinds.items()}},
    )


def _differing(environment: Environment) -> Iterator[ValidityFinding]:
    names = [name for name in environment.differing if name not in _OWN_CODE]
    if names:
        words = f"Not all runs had the same {listed(names)}: see the environment below."
        yield ValidityFinding("runs-differ", words, [], {"differing": names})


def _not_stable(envs: _Environments) -> Iterator[ValidityFinding]:
    odd = [cell for cell, env in envs if any(map(_NOT_STABLE.search, _texts(env)))]
    if odd:
        cells = list(dict.fromkeys(odd))
        words = (
            f"In {len(odd):,} of {count(len(envs), 'run')}, the step time still changed after the warm-up "
            f"({_named(cells)}): raise warmup_steps."
        )
        yield ValidityFinding("not-stable", words, cells, {"runs": len(odd), "of": len(envs)})


# -- samples and batches --------------------------------------------------------------


def _samples(ranks: pd.DataFrame) -> Iterator[ValidityFinding]:
    odd = unequal_samples(ranks)
    if not len(odd):
        return
    cells = list(dict.fromkeys(odd["cell_id"]))
    worst = odd.iloc[int(odd["ratio"].to_numpy().argmax())]
    most, least, times = int(worst["most"]), int(worst["least"]), number(worst["ratio"], digits=2)
    yield ValidityFinding(
        "unequal-samples",
        f"Rank {most} processes {times} times the samples of rank {least} ({_named(cells)}): the load "
        "balance measures this split of the data.",
        cells,
        {"rank": most, "other_rank": least, "ratio": float(worst["ratio"])},
    )


def _batches(rows: pd.DataFrame) -> Iterator[ValidityFinding]:
    odd = rows[rows["other_unit"]].drop_duplicates("cell_id")
    if not len(odd):
        return
    cells = odd["cell_id"].to_list()
    samples = {
        row["cell_id"]: {"planned": int(row["global_batch"]), "measured": _per_step(row)}
        for row in odd.to_dict("records")
    }
    shown = [
        f"{one_line(cell, limit=60)} ({_measured(own['measured'])}, planned {own['planned']:,})"
        for cell, own in samples.items()
    ]
    yield ValidityFinding(
        "other-batch",
        f"Samples per step: {listed(shown, limit=_MAX_CELLS)}. No efficiency, because these runs or those of "
        "their baseline do other work than planned.",
        cells,
        {"samples_per_step": samples},
    )


def _per_step(row: Mapping[Any, Any]) -> float | None:
    """Return the samples per step of a cell's runs; None if its runs differ or the number is unknown."""
    samples = float(row["unit"]) * float(row["global_batch"])
    return samples if abs(samples) < float("inf") else None


def _measured(samples: float | None) -> str:
    return "runs differ" if samples is None else f"measured {number(samples)}"


# -- late and slow nodes --------------------------------------------------------------


def _late_and_slow(study: Study, frames: Frames, ranks: pd.DataFrame) -> Iterator[ValidityFinding]:
    """Yield the nodes on which ranks are late, and the nodes that are slow over all their runs."""
    sample = ranks_sample(frames.runs)
    late = late_nodes_of(stragglers(ranks), sample["cell_id"])
    slow = slow_nodes_of(ranks)
    advice = _advice(study, ranks, slow["host"].to_list()) if len(slow) else ""
    slow_text = f"slower than the other nodes of the same runs: {listed(excess_texts(slow))}"
    both = slow["host"].isin(list(late.sentences))
    excess = {str(host): float(value) for host, value in zip(slow["host"], slow["excess"], strict=True)}
    if late.sentences:
        named = capital(listed(late.texts, limit=_MAX_NAMED))
        text = f"{named}. The others wait for these ranks; such waiting is not slow communication."
        if both.any():
            text += f" {capital(slow_text)}. {advice}"
        yield ValidityFinding("straggler", text, [], {"nodes": list(late.sentences), "excess": excess})
    if len(slow) and not both.any():
        yield ValidityFinding("slow-node", f"{capital(slow_text)}. {advice}", [], {"excess": excess})


def _advice(study: Study, ranks: pd.DataFrame, slow: Sequence[str]) -> str:
    """Return advice about slow nodes that does not contradict the matrix."""
    plan = study.plan
    if plan.get("executor") != "slurm" or plan.get("nodelist"):
        return "Have it checked: the matrix names the nodes."
    largest = int(study.cells["nodes"].max())
    if ranks["host"].nunique() - len(slow) < largest:
        others = count(largest, "other node")
        return f"Have it checked. Leave it out (`exclude:`) only if {others} remain for the largest cell."
    return "Leave it out (`exclude:`) or have it checked."
