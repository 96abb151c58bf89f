"""The scaling section that proposals for computing time ask for, as Markdown and LaTeX.

What reviewers look for: nodes, GPUs, batch, absolute time, throughput, speedup, efficiency, interval and
number of runs; a log-log plot with the ideal line and an efficiency plot with a guide;
main-loop and whole-job time; node-hours; the recommended size and why; what causes the
loss; settings as in production, input and output told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.compare.matching import spelled
from analysis.data.environment import Environment
from analysis.data.load import Study
from analysis.data.names import Row, job_size, nodes_known, widest_series
from analysis.report.document import (
    Block,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    Table,
    as_latex,
    as_markdown,
)
from analysis.report.figures.drawing import Drawing
from analysis.report.summary import certainty, closest_to_guide, nothing_to_tell, recommended
from analysis.stats.losses import LOSSES, SMALLEST_SHARE, hardly_any_loss, losses, why_unknown
from analysis.stats.measured import Frames
from analysis.stats.scaling import GUIDE
from analysis.text import (
    MISSING,
    capital,
    count,
    fraction,
    fractions,
    known,
    listed,
    number,
    one_line,
    percent,
    seconds,
    whole,
)

FILES = ("proposal.md", "proposal.tex")


@dataclass(frozen=True)
class _Series:
    """One series that is shown: its measured rows from small to large, its base and its regime."""

    rows: pd.DataFrame
    regime: str
    base: pd.Series
    rate_unit: str

    @property
    def counted(self) -> str:
        """What the throughput counts: samples, as a rule."""
        return self.rate_unit.removesuffix("/s")


def proposal_files(
    study: Study, frames: Frames, rows: pd.DataFrame, drawings: Sequence[Drawing], environment: Environment
) -> dict[str, str]:
    """Return the section by file name, :data:`FILES`.

    Args:
        study: the study.
        frames: what its runs measured.
        rows: from :func:`analysis.checks.scaling_table.scaling_table`.
        drawings: the report's figures, which the section refers to.
        environment: what the runs ran on.
    """
    blocks = list(_blocks(study, frames, rows, drawings, environment))
    return {"proposal.md": as_markdown(blocks), "proposal.tex": as_latex(blocks)}


def _blocks(
    study: Study, frames: Frames, rows: pd.DataFrame, drawings: Sequence[Drawing], environment: Environment
) -> list[Block]:
    blocks: list[Block] = [Heading(f"Scaling of {study.name}", level=1)]
    shown = [found for regime in ("strong", "weak") if (found := _series(rows, regime, frames.rate_unit))]
    if not shown:
        return [*blocks, Paragraph(nothing_to_tell(rows)), *missing(rows)]
    blocks += [Paragraph(_measured_on(frames, environment)), *_recommendation(shown)]
    for series in shown:
        blocks += _section(series, frames, drawings)
    blocks += [
        *_losses(shown),
        *method(study, rows),
        *settings(study, str(shown[0].rows.iloc[-1]["cell_id"]), environment),
        *missing(rows),
    ]
    return blocks


def _series(rows: pd.DataFrame, regime: str, rate_unit: str) -> _Series | None:
    """Return the series of a regime with the most measured sizes, the plan's first among equals."""
    measured = rows[(rows["mode"] == regime) & rows["efficiency"].notna()]
    widest = widest_series(measured, limit=1)
    if not widest:
        return None
    own = measured[measured["series"] == widest[0]].sort_values(["gpus", "nodes"], kind="stable")
    # The base may be a cell of another series: one rank without DDP, say.
    return _Series(own, regime, rows.iloc[int(own["base_place"].iloc[-1])], rate_unit)


