"""`bench report`: write the page, tables and figures of a study, a table measured elsewhere, or logs."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddp_scaling_bench.errors import BenchError, UnwritableError
from ddp_scaling_bench.files import check_writable
from ddp_scaling_bench.finding import with_remedies
from ddp_scaling_bench.units import count

from ..study.layout import StudyFolder
from ..study.plan_json import open_study
from ..terminal import print_json, say, show
from .advise import parse_samples
from .completion import complete_baseline, complete_study
from .options import JsonOption, ResultsOption, find_study, require_report, settle_study

if TYPE_CHECKING:
    from analysis.report.proposal import Request
    from analysis.report.write import Report

#: File suffixes of tables. A study whose name ends in one of them must be given by its folder.
TABLE_SUFFIXES = (".csv", ".tsv", ".md", ".txt")
_SPREADSHEETS = (".xlsx", ".xls", ".ods")


BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="SIZE",
        help="The reference for efficiencies: a size (1x4, or 4 GPUs), a cell_id, no-ddp, or common (the "
        "smallest size that all series have); default: the smallest measured size.",
        show_default=False,
        autocompletion=complete_baseline,
    ),
]
ProposalOption = Annotated[
    bool, typer.Option("--proposal", help="Also write the scaling section of a proposal as .md and .tex.")
]
SeriesOption = Annotated[
    str,
    typer.Option(
        "--series",
        metavar="NAME",
        help="With --proposal: the series whose size you request: its name, or parts of it such as 'weak, "
        "precision bf16'; default: the highest throughput of those with a recommended size.",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--samples",
        help="With --proposal: samples per epoch of the training that you ask time for, such as 1.3M.",
        show_default=False,
    ),
]
EpochsOption = Annotated[
    int, typer.Option("--epochs", min=1, help="With --samples: epochs of that training.")
]
TrainingsOption = Annotated[
    int, typer.Option("--trainings", min=1, help="With --samples: the number of such trainings.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.yaml",
        help="With --proposal: what a centre asks for (generic, csc, or a file); lists what is missing.",
        show_default=False,
    ),
]
TargetSizeOption = Annotated[
    str,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        help="With --profile: the largest job that you will run in production, as 4x4 or 16 GPUs.",
        show_default=False,
    ),
]
TargetsOption = Annotated[
    Path | None,
    typer.Option(
        "--targets",
        metavar="FILE.yaml",
        help="Targets instead of those of the matrix: the key `targets` of a matrix, or its value alone.",
        show_default=False,
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option("--check", help="The exit code is that of the targets: 1 missed, 3 cannot tell, 0 all met."),
]
SpreadOption = Annotated[
    float | None,
    typer.Option(
        "--spread",
        metavar="PERCENT",
        help="The deviation from run to run that you expect in per cent, such as 2. For sizes with fewer "
        "than three runs, P and an interval follow from it; nothing is recommended from it.",
        show_default=False,
    ),
]
IncludeDisturbedOption = Annotated[
    bool, typer.Option("--include-disturbed", help="Use all completed runs, including disturbed ones.")
]

SourcesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STUDY|TABLE.csv|SIZE=LOG...]",
        help="A study's name, folder or archive (default: the study planned last), a table measured "
        "elsewhere (.csv, .tsv, .md or .txt), or logs of finished runs with their sizes (2=a.log or "
        "1x2=a.log).",
        show_default=False,
        autocompletion=complete_study,
    ),
]
_MODE = "The scaling mode (strong or weak) of logs, or of a table without batch columns."
ModeOption = Annotated[
    Literal["strong", "weak"] | None, typer.Option("--mode", help=_MODE, show_default=False)
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="NAME=COLUMN",
        help="For a table: what one of its columns means (throughput=tok_s, gpus=cores, series=framework); "
        "repeatable.",
        show_default=False,
    ),
]
_OUTPUT = (
    "The folder in which STUDY-report/ or TABLE-report/ is created; default: report/ of the study, or the "
    "folder of the table or archive."
)
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help=_OUTPUT, show_default=False)
]

PatternOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern",
        metavar="NAME=REGEX",
        help="For logs: the pattern of throughput, step_time or loss, with one group; repeatable.",
        show_default=False,
    ),
]
UnitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--unit",
        help="For logs: the unit (samples/s, it/s, tokens/s; s, ms, us); repeatable.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="For logs: kind, scope, skip or ranks as in workload.metrics of a matrix; repeatable.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="For logs: samples per step, of a rank (--mode weak) or of all ranks (--mode strong).",
        show_default=False,
    ),
]


def report_command(
    sources: SourcesArgument = None,
    pattern: PatternOption = None,
    unit: UnitOption = None,
    settings: SetOption = None,
    batch: BatchOption = None,
    baseline: BaselineOption = None,
    mode: ModeOption = None,
    names: MapOption = None,
    output: OutputOption = None,
    proposal: ProposalOption = False,
    series: SeriesOption = "",
    samples: SamplesOption = None,
    epochs: EpochsOption = 1,
    trainings: TrainingsOption = 1,
    profile: ProfileOption = None,
    target_size: TargetSizeOption = "",
    targets: TargetsOption = None,
    check: CheckOption = False,
    spread: SpreadOption = None,
    include_disturbed: IncludeDisturbedOption = False,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a report: report/index.html (in TABLE-report/ or logs-report/ for these), tables and figures.

    For a study, missing and failed runs are listed with the reason. A TABLE.csv measured elsewhere
    has one row per run or per size. For logs with --pattern, the matched lines are listed, too. The page is
    one file and works offline. With --output, the report of a study that you cannot write to goes to
    another folder. The exit code is 1 if an error is printed: the report is complete, but numbers are missing
    or not valid, or single runs show a size as slower than a smaller one. With --check, only the targets
    decide: 1 if one is missed, 3 if one cannot be told.
    """
    require_report("bench report")
    for option, given in (("--series", series), ("--samples", samples), ("--profile", profile)):
        if given and not proposal:
            raise BenchError(f"{option} requires --proposal", remedy=f"add --proposal, or omit {option}")
    asked = (series, samples, epochs, trainings, profile, target_size)
    options: dict[str, Any] = {"baseline": baseline, "proposal": _request(*asked) if proposal else None}
    options["targets"] = None if targets is None else _read_targets(targets)
    if spread is not None:
        options["spread"] = _log_spread(spread)
    shown: dict[str, Any] = {"as_json": as_json, "check": check}
    source, meanings = sources[0] if sources else None, _meanings(names or ())
    if pattern:
        if include_disturbed or names:
            option = "--map" if names else "--include-disturbed"
            raise BenchError(f"{option} is not for logs", remedy="omit it")
        from analysis.tables_in.logs import metrics_of

        metrics = metrics_of(pattern, unit or (), settings or ())
        return _report_logs(sources or (), metrics, batch=batch, mode=mode, output=output, **shown, **options)
    of_logs = {"--unit": unit, "--set": settings, "--batch": batch}
    _refuse_others(sources or (), option=next((name for name, own in of_logs.items() if own), ""))
    if source is not None and source.lower().endswith(TABLE_SUFFIXES) and not Path(source).is_dir():
        if include_disturbed:
            raise BenchError("--include-disturbed is for a study, not for a table", remedy="omit it")
        return _report_table(Path(source), meanings, mode=mode, output=output, **shown, **options)
    for option, value in (("--mode", mode), ("--map", names)):
        if value:
            what = f"{option} is for a table measured elsewhere, not for a study"
            raise BenchError(what, remedy=f"omit {option}, or give a TABLE.csv")
    folder = find_study(source, results)
    return write(folder, output=output, include_disturbed=include_disturbed, **shown, **options)


