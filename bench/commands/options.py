"""Options that several commands share; find the studies and runs that the options refer to."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from ddp_scaling_bench.errors import BenchError, UnavailableError, missing_file
from ddp_scaling_bench.units import join_names

from ..archive import SUFFIX, is_archive, open_archive
from ..extras import EXTRAS, install_line, missing_packages
from ..jobs.engine import Engine
from ..matrix.cell import SAME_SETTING, SIZES, Cell, Run, value_text
from ..matrix.field_types import did_you_mean
from ..study.layout import StudyFolder, latest_first, studies
from ..study.ledger import Record, RunState
from ..study.plan_json import ATTEMPT, PlannedStudy, open_study
from ..terminal import SHOWN_ROWS, say, short_names
from .completion import complete_filter, complete_matrix, complete_study
from .next_step import step_in_folder

ResultsOption = Annotated[
    Path | None,
    typer.Option(
        "--results", envvar="BENCH_RESULTS", help="The folder of all studies.", show_default="results"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
AllOption = Annotated[
    bool, typer.Option("--all", help=f"List every row of the table, not only {SHOWN_ROWS}.")
]
MatrixArgument = Annotated[
    str,
    typer.Argument(
        help="A matrix file, or the name of a shipped example.",
        autocompletion=complete_matrix,
    ),
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        help="The site file that the matrix inherits from; empty means none. [env var: BENCH_SITE]",
        show_default="~/.config/ddp-scaling-bench/site.yaml",
    ),
]
StudyArgument = Annotated[
    str | None,
    typer.Argument(
        help="A study's name or folder; default: the study planned last.",
        autocompletion=complete_study,
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Select runs by a name pattern ('n4x4-*') or by key=value (nodes=4); repeatable.",
        autocompletion=complete_filter,
    ),
]
RetryOption = Annotated[
    bool, typer.Option("--retry-failed", help="Start failed runs again, as a new attempt.")
]
RetryDisturbedOption = Annotated[
    bool, typer.Option("--retry-disturbed", help="Start disturbed runs again, as a new attempt.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", min=0.0, help="Start nothing if the runs could use more GPU-hours than this."),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Do not ask, even if the cost is above the limit of the site file.")
]
StepTimeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--step-time",
        help="Seconds per step at the smallest size, or SIZE=SECONDS (repeatable), for the expected cost.",
    ),
]
AdoptOption = Annotated[
    bool, typer.Option("--adopt", help="Go on with a copied study; the original is no longer used.")
]


def results_folder(results: Path | None) -> Path:
    """Return the folder of all studies."""
    root = results if results is not None else Path("results")
    if root.exists() and not root.is_dir():
        raise BenchError(
            f"{_shown_root(root)} is not a folder of studies", remedy="give a folder: --results DIR"
        )
    if StudyFolder(root).is_planned:
        what = f"{_shown_root(root)} is a study, not a folder of studies"
        raise BenchError(what, remedy=f"give --results {os.path.relpath(root.resolve().parent)}")
    return root


def _shown_root(root: Path) -> str:
    return f"BENCH_RESULTS={root}" if os.environ.get("BENCH_RESULTS") == str(root) else str(root)


def no_study(root: Path) -> BenchError:
    """Return the error for a folder without studies; the remedy names a folder near it that has some."""
    what = f"no study is planned below {_shown_root(root)}"
    here = Path.cwd()
    around = [here.parent] if StudyFolder(here).is_planned else []
    for place in (here, *around, *(above / "results" for above in (here, *here.parents[:2]))):
        with suppress(OSError):  # it may not be readable
            if any(studies(place)):
                there = os.path.relpath(place)
                return BenchError(what, remedy=f"studies are below {there}: give --results {there}")
    if root.is_dir() or root == Path("results"):
        return BenchError(what, remedy=f"the next step: {step_in_folder(root)}")
    return BenchError(
        f"{_shown_root(root)} does not exist", remedy="give the folder of studies: --results DIR"
    )


def require_report(what: str) -> None:
    """Raise BenchError if the packages that evaluate and draw results are not installed."""
    if missing := missing_packages(EXTRAS["report"]):
        verb = "is" if len(missing) == 1 else "are"
        absent = f"{join_names(missing, most=len(missing))}, which {verb} not installed"
        raise BenchError(f"{what} needs {absent}", remedy=f"install the extra: {install_line('report')}")


def find_study(name: str | None, results: Path | None) -> StudyFolder:
    """Return a study by its name, folder or archive; without a name, the study planned last."""
    root = results_folder(results)
    known = [study.name for study in studies(root)]
    if name is None:
        if not known:
            raise no_study(root)
        return latest_first(root)[0]
    if not name:
        raise BenchError("the name of the study is empty", remedy="give a name (see bench list)")
    for path in (Path(name), root / name):
        if StudyFolder(path).is_planned:
            return StudyFolder(path)
        if is_archive(path) and path.is_file():
            return open_archive(path)
    raise _not_a_study(name, root, known)


def _not_a_study(name: str, root: Path, known: Sequence[str]) -> BenchError:
    """Return the error for a name that is neither a study nor an archive."""
    path, inside = Path(name), root / name
    for folder in map(StudyFolder, (path, inside)):
        if folder.ledger.exists():
            remedy = f"restore it, or move {folder.path} away and plan the matrix again"
            return BenchError(f"{folder.path} contains runs, but no plan.json", remedy=remedy)
    if path.suffix in (".yaml", ".yml"):
        matrix = next((one for one in _matrices_of(path) if one.is_file()), None)
        if path.stem in known:
            return BenchError(f"{name} is a matrix, not a study", remedy=f"give its study: {path.stem}")
        if matrix == path:
            return BenchError(f"{name} is a matrix, not a study", remedy=f"plan it first: bench plan {name}")
        remedy = (
            f"plan the one that exists: bench plan {matrix}"
            if matrix
            else "give the name of a study (see bench list)"
        )
        return missing_file(path, what="the matrix", remedy=remedy)
    if (runs := list(find_attempts(name, root))) and len(runs[0][1]) == 1:
        return BenchError(f"{name} is a run, not a study", remedy=f"its study is {runs[0][0].folder.name}")
    listed = join_names(known, most=4) or "none"
    within = next((folder for folder in path.parents if "/" in name and StudyFolder(folder).is_planned), None)
    if path.exists() or within:
        what = "the folder of all studies" if path.resolve() == root.resolve() else "not a study"
        is_what = f"is {what}" if path.exists() else "does not exist"
        remedy = f"its study is {within}" if within else f"give one of the studies (planned: {listed})"
        return BenchError(f"{name} {is_what}", remedy=remedy + ("" if within else _use_of(path)))
    what = f"no study {name!r} is planned below {_shown_root(root)}"
    if matrix := next((one for one in _matrices_of(path) if one.is_file()), None):
        return BenchError(what, remedy=f"plan it: bench plan {matrix}")
    if not known:
        return no_study(root)
    parts = re.split("[,;:]", name)
    places = [one for one in (inside, Path(f"{inside}{SUFFIX}")) if one.exists()]
    near = [*places, *get_close_matches(path.name, known, n=1)]
    remedy = f"did you mean {near[0]}?" if near else "give the name or folder of one of these"
    if {*parts} <= {*known}:
        remedy = f"give one study, such as {parts[0]}"
    return BenchError(f"{what} (planned: {listed})", remedy=remedy)


def _matrices_of(path: Path) -> list[Path]:
    """Return the paths at which a matrix of this name can be."""
    return [path, *(path.with_name(f"{path.stem}{end}") for end in (".yaml", ".yml"))]


def _use_of(path: Path) -> str:
    """Return which command reads a file that is not a study, as an addition to a remedy."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        begin = file.read(1000)
    if begin.startswith(b"\x1f\x8b"):
        return f"; an archive has a name that ends in {SUFFIX}"
    if path.suffix in (".csv", ".tsv"):
        return f"; for a table: bench report {path}"
    return "" if b"\0" in begin else f"; for a log: bench doctor {path}"


