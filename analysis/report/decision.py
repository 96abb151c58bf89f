"""Build the page's first screen: what went wrong, and tables with a row and a verdict per size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from analysis.causes.cells import CellDivision
from analysis.causes.divide import NOT_EXPLAINED, WHOLE
from analysis.causes.table import rest_parts
from analysis.checks.scaling_table import TogetherUnknown
from analysis.data.columns import RunRow, ScalingRow, by_series, grouped, part_title
from analysis.data.names import layout, nodes_known, ranks, short_labels, with_layout
from analysis.decide import AT_GUIDE, Verdict, VerdictKind, efficiency_text, probability_text, what_decides
from analysis.report.results import Results
from analysis.report.words import WORDS, mode_title
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import outcome_of, outcome_text, outcomes_text
from analysis.stats.rates import rate_unit
from analysis.stats.scaling import GUIDE
from analysis.text import heading, one_line
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import MISSING, count, known, listed, number, percent, short_percent

MAX_SERIES = 4
#: A table shows at most as many sizes, and of each series at least so many; the others are folded.
_MOST_SIZES, _FEWEST_SIZES = 16, 5
#: Maximum number of sizes, and of things that went wrong, that a line names.
_MAX_NAMED = 3
_WAITING = (RunState.PLANNED, RunState.QUEUED, RunState.RUNNING)
#: Verdicts whose reason is the largest loss.
_EXPLAINED = (VerdictKind.INEFFICIENT, VerdictKind.AT_THE_GUIDE, VerdictKind.CANNOT_TELL)
#: Verdicts that the answer names for sizes smaller than the recommended one, too.
_RULED_OUT = (VerdictKind.INEFFICIENT, VerdictKind.NO_RESULT, VerdictKind.NOT_VALID)
#: Sizes of which the runs show that they are not efficient.
_NOT_EFFICIENT = (VerdictKind.INEFFICIENT, VerdictKind.AT_THE_GUIDE)
#: A smaller loss without a named cause, a share of the step, is mostly noise.
LEAST_LOSS = 0.03


@dataclass(frozen=True)
class SizeRow:
    """One size: its texts, the kind of its verdict, and whether it is among the sizes that are folded."""

    ranks: str
    layout: str
    efficiency: str
    verdict: str
    lacking: str
    kind: str
    recommended: bool
    speedup: str
    over_smaller: str
    cost: str
    loss: str
    of_itself: str
    folded: bool


@dataclass(frozen=True)
class Answer:
    """What the runs of a series say about its sizes, in texts; an unknown one is empty.

    Attributes:
        label: the series; empty if it is the only one.
        use: the size to use with its speedup, or that it is not known.
        sure: its efficiency with its interval, and P.
        why: the largest loss of the size.
        others: the verdicts on the other sizes, as far as they matter.
    """

    label: str
    use: str
    sure: str
    why: str
    others: str


@dataclass(frozen=True)
class Decision:
    """The table of one scaling mode.

    Attributes:
        mode: ``strong``, ``weak`` or empty.
        title: the title of the mode.
        caption: what all series share, and the series that are left out.
        cost: the heading of the costs.
        cost_of: the amount of work that the costs are for, such as ``to train 1M samples``.
        groups: the series, each with its label (empty if it is alone) and its sizes.
        answers: the answer of each series.
        lines: label and value of the lines below the table.
    """

    mode: str
    title: str
    caption: str
    cost: str
    cost_of: str
    groups: list[tuple[str, list[SizeRow]]]
    answers: list[Answer]
    lines: list[tuple[str, str]]
    more: str


def decisions(results: Results) -> list[Decision]:
    """Return the table of each scaling mode, in the plan's order."""
    on_gpus = all(cell.device == "cuda" for cell in results.study.cells.values())
    # In a table of tokens/s without the length of its samples, a sample is a token.
    counts_tokens = all(row.tokens_per_sample == 1 for row in results.rows)
    found = []
    for mode, rows in grouped(results.rows, lambda row: row.mode).items():
        series = by_series(rows)
        shown = {name: _with_baseline(series[name]) for name in _chosen(series, results)}
        kept = _unfolded(shown, results)
        hidden = {row.series for row in rows} - {row.series for own in shown.values() for row in own}
        labels, shared = short_labels(results.parts, shown)
        alone = list(labels.values()) if len(shown) == 1 else []
        number = f"{len(shown)} of {len(shown) + len(hidden)} series"
        more = f"{number}, {WORDS['decision']['others']}" if hidden else ""
        groups = {
            name: [_size_row(row, results, on_gpus=on_gpus, folded=row.place not in kept) for row in own]
            for name, own in shown.items()
        }
        decision = Decision(
            mode=mode,
            title=mode_title(mode) if mode else WORDS["modes"]["other"]["title"],
            caption=", ".join(filter(None, [*alone, shared, more])),
            cost=WORDS["decision"]["gpu_hours" if on_gpus else "node_hours"],
            cost_of=WORDS["decision"]["per_tokens" if counts_tokens else "per_samples"],
            groups=[("" if alone else labels[name], own) for name, own in groups.items()],
            answers=[_answer("" if alone else labels[name], own, results) for name, own in shown.items()],
            lines=_lines({labels[name]: own for name, own in shown.items()}, results),
            more=_of_hidden({name: series[name] for name in series if name in hidden}, results) or more,
        )
        found.append(decision)
    return found


