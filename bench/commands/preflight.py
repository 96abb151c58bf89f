"""`bench preflight`: find slow nodes and links with a study of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddp_scaling_bench.errors import BenchError, InputError, UnavailableError
from ddp_scaling_bench.units import count, join_names

from ..study.layout import StudyFolder, studies
from ..study.ledger import Record, RunState
from ..study.plan_json import PlannedStudy, open_study
from ..terminal import print_json, print_table, say, show, show_progress
from .options import (
    JsonOption,
    MatrixArgument,
    ResultsOption,
    SiteOption,
    YesOption,
    choose_runs,
    results_folder,
)
from .plan import chosen_matrix
from .submit import check_cost, new_submission

if TYPE_CHECKING:
    from ..matrix.schema import Cluster
    from ..preflight import Verdict

#: The folder of the studies, below results. They are not studies of a training: `bench list` omits them.
FOLDER = "preflight"

_NODES = "Number of nodes; default: those of the largest run."
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help=_NODES)]
_THRESHOLD = "A rate below this fraction (0.9: 90 %) of the median is too low."
ThresholdOption = Annotated[float, typer.Option("--threshold", min=0.0, max=1.0, help=_THRESHOLD)]


def preflight_command(
    matrix: MatrixArgument,
    nodes: NodesOption = None,
    threshold: ThresholdOption = 0.9,
    results: ResultsOption = None,
    site: SiteOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Find nodes and links that are slow or unfit, with one run of at most ten minutes.

    The run has the matrix's cluster section. The command waits for it, and prints the exclude: line for the
    matrix. Each call measures again; after an interruption, it waits for the same run. The exit code is 1 if
    a node is unfit or a link is bad, and 3 if the nodes could not be checked.
    """
    from ..matrix.load import find_site
    from ..plan import make_plan, write_plan
    from ..preflight import ROWS, plan_nodecheck

    root = results_folder(results)
    plan = make_plan(chosen_matrix(matrix, root), site=find_site(site))
    root, name = root / FOLDER, plan.matrix.study[:50]
    last = _last_number(root, name)
    folder = StudyFolder(root / f"{name}-{last}")
    if not last or not any(record.state.active for record in open_study(folder).records().values()):
        number = last + 1 if folder.has_runs or not last else last  # Slurm may have accepted no run
        try:
            check = plan_nodecheck(plan, f"{name}-{number}", nodes=nodes)
        except InputError as error:
            what = "; ".join(problem.message for problem in error.problems)
            remedy = "change the matrix's cluster section" + ", or --nodes" * bool(nodes)
            raise BenchError(f"{matrix}: no check of these nodes: {what}", remedy=remedy) from None
        folder = write_plan(check, root)
    planned = open_study(folder)
    say(f"preflight: {planned.folder.path}, {count(next(iter(planned.cells.values())).nodes, 'node')}")
    record = _run(planned, ask=not yes)
    path = planned.run_folder(record).path / ROWS
    verdict = _verdict(path, record, threshold)
    if as_json:
        print_json({**verdict.as_json(), "threshold": threshold, "file": str(path)})
    else:
        _show(verdict, plan.matrix.cluster)
        show(f"written: {path}")
    if verdict.unfit or verdict.links:
        return 1
    return 3 if len(verdict.nodes) == 1 else 0


def _last_number(root: Path, name: str) -> int:
    """Return the number of the last preflight of a matrix, or 0 if there is none."""
    numbers = (study.name.removeprefix(f"{name}-") for study in studies(root))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _run(planned: PlannedStudy, *, ask: bool) -> Record:
    """Start the run of a preflight unless it is in progress, wait for its end, and return its record."""
    from ..preflight import UndecidedError

    submission = new_submission(planned)
    try:
        seen = submission.records(wait=True)
        runs = choose_runs(planned, seen)
        check_cost(planned, runs, budget=None, step_time=None, ask=ask)
        with show_progress(len(runs)) as submission.callbacks:
            (record,) = submission.finish(runs, seen=seen).values()
    except UnavailableError as absent:
        raise UndecidedError(absent.message, remedy=absent.remedy) from None
    return record


def _verdict(path: Path, record: Record, threshold: float) -> Verdict:
    """Judge the measurements of a run.

    Raises:
        UndecidedError: the run has failed, with the reasons that it recorded before.
    """
    from ..preflight import UndecidedError, judge, read_measurements

    if record.state is not RunState.COMPLETED:
        rows = read_measurements(path) if path.is_file() else []
        why = [
            record.reason or f"the run is {record.state}",
            *(f"{row.node}: {row.reason}" for row in rows if row.reason),
        ]
        raise UndecidedError(join_names(why), remedy=f"see {path.parent}")
    return judge(read_measurements(path), threshold=threshold)


def _show(verdict: Verdict, cluster: Cluster) -> None:
    """Print the table of nodes, the findings, and the ``exclude:`` line for the matrix."""
    from ..preflight import CHECKS, cell_text

    rows = []
    for result in verdict.nodes:
        values = {
            check: cell_text(rate, verdict.medians[check], check) for check, rate in result.values.items()
        }
        cells = [values.get(check, "-") for check in CHECKS]
        rows.append((result.node, "NO" if result.failures else "yes", *cells))
    print_table(f"Preflight of {count(len(rows), 'node')}", ["node", "fit", *CHECKS], rows, right=CHECKS)
    for line in verdict.findings():
        show(line)
    for line in verdict.limits():
        say(line)
    if verdict.unfit and "exclude" in cluster.scheduler.keys:
        listed = ",".join([*filter(None, [cluster.exclude]), *verdict.unfit])
        show(f'in the matrix, below cluster:\n  exclude: "{listed}"')