def refuse_part_of_run(name: str, root: Path) -> None:
    """Raise BenchError if ``name`` is a part of a run: of its name, or a file or folder in its folder."""
    for path in (Path(name), *Path(name).parents, root / name):
        if found := _of_folder(path):
            what = "is a file of a run" if Path(name).exists() else "does not exist"
            run = found[0].folder.runs / found[1][0][0]
            raise BenchError(f"{name} {what}", remedy=f"give the run: {run}")
    study, _, start = name.rstrip("*").rpartition("/")
    study = Path(study).parent.name if Path(study).name == "runs" else study
    if Path(name).exists() or (root / name).exists():
        return
    runs: list[str] = []
    for folder in latest_first(root):
        if study in ("", folder.name):
            with suppress(BenchError):  # the plan is damaged, or of another version
                runs += [f"{folder.name}/{run.run_id}" for run in open_study(folder).runs]
    alike = [run for run in runs if len(start) > 2 and run.rpartition("/")[2].startswith(start)]
    if alike or (study and runs):
        what = f"{name} is not the whole name of a run" if alike else f"{study} has no run {start}"
        raise BenchError(what, remedy=f"give a run, such as {(alike or runs)[0]}")


def find_attempts(target: str, root: Path) -> Iterator[tuple[PlannedStudy, list[tuple[str, int]]]]:
    """Yield each study that contains the run or job ``target``, with the matching (run, attempt) pairs.

    ``target`` is the folder of a run or of an attempt, ``STUDY/RUN``, or the name of a run (also as in a
    table) or the id of a job in any study below ``root``; the study planned last comes first. If ``target``
    is a run, the pair contains its latest attempt (0 if the run was never started). If it is a job, there is
    a pair for each attempt in the job, even if the run has a later attempt.
    """
    if Path(target).is_dir() and (found := _of_folder(Path(target))):
        yield found
        return
    study, _, name = target.rpartition("/")
    places = [Path(study).parent] if Path(study).name == "runs" else [root / study, Path(study)]
    folders = [StudyFolder(place) for place in places if study and StudyFolder(place).is_planned][:1]
    for folder in folders or latest_first(root):
        try:
            planned = open_study(folder)
        except BenchError:  # planned by another version of bench: the target may be in a different study
            continue
        records, names = planned.records(), short_names(planned)
        wanted = name if folders else target
        if named := [run_id for run_id in records if wanted in (run_id, names[run_id])]:
            yield planned, [(named[0], records[named[0]].attempt)]
        elif of_job := [
            (run_id, attempt)
            for run_id, attempts in planned.ledger.attempts().items()
            for attempt, record in attempts.items()
            if record.job_id == target and run_id in records
        ]:
            yield planned, of_job