def _meanings(texts: Sequence[str]) -> dict[str, str]:
    """Return the columns by their meanings, from the texts of --map."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, column = text.partition("=")
        if not equals:
            remedy = "write NAME=COLUMN, such as --map throughput=tok_s"
            raise BenchError(f"--map {text} has no =", remedy=remedy)
        if found.setdefault(name, column) != column:
            what = f"--map gives two columns for {name}: {found[name]} and {column}"
            raise BenchError(what, remedy="keep one of the two options")
    return found


def _refuse_others(sources: Sequence[str], *, option: str) -> None:
    """Raise BenchError for sources, or an ``option`` of logs, that make no report without --pattern."""
    several = sources if len(sources) > 1 else ()
    is_table = any(one.lower().endswith(TABLE_SUFFIXES) for one in sources)
    if option and is_table:
        unit = "; --map NAME=COLUMN says what a column counts, such as tokens/s" * (option == "--unit")
        raise BenchError(f"{option} is for logs, not for a table", remedy=f"omit it{unit}")
    if several and all(one.lower().endswith(TABLE_SUFFIXES) for one in several):
        raise BenchError("several tables are given", remedy="put the rows of all into one file")
    if several and all(Path(one).is_dir() for one in several):
        remedy = f"compare two: bench compare {shlex.join(several[:2])}"
        raise BenchError("several studies are given", remedy=remedy)
    if several and not any("=" in one or Path(one).is_file() for one in several[1:]):
        what = f"a report is of one study or table, but {len(several)} are given: {' '.join(several)}"
        raise BenchError(what, remedy="give one of them, and put a name with blanks into quotes")
    if option or several or any("=" in one for one in sources):
        what = "logs of finished runs (SIZE=LOG, --unit, --set, --batch) need --pattern"
        example = "bench report 4=a.log 8=b.log --pattern throughput='REGEX with one group ( )'"
        raise BenchError(what, remedy=f"type, for example: {example}")
    for source in filter(lambda one: Path(one).is_file(), sources):
        if source.lower().endswith(_SPREADSHEETS):
            remedy = f"save it as CSV, then: bench report {Path(source).stem}.csv"
            raise BenchError(f"{source} is a spreadsheet, which bench cannot read", remedy=remedy)
        if source.endswith((".log", ".out", ".err")):
            report = f"for a report: bench report 1={source} --pattern throughput=REGEX (1: its GPUs)"
            remedy = f"{report}; for a failure: bench doctor {source}"
            raise BenchError(f"{source} is a log, not a study", remedy=remedy)


def _log_spread(percent: float) -> float:
    """Return the standard deviation of a run's logarithm for a stated deviation in per cent."""
    if not 0.1 <= percent < 100:
        what = f"--spread {percent:g} is not between 0.1 and 100 %"
        raise BenchError(what, remedy="give the deviation from run to run in per cent, such as 2")
    return math.log1p(percent / 100)


