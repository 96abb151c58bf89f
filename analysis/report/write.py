"""Write ``report/`` of a study, or ``TABLE-report/`` of a table: the page, its tables and its figures."""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup
from markupsafe import escape as escape_html

from analysis.checks.assessment import Assessment
from analysis.checks.fabric import FabricRow, SweepRow
from analysis.checks.slow_ranks import nodes_table
from analysis.data.columns import grouped, table_of
from analysis.data.csv_files import csv_text
from analysis.data.differences import difference_rows
from analysis.data.environment import OfRuns
from analysis.data.load import load_study
from analysis.processes import in_background
from analysis.report.decision import Decision, decisions
from analysis.report.figures.drawing import Drawing, draw_figures, is_name
from analysis.report.page import page_context, page_tables
from analysis.report.results import Results
from analysis.report.tables import (
    causes_csv,
    csv_table,
    latex,
    latex_rows,
    latex_table,
    markdown_rows,
    markdown_table,
    runs_csv,
    text_table,
)
from analysis.report.words import WORDS
from analysis.stats.scaling import AXES_COLUMNS
from analysis.tables_in.read import read_table
from analysis.tables_in.study import study_of_table
from analysis.targets import TargetRow, target_lines
from analysis.text import heading, markdown, message, plain
from bench.study.ledger import Record
from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import read_json, write_atomically
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import capital, count, cut, names

if TYPE_CHECKING:
    from analysis.report.proposal import Proposal, Request
    from analysis.report.requirements import Missing

#: The largest number of characters of a warning on the terminal.
_MAX_LINE = 160
_TEMPLATES = Path(__file__).resolve().parent / "template"
#: Maximum number of characters of a paragraph in a proposal.
_MAX_PARAGRAPH = 5000
#: A longer word can be broken.
_LONGEST_WORD = 26
#: Files that only some reports have.
_OPTIONAL_FILES = ("axes.csv", "causes.csv", "sweep.csv", "fabric.csv", "nodes.csv", "targets.csv")


class Report(NamedTuple):
    """A written report: the path of its index.html, the validity of its numbers, and its verdicts.

    ``verdicts`` contains ``series, cell_id, gpus, verdict, p, recommended, judged, more_runs`` and ``reason``
    of each size; see :class:`analysis.decide.Verdict`. ``settings`` are those on the swept settings.
    ``of_runs`` are the findings that runs recorded and that no finding about the study replaces, each with
    its runs. ``of_sizes`` are the findings of the decision on each series that has any: a slow baseline, and
    sizes slower than smaller ones. ``targets`` are the verdicts on the targets, and
    ``missing`` is what the profile of the proposal asks for and lacks.
    """

    page: Path
    assessment: Assessment
    verdicts: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    of_runs: Sequence[OfRuns]
    decisions: Sequence[Decision]
    of_sizes: Mapping[str, Sequence[Finding]]
    targets: Sequence[TargetRow] = ()
    missing: Sequence[Missing] = ()

    @property
    def recommended(self) -> list[dict[str, Any]]:
        """``series, cell_id`` and ``gpus`` of each recommended size."""
        names = ("series", "cell_id", "gpus")
        best = [one for one in self.verdicts if one["recommended"]]
        return [{name: one[name] for name in names} for one in best]

    @property
    def validity(self) -> Sequence[Finding]:
        """The findings about the validity of the numbers."""
        return self.assessment.findings

    @property
    def has_errors(self) -> bool:
        """True if a finding is an error: numbers are missing or not valid, or single runs say "slower"."""
        of_sizes = (one for own in self.of_sizes.values() for one in own)
        return any(one.severity == "error" for one in (*self.validity, *of_sizes))

    def answers(self) -> Iterator[str]:
        """Yield what to use, how sure that is, and why: three lines, or one for each of several series.

        What is not known of several series is a line of its own.
        """
        is_one = sum(len(one.answers) for one in self.decisions) == 1
        for decision in self.decisions:
            title, unknown = decision.title, dict(decision.lines).get(WORDS["decision"]["unknown"], "")
            open_answers = [one for one in decision.answers if not one.sure and one.others != unknown]
            unknown = unknown if open_answers else ""
            for answer in decision.answers:
                lost = answer.why and f"lost: {answer.why}"
                if is_one:
                    why = "; ".join(filter(None, (lost, answer.others, unknown)))
                    yield f"{title}: {answer.use}"
                    yield f"how sure: {answer.sure or 'no size is recommended'}"
                    yield f"why: {why or 'not known, because the parts of the step were not measured'}"
                else:
                    name = ", ".join(filter(None, (title, answer.label)))
                    texts = (answer.use, answer.sure, lost, answer.others)
                    yield f"{name}: {'; '.join(filter(None, texts))}"
            if unknown and not is_one:
                yield f"{title}, not known: {unknown}"

    def lines(self) -> Iterator[str]:
        """Yield a line for each finding about the study, and for each kind of warnings of runs.

        If the warnings of a kind differ in their values, the line has those of the most runs. A long text is
        cut; the page has all of it.
        """
        yield from (_line(one, _shortened(one)) for one in self.validity)
        yield from target_lines(self.targets)
        yield from map(str, self.missing)
        sizes = [(series, one) for series, own in self.of_sizes.items() for one in own]
        for alike in grouped(sizes, lambda pair: (pair[1].kind, pair[1].severity)).values():
            series, first = alike[0]
            about = f"{series}: " if len(self.of_sizes) > 1 else ""
            more = f", and {len(alike) - 1:,} more" if len(alike) > 1 else ""
            yield _line(first, f"{capital(about + _shortened(first))}{more}.")
        groups: dict[tuple[str, str], list[OfRuns]] = {}
        for group in self.of_runs:
            if group.finding.severity != "info":
                groups.setdefault((group.finding.kind, heading(group.finding)), []).append(group)
        for own in groups.values():
            runs = list(dict.fromkeys(run for group in own for run in group.runs))
            text = capital(_shortened(own[0].finding)).rstrip(".")
            yield _line(own[0].finding, f"{text} ({count(len(runs), 'run')}: {names(runs)}).")