def _of_folder(path: Path) -> tuple[PlannedStudy, list[tuple[str, int]]] | None:
    """Return the study and the attempt of the folder of a run or attempt, or None if it is another folder."""
    number = ATTEMPT(path.resolve().name)
    run = Path(os.path.normpath(path / "..")) if number else path
    study = StudyFolder(Path(os.path.normpath(run / "../..")))
    if run.resolve().parent.name != "runs" or not study.is_planned:
        return None
    planned, run_id = open_study(study), run.resolve().name
    record = planned.records().get(run_id)
    return (planned, [(run_id, int(number[1]) if number else record.attempt)]) if record else None


def say_if_copy(engine: Engine) -> None:
    """Print that a study is a copy, if it is one: its jobs are those of the original."""
    if engine.is_copy():
        path = engine.study.folder.path
        say(f"{path} is a copy of a study in another folder; `bench submit --adopt` goes on with it")


def settle_study(folder: StudyFolder) -> dict[str, Record]:
    """Update and return the records of a study; if that is not possible, print a diagnostic line.

    If the scheduler cannot be reached, or the study is an archive, the records are those of the ledger.
    """
    planned = open_study(folder)
    if folder.archive:
        return planned.records()
    try:
        engine = Engine(planned)
        say_if_copy(engine)
        return engine.settled()
    except UnavailableError as absent:
        say(f"{folder.path}: the states of unfinished runs are not updated: {absent.message}")
        return planned.records()


