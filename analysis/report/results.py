"""All results of one study that a report shows; each is computed once, when it is first needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from analysis.causes.cells import CauseRow, CellDivision
from analysis.causes.claims import RunEvidence, clocks_of
from analysis.causes.evidence import RunFacts
from analysis.causes.table import cause_rows, divide_study, read_evidence, read_run_facts
from analysis.checks.assessment import CheckedStudy
from analysis.checks.fabric import FabricRow, SweepRow, fabric_table, sweep_rows
from analysis.checks.slow_ranks import RankMeans, rank_means
from analysis.compare.comparison import Comparison
from analysis.compare.settings import SettingRow, setting_rows
from analysis.compare.strategies import StrategyRow, strategy_rows
from analysis.data.columns import RunRow, ScalingRow, by_series
from analysis.data.differences import Difference, differences, observe
from analysis.data.names import series_parts, short_labels
from analysis.decide import Choice, Verdict, decide_all
from analysis.report.words import mode_title
from analysis.stats.attempts import all_attempts
from analysis.stats.scaling import two_axes
from analysis.targets import TargetRow, judge_targets, planned_targets


@dataclass(frozen=True)
class Results(CheckedStudy):
    """A checked study with everything else that a report shows.

    ``targets`` replace those of the plan, if they are given. ``spread`` is stated, see
    :func:`analysis.decide.decide`.
    """

    targets: Sequence[Any] | None = None
    spread: float = math.nan

    @cached_property
    def target_rows(self) -> list[TargetRow]:
        """The verdicts on the targets."""
        targets = planned_targets(self.study) if self.targets is None else self.targets
        return judge_targets(targets, self.study, self.frames, self.rows, invalid=self.invalid)

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        """The verdict on each row, by its place."""
        return {place: one for choice in self.choices.values() for place, one in choice.verdicts.items()}

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """The verdicts and the recommended size of each series."""
        return decide_all(self.rows, invalid=self.invalid, spread=self.spread)

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """The names of the series in parts, see :func:`analysis.data.names.series_parts`."""
        return series_parts(self.study.plan)

    @cached_property
    def labels(self) -> tuple[dict[str, str], str]:
        """A short label for each series, and the words that all series share."""
        return short_labels(self.parts, by_series(self.rows))

    @cached_property
    def titles(self) -> dict[str, str]:
        """A short label with the scaling mode for each series."""
        return {series: self._title(series, label) for series, label in self.labels[0].items()}

    def _title(self, series: str, label: str) -> str:
        mode = self.parts.get(series, {}).get("mode", "")
        # If a table does not name its series, a series is labelled by its mode.
        title = mode_title(mode)
        return label if not mode else title if label == mode else f"{title}, {label}"

    @cached_property
    def device(self) -> str:
        """What sizes count: ``GPU``, or ``rank`` if not all ranks have one."""
        return "GPU" if all(cell.device == "cuda" for cell in self.study.cells.values()) else "rank"

    @cached_property
    def attempts(self) -> list[RunRow]:
        """All attempts of the runs, see :func:`analysis.stats.attempts.all_attempts`."""
        return all_attempts(self.study, self.frames.runs)

    @cached_property
    def sizes(self) -> list[ScalingRow]:
        """The rows of axes.csv, see :func:`analysis.stats.scaling.two_axes`."""
        return two_axes(self.rows)

    @cached_property
    def ranks(self) -> RankMeans | None:
        """Means of the ranks of the least balanced cells; None if no run has ranks.csv."""
        return rank_means(self)

    @cached_property
    def sweep(self) -> list[SweepRow]:
        """The timed collectives of all runs."""
        return sweep_rows(self.study)

    @cached_property
    def fabric(self) -> list[FabricRow]:
        """Latency and bandwidth of each cell with timed all-reduces."""
        return fabric_table(self.sweep)

    @cached_property
    def run_facts(self) -> dict[str, RunFacts]:
        """What the runs that count recorded about themselves, by run_id; of a sample of many runs."""
        return read_run_facts(self)

    @cached_property
    def differences(self) -> list[Difference]:
        """The settings, software, hosts and clocks in which the runs differ."""
        if self.study.table:
            return []
        return differences(observe(self.study, self.environment.envs, clocks_of(self.run_facts)))

    @cached_property
    def evidence(self) -> dict[str, list[RunEvidence]]:
        """The evidence of the causes of the losses, by cell; empty for a table."""
        if self.study.table:
            return {}
        return read_evidence(self, self.run_facts, fabric=self.fabric)

    @cached_property
    def divisions(self) -> dict[int, CellDivision]:
        """The divisions of the losses, by the place of the row."""
        return divide_study(self.rows, self.evidence)

    def read_facts(self) -> None:
        """Read the files of the runs from which losses are divided, unless this was done before."""
        _ = self.run_facts, self.fabric

    def know_divisions(self, divisions: dict[int, CellDivision]) -> None:
        """Keep the divisions that another process has computed."""
        vars(self)["divisions"] = divisions

    @cached_property
    def settings(self) -> list[SettingRow]:
        """The verdicts on the swept settings."""
        return setting_rows(self)

    def strategies(self, comparison: Comparison | None = None) -> list[StrategyRow]:
        """Return the strategies side by side; ``comparison`` is that of the strategies, if it is known."""
        return strategy_rows(self, comparison)

    @cached_property
    def causes(self) -> list[CauseRow]:
        """The rows of causes.csv."""
        return cause_rows(self.rows, self.divisions, invalid=self.invalid)