def _shortened(finding: Finding) -> str:
    """Return a finding in words; a long one is cut, unless it is an error."""
    text = message(finding)
    return text if finding.severity == "error" else cut(text, limit=_MAX_LINE)


def _line(finding: Finding, text: str) -> str:
    advice = f"{text} {finding.remedy}".strip()
    return f"{finding.severity}: {heading(finding)}. {advice} [{finding.kind}]"


def write_report(
    study_path: Path,
    *,
    output: Path | None = None,
    archive: Path | None = None,
    records: Mapping[str, Record] | None = None,
    baseline: str | None = None,
    proposal: Request | None = None,
    include_disturbed: bool = False,
    targets: Sequence[Any] | None = None,
    spread: float = math.nan,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Write ``report/`` of a study, or ``STUDY-report/`` in the folder ``output``.

    The files are the page, scaling.csv, scaling.md, scaling.tex, runs.csv, what-differs.csv, and each figure
    as SVG and PDF in figures/; with suitable data also axes.csv, causes.csv, sweep.csv, fabric.csv,
    nodes.csv and targets.csv. Files of an older report are replaced, except for its proposal if no new one is
    requested.

    Args:
        study_path: the study's folder; with ``output``, nothing is written there.
        output: the folder in which to create ``STUDY-report/``.
        archive: the archive from which the study was unpacked.
        records: the present records of the runs, see :func:`analysis.data.load.load_study`.
        baseline: the size or cell that efficiencies refer to, in the form of
            :func:`analysis.stats.scaling.with_baseline`; by default the smallest measured size.
        proposal: what the proposal asks for; by default, proposal.md and proposal.tex are not written.
        include_disturbed: count disturbed runs, too.
        targets: targets (:class:`bench.matrix.schema.Target`) that replace those of the plan.
        spread: the stated standard deviation of a run's logarithm, for sizes with fewer than three runs.
        progress: called before each step with a short description of the step.

    Raises:
        BenchError: the plan is not readable, the baseline or the series of the proposal does not exist, or
            the folder cannot be written or is not the report of this study.
    """
    say = progress or (lambda step: None)
    say("reading the runs")
    with _no_collection():
        study = load_study(study_path, records=records)
        study.folder = replace(study.folder, archive=archive)
        folder, files = study.folder.report, {}
        if output is not None:
            folder = output / f"{study_path.resolve().name}-report"
            files = _source_of(archive or study_path, folder, kind="study")
        say("computing")
        results = Results.of(
            study, baseline=baseline, include_disturbed=include_disturbed, targets=targets, spread=spread
        )
        return _report(results, folder, files, say, proposal)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Do not search for cycles of references again and again: only the figures have some."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def write_table_report(
    table: Path,
    *,
    output: Path,
    text: str | None = None,
    mode: str | None = None,
    names: Mapping[str, str] | None = None,
    baseline: str | None = None,
    proposal: Request | None = None,
    targets: Sequence[Any] | None = None,
    spread: float = math.nan,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Write the report of a table measured elsewhere, ``TABLE-report/`` in the folder ``output``.

    ``table`` is a file with one row per run or per size; docs/analysis.md lists its forms and columns.
    ``mode`` (``strong`` or ``weak``) is for series without batch columns. ``names`` gives names of columns by
    their meanings. ``text`` is the content of a table that is not yet in the report. The other arguments are
    those of :func:`write_report`.

    Raises:
        BenchError: the table has errors (all are listed with their lines), the baseline does not exist, or
            the folder cannot be written or is not the report of this table.
    """
    say = progress or (lambda step: None)
    say("reading the table")
    content = read_table(table, text, names=names)
    folder = output / f"{table.stem}-report"
    files = _source_of(table, folder, kind="table") | ({} if text is None else {table.name: text})
    converted = study_of_table(content, mode=mode, folder=folder)
    for remark in converted.remarks:
        say(remark)
    say("computing")
    results = Results(converted.study, converted.shown, converted.scale(baseline=baseline), targets, spread)
    return _report(results, folder, files, say, proposal)


def _source_of(path: Path, folder: Path, *, kind: Literal["study", "table"]) -> dict[str, str]:
    """Return study.json or table.json as a dict of file name and text.

    The file contains the path of the study or table, relative to ``folder``, so that both can be moved
    together. Raises BenchError if the report of another study or table is in ``folder``.
    """
    name, file = os.path.relpath(path.resolve(), folder.resolve()), f"{kind}.json"
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        other = (read_json(folder / file) or {}).get(kind)
        if other != name:
            what = (
                f"is the report of {os.path.normpath(folder / str(other))}"
                if other
                else f"exists and is not a {kind}'s report"
            )
            renamed = "the table or this folder" if kind == "table" else "this folder"
            remedy = f"give another folder with --output DIR, or rename {renamed}"
            raise BenchError(f"{folder} {what}; {path} would replace it", remedy=remedy)
    return {file: json.dumps({kind: name}, ensure_ascii=False) + "\n"}


def _report(
    results: Results,
    folder: Path,
    files: dict[str, str],
    say: Callable[[str], None],
    request: Request | None,
) -> Report:
    """Write the report and ``files`` (texts by file name) to ``folder``."""
    say("reading the environment")
    results.read_facts()  # both processes need them
    others = in_background(lambda: results.divisions)
    verdicts = _verdicts(results)
    files |= _tables(results)
    page = page_tables(results)
    results.know_divisions(others())
    proposal = _proposal(results, request) if request else None
    say("drawing")
    drawings = draw_figures(results)
    if results.causes:
        files["causes.csv"] = causes_csv(results.causes)
    say("writing")
    decided = decisions(results)
    files["index.html"] = render_page(page | page_context(results, drawings, decided))
    missing: Sequence[Missing] = ()
    if proposal:
        texts, figures, missing = _proposal_files(proposal, folder, say)
        files |= texts
        drawings += figures
    path, settings = _write(folder, files, drawings), [row.as_json() for row in results.settings]
    of_sizes = {name: one.findings for name, one in results.choices.items() if one.findings}
    warnings = results.environment.warnings
    written = Report(path, results.assessment, verdicts, settings, warnings, decided, of_sizes)
    return written._replace(targets=results.target_rows, missing=missing)


def _proposal(results: Results, request: Request) -> Proposal:
    from analysis.report.proposal import Proposal  # the models of profiles take long to build

    return Proposal.of(results, request)


def _proposal_files(
    proposal: Proposal, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, str], list[Drawing], Sequence[Missing]]:
    """Return the files of a proposal, its figures, and what its profile asks for and it lacks."""
    from analysis.report.requirements import check_profile

    figure = proposal.figure()
    missing: Sequence[Missing] = ()
    context = proposal.context(figure) | {"parts": []}
    if profile := proposal.asked.profile:
        context["parts"], missing = check_profile(proposal, profile)
        say(f"profile: {profile.title}, {profile.source} ({profile.date})")
        say(proposal.other_size())
    say(f"proposal: {folder / 'proposal.tex'} and proposal.md")
    if proposal.reason:
        other = "; another with --series" * (not proposal.asked.series)
        say(f"series {proposal.name}: {proposal.reason}{other}")
    if proposal.asked.samples and not context["request"]:
        say("the proposal requests no time, and says why")
    return render_proposal(context), [figure] if figure else [], missing