def choose_runs(
    planned: PlannedStudy,
    records: Mapping[str, Record],
    filters: Sequence[str] | None = None,
    *,
    retry_failed: bool = False,
    retry_disturbed: bool = False,
) -> list[Run]:
    """Return the runs that a submission starts, in the planned order: those in state planned or cancelled.

    With ``retry_failed`` and ``retry_disturbed``, also failed runs, and completed runs that were disturbed.
    """
    wanted = {RunState.PLANNED, RunState.CANCELLED, *([RunState.FAILED] if retry_failed else [])}
    # Filters apply to all runs: a filter that matches none is an error even if no run is left to start.
    chosen = ((run, records[run.run_id]) for run in only(planned, filters or []))
    return [run for run, r in chosen if r.state in wanted or (retry_disturbed and r.is_disturbed)]


def only(planned: PlannedStudy, filters: Sequence[str]) -> list[Run]:
    """Return the runs that match every filter.

    A filter is a pattern for a name of the run or cell (``n4x4-*``), or ``key=value``. The key is a
    property of the run's configuration or a workload option (``nodes=4``, ``mode=weak``, ``precision=bf16``).

    Raises:
        BenchError: a key is unknown, or no run matches.
    """
    runs, cells, names = planned.runs, planned.cells, short_names(planned) if filters else {}
    if "" in filters:
        raise BenchError("--only is empty", remedy="give KEY=VALUE or a pattern of run names, or omit it")
    matching = [
        {run.run_id for run in runs if _matches(run, cells[run.cell_id], names, one)} for one in filters
    ]
    kept = [run for run in runs if all(run.run_id in some for some in matching)]
    if kept or not filters or not runs:
        return kept
    lone = next((one for one, some in zip(filters, matching, strict=True) if not some), None)
    if lone is None:
        together = " ".join(f"--only {one}" for one in filters)
        raise BenchError(f"no run matches all of {together}", remedy="a run must match each --only: omit one")
    raise BenchError(f"--only {lone} matches no run", remedy=_filter_like(lone, planned, names))


def _filter_like(text: str, planned: PlannedStudy, names: Mapping[str, str]) -> str:
    """Return what to write instead of a filter that matches no run."""
    key = re.split(r"[^\w.]", text, maxsplit=1)[0]
    with suppress(BenchError):
        found = [one for run in planned.runs for one in _values(run, planned.cells[run.cell_id], key)]
        if texts := join_names([*filter(None, dict.fromkeys(map(value_text, found)))], most=6):
            return f"write {key}=VALUE with one of its values: {texts}"
    for pattern in (f"{text}*", f"*{text}*"):
        if len(text) > 1 and fnmatch.filter(names.values(), pattern):
            return f"a pattern matches whole names: --only '{pattern}'"
    cell = planned.cells[planned.runs[0].cell_id]
    name = names[cell.cell_id]
    return f"give KEY=VALUE, such as nodes={cell.nodes}, or a pattern of run names, such as '{name}*'"


def _matches(run: Run, cell: Cell, names: Mapping[str, str], pattern: str) -> bool:
    key, equals, value = pattern.partition("=")
    if not equals:
        own = (run.run_id, run.cell_id, names[run.run_id], names[run.cell_id])
        return any(fnmatch.fnmatchcase(name, pattern) for name in own)
    if key == "command" and cell.name == value:
        return True
    return any(_is_written(found, value) for found in _values(run, cell, key))


def _values(run: Run, cell: Cell, key: str) -> Collection[Any]:
    """Return the values of a run for a key of a filter."""
    if key == "repeat":
        return [run.repeat]
    return cell.modes if key == "mode" else [_property(cell, key)]


def _is_written(found: Any, text: str) -> bool:
    with suppress(ValueError):
        if isinstance(found, float):  # 25.0 in the plan, 25 in the matrix
            return found == float(text)
    return value_text(found) == text


def _property(cell: Cell, key: str) -> Any:
    if key.startswith("env."):  # with the values that are not shown
        return cell.env.get(key.removeprefix("env."), "")
    settings = cell.settings | {"command": cell.argv}
    name = SAME_SETTING.get(key, key)
    if name in settings:
        return settings[name]
    keys = (*SIZES, *SAME_SETTING, "backend", "launcher", "mode", "repeat", "command")
    allowed = did_you_mean(key, [*keys, *cell.workload], cutoff=0.8)
    raise BenchError(f"--only: unknown key {key!r}", remedy=f"{allowed}, or give a pattern such as 'n4x4-*'")