def _measured_on(frames: Frames, environment: Environment) -> str:
    facts = dict(environment.facts)
    done = frames.runs[frames.runs["measured"]]
    where = f" on {facts['Device']}" if "Device" in facts else ""
    text = f"{count(len(done), 'run').capitalize()}{where}"
    first, last = done["started_at"].min(), done["ended_at"].max()
    if not (pd.isna(first) or pd.isna(last)):
        days = list(dict.fromkeys(f"{time:%Y-%m-%d}" for time in (first, last)))
        text += f", {'on' if len(days) == 1 else 'between'} {' and '.join(days)}"
    return f"{text}. A rank is one process, with one GPU where there are GPUs."


def _recommendation(shown: Sequence[_Series]) -> list[Block]:
    series = shown[0]
    best = recommended(series.rows)
    blocks: list[Block] = [Heading("Recommended job size")]
    if best is None:
        return [*blocks, Paragraph(_no_more_than_base(series))]
    texts = [
        f"{job_size(best)}: the largest measured size whose efficiency ({series.regime} scaling) is at least "
        f"{GUIDE}: {_efficiency(best)}.",
        *_against_base(best, series),
    ]
    if known(best["efficiency_low"]) and best["efficiency_low"] < GUIDE:
        texts.append(f"The interval reaches below {GUIDE}: more repeats would settle it.")
    larger = series.rows[series.rows["gpus"] > best["gpus"]]
    if len(larger):
        texts.append(_next_larger(best, larger.iloc[0], series))
    else:
        texts.append("It is the largest size that was measured; larger ones may do as well.")
    return [*blocks, Paragraph(" ".join(texts))]


def _no_more_than_base(series: _Series) -> str:
    base, closest = series.base["baseline"], closest_to_guide(series.rows)
    text = f"No size beyond the baseline, {base}, reaches an efficiency of {GUIDE}"
    text = f"{text}: more than the baseline cannot be recommended."
    if closest is None:
        return text
    return f"{text} {capital(job_size(closest))} comes closest, with {_efficiency(closest)}."


def _against_base(best: pd.Series, series: _Series) -> list[str]:
    """Return what the recommended size costs and brings against the baseline, as far as it is known."""
    base, texts = series.base, []
    if known(best["step_time_sec"]) and known(base["step_time_sec"]):
        times = seconds(best["step_time_sec"]), seconds(base["step_time_sec"])
        texts.append(f"A step takes {times[0]} there and {times[1]} on the baseline, {base['baseline']}.")
    costs = [_node_hours_per_million(row) for row in (best, base)]
    if all(known(cost) for cost in costs):
        there, before = (number(cost, digits=3) for cost in costs)
        texts.append(f"A million {series.counted} cost {there} node-hours there, on the baseline {before}.")
    return texts


def _next_larger(best: pd.Series, larger: pd.Series, series: _Series) -> str:
    gain = larger["throughput_samples_per_sec"] / best["throughput_samples_per_sec"]
    cost = _node_hours_per_million(larger) / _node_hours_per_million(best)
    text = f"The next larger one, {job_size(larger)}, has an efficiency of {_efficiency(larger)}"
    if not (known(gain) and known(cost)):
        return f"{text}."
    times = number(gain, digits=3), number(cost, digits=3)
    counted = series.counted.removesuffix("s")
    return f"{text}: {times[0]} times the throughput for {times[1]} times the node-hours per {counted}."


def _node_hours_per_million(row: Row) -> float:
    if not nodes_known(row):
        return math.nan
    return float(row["nodes"] * 1e6 / row["throughput_samples_per_sec"] / 3600)


def _efficiency(row: Row) -> str:
    bounds = fractions(row["efficiency_low"], row["efficiency_high"])
    return f"{fraction(row['efficiency'])} {bounds}".strip()


# -- the measurements -----------------------------------------------------------------

_FORMULAS = {
    "strong": "The global batch is constant. Speedup S(N) = T(N0)/T(N), efficiency E(N) = S(N) N0/N",
    "weak": "The batch per rank is constant. Efficiency E(N) = T(N0)/T(N), scaled speedup S(N) = E(N) N/N0",
}


