"""Check a proposal against the profile of a centre: yield what is there, and what is missing.

Every value is that of the page, or a mean over the runs of a size that count. A requirement that cannot be
shown is :class:`Missing`, with the reason; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from analysis.data.columns import RunRow, ScalingRow, three_digits
from analysis.data.names import nodes_known
from analysis.decide import VerdictKind
from analysis.report.profile import Profile
from analysis.report.proposal import Proposal
from analysis.report.tables import TextTable
from analysis.stats.decompose import mean
from analysis.stats.estimate import log_moments, mean_interval, ratio_interval
from analysis.stats.scaling import with_baseline
from analysis.text import clean, heading, one_line
from bench.matrix.schedulers import SCHEDULERS
from ddp_scaling_bench.units import (
    count,
    fraction,
    human_bytes,
    human_duration,
    known,
    listed,
    percent,
    short_percent,
)
from ddp_scaling_bench.variables import shown_variables

#: The numbers of samples of two sizes are equal if they differ by less than this share.
_SAME_WORK = 0.01
_MAX_SCRIPT = 20_000
_BY_HAND, _RECORDER = "add it by hand", "see docs/recorder.md"
_ADD = "add it to the axes, and submit it"
_REPAIR = "bench status says what is wrong with its runs"
_OWN_JOB = "submit each run as a job of its own"
_LONGER = "raise workload.steps_per_epoch, or the work of the command"


class Missing(NamedTuple):
    """What a profile asks for and the proposal lacks, and what to do; empty for work by hand."""

    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"missing: {self.what}; {self.remedy}" if self.remedy else f"by hand: {self.what}"


class Column(NamedTuple):
    """A column of the table of runs: a text for each size, and a note."""

    title: str
    texts: Sequence[str]
    note: str = ""


class Part(NamedTuple):
    """A paragraph, a table with its caption, or a script as lines: the indentation and the text of each."""

    title: str
    text: str = ""
    table: TextTable | None = None
    lines: Sequence[tuple[int, str]] = ()


Found = Iterator[Missing | Column | Part]


def check_profile(proposal: Proposal, profile: Profile) -> tuple[list[Part], list[Missing]]:
    """Return the parts of a proposal that a profile asks for, and what is missing."""
    asked = Requirements(proposal, profile)
    found = [*asked.efficiency(), *(one for name in profile.contents for one in getattr(asked, name)())]
    columns = [one for one in found if isinstance(one, Column)]
    parts = [one for one in found if isinstance(one, Part)]
    if columns:
        texts = [[*map(proposal.size, asked.rows)], *(one.texts for one in columns)]
        table = TextTable(["Job", *(one.title for one in columns)], [("", [*zip(*texts, strict=True)])])
        notes = " ".join(
            filter(None, ("Means over the runs of a size that count.", *(one.note for one in columns)))
        )
        parts.insert(0, Part("Runs", notes, table))
    missing = [one for one in found if isinstance(one, Missing)]
    if proposal.results.study.table:
        missing = [one._replace(remedy=_of_table(one.remedy)) for one in missing]
    return parts, [*missing, *map(Missing, profile.by_hand)]


def _of_table(remedy: str) -> str:
    """Return a remedy for a table: its runs are not runs of this tool."""
    return remedy if remedy.startswith(("add --", "give ", _BY_HAND)) else "add it to the table, or by hand"


@dataclass(frozen=True)
class Requirements:
    """The sizes of a proposal; each item of a profile's contents is a method that yields what it finds."""

    proposal: Proposal
    profile: Profile

    @cached_property
    def rows(self) -> list[ScalingRow]:
        """The sizes with valid values of the series that the request is based on."""
        rows = self.proposal.series[0] if self.proposal.series else self.proposal.shown
        return [row for row in rows if row.n and not self.proposal.results.error_of(row)]

    @cached_property
    def runs(self) -> list[list[RunRow]]:
        """The runs of each of these sizes that count."""
        return [self.proposal.results.frames.measured_in(row.cell_id) for row in self.rows]

    @cached_property
    def goal(self) -> ScalingRow | None:
        """The size of --target-size, else the requested one."""
        if asked := self.proposal.asked.target_size:
            return next(iter(with_baseline(self.rows, asked)), None)
        return self.proposal.row

    @property
    def _device(self) -> str:
        return self.proposal.results.device

    @property
    def _is_built_in(self) -> bool:
        return self.proposal.executed.kind == "built_in" and not self.proposal.results.study.table

    def efficiency(self) -> Found:
        """Yield the sizes that are lacking, and the lacking efficiency of the size of the application."""
        goal, least, of = self.goal, self.profile.least_sizes, self.profile.sizes_of
        if self.proposal.asked.target_size and goal is None:
            size = one_line(self.proposal.asked.target_size, limit=40)
            planned = with_baseline(self.proposal.results.rows, self.proposal.asked.target_size)
            if not any(map(self.proposal.results.error_of, planned)):  # these are named below
                yield Missing(f"a valid result of the target size {size}", _REPAIR if planned else _ADD)
        is_target = bool(goal and self.proposal.asked.target_size)
        counts_all = not goal or (goal.is_base and not is_target)
        rows = [row for row in self.rows if counts_all or (goal and row.gpus <= goal.gpus)]
        sizes = len({getattr(row, of) for row in rows if of == "gpus" or nodes_known(row)})
        if sizes < least:
            more = count(least - sizes, f"more {'node' if of == 'nodes' else self._device} count")
            yield Missing(f"{more}: {sizes} of {least} are valid", "add sizes up to the target to the axes")
        for row in self.proposal.series[0] if self.proposal.series else ():
            if row.n and (error := self.proposal.results.error_of(row)):
                what = f"a valid result at {self.proposal.size(row)}: {heading(error)}"
                yield Missing(what, "remove the error, and measure again")
        choice = self.proposal.choices.get(self.proposal.name)
        if goal and goal.is_base and is_target:
            what = f"a target size above {self.proposal.size(goal)}, the baseline"
            yield Missing(what, "give a larger --target-size")
        elif goal and choice and choice.verdicts[goal.place].kind is not VerdictKind.EFFICIENT:
            wanted = f"an efficiency of at least {self.profile.threshold}"
            if goal.is_base:
                yield Missing(f"a size above the baseline with {wanted}", "submit more runs, or other sizes")
                return
            value, is_known = self.proposal.efficiency(goal), known(goal.efficiency_low)
            if choice.verdicts[goal.place].kind is VerdictKind.INEFFICIENT:
                why = f"it is {value}"
            else:
                why = f"{value} is not certain" + " with fewer than three runs" * (not is_known)
            smaller = [row for row in self.rows if row.gpus < goal.gpus and not row.is_base]
            kinds = {choice.verdicts[row.place].kind for row in smaller}
            other = "request a smaller size, or " * (VerdictKind.EFFICIENT in kinds)
            remedy = f"{other}submit more runs"
            yield Missing(f"{wanted} at {self.proposal.size(goal)}: {why}", remedy)
        elif not choice:
            what = f"an efficiency of at least {self.profile.threshold}: no two sizes can be compared"
            yield Missing(what, "measure several sizes, see bench plan")

    def description(self) -> Found:
        """The Method describes the tool's own training, but of a command only its words."""
        if self._is_built_in:
            what = "runs of your program: these are of the tool's own training"
            yield Missing(what, "measure your program: workload.command")
        else:
            yield Missing("what the program, its test case and its parallelisation are", _BY_HAND)

    def same_input(self) -> Found:
        """In weak scaling, the input grows with the size."""
        shown = self.rows or self.proposal.shown or self.proposal.results.rows
        if shown and all(row.mode != "strong" for row in shown):
            what = "the same input at all sizes: this series is not strong scaling"
            others = any(row.mode == "strong" and known(row.efficiency) for row in self.proposal.results.rows)
            other = ", or choose another --series" * others
            yield Missing(what, f"measure scaling: {{mode: strong}}{other}")
        elif not self._is_built_in:
            yield Missing("whether the program reads the same input at all sizes", _BY_HAND)

    def target_size(self) -> Found:
        """State the largest job in production."""
        if not self.proposal.asked.target_size:
            yield Missing("the size of your largest job in production", "add --target-size SIZE")
        elif self.goal:
            what, value = "with an efficiency (of the time per step) of", self.proposal.efficiency(self.goal)
            result = f"{what} {value}" if known(self.goal.efficiency) else "whose efficiency is not known"
            text = f"The largest job in production is {self.proposal.size(self.goal)}, {result}."
            yield Part("Target", text)

    def machine(self) -> Found:
        """Yield another executor, or another cluster by Slurm's name in env.json."""
        study, asked = self.proposal.results.study, self.profile
        executor = one_line(study.plan.get("executor"), limit=40) or "not known"
        if executor != asked.executor:
            yield Missing(
                f"runs with executor {asked.executor}: it is {executor}", f"run it on {asked.cluster}"
            )
            return
        envs = study.envs_of(run.run_id for run in self.proposal.executed.runs).values()
        names = {one_line((env.get("slurm") or {}).get("SLURM_CLUSTER_NAME"), limit=40) for env in envs}
        if not names or not all(asked.cluster.casefold() in name.casefold() for name in names):
            named = listed(sorted(names - {""})) or "not recorded"
            yield Missing(f"runs on {asked.cluster}: the cluster is {named}", f"run it on {asked.cluster}")

    @cached_property
    def _wall_times(self) -> tuple[list[list[float]], str, str]:
        """The wall times of the runs of each size (s), from start to end; why they do not count; a remedy."""
        times = [[run.wall_s for run in own if known(run.wall_s)] for own in self.runs]
        if any(run.allocation == "pack" for own in self.runs for run in own):
            return times, "the runs shared a job (--pack)", _OWN_JOB
        if not times:
            return times, "no size has a valid result", _REPAIR
        if not all(times):
            return times, "some sizes have no start and end", "bench verify says what is missing"
        is_long = all(wall_s > 0 for own in times for wall_s in own)
        return times, "" if is_long else "some runs took less than a second", _LONGER

    def wall_time(self) -> Found:
        """Yield the wall time of each size."""
        times, reason, remedy = self._wall_times
        if all(times):
            yield from self._too_short([mean(own) for own in times])
        if reason:
            yield Missing(f"the wall time of each size: {reason}", remedy)
            return
        means = [mean(own) for own in times]
        ends = [*zip(means, *mean_interval(log_moments(times)), strict=True)]
        is_job = all(run.allocation == "job" for own in self.runs for run in own)
        what = "whole jobs" if is_job else "runs, from their start to their end"
        note = f"Wall times are those of {what}, with start-up and warm-up"
        is_whole = all(wall_s == round(wall_s) for own in times for wall_s in own)
        is_narrow = is_whole and any(known(low) and high - low < 1 for _, low, high in ends)
        note += ", in whole seconds, so that intervals may be too narrow." if is_narrow else "."
        yield Column("Wall time (s)", [_with_ends(three_digits, *own) for own in ends], note)

    def _too_short(self, means: Sequence[float]) -> Found:
        least_s = 60 * self.profile.least_minutes
        if not means:
            yield Missing(f"runs of {human_duration(least_s)}: no size has a valid result", _REPAIR)
        elif min(means) < least_s:
            size, took = self.proposal.size(self.rows[means.index(min(means))]), human_duration(min(means))
            yield Missing(f"runs of {human_duration(least_s)}: {took} at {size}", _LONGER)

    def wall_efficiency(self) -> Found:
        """Yield E = p_b T_b / (p_N T_N) with the wall times T and the ranks p of baseline and size."""
        times, reason, remedy = self._wall_times
        bases = [at for at, row in enumerate(self.rows) if row.is_base]
        samples = [run.samples for own in self.runs for run in own]
        strong = "measure strong scaling, with the same work at all sizes"
        if not reason and (not bases or self.rows[0].mode != "strong"):
            reason, remedy = "it needs strong scaling with a valid baseline", strong
        elif not reason and (not all(map(known, samples)) or max(samples) > (1 + _SAME_WORK) * min(samples)):
            reason, remedy = "that all sizes did equal work is not known", strong
        if reason:
            yield Missing(f"an efficiency of the wall time: {reason}", remedy)
            return
        moments, means = log_moments(times), [mean(own) for own in times]
        scales = np.array([self.rows[bases[0]].gpus / row.gpus for row in self.rows])
        ends = (scales * end for end in ratio_interval(moments.take(np.array(bases)), moments))
        values = zip(scales * means[bases[0]] / means, *ends, strict=True)
        texts = []
        for row, (value, low, high) in zip(self.rows, values, strict=True):
            texts.append("1" if row.is_base else _with_ends(fraction, value, low, high))
            if (
                row is (self.goal or self.proposal.row)
                and not row.is_base
                and not min(low, value) >= self.profile.threshold
            ):
                what = f"an efficiency of the wall time of {self.profile.threshold}"
                remedy = "lengthen the runs against their start-up"
                yield Missing(f"{what}: {texts[-1]} at {self.proposal.size(row)}", remedy)
        yield Column("E (wall time)", texts, "E (wall time): p_b T_b/(p_N T_N), T: wall time, p: ranks.")

    def start_up(self) -> Found:
        """Yield the share of the wall time outside the timed windows: at least that of the start-up."""
        shares = [mean(1 - run.window_s / run.wall_s for run in own if run.wall_s > 0) for own in self.runs]
        if any(run.wall_s == 0 for own in self.runs for run in own):
            yield Missing("the share of the start-up: some runs took less than a second", _LONGER)
            return
        if not shares or not all(map(known, shares)):
            remedy = _REPAIR if self._is_built_in else _RECORDER
            yield Missing("the share of the start-up: the times of steps or runs are not known", remedy)
            return
        if min(shares) < -_SAME_WORK:
            size = self.proposal.size(self.rows[shares.index(min(shares))])
            what = f"the share of the start-up: at {size}, the timed steps are longer than the wall time"
            yield Missing(what, "check the clocks of the nodes and of Slurm")
            return
        outside = "start-up, warm-up, validation, probes, end"
        note = f"Outside steps: share of the wall time outside the timed steps ({outside})."
        yield Column("Outside steps", [percent(share) for share in shares], note)
        if max(shares) > self.profile.most_start_up:
            size = self.proposal.size(self.rows[shares.index(max(shares))])
            share = f"up to {short_percent(max(shares))} at {size}, all that is outside the timed steps"
            yield Missing(f"a start-up that does not dominate: {share}", _LONGER)

    def utilisation(self) -> Found:
        """Yield the utilisation of the GPUs in the timed steps."""
        results = self.proposal.results
        if self.rows and all(known(row.gpu_util) for row in self.rows):
            yield Column("GPU utilisation", [f"{three_digits(row.gpu_util)} %" for row in self.rows])
        elif results.device != "GPU":
            yield Missing("GPU utilisation: the runs used no GPU", "measure on GPUs, if you apply for them")
        elif results.study.table or self.proposal.executed.reads_values:
            yield Missing("GPU utilisation: only the recorder measures it", _RECORDER)
        elif any(facts.mhz > 0 for facts in results.run_facts.values()):
            what = "GPU utilisation: the driver kept no samples, as on MIG or in short windows"
            yield Missing(what, "measure longer windows, or on whole GPUs")
        else:
            what = "GPU utilisation: nvidia-ml-py or the driver's NVML was not available in the jobs"
            yield Missing(what, "install nvidia-ml-py in the environment of the jobs")

    def memory(self) -> Found:
        """Yield the largest memory of a rank."""
        if self.rows and all(known(row.peak_mem_bytes) for row in self.rows):
            yield Column("Memory of a rank", [human_bytes(row.peak_mem_bytes) for row in self.rows])
        else:
            remedy = _REPAIR if self._is_built_in else _RECORDER
            yield Missing("the memory of a rank: it was not recorded at all sizes", remedy)

    def io(self) -> Found:
        """The Method describes the input of the tool's own training only."""
        if not self._is_built_in:
            yield Missing("how the program reads and writes, and how much", _BY_HAND)
        elif any(cell.workload.get("data") in (None, "synthetic") for cell in self.proposal.executed.cells):
            yield Missing("the load on the file system: batches are synthetic", "measure with your data")

    def hours(self) -> Found:
        """Yield the requested hours in the centre's unit, by period."""
        row, asked = self.proposal.row, self.profile.hours
        total = None if row is None or self.proposal.error else self.proposal.total_hours(row).get(asked.unit)
        if total is None or not self.proposal.asked.samples:
            reason = f"no {asked.unit} is counted" if total is None else "the training is an example"
            yield Missing(f"the {asked.name}: {reason}", "add --samples N --epochs N --trainings N")
            return
        text = f"{three_digits(asked.factor * total)} {asked.name} ({asked.factor:g} per {asked.unit}-hour)"
        share = three_digits(asked.factor * total / asked.periods)
        each = f", {share} in each of {asked.periods} equal periods" if asked.periods > 1 else ""
        yield Part("Hours", f"The request with its reserve is for {text}{each}.")

    def job_script(self) -> Found:
        """Yield the script of the requested size; a script with values that are not shown is left out."""
        study, goal = self.proposal.results.study, self.goal or self.proposal.row
        cells = [cell for cell in study.planned if goal and clean(cell.cell_id) == goal.cell_id]
        if any(run.allocation == "pack" for own in self.runs for run in own):
            what = "the script of a job of this size: the runs shared jobs of scripts/pack.sbatch"
            yield Missing(what, _OWN_JOB)
        for cell in cells:
            path = study.folder.scripts / f"{cell.cell_id}{SCHEDULERS[str(study.plan['executor'])].suffix}"
            values = shown_variables(cell.env, cell.swept)
            if hidden := listed([name for name, value in values.items() if value is None], limit=3):
                what = f"the job script: it sets {hidden}, whose values are not shown"
                yield Missing(what, f"attach a copy of scripts/{path.name} without them")
            elif not path.is_file():
                yield Missing(f"the job script: scripts/{path.name} is not there", "attach the one that ran")
            else:
                executor = str(study.plan["executor"])
                if self.profile.executor not in ("", executor):
                    yield Missing(f"a batch script: this one is for executor {executor}", _BY_HAND)
                text = path.read_text(encoding="utf-8", errors="replace")
                if len(text) > _MAX_SCRIPT:
                    yield Missing(f"the end of the long job script scripts/{path.name}", "attach the file")
                text = text[:_MAX_SCRIPT]
                lines = [clean(line.expandtabs()).rstrip() for line in text.splitlines()]
                indented = [(len(line) - len(line.lstrip()), line.lstrip()) for line in lines]
                yield Part(f"Job script of {self.proposal.size(goal)}" if goal else "", lines=indented)
        if not cells:
            why, remedy = (
                ("no size is requested", "attach one of scripts/")
                if study.planned
                else ("there is none", "attach yours")
            )
            yield Missing(f"the job script: {why}", remedy)


def _with_ends(form: Callable[[float], str], value: float, low: float, high: float) -> str:
    """Return a value with its interval, which contains it."""
    if not (known(low) and known(high)):
        return form(value)
    return f"{form(value)} [{form(min(low, value))}, {form(max(high, value))}]"