def _report_table(
    table: Path,
    names: Mapping[str, str],
    *,
    mode: str | None,
    output: Path | None,
    as_json: bool,
    check: bool,
    **options: Any,
) -> int:
    """Write the report of a table; ``names`` are the columns by their meanings."""
    from analysis.report.write import write_table_report

    _check_targets(check, bool(options["targets"]))
    options |= {"mode": mode, "names": names}
    written = write_table_report(table, output=output or table.parent, progress=say, **options)
    return _end(written, check=check, study=table.stem, as_json=as_json)


def _read_targets(path: Path) -> list[Any]:
    """Return the targets of a file."""
    from ..matrix.load import read_section
    from ..matrix.schema import TargetsFile

    example = "write a target, such as `- efficiency: 0.8`"
    found = read_section(path, TargetsFile, what="file with targets", example=example, alone="targets")
    return list(found.targets)


def _request(
    series: str, samples: str | None, epochs: int, trainings: int, profile: str | None, target_size: str
) -> Request:
    """Return what the proposal asks for."""
    from analysis.report.profile import read_profile
    from analysis.report.proposal import Request

    for option, number in (("--epochs", epochs), ("--trainings", trainings)):
        if number > 1 and samples is None:
            raise BenchError(f"{option} requires --samples", remedy="add --samples, the samples per epoch")
    if re.fullmatch(r"\s*\d+\s*nodes?\s*", target_size, re.I):
        remedy = "give nodes x GPUs of a node, as 8x4, or a number of GPUs, as 32"
        raise BenchError(f"--target-size {target_size} is not a size", remedy=remedy)
    if target_size and profile is None:
        raise BenchError("--target-size requires --profile", remedy="add --profile, or omit --target-size")
    total = None if samples is None else parse_samples(samples)
    rules = None if profile is None else read_profile(profile)
    return Request(series, total, epochs, trainings, rules, target_size)


def write(
    folder: StudyFolder,
    *,
    as_json: bool = False,
    output: Path | None = None,
    check: bool = False,
    **options: Any,
) -> int:
    """Update the records of a study, write its report, and print the path and the validity of the numbers.

    Return 1 if an error limits the numbers, else 0; if ``check``, see :func:`_end`. ``options`` are those of
    :func:`analysis.report.write.write_report`.
    """
    if options.get("targets") is None:
        planned = open_study(folder)
        has_targets = bool(planned.plan.get("targets"))
        _check_targets(check, has_targets, of_study=True)  # before the work
        if has_targets and (changed := planned.changed_matrix()):
            say(f"warning: the targets are those of the plan; {changed} differs: bench plan {changed}")
    if folder.archive:
        output = output or folder.archive.parent
    try:
        check_writable(output or folder.report)  # a large study takes minutes
        records = settle_study(folder)
        from analysis.report.write import write_report

        options |= {"archive": folder.archive, "records": records}
        written = write_report(folder.path, output=output, progress=say, **options)
    except UnwritableError as error:
        elsewhere = f"write the report elsewhere: bench report {shlex.quote(str(folder.source))} --output DIR"
        remedy = f"{error.remedy}, or {elsewhere}" if error.remedy else elsewhere
        raise UnwritableError(error.message, remedy=remedy) from None
    return _end(written, check=check, study=folder.name, as_json=as_json)


