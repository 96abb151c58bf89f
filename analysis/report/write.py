"""`report/`: one page that works offline, and its tables and figures as files.

Heavy packages are imported when a report is written, not when this module is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from analysis.data.load import Study
    from analysis.report.figures.drawing import Drawing
    from analysis.stats.measured import Frames

_TEMPLATE = Path(__file__).resolve().parent / "template"


def write_report(
    study_path: Path,
    *,
    baseline: str | None = None,
    proposal: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write ``report/`` of a study and return the path of its index.html.

    Beside the page: scaling.csv, scaling.md, scaling.tex, runs.csv, and each figure as SVG,
    PNG and PDF in figures/; where runs left it, axes.csv, sweep.csv, fabric.csv
    and nodes.csv. What was there of an older report is replaced; of its proposal nothing is
    touched unless a new one is asked for.

    Args:
        study_path: the study's folder.
        baseline: what efficiencies refer to, as :func:`analysis.stats.baselines.is_baseline` reads it; by
            default the smallest size that was measured.
        proposal: write proposal.md and proposal.tex, too.
        progress: called with a few words before each step.

    Raises:
        BenchError: there is no readable plan or no such baseline, or the folder cannot be written.
    """
    from analysis.checks.scaling_table import scaling_table
    from analysis.data.load import load_study
    from analysis.stats.measured import measure

    say = progress or (lambda words: None)
    say("reading the runs")
    study = load_study(study_path)
    say("computing")
    frames = measure(study)
    return _report(study, frames, scaling_table(frames, baseline=baseline), say, proposal=proposal)


def write_table_report(
    table: Path,
    *,
    output: Path,
    mode: str | None = None,
    baseline: str | None = None,
    proposal: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write the report of a table measured elsewhere and return the path of its index.html.

    Args:
        table: a CSV file, one row per run or per size; docs/analysis.md says which columns.
        output: the folder that ``report/`` is made in.
        mode: ``strong`` or ``weak`` for series whose batch columns do not tell.
        baseline: as for :func:`write_report`.
        proposal: as for :func:`write_report`.
        progress: called with a few words before each step.

    Raises:
        BenchError: the table is wrong, every problem with its line; there is no such baseline; the
            folder cannot be written.
    """
    from analysis.tables_in.read import read_table
    from analysis.tables_in.study import foreign_study

    say = progress or (lambda words: None)
    say("reading the table")
    foreign = foreign_study(read_table(table), mode=mode, folder=output)
    for remark in foreign.remarks:
        say(remark)
    say("computing")
    rows = foreign.scale(baseline=baseline)
    return _report(foreign.study, foreign.shown, rows, say, proposal=proposal)


def _report(
    study: Study, frames: Frames, rows: pd.DataFrame, say: Callable[[str], None], *, proposal: bool
) -> Path:
    """Write what a study and a table have in common: all files of the report."""
    from analysis.data.environment import describe_environment
    from analysis.data.names import series_parts
    from analysis.report.details import look_closer
    from analysis.report.figures.all_figures import draw_figures
    from analysis.report.figures.heatmaps import grids
    from analysis.report.page import page_context
    from analysis.report.tables import axes_csv, csv_table, latex_table, markdown_table, runs_csv
    from analysis.stats.losses import add_typical_rank
    from analysis.stats.scaling import two_axes

    rows = add_typical_rank(study, frames, rows)
    say("drawing")
    parts = series_parts(study.plan)
    closer = look_closer(study, frames, rows, parts=parts)
    sizes = two_axes(rows)
    axes = grids(sizes, parts)
    drawings = [
        *draw_figures(rows, frames.runs, parts=parts, axes=axes, rate_unit=frames.rate_unit),
        *closer.drawings,
    ]
    say("reading the environment")
    environment = describe_environment(study)
    say("writing")
    files = {
        "scaling.csv": csv_table(rows),
        "scaling.md": markdown_table(rows, rate_unit=frames.rate_unit),
        "scaling.tex": latex_table(rows, rate_unit=frames.rate_unit),
        "runs.csv": runs_csv(frames.runs),
        "index.html": render_page(page_context(study, frames, rows, drawings, environment, closer, axes)),
    }
    if proposal:
        from analysis.report.proposal import proposal_files

        files |= proposal_files(study, frames, rows, drawings, environment)
    if len(sizes):
        files["axes.csv"] = axes_csv(sizes)
    files |= closer.files
    return _write(study.folder.report, files, drawings)


def render_page(context: dict[str, Any]) -> str:
    """Return the page; every value is escaped but for the figures, which escape their own texts."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_TEMPLATE / "page.css").read_text(encoding="utf-8")
    script = (_TEMPLATE / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.j2").render(
        **context,
        style=Markup(style),  # noqa: S704 (our own file)
        script=Markup(script),  # noqa: S704 (our own file)
        data_block=Markup(context["data"]),  # noqa: S704 (json_for_script leaves no markup in it)
        svg=Markup,
        policy=policy,
    )


def _digest(text: str) -> str:
    """Return the source expression by which a Content-Security-Policy lets one inline block in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _write(folder: Path, files: dict[str, str], drawings: Sequence[Drawing]) -> Path:
    from analysis.report.details import FILES
    from bench.study.files import write_atomically

    figures = folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            write_atomically(figures / f"{drawing.name}.svg", drawing.svg)
            (figures / f"{drawing.name}.png").write_bytes(drawing.png)
            (figures / f"{drawing.name}.pdf").write_bytes(drawing.pdf)
        _remove_stale(figures, {drawing.name for drawing in drawings})
        for name, text in files.items():
            write_atomically(folder / name, text)
        for name in {"axes.csv", *FILES} - set(files):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    return folder / "index.html"


def _remove_stale(figures: Path, names: set[str]) -> None:
    """Remove figures that an older report drew and this one does not; no file of anybody else."""
    from analysis.report.figures.all_figures import all_names

    for name in all_names():
        if name not in names:
            for form in ("svg", "png", "pdf"):
                (figures / f"{name}.{form}").unlink(missing_ok=True)