def _section(series: _Series, frames: Frames, drawings: Sequence[Drawing]) -> list[Block]:
    base = series.base
    text = (
        f"{_FORMULAS[series.regime]}, with T the time per step and N ranks. Baseline N0: {base['baseline']}"
    )
    if known(base["step_time_sec"]):
        text += f", T(N0) = {seconds(base['step_time_sec'], digits=4)}"
    return [
        Heading(f"{series.regime.capitalize()} scaling"),
        Paragraph(f"{text}."),
        _table(series, frames),
        *_figures(series.regime, drawings),
    ]


def _table(series: _Series, frames: Frames) -> Table:
    measured = frames.runs[frames.runs["measured"]]
    groups = measured.groupby("cell_id", observed=True)
    loops, jobs = groups["window_s"].mean(), groups["wall_s"].mean()
    rows = [_table_row(row, loops, jobs) for row in series.rows.to_dict("records")]
    headings = (
        *("Nodes", "Ranks per node", "Ranks", "Batch", "Time per step", capital(series.rate_unit), "Speedup"),
        *(
            "Efficiency [95 %]",
            "n",
            "Main loop (s)",
            "Whole job (s)",
            "Node-h per run",
            f"Node-h per 1M {series.counted}",
        ),
    )
    kept = [place for place in range(len(headings)) if any(row[place] != MISSING for row in rows)]
    table_rows = [[row[place] for place in kept] for row in rows]
    caption = f"{series.regime.capitalize()} scaling. n: runs"
    if "Main loop (s)" in [headings[place] for place in kept]:
        caption += "; main loop: the timed windows of one run; whole job: from start to end"
    caption += f"; {MISSING}: not measured." if any(MISSING in row for row in table_rows) else "."
    return Table(caption, [headings[place] for place in kept], table_rows, text_columns=())


def _table_row(row: Row, loops: Any, jobs: Any) -> list[str]:
    cell = row["cell_id"]
    return [
        str(row["nodes"]) if nodes_known(row) else MISSING,
        str(row["gpus_per_node"]) or MISSING,
        str(row["gpus"]),
        whole(row["global_batch"]),
        seconds(row["step_time_sec"], digits=4),
        number(row["throughput_samples_per_sec"]),
        number(row["speedup"], digits=3),
        _efficiency(row),
        str(row["n"]),
        number(loops.get(cell), digits=3),
        number(jobs.get(cell), digits=3),
        number(row["node_hours"], digits=3),
        number(_node_hours_per_million(row), digits=3),
    ]


def _figures(regime: str, drawings: Sequence[Drawing]) -> list[Block]:
    by_name = {drawing.name: drawing for drawing in drawings}
    found = [by_name[name] for kind in ("speedup", "efficiency") if (name := f"{kind}-{regime}") in by_name]
    return [
        Figure(f"figures/{drawing.name}", f"{drawing.title}. {_ascii(drawing.caption)}", drawing.description)
        for drawing in found
    ]


def _ascii(caption: str) -> str:
    """Return a caption in letters that any LaTeX has."""
    return caption.replace("N₀", "N0").replace("·", " ")


def _losses(shown: Sequence[_Series]) -> list[Block]:
    blocks: list[Block] = [Heading("Causes of the loss")]
    texts = []
    for series in shown:
        last = series.rows.iloc[-1]
        name = f"{series.regime.capitalize()} scaling, {job_size(last)}, efficiency {_efficiency(last)}"
        texts.append(f"{name}: {_causes(last, series.base)}.")
    if not any("%" in text for text in texts):
        return [*blocks, Bullets(texts)]
    note = (
        "Shares of the logarithm of the efficiency, by load balance, communication efficiency and "
        "computational scalability (POP Centre of Excellence), from an instrumented window of its own."
    )
    return [*blocks, Bullets(texts), Paragraph(note)]