def _report_logs(
    sources: Sequence[str],
    metrics: dict[str, Any],
    *,
    batch: int | None,
    mode: str | None,
    output: Path | None,
    as_json: bool,
    check: bool,
    **options: Any,
) -> int:
    """Print what patterns match in logs; write a report if these have several sizes or a mode."""
    from analysis.report.write import write_table_report
    from analysis.tables_in.logs import read_log, table_text

    _check_targets(check, bool(options["targets"]))
    if not sources:
        raise BenchError("--pattern needs logs", remedy="give SIZE=LOG, such as 1=a.log 2=b.log")
    if batch and mode is None:
        remedy = "add --mode weak (a batch per rank) or --mode strong (a global batch)"
        raise BenchError("--batch requires --mode", remedy=remedy)
    logs = [read_log(source, metrics, batch=batch, mode=mode) for source in sources]
    for log in logs:
        for finding in log.readings.findings:
            is_info = finding.severity == "info"
            say(finding.message if is_info else f"{finding.severity}: {with_remedies([finding])}")
        if log.rate is not None:
            say(f"{log.path}: {count(len(log.readings.rows), 'value')}, mean {log.rate:.6g} {log.unit}")
    told = [log.as_json() for log in logs]
    if problems := [log.readings.problem for log in logs if log.readings.problem]:
        if as_json:
            print_json({"report": None, "logs": told})
        raise BenchError("\n".join(problems))
    if mode is None:
        what = "the logs do not show whether this is strong or weak scaling"
        remedy = "for a report, add --mode strong (the same work at every size) or --mode weak (per rank)"
        say(f"no report: {what}; {remedy}")
        if as_json:
            print_json({"report": None, "logs": told})
        return 0
    folder = output or Path()
    written = write_table_report(
        folder / "logs-report" / "logs.csv",
        output=folder,
        text=table_text(logs, batch=batch, mode=mode),
        mode=mode,
        progress=say,
        **options,
    )
    return _end(written, check=check, study="logs", as_json=as_json, logs=told)


def _end(written: Report, *, check: bool, **options: Any) -> int:
    """Print a written report; return 1 if an error limits its numbers, else 0.

    If ``check``, only the targets decide: 1 if one is missed, else 3 if one cannot be told, else 0.
    """
    _check_targets(check, bool(written.targets))
    _print(written, **options)
    if not check:
        return int(written.has_errors)
    verdicts = {one.verdict for one in written.targets}
    return 1 if "missed" in verdicts else 3 if "cannot tell" in verdicts else 0


def _check_targets(check: bool, has_targets: bool, *, of_study: bool = False) -> None:
    """Raise BenchError if --check has no targets."""
    if check and not has_targets:
        planned = ", or `targets:` to the matrix and plan it again" * of_study
        remedy = f"add --targets FILE.yaml{planned}"
        raise BenchError("--check: there are no targets", remedy=remedy)


def _print(written: Report, *, study: str, as_json: bool, **more: Any) -> None:
    """Print findings, the path of the page, what to use, how sure that is, and why."""
    from analysis.text import message

    page = written.page
    if not as_json:
        for line in written.lines():
            say(line)
        show(page)
        for line in written.answers():
            show(line)
        return
    files = sorted(str(path) for path in page.parent.rglob("*") if path.is_file())
    validity = [
        {
            "code": one.kind,
            "severity": one.severity,
            "message": message(one),
            "remedy": one.remedy,
            "cells": one.subject,
            "values": one.values,
        }
        for one in written.validity
    ]
    content = {"study": study, "report": str(page), "files": files, "validity": validity}
    content["findings"] = [
        {**one.as_json(), "message": message(one), "remedy": one.remedy, "runs": len(runs)}
        for one, runs in written.of_runs
    ]
    content["sizes"] = [
        {"series": series, **one.as_json(), "message": message(one), "remedy": one.remedy}
        for series, own in written.of_sizes.items()
        for one in own
    ]
    content["checks"] = [check.as_json() for check in written.assessment.checks]
    judged = {"recommended": written.recommended, "verdicts": written.verdicts, "settings": written.settings}
    judged["targets"] = [one.as_json() for one in written.targets]
    judged["missing"] = [one._asdict() for one in written.missing]
    print_json({**content, **judged, **more})