def _verdicts(results: Results) -> list[dict[str, Any]]:
    found = []
    for row in results.rows:
        own = results.verdicts[row.place]
        verdict = {"verdict": str(own.kind), "p": plain(own.p), "recommended": own.recommended}
        judged = own.judged
        verdict["judged"] = judged and {
            "reference": judged.reference.cell_id,
            "efficiency": plain(judged.efficiency),
            "efficiency_low": plain(judged.efficiency_low),
            "efficiency_high": plain(judged.efficiency_high),
            "spread": plain(math.expm1(judged.spread)),
        }
        verdict |= {"more_runs": own.more_runs and [*map(plain, own.more_runs)], "reason": own.reason}
        found.append({"series": row.series, "cell_id": row.cell_id, "gpus": row.gpus, **verdict})
    return found


def _tables(results: Results) -> dict[str, str]:
    """Return the report's tables by file name, but for the causes."""
    table = text_table(results.rows, results.titles, device=results.device)
    files = {
        "scaling.csv": csv_table(results.rows),
        "scaling.md": markdown_table(table, results.rows),
        "scaling.tex": latex_table(table),
        "runs.csv": runs_csv(results.attempts),
    }
    if results.sizes:
        files["axes.csv"] = csv_text(table_of(results.sizes, AXES_COLUMNS))
    if not results.study.table:
        files["what-differs.csv"] = csv_text(difference_rows(results.differences))
    # Nine digits resolve microseconds in steps that take seconds.
    if results.sweep:
        files["sweep.csv"] = csv_text(table_of(results.sweep, SweepRow._fields), digits=9)
        files["fabric.csv"] = csv_text(table_of(results.fabric, FabricRow._fields), digits=9)
    if results.target_rows:
        files["targets.csv"] = csv_text(table_of(results.target_rows, TargetRow._fields))
    if results.ranks is not None:
        files["nodes.csv"] = csv_text(nodes_table(results.ranks), digits=9)
    return files