def _causes(last: pd.Series, base: pd.Series) -> str:
    if hardly_any_loss(last):
        return "hardly any loss"
    found = [loss for loss in losses(last, base) if loss.share >= SMALLEST_SHARE]
    told = [f"{percent(loss.share)} {LOSSES[loss.factor]}" for loss in found]
    return listed(told) or f"not known, {why_unknown(last, base)}"


# How the runs of a proposal's scaling section were measured, with which settings, and what is missing.

#: Options of the workload that decide what is computed, and how.
_SETTINGS = (
    *("model", "parameters", "seq_len", "image_size", "precision", "optimizer", "grad_accum"),
    *("bucket_cap_mb", "activation_checkpointing", "compile", "data", "num_workers", "checkpoint"),
)
_FACTS = ("Device", "PyTorch", "CUDA", "NCCL", "Network", "Interface", "Threads per rank")


def method(study: Study, rows: pd.DataFrame) -> list[Block]:
    """Return how the runs were measured, input and output included."""
    cells = study.plan.get("cells") or []
    workload = (cells[0].get("workload") or {}) if cells else {}
    heading = Heading("How it was measured")
    intervals = (
        f"{certainty(rows)} Intervals: 95 %, Welch's t on the logarithms of the runs' throughputs, "
        "from three runs on."
    )
    if not workload:
        return [
            heading,
            Paragraph(f"The figures were measured elsewhere and taken from a table. {intervals}"),
        ]
    windows = ""
    if workload.get("steps_per_epoch") and workload.get("epochs"):
        windows = (
            f"Each run times {count(int(workload['epochs']), 'window')} of "
            f"{count(int(workload['steps_per_epoch']), 'step')} after a warm-up, not instrumented. "
        )
    text = f"{windows}The unit is the run; repeats are spread over a seeded random order. {intervals}"
    return [heading, Paragraph(text), Paragraph(_input_output(workload))]


def _input_output(workload: Mapping[str, Any]) -> str:
    data = workload.get("data")
    if data in (None, "synthetic"):
        text = "Input: synthetic batches, drawn anew for each step; reading from storage is not included."
    else:
        workers = count(int(workload.get("num_workers") or 0), "loading process", "loading processes")
        text = f"Input: {one_line(data, limit=120)}, by {workers} a rank."
    if workload.get("checkpoint"):
        return f"{text} Output: a checkpoint after each window, timed apart from it."
    return f"{text} Output: no checkpoints were written."


def settings(study: Study, largest: str, environment: Environment) -> list[Block]:
    """Return the settings of the cell ``largest`` and what it ran on; nothing for a table."""
    cells = study.plan.get("cells") or []
    cell = next((cell for cell in cells if cell["cell_id"] == largest), None)
    if cell is None:
        return []
    workload = cell.get("workload") or {}
    found = [(name, spelled(workload[name])) for name in _SETTINGS if workload.get(name) is not None]
    found += [("backend", spelled(cell.get("backend"))), ("launcher", spelled(cell.get("launcher")))]
    found += [(one_line(k, limit=60), one_line(v, limit=80)) for k, v in (cell.get("env") or {}).items()]
    found += [(label, one_line(value, limit=80)) for label, value in environment.facts if label in _FACTS]
    rows = [[name, value] for name, value in found]
    return [
        Heading("Settings"),
        Table("Settings of the runs.", ("Setting", "Value"), rows, text_columns=(0, 1)),
    ]


def missing(rows: pd.DataFrame) -> list[Block]:
    """Return the planned cells without a number, with their reasons: none is left out silently."""
    lacking = rows[rows["n"] == 0].drop_duplicates("cell_id")
    if not len(lacking):
        return []
    items = [
        f"{row['cell_id']} ({job_size(row)}): {one_line(row['reason'], limit=160) or row['state']}."
        for row in lacking.head(20).to_dict("records")
    ]
    if len(lacking) > len(items):
        items.append(f"and {count(len(lacking) - len(items), 'more cell')}.")
    return [Heading("Planned and not measured"), Bullets(items)]
