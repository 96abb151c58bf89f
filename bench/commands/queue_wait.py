"""How long a training would wait in the queue: given by hand, asked of Slurm, or none."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.executors.admission import longest_limit_s, partitions_of
from bench.matrix.cell import value_text
from bench.slurm.client import Slurm, SlurmRefusedError, SlurmUnavailableError
from bench.study.plan_json import PlannedStudy
from bench.units import human_duration, parse_duration_s, slurm_time

if TYPE_CHECKING:
    from analysis.advise.options import Layout, Wait

#: A job asks for this much more than the training is expected to take.
_MARGIN = 1.1
_LEAST_S = 600
_NOTHING = re.compile(r"0+(?:\.0*)?[smhd]?|none|now")


def parse_waits(texts: Sequence[str], *, studies: Sequence[str]) -> dict[str, float]:
    """Return seconds by study from ``6.5h`` (all studies) and ``l40s=0`` (one); later texts win.

    Raises:
        BenchError: not a duration, or no such study.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, duration = text.rpartition("=")
        if equals and name not in studies:
            raise BenchError(
                f"--wait {text}: no study {name!r} is given", remedy=f"there are: {', '.join(studies)}"
            )
        try:
            seconds = 0 if _NOTHING.fullmatch(duration.strip()) else parse_duration_s(duration)
        except ValueError as wrong:
            raise BenchError(f"--wait {text}: {wrong}", remedy="0 where nothing waits") from None
        found |= dict.fromkeys([name] if equals else studies, float(seconds))
    return found


def given_wait(seconds: float) -> Wait:
    """Return a wait that the user stated."""
    from analysis.advise.options import Wait

    return Wait(seconds, "as given (--wait)")


@dataclass
class Queue:
    """Asks Slurm when jobs would start, through the study's own scripts; nothing is submitted."""

    slurm: Slurm = field(default_factory=Slurm)
    _limits: dict[Path, int | None] = field(default_factory=dict)

    def waits(self, study: PlannedStudy, layouts: Mapping[Layout, float]) -> dict[Layout, Wait]:
        """Return the wait of each layout of a study, by the seconds of its fastest training.

        Each is asked for with the training's time limit: a job of hours waits longer than the
        benchmark's minutes. One whose training is not known is not asked for.
        """
        from analysis.advise.options import Wait

        if study.executor != "slurm":
            return dict.fromkeys(layouts, Wait(0.0, f"no queue (executor {study.executor})"))
        known = {layout: training_s for layout, training_s in layouts.items() if math.isfinite(training_s)}
        try:
            return {layout: self._ask(study, layout, training_s) for layout, training_s in known.items()}
        except SlurmUnavailableError as absent:
            return dict.fromkeys(layouts, Wait(None, f"not known: {_one_line(absent.message)}"))

    def _ask(self, study: PlannedStudy, layout: Layout, training_s: float) -> Wait:
        from analysis.advise.options import Wait

        _, nodes, each = layout
        script = study.script(_cell_like(study, nodes, each))
        wanted_s = max(_LEAST_S, math.ceil(_MARGIN * training_s))
        limit_s = self._limit_of(script)
        jobs = 1 if limit_s is None else math.ceil(wanted_s / limit_s)
        asked_s = wanted_s if limit_s is None else min(wanted_s, limit_s)
        remark = ""
        if jobs > 1 and limit_s is not None:
            remark = (
                f"{jobs} jobs in a row: the partition's limit is {human_duration(limit_s)}; one wait counted"
            )
        # The script of another number of nodes serves for a predicted size.
        options = [f"--nodes={nodes}", f"--time={slurm_time(asked_s)}"]
        now = datetime.now(UTC)
        try:
            starts = self.slurm.test_only(script, options=options)
        except SlurmRefusedError as refusal:
            return Wait(None, "", f"Slurm would not take it: {_one_line(refusal.output)}")
        if starts is None:
            return Wait(None, "", f"Slurm cannot tell when it would start{'; ' if remark else ''}{remark}")
        seconds = max(0.0, (starts - now).total_seconds())
        # Slurm names whole seconds: what starts at once may seem to start one second ago, or in one.
        seconds = 0.0 if seconds < 2 else seconds
        return Wait(seconds, f"Slurm's estimate at {now:%Y-%m-%d %H:%M} UTC (sbatch --test-only)", remark)

    def _limit_of(self, script: Path) -> int | None:
        """Return the time limit of the script's partitions, seconds; None for no limit or not known."""
        if script not in self._limits:
            partitions = partitions_of(self.slurm, script) if script.is_file() else {}
            self._limits[script] = longest_limit_s(partitions)
        return self._limits[script]


def _one_line(words: str) -> str:
    return " ".join(words.split())[:300]


def _cell_like(study: PlannedStudy, nodes: int, each: str) -> str:
    """Return the cell of this layout; for a predicted size one with as many ranks on each node."""
    of_each = {
        cell.cell_id: cell.nodes for cell in study.cells.values() if value_text(cell.tasks_per_node) == each
    }
    return min(of_each, key=lambda cell_id: (of_each[cell_id] != nodes, -of_each[cell_id], cell_id))


def waits_for(
    layouts: Mapping[Layout, float],
    planned: Mapping[str, PlannedStudy],
    *,
    given: Mapping[str, float],
    ask: bool,
) -> dict[Layout, Wait]:
    """Return the wait of each layout: as given, else asked of the queue if ``ask``.

    Args:
        layouts: seconds of the fastest training, by layout.
        planned: the studies by name.
        given: seconds by study.
        ask: ask Slurm about the others.
    """
    queue = Queue()
    found: dict[Layout, Wait] = {}
    for name, study in planned.items():
        own = {layout: training_s for layout, training_s in layouts.items() if layout[0] == name}
        if name in given:
            found |= dict.fromkeys(own, given_wait(given[name]))
        elif ask:
            found |= queue.waits(study, own)
    return found