def _chosen(series: Mapping[str, Sequence[ScalingRow]], results: Results) -> list[str]:
    """Return the series to show: those with a recommended size, then those with the most valid sizes."""

    def merit(name: str) -> tuple[int, ...]:
        valid = [row for row in series[name] if known(row.efficiency) and not results.error_of(row)]
        used = [row for row in series[name] if results.verdicts[row.place].recommended]
        kinds = (used, valid, [row for row in series[name] if row.n])
        return tuple(len({row.gpus for row in own}) for own in kinds)

    several = [name for name, rows in series.items() if len({row.gpus for row in rows}) > 1] or [*series]
    best = sorted(several, key=merit, reverse=True)[:MAX_SERIES]
    return [name for name in several if name in best]


def _with_baseline(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Return the sizes of a series in order, and its baseline if that is in another series."""
    bases = {row.base.place: row.base for row in rows if row.base}
    others = [base for base in bases.values() if base.series != rows[0].series]
    return [*others, *sorted(rows, key=lambda row: (row.gpus, row.nodes))]


def _unfolded(shown: Mapping[str, Sequence[ScalingRow]], results: Results) -> set[int]:
    """Return the places of the sizes that are not folded: of each series, those that decide most."""
    most = max(_MOST_SIZES // len(shown), _FEWEST_SIZES)

    def weight(row: ScalingRow, last: ScalingRow) -> tuple[bool, bool, int]:
        verdict = results.verdicts[row.place]
        ends = row.is_base or row is last
        return verdict.recommended or ends, verdict.kind is not VerdictKind.EFFICIENT, row.gpus

    kept = set()
    for rows in shown.values():
        by_weight = sorted(rows, key=lambda row: weight(row, rows[-1]), reverse=True)
        kept |= {row.place for row in (by_weight[:most] if len(rows) > most + 1 else rows)}
    return kept


def _size_row(row: ScalingRow, results: Results, *, on_gpus: bool, folded: bool) -> SizeRow:
    verdict = results.verdicts[row.place]
    division = results.divisions.get(row.place) if verdict.kind is not VerdictKind.NOT_VALID else None
    title, share = main_loss(division) if division and row.n else (MISSING, math.nan)
    return SizeRow(
        ranks=f"{row.gpus:,}",
        layout=", ".join(filter(None, [layout(row), "" if row.ddp else WORDS["decision"]["no_ddp"]])),
        efficiency=efficiency_text(row),
        verdict=_verdict_text(row, results),
        lacking=_lacking(row, results.frames.runs_of_cells.get(row.cell_id, ())),
        kind=verdict.kind,
        recommended=verdict.recommended,
        speedup=number(row.speedup, digits=3),
        over_smaller=_over_smaller(row),
        cost=number(hours_per_million(row, on_gpus=on_gpus), digits=3),
        loss=_with_share(title, share),
        of_itself=WORDS["decision"]["of_itself"] if row.is_base and known(share) else "",
        folded=folded,
    )


def _over_smaller(row: ScalingRow) -> str:
    """Return what a size brings compared with the next smaller one, such as ``1.86 × of 2``."""
    if not known(row.incremental_efficiency):
        return ""
    growth = row.gpus / row.incremental_from
    ratio = growth * row.incremental_efficiency ** math.log2(growth)
    return f"{number(ratio, digits=3)} × of {row.incremental_from:,.0f}"


def _with_share(title: str, share: float) -> str:
    return f"{percent(share)} {title}" if known(share) else title


def hours_per_million(row: ScalingRow, *, on_gpus: bool = False) -> float:
    """Return the GPU-hours, or on CPUs the node-hours, of a million samples."""
    units = row.gpus if on_gpus else row.nodes if nodes_known(row) else math.nan
    return units * 1e6 / row.throughput_samples_per_sec / 3600 if row.n else math.nan


def _verdict_text(row: ScalingRow, results: Results) -> str:
    verdict = results.verdicts[row.place]
    text, use = str(WORDS["verdicts"][verdict.kind]), f"{WORDS['verdicts']['use']}: " * verdict.recommended
    if verdict.kind is VerdictKind.NOT_VALID and verdict.error:
        return f"{text}: {heading(verdict.error)}"
    if verdict.kind is VerdictKind.FEW_RUNS:
        return _few_runs(verdict, row)
    sure = probability_text(verdict.p).replace(" ", "\N{NO-BREAK SPACE}")
    # The row shows the efficiency relative to the baseline.
    of_other = _judged(verdict, row) if verdict.judged and verdict.judged.reference is not row.base else ""
    return use + ", ".join(filter(None, (text, of_other, sure)))


def _few_runs(verdict: Verdict, row: ScalingRow) -> str:
    """Return the verdict on a size of which, or of whose reference, there are few runs."""
    reference = verdict.judged.reference if verdict.judged else row
    fewest = min(row, reference, key=lambda one: one.n)
    runs = "single run" if fewest.n == 1 else count(fewest.n, "run")
    of_other = "" if fewest is row else f" of {ranks(fewest)}"
    judged = verdict.judged
    if judged and known(judged.spread):
        sure = f"{efficiency_text(judged)}, {probability_text(judged.p)}"
        return f"{runs}{of_other}, {sure} with a stated spread of {short_percent(math.expm1(judged.spread))}"
    clear = judged and judged.efficiency < GUIDE * (1 - AT_GUIDE)
    text = f"{runs}{of_other}, {WORDS['verdicts'][verdict.kind]}"
    return f"below {GUIDE} so far ({text})" if clear else text


def _lacking(row: ScalingRow, runs: Sequence[RunRow]) -> str:
    lacking = outcomes_text(run for run in runs if not run.measured)
    counted = f"{row.n} of {count(len(runs), 'run')}" if lacking and row.n else ""
    unknown = [fact.message for fact in row.facts if isinstance(fact, TogetherUnknown)]
    return "; ".join(filter(None, (counted, lacking, *unknown)))


def went_wrong(results: Results, *, warned: bool) -> tuple[str, bool]:
    """Return how many runs of which sizes went wrong, and in what way; and whether any did.

    A run that has not ended is not wrong. ``warned`` is True if the study has a warning.
    """
    runs, not_valid = results.frames.runs, WORDS["verdicts"]["not-valid"]
    errors = {cell: f"{not_valid}, {heading(error)}" for cell, error in results.invalid.items()}
    groups = grouped(runs, lambda run: errors.get(run.cell_id, "") if run.measured else outcome_of(run))
    counted = len(groups.pop("", ()))
    waiting = [run for state in _WAITING for run in groups.pop(state, ())]
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    total, repeated = count(len(runs), "run"), len(results.study.earlier)
    wrong = [f"{outcome_text(name)} ({_sizes(own, results)})" for name, own in largest]
    if several := len(wrong) > 1:
        wrong = [f"{len(own):,} {text}" for (_, own), text in zip(largest, wrong, strict=True)]
    none = "no run failed so far" if waiting else "no run failed" if warned or repeated else "nothing"
    bad = f"{len(runs) - counted - len(waiting):,} of {total}{':' * several} {wrong[0]}" if wrong else ""
    found = [bad or none, *wrong[1:_MAX_NAMED]]
    found += [f"{len(wrong) - _MAX_NAMED} more"] if len(wrong) > _MAX_NAMED else []
    found += [f"{len(waiting):,} not run yet ({_sizes(waiting, results)})"] if waiting else []
    found += [f"{count(repeated, 'attempt')} repeated"] if repeated else []
    slower = [one for own in results.choices.values() for one in own.findings if one.severity == "error"]
    found += [f"{heading(slower[0])} ({count(len(slower), 'case')})"] if slower else []
    return "; ".join(found), bool(wrong or slower)


def _sizes(runs: Sequence[RunRow], results: Results) -> str:
    """Return the sizes of some runs, after the label of their series if other series have none of them."""
    ranks_of = {cell.cell_id: int(cell.gpus) for cell in results.frames.cells}
    cells, labels = {run.cell_id for run in runs}, results.labels[0]
    alone = [name for name, own in by_series(results.rows).items() if cells <= {row.cell_id for row in own}]
    label = f"{labels[alone[0]]}, " if len(alone) == 1 < len(labels) else ""
    concerned = {row.series for row in results.rows if row.cell_id in cells}
    several = f" of {count(len(concerned), 'series', 'series')}" if not alone else ""
    own = sorted({ranks_of[cell] for cell in cells})
    if len(own) > _MAX_NAMED:
        sizes = "all sizes" if {*own} == {*ranks_of.values()} else count(len(own), "size")
        return label + sizes + several
    return label + listed([*(f"{size:,}" for size in own[:-1]), count(own[-1], "rank")]) + several


# -- the lines below a table ----------------------------------------------------------


def _lines(shown: Mapping[str, Sequence[ScalingRow]], results: Results) -> list[tuple[str, str]]:
    """Return the lines about the series ``shown``, by their labels; a text is not repeated."""
    several = len(shown) > 1
    lines = []
    about = (("beware", _beware), ("unknown", _unknown))
    for name, describe in about:
        texts = {label: describe(rows, results, several=several) for label, rows in shown.items()}
        same = [*texts.values()][:1] if len(set(texts.values())) == 1 else []
        every = same or [f"{label}: {text}" for label, text in texts.items() if text]
        lines.append((str(WORDS["decision"][name]), " · ".join(every)))
    lines.insert(0, (str(WORDS["decision"]["fastest"]), _fastest(shown, results)))
    return [line for line in lines if line[1]]


def _fastest(shown: Mapping[str, Sequence[ScalingRow]], results: Results) -> str:
    """Return the recommended size with the highest throughput of several series that have one."""
    chosen = results.verdicts
    best = [(row, label) for label, rows in shown.items() for row in rows if chosen[row.place].recommended]
    if len(best) < 2:
        return ""
    row, label = max(best, key=lambda one: one[0].rate)
    unit = rate_unit([row])
    rate = f"{number(unit.of(row.throughput_samples_per_sec, row))} {unit.name}"
    return f"{label}, {with_layout(row)}, {rate}, efficiency {_judged(chosen[row.place], row)}"


def _size(row: ScalingRow) -> str:
    return with_layout(row) if row.several else ranks(row)


def _of_kind(rows: Sequence[ScalingRow], results: Results, *kinds: VerdictKind) -> list[ScalingRow]:
    return [row for row in rows if results.verdicts[row.place].kind in kinds]


def _answer(label: str, rows: Sequence[ScalingRow], results: Results) -> Answer:
    """Return what the runs say about the sizes of a series."""
    best = _best(rows, results)
    if best is None:
        has_result = any(row.n for row in rows)
        return Answer(
            label, _without_best(rows, results), "", "", _others(rows, results, 0) if has_result else ""
        )
    times = f", {number(best.speedup, digits=3)} times the rate of {_size(best.base)}" if best.base else ""
    largest = f", {WORDS['decision']['largest']}" if best.gpus == rows[-1].gpus else ""
    verdict = results.verdicts[best.place]
    sure = f"efficiency {_judged(verdict, best)}, {probability_text(verdict.p)}"
    if lacking := _lacking(best, results.frames.runs_of_cells.get(best.cell_id, ())):
        sure += f" ({lacking})"
    use = f"use {_size(best) if label else with_layout(best)}{times}{largest}"
    return Answer(label, use, sure, _loss(best, results), _others(rows, results, best.gpus))


def _of_hidden(series: Mapping[str, Sequence[ScalingRow]], results: Results) -> str:
    """Return what to use of some series that have no rows in the table; empty if they are too many."""
    if len(series) > MAX_SERIES:
        return ""
    texts = [(results.labels[0][name], _use(rows, results)) for name, rows in series.items()]
    return "; ".join(
        f"{listed([one[0] for one in own])}: {use}" for use, own in grouped(texts, itemgetter(1)).items()
    )


def _use(rows: Sequence[ScalingRow], results: Results) -> str:
    best = _best(rows, results)
    return f"use {with_layout(best)}" if best else _without_best(rows, results)


def _best(rows: Sequence[ScalingRow], results: Results) -> ScalingRow | None:
    """Return the recommended size of a series."""
    return next((row for row in rows if results.verdicts[row.place].recommended), None)


def _without_best(rows: Sequence[ScalingRow], results: Results) -> str:
    if not any(row.n for row in rows):
        runs = [run for row in rows for run in results.frames.runs_of_cells.get(row.cell_id, ())]
        return f"{WORDS['decision']['none']} ({outcomes_text(runs)})" if runs else WORDS["decision"]["none"]
    if len({row.gpus for row in rows}) == 1:
        return str(WORDS["decision"]["one_size"])
    base = next((row for row in rows if row.is_base), None)
    ruled_out = {*_NOT_EFFICIENT, VerdictKind.NO_RESULT}
    larger_kinds = {results.verdicts[row.place].kind for row in rows if base and row.gpus > base.gpus}
    if base and VerdictKind.AT_THE_GUIDE in larger_kinds <= ruled_out:
        at_guide = _named(_of_kind(rows, results, VerdictKind.AT_THE_GUIDE))
        return f"no larger size is clearly above {GUIDE}: {at_guide} at {GUIDE}"
    if base and VerdictKind.INEFFICIENT in larger_kinds <= ruled_out:
        return f"use no more than {with_layout(base)}"
    return str(WORDS["decision"]["open"])


def _others(rows: Sequence[ScalingRow], results: Results, recommended: int) -> str:
    """Return the verdicts on sizes beyond ``recommended`` ranks, and on smaller ones that are no choice."""
    told = (VerdictKind.BASELINE, VerdictKind.NO_ADVICE)
    ruled_out = _of_kind(rows, results, *_RULED_OUT)
    about = [row for row in rows if row.gpus > recommended or row in ruled_out]
    groups = grouped(
        (row for row in about if results.verdicts[row.place].kind not in told),
        lambda row: _short_verdict(results.verdicts[row.place], row),
    )
    return "; ".join(
        f"{_named(own)}: {_point(own, results)}{text}{_detail(own, results)}" for text, own in groups.items()
    )


def _point(rows: Sequence[ScalingRow], results: Results) -> str:
    """Return the efficiency of the only one of these sizes if it has few runs, of which nothing is stated."""
    verdict = results.verdicts[rows[0].place]
    is_alone = len(rows) == 1 and verdict.kind is VerdictKind.FEW_RUNS and verdict.judged
    return f"{_judged(verdict, rows[0])}, " if is_alone and not known(results.spread) else ""


def _detail(rows: Sequence[ScalingRow], results: Results) -> str:
    """Return the efficiency of the only one of these sizes, or the loss of the first one, in parentheses."""
    verdict, loss = results.verdicts[rows[0].place], _loss(rows[0], results)
    is_known = len(rows) == 1 and known(verdict.p) and verdict.kind is not VerdictKind.FEW_RUNS
    parts = [_judged(verdict, rows[0]), probability_text(verdict.p)] if is_known else []
    at = f" at {_size(rows[0])}" if len(rows) > 1 else ""
    if verdict.kind is VerdictKind.FEW_RUNS and loss and rows[0].efficiency < GUIDE:
        return f", lost: {loss}{at}"
    parts += [f"lost: {loss}{at}"] if loss and verdict.kind in _EXPLAINED else []
    return f" ({', '.join(parts)})" * bool(parts)


def _short_verdict(verdict: Verdict, row: ScalingRow) -> str:
    """Return a verdict without P, and the error of a size that is not valid."""
    if verdict.kind is VerdictKind.FEW_RUNS:
        return _few_runs(verdict, row)
    is_invalid = verdict.kind is VerdictKind.NOT_VALID and verdict.error
    error = f" ({heading(verdict.error)})" if is_invalid and verdict.error else ""
    return f"{WORDS['verdicts'][verdict.kind]}{error}"


def _loss(row: ScalingRow, results: Results) -> str:
    """Return the largest loss of a size with its share of the step; empty if it is not known."""
    division = results.divisions.get(row.place)
    return _with_share(*main_loss(division)) if division else ""


def _named(rows: Sequence[ScalingRow]) -> str:
    return listed([_size(row) for row in rows], limit=_MAX_NAMED)


def _judged(verdict: Verdict, row: ScalingRow) -> str:
    """Return the efficiency that a verdict is about, and its reference if that is not the baseline."""
    judged = verdict.judged
    if judged is None or judged.reference is row.base:
        return efficiency_text(row)
    return f"{efficiency_text(judged)} of {_size(judged.reference)}"


def _beware(rows: Sequence[ScalingRow], results: Results, *, several: bool) -> str:
    """Return a slow baseline, and sizes that are slower than smaller ones."""
    return messages(results.choices[rows[-1].series].findings)


def _unknown(rows: Sequence[ScalingRow], results: Results, *, several: bool) -> str:
    """Return why verdicts are missing, and (of one series) what would settle them."""
    found = []
    undecided = _of_kind(rows, results, VerdictKind.CANNOT_TELL, VerdictKind.FEW_RUNS)
    if undecided and not several:
        few = len(_of_kind(undecided, results, VerdictKind.FEW_RUNS))

        def needs(row: ScalingRow) -> str:
            verdict = results.verdicts[row.place]
            if few < 2 or verdict.kind is not VerdictKind.FEW_RUNS or not verdict.judged:
                return what_decides(verdict, row)
            reference = ranks(verdict.judged.reference)
            return f"an interval needs {MIN_RUNS} undisturbed runs of each and of {reference}"

        texts = grouped(undecided, needs)
        found += [f"whether {_named(own)} reach {GUIDE}: {text}" for text, own in texts.items()][:_MAX_NAMED]
    unjudged = [row for row in _of_kind(rows, results, VerdictKind.NO_ADVICE) if row.facts]
    for reason, own in grouped(unjudged, lambda row: one_line(row.facts[-1].message, limit=300)).items():
        found.append(f"{_named(own)}: {reason}")
    return "; ".join(dict.fromkeys(found))


# -- the main loss --------------------------------------------------------------------


def main_loss(division: CellDivision) -> tuple[str, float]:
    """Return the title and the share of the largest part of a loss: a cause, else a part of the step.

    The share is NaN if the title says that there is hardly any loss, or that its cause is not known.
    """
    if WHOLE in division.parts:
        return "not known", math.nan
    if division.loss < LEAST_LOSS and all(one.is_rest for one in division.rows):
        return "hardly any loss", math.nan
    shares = [(one.title, one.share) for one in division.rows if one.cause != NOT_EXPLAINED]
    rest = next(one for one in division.rows if one.cause == NOT_EXPLAINED)
    if not rest.share_low <= 0:
        shares += [(part_title(part.part), part.share) for part in rest_parts(division)]
    title, share = max(shares, key=lambda one: one[1] if known(one[1]) else 0.0, default=("", math.nan))
    return (title, share) if share >= LEAST_LOSS else ("no clear cause", math.nan)