@cache
def _templates(*, autoescape: bool, **options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=autoescape,  # noqa: S701 (a proposal is not HTML)
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def render_page(context: dict[str, Any]) -> str:
    """Return the page's HTML. All values are escaped, except for figures, which escape their own texts."""
    style = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    # matplotlib writes style attributes. Without scripts and requests, a style can do no harm.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    templates = _templates(autoescape=True)
    templates.filters["marked"] = _marked
    template = templates.get_template("page.html.j2")
    return template.render(
        **context,
        style=Markup(style),  # noqa: S704 (our own file)
        script=Markup(script),  # noqa: S704 (our own file)
        data_block=Markup(context["data"]),  # noqa: S704 (json_for_script leaves no markup in it)
        svg=Markup,
        policy=policy,
    )


#: In HTML: what is not broken, and where a long name breaks.
_WHOLE = re.compile(r"(?<![\w-])(?:--[a-z][\w-]+|\d{4}-\d\d-\d\dT[\d:]+Z?)|\[-?[\d.]+, -?[\d.]+\]")
_BREAK = re.compile(r"(?<=\w[._])(?=[A-Za-z])")


def _marked(text: object) -> Markup:
    """Escape a text, and show the parts between backticks as code.

    Options, dates and intervals stay whole, and long names break after a dot or an underscore.
    """
    html = " ".join(
        _BREAK.sub("<wbr>", word) if len(word) > _LONGEST_WORD else word
        for word in str(escape_html(text)).split(" ")
    )
    html = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", re.sub(r"`([^`]+)`", r"<code>\1</code>", html))
    return Markup(_WHOLE.sub(r"<span class=whole>\g<0></span>", html))  # noqa: S704 (escaped)


def render_proposal(context: dict[str, Any]) -> dict[str, str]:
    """Return proposal.md and proposal.tex by file name; the filters of the templates escape all values."""
    # Jinja's default delimiters contain braces, which LaTeX uses itself.
    delimiters = {"block_start_string": "<%", "block_end_string": "%>"}
    delimiters |= {"variable_start_string": "<<", "variable_end_string": ">>"}
    files = {}
    for name, escape, rows in (
        ("proposal.md", markdown, markdown_rows),
        ("proposal.tex", latex, latex_rows),
    ):
        templates = _templates(autoescape=False, **delimiters)
        templates.filters |= {"text": partial(escape, limit=_MAX_PARAGRAPH), "table": rows}
        files[name] = templates.get_template(f"{name}.j2").render(context).rstrip() + "\n"
    return files


def _write(folder: Path, files: dict[str, str], drawings: Sequence[Drawing]) -> Path:
    figures = folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            write_atomically(figures / f"{drawing.name}.svg", drawing.svg)
            (figures / f"{drawing.name}.pdf").write_bytes(drawing.pdf)
        # Delete figures and files of an older report that this one lacks, and keep all other files.
        for file in figures.iterdir():
            is_drawing = file.suffix in (".svg", ".png", ".pdf") and is_name(file.stem)
            if is_drawing and file.stem not in {drawing.name for drawing in drawings}:
                file.unlink()
        for name, text in files.items():
            write_atomically(folder / name, text)
        for name in set(_OPTIONAL_FILES) - set(files):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(Path(error.filename or folder), error) from None
    return folder / "index.html"
