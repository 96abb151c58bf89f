"""Findings about the planned runs: those that do not count, were disturbed, or measure something else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.checks.assessment import CheckedStudy, check
from analysis.checks.scaling_table import SamplesPerStep, samples_per_step
from analysis.data.columns import distinct, first_of_cells, grouped
from analysis.data.differences import differences, observe
from analysis.data.environment import fact_title
from analysis.stats.measured import OutcomeCount, common_reasons, count_outcomes
from analysis.text import clean, one_line
from bench.study.findings import AverageOfRun, Disturbance, LineForms, StudyRun, by_reason
from bench.study.found import findings_of_env
from bench.study.together import REMEDY as TOGETHER_REMEDY
from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.finding import Finding, Severity, messages
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.measure.findings import NotStable, SeparateTrainings
from ddp_scaling_bench.units import clauses, count, human_duration, known, listed, names, short_name

#: Facts of the environment that ``runs-differ`` leaves out, because another kind reports them.
_OWN_KIND = frozenset({"threads_per_rank"})
#: In a shorter warm-up, each half (without the first 2 steps) has fewer than 3 steps.
_FEWEST_TO_TELL = 8
#: The strategies (``strategy`` in env.json) whose parts of a step are not measured, with their names.
_WITHOUT_PARTS = {name: one.untimed for name, one in STRATEGIES.items() if one.untimed}

# -- runs that do not count -----------------------------------------------------------


class IncompleteRuns(Finding, kind="incomplete"):
    """Runs that do not count; ``example`` is the reason of the first run that has one."""

    heading = "Incomplete"
    runs: int
    missing: int
    outcomes: tuple[OutcomeCount, ...]
    example: str = ""
    of_table: bool = False

    def _remedy(self) -> str:
        if self.of_table:
            return "Measure these rows, and add their values to the table."
        return "`bench submit`, or `bench submit --retry-failed`."

    def _message(self) -> str:
        of_all = f"{self.missing:,} of {count(self.runs, 'run')} {'does' if self.missing == 1 else 'do'} not"
        return f"{of_all} count: {self._outcomes()}. Configurations: {names(self.subject)}.{self._example()}"

    def _outcomes(self) -> str:
        return clauses([*map(str, self.outcomes)])

    def _example(self) -> str:
        return f" For example: {self.example}." if self.example else ""


class NoThroughput(IncompleteRuns, kind="no-throughput"):
    """A study of which no run has a throughput."""

    heading = "Nothing to compare"
    remedy = "`bench status` shows the reasons."
    severity: Severity = "error"

    def _message(self) -> str:
        states = f": {self._outcomes()}" if self.outcomes else ""
        return f"None of the {count(self.runs, 'planned run')} has a throughput{states}.{self._example()}"


class DamagedFiles(Finding, kind="damaged-files"):
    """The first damaged file of each completed run that has one, in words."""

    heading = "Damaged files"
    remedy = (
        "Restore these files (`sha256sum -c SHA256SUMS` names them), or delete the runs' folders and call "
        "`bench submit --retry-failed`."
    )
    files: tuple[str, ...]

    def _message(self) -> str:
        return f"{listed([*self.files], limit=3)}. The runs have no values."


@check("throughput", possible=lambda about: {row.cell_id for row in about.measured})
def _missing_values(about: CheckedStudy) -> Iterator[Finding]:
    missing = [run for run in about.runs if not run.measured and not run.left_out]
    damaged = [(run.cell_id, run.folder) for run in about.runs if run.folder and not run.values_folder]
    if len(missing) < len(about.runs):  # else no run has a throughput
        missing = [run for run in missing if not run.folder or run.values_folder]
    if missing or not about.runs:
        yield (NoThroughput if len(missing) == len(about.runs) else IncompleteRuns)(
            subject=distinct(run.cell_id for run in missing),
            runs=len(about.runs),
            missing=len(missing),
            outcomes=count_outcomes(missing),
            example=one_line(next((messages(run.facts) for run in missing if run.facts), ""), limit=200),
            of_table=about.study.table is not None,
        )
    if damaged:
        files = tuple(find_damage(folder) for _, folder in damaged)
        yield DamagedFiles(subject=distinct(cell for cell, _ in damaged), files=files)
    yield from _longer_than_run(about)


# -- runs that measure something else -------------------------------------------------


class LongerThanRun(Finding, kind="longer-than-run"):
    """Commands that report longer steps, or lower rates, than their runs had time for; one as an example."""

    heading = "Steps longer than the run"
    remedy = "State the unit, such as `units: {step_time: ms}`, or let one rank print each value once."
    run_id: str
    least_s: float
    wall_s: float

    def _message(self) -> str:
        took = f"{human_duration(self.least_s)} or more in a run of {human_duration(self.wall_s)}"
        return f"{names(self.subject)}: by the reported values, the steps took {took} ({self.run_id})."


def _longer_than_run(about: CheckedStudy) -> Iterator[LongerThanRun]:
    # Times of runs can be whole seconds.
    longer = [run for run in about.runs if run.measured and run.least_s > 1.1 * run.wall_s + 2]
    if longer:
        one, cells = longer[0], distinct(run.cell_id for run in longer)
        yield LongerThanRun(subject=cells, run_id=one.run_id, least_s=one.least_s, wall_s=one.wall_s)


class OtherBatch(Finding, kind="other-batch"):
    """Cells that process another batch than planned."""

    heading = "Other batch than planned"
    remedy = "Let the script use {per_gpu_batch} or {global_batch}, and count samples in every cell."
    severity: Severity = "error"
    samples_per_step: Mapping[str, SamplesPerStep]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} ({one})" for cell, one in self.samples_per_step.items()]
        return (
            f"Samples per step: {listed(cells, limit=4)}. The batch in the tables is the planned one, so "
            "these cells have neither a time per step nor an efficiency; their throughput is measured."
        )


@check("batch", possible=lambda about: {row.cell_id for row in about.measured if known(row.unit)})
def _other_batches(about: CheckedStudy) -> Iterator[OtherBatch]:
    if odd := first_of_cells(row for row in about.measured if row.other_batch):
        samples = {row.cell_id: samples_per_step(row) for row in odd}
        yield OtherBatch(subject=tuple(samples), samples_per_step=samples)


class ReplicasApart(Finding, kind="separate-trainings"):
    """Cells whose ranks do not train together; ``shown`` is what shows it in one of them.

    ``with_recorder`` is False if only the bytes between the nodes of commands show it.
    """

    heading = SeparateTrainings.heading
    severity: Severity = "error"
    shown: SeparateTrainings
    with_recorder: bool

    def _message(self) -> str:
        return (
            f"{names(self.subject)}: {self.shown.message}. The rates of separate trainings do not show "
            "scaling, so there is no efficiency."
        )

    def _remedy(self) -> str:
        own = SeparateTrainings.remedy
        return own if self.with_recorder else f"{own} Without the recorder: {TOGETHER_REMEDY}."


@check(
    "together",
    least_ranks=2,
    possible=lambda about: {cell for cell, one in about.frames.together.items() if one is not None},
)
def _separate_trainings(about: CheckedStudy) -> Iterator[ReplicasApart]:
    cells = [cell.cell_id for cell in about.frames.cells if about.frames.are_separate(cell.cell_id)]
    if cells:
        own = (one for run, env in about.envs if run.cell_id in cells for one in findings_of_env(env))
        recorded = next((one for one in own if isinstance(one, SeparateTrainings)), None)
        shown = recorded or SeparateTrainings(by="bytes")
        yield ReplicasApart(subject=tuple(cells), shown=shown, with_recorder=recorded is not None)


# -- disturbed runs -------------------------------------------------------------------


class CommonCondition(Finding, kind="common-condition"):
    """Disturbances that all runs of a cell have, by cell."""

    heading = "All runs disturbed"
    remedy = "Remove the cause and repeat the runs, or report the results with it."
    severity: Severity = "error"
    conditions: Mapping[str, tuple[Disturbance, ...]]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} ({messages(own)})" for cell, own in self.conditions.items()]
        return (
            f"All runs of these configurations were disturbed: {listed(cells, limit=4)}. "
            "No run is left out for this reason."
        )


@dataclass(frozen=True, kw_only=True)
class DisturbedRun:
    """A disturbed run."""

    run_id: str
    left_out: bool
    facts: tuple[Disturbance, ...]

    def __str__(self) -> str:
        return f"{short_name(self.run_id)}: {messages(self.facts)}"


class DisturbedRuns(Finding, kind="disturbed"):
    """Disturbed runs, without those whose condition is common to all runs of their cell.

    Attributes:
        runs: those that are described; a proposal names none.
        disturbed, finished, left_out: numbers of runs.
    """

    heading = "Disturbed runs"
    remedy = "Repeat the runs: `bench submit --retry-disturbed`."
    _what = "were disturbed"
    runs: tuple[DisturbedRun, ...] = ()
    disturbed: int
    finished: int
    left_out: int

    def _message(self) -> str:
        if not self.runs:
            number = f"{self.disturbed:,} of {count(self.finished, 'completed run')} {self._what}"
            return f"{number}, {self.left_out:,} of them left out."
        runs = listed([*map(str, self.runs)], limit=3)
        number = f"{self.disturbed:,} of {count(self.finished, 'run')}"
        return f"{number}, {self.left_out:,} of them left out: {runs}."


class OverlappingRuns(DisturbedRuns, kind="overlap"):
    """Runs of the study that used a node at the same time."""

    heading = "Runs overlap"
    remedy = (
        "Use exclusive: true, max_running: 1 or `bench submit --pack`, then `bench submit --retry-disturbed`."
    )
    _what = "overlapped with other runs"


def _recorded_conditions(about: CheckedStudy) -> set[str]:
    unknown = {run.cell_id for run in about.finished if run.disturbed is None}
    return {row.cell_id for row in about.measured} - unknown


@check("disturbances", possible=_recorded_conditions)
def disturbed_runs(about: CheckedStudy) -> Iterator[Finding]:
    """Yield what disturbs all runs of a cell, the runs that overlap, and the other disturbed runs."""
    finished = about.finished
    runs = grouped(finished, lambda run: run.cell_id)
    found = {cell: reasons - {StudyRun.kind} for cell, reasons in common_reasons(finished).items()}
    if common := {cell: own for cell, own in found.items() if own and len(runs[cell]) > 1}:
        conditions = {
            cell: tuple(
                by_reason([one for run in runs[cell] for one in run.disturbed or () if one.kind in own])
            )
            for cell, own in common.items()
        }
        yield CommonCondition(subject=tuple(common), conditions=conditions)
    for kind in (OverlappingRuns, DisturbedRuns):
        odd = []
        for run in finished:
            others = [one for one in run.disturbed or () if one.kind not in common.get(run.cell_id, ())]
            if own := tuple(one for one in others if isinstance(one, StudyRun) == (kind is OverlappingRuns)):
                odd.append((run, DisturbedRun(run_id=run.run_id, left_out=run.left_out, facts=own)))
        if odd:
            yield kind(
                subject=distinct(run.cell_id for run, _ in odd),
                runs=tuple(one for _, one in odd),
                disturbed=len(odd),
                finished=len(finished),
                left_out=sum(run.left_out for run, _ in odd),
            )


# -- environment and warm-up ----------------------------------------------------------


class RunsDiffer(Finding, kind="runs-differ"):
    """Facts of the environment (names as in env.json) in which runs differ, though the plan does not."""

    heading = "Runs differ"
    remedy = "Repeat all runs in one environment."
    differing: tuple[str, ...]

    def _message(self) -> str:
        return f"Not all runs had the same {listed([*map(fact_title, self.differing)])}."


@check("environment", possible=lambda about: {run.cell_id for run, _ in about.envs})
def runs_differ(about: CheckedStudy) -> Iterator[RunsDiffer]:
    """Yield the facts of the environment in which runs differ, though the plan does not."""
    if facts := {*about.environment.differing} - _OWN_KIND:
        unplanned = [
            one for one in differences(observe(about.study, about.environment.envs)) if not one.planned
        ]
        if odd := tuple(one.name for one in unplanned if one.kind == "environment" and one.name in facts):
            yield RunsDiffer(differing=odd)


class UnstableWarmUp(Finding, kind="not-stable"):
    """Runs whose step time was not yet stable after the warm-up.

    Attributes:
        runs: the number of these runs, of the ``of`` measured runs.
        fewest: the steps of warm-up that are enough to tell, if all these runs had fewer.
    """

    heading = "Not yet stable"
    remedy = "Raise warmup_steps."
    runs: int
    of: int
    fewest: int | None = None

    def _message(self) -> str:
        where = f"In {self.runs:,} of {count(self.of, 'measured run')} ({names(self.subject)}), the"
        if self.fewest is not None:
            return (
                f"{where} step times at the end of the warm-up differ, but fewer than {self.fewest} steps of "
                "warm-up are too few to tell whether the step time is stable."
            )
        return (
            f"{where} medians of the step times in the two halves of the warm-up (without its first 2 steps) "
            "differ by more than 10 % on some rank."
        )


def _with_warm_up(about: CheckedStudy) -> set[str]:
    read = {clean(cell.cell_id) for cell in about.study.planned if cell.reads_values}
    return {run.cell_id for run, _ in about.envs} - read


@check("warm-up", possible=_with_warm_up)
def _unstable_warm_up(about: CheckedStudy) -> Iterator[UnstableWarmUp]:
    counted = [(run.cell_id, findings_of_env(env)) for run, env in about.envs if run.measured]
    steps = [(cell, [one.steps for one in own if isinstance(one, NotStable)]) for cell, own in counted]
    if odd := [(cell, own) for cell, own in steps if own]:
        is_short = all(number < _FEWEST_TO_TELL for _, own in odd for number in own)
        fewest = _FEWEST_TO_TELL if is_short else None
        cells = distinct(cell for cell, _ in odd)
        yield UnstableWarmUp(subject=cells, runs=len(odd), of=len(counted), fewest=fewest)


class PartsNotMeasured(Finding, kind="parts-not-measured"):
    """Cells with ``strategies`` whose parts of the step are not measured."""

    heading = "Parts of the step not measured"
    strategies: tuple[str, ...]

    def _message(self) -> str:
        return (
            f"The parts of the step are not measured with {names(map(_WITHOUT_PARTS.get, self.strategies))} "
            "yet; throughput, step times and data loading are."
        )


@check()
def _parts_not_measured(about: CheckedStudy) -> Iterator[PartsNotMeasured]:
    used = [(str(env.get("strategy")), run.cell_id) for run, env in about.envs]
    if found := [one for one in used if one[0] in _WITHOUT_PARTS]:
        strategies = tuple(name for name in _WITHOUT_PARTS if name in {strategy for strategy, _ in found})
        yield PartsNotMeasured(subject=distinct(cell for _, cell in found), strategies=strategies)


# -- commands without the recorder ----------------------------------------------------


class WholeRunAverages(Finding, kind="average-of-run"):
    """Cells whose throughput is one average of the whole run.

    Attributes:
        reported: the findings of their runs, by cell.
    """

    heading = "Averages with start-up"
    remedy = "Train longer, or let the command report values of single steps."
    reported: Mapping[str, Sequence[AverageOfRun]] = field(default_factory=dict)

    def _message(self) -> str:
        text = (
            f"The throughput of {names(self.subject)} is one average of the whole run, including start-up, "
            "and evaluation if the command counts it. The efficiency and the time per step, which is the "
            "global batch of the plan divided by the throughput, are therefore those of whole runs."
        )
        most = max((one.reported for own in self.reported.values() for one in own), default=1)
        several = f"The commands report it up to {most} times per run, and the lowest rate counts."
        return f"{text} {several}" if most > 1 else text


@check()
def _averages(about: CheckedStudy) -> Iterator[WholeRunAverages]:
    measured = {run.cell_id for run in about.runs if run.measured}
    planned = (clean(cell.cell_id) for cell in about.study.planned if cell.is_average)
    if cells := distinct(cell for cell in planned if cell in measured):
        reported: dict[str, list[AverageOfRun]] = {}
        for run, env in about.envs:
            own = [one for one in findings_of_env(env) if isinstance(one, AverageOfRun)]
            reported.setdefault(run.cell_id, []).extend(own)
        yield WholeRunAverages(subject=cells, reported={cell: own for cell, own in reported.items() if own})


class RanksNotCounted(Finding, kind="ranks-not-counted"):
    """Cells whose command started an unknown number of ranks, in ``runs`` runs."""

    heading = "Ranks not counted"
    remedy = "Compare the world size that the program prints with the plan's, or use the recorder."
    runs: int

    def _message(self) -> str:
        return (
            f"It is not known how many ranks the commands of {names(self.subject)} started: only the "
            "recorder measures this. If they start another number than planned, the rates are those of other "
            "trainings."
        )


@check()
def _uncounted_ranks(about: CheckedStudy) -> Iterator[RanksNotCounted]:
    commands = {clean(cell.cell_id) for cell in about.study.planned if cell.is_unrecorded}
    joined = {run.run_id for run, env in about.envs if env.get("joined")}
    measured = [run for run in about.runs if run.measured and run.cell_id in commands]
    if cells := [run.cell_id for run in measured if run.run_id not in joined]:
        yield RanksNotCounted(subject=distinct(cells), runs=len(cells))


class ValueCounts(Finding, kind="value-counts"):
    """Runs of a cell, or cells of a series, with different numbers of values or windows, by cell."""

    heading = "Number of values or windows differs"
    remedy = "Let only rank 0 report values, and train the same number of steps in all runs."
    values_per_run: Mapping[str, Sequence[int]]

    def _message(self) -> str:
        cells = [
            f"{short_name(cell)} {' or '.join(map(str, numbers))}"
            for cell, numbers in self.values_per_run.items()
        ]
        return (
            f"Values or windows per run: {listed(cells, limit=4)}. Either the runs trained different numbers "
            "of steps, or several ranks reported values."
        )


@check()
def value_counts(about: CheckedStudy) -> Iterator[ValueCounts]:
    """Yield the cells of a series that reported different numbers of values, or whose runs differ in them.

    With the recorder, only the runs of a cell are compared: the windows of sizes can be planned differently.
    """
    planned, frames = about.study.planned, about.frames
    reported = {clean(cell.cell_id) for cell in planned if cell.reads_values and not cell.is_average}
    reported -= {run.cell_id for run in about.runs if _of_a_bar(about.study.facts.get(run.run_id, ()))}
    recorded = {clean(cell.cell_id) for cell in planned if not (cell.is_unrecorded or cell.follows_plan)}
    counts = {
        cell: sorted({int(run.epochs) for run in frames.measured_in(cell)})
        for cell in frames.runs_of_cells
        if cell in reported | recorded and frames.measured_in(cell)
    }
    groups: dict[str, dict[str, list[int]]] = {}
    for cell, name, _ in frames.members:
        if cell in counts:
            groups.setdefault(name if cell in reported else f"cell {cell}", {})[cell] = counts[cell]
    odd: dict[str, list[int]] = {}
    for own in groups.values():
        if len({number for numbers in own.values() for number in numbers}) > 1:
            odd |= own
    if odd:
        yield ValueCounts(subject=tuple(odd), values_per_run=odd)


def _of_a_bar(findings: Iterable[Finding]) -> bool:
    """Return whether values come from a progress bar, which is drawn at times of its own."""
    return any("%|" in form.form for one in findings if isinstance(one, LineForms) for form in one.forms)
