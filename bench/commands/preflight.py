"""`bench preflight`: check nodes before a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cores import usable_cores
from ..errors import BenchError, unwritable
from ..jobs.slurm.client import Slurm, SlurmMissingError, SlurmUnavailableError
from ..jobs.slurm.pack import planned_script
from ..matrix.cell import Run
from ..preflight.job import PreflightError, PreflightJob, nodes_to_check
from ..preflight.verdict import DEFAULT_THRESHOLD
from ..study.layout import PreflightFolder, StudyFolder
from ..study.plan_json import PlannedStudy
from ..study.preflight import next_folder, read_result, write_unfit
from ..units import count
from .console import print_json, print_table, say, show
from .init import cluster_matrix, local_matrix, partitions
from .options import (
    JsonOption,
    ResultsOption,
    SiteOption,
    parse_duration_option,
    results_folder,
)

if TYPE_CHECKING:
    from ..plan import Plan


#: Folder of preflights that belong to no study.
OWN_FOLDER = Path(".bench-preflight")
DEFAULT_TIMEOUT = "30m"
DEFAULT_TIMEOUT_S = 1800.0

_MATRIX = "A matrix file, whose cluster section is used; default: the default partition."
OptionalMatrixArgument = Annotated[str | None, typer.Argument(help=_MATRIX, show_default=False)]
_NODES = "Number of nodes; default: up to twice those of the largest run, or without a matrix all idle nodes."
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help=_NODES, show_default=False)]
_THRESHOLD = "A node below this fraction of the median is unfit."
ThresholdOption = Annotated[float, typer.Option("--threshold", min=0.0, max=1.0, help=_THRESHOLD)]
_TIMEOUT = "How long to wait for the start of the job."
TimeoutOption = Annotated[str, typer.Option("--timeout", metavar="DURATION", help=_TIMEOUT)]


def preflight_command(
    matrix: OptionalMatrixArgument = None,
    nodes: NodesOption = None,
    threshold: ThresholdOption = DEFAULT_THRESHOLD,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    results: ResultsOption = None,
    site: SiteOption = None,
    as_json: JsonOption = False,
) -> int:
    """Find nodes and links that are slow or unfit, with one job of at most three minutes.

    The job measures each node, and the links of a ring through all nodes. The command prints the
    exclude: line for the matrix. The exit code is 1 if a node is unfit or a link is slow, and 2 if the
    nodes could not be checked.
    """
    timeout_s = parse_duration_option("--timeout", timeout)
    plan = _plan(matrix, site)
    root = _root(plan, results) if matrix is not None else OWN_FOLDER
    if plan.matrix.cluster.scheduler.preflight == "process":
        folder, result = _check_this_machine(root, threshold, nodes)
    else:
        job = _job(plan, root, nodes=nodes, threshold=threshold, timeout_s=timeout_s, all_idle=matrix is None)
        folder, result = job.perform()
    excluded = plan.matrix.cluster.exclude
    if as_json:
        keys = ("nodes", "links", "exclude", "job_id", "threshold", "pairs")
        print_json({**{key: result[key] for key in keys}, "folder": str(folder.path)})
    else:
        show_result(result, excluded=excluded)
        show(f"written: {folder.path}")
    return 1 if result["exclude"] or result["links"] else 0


def check_nodes_of(planned: PlannedStudy, runs: Sequence[Run], *, timeout_s: float | None) -> None:
    """Check nodes for ``runs`` of a study, and record the unfit nodes, which submissions exclude.

    ``timeout_s`` limits the wait for the start of the job; None means no limit.

    Raises:
        PreflightError: the nodes could not be checked.
    """
    text = planned_script(planned.folder.preflight_script).read_text(encoding="utf-8")
    largest = max(planned.cells[run.cell_id].nodes for run in runs)
    job = PreflightJob(
        root=planned.folder.preflights,
        text=text,
        nodes=_nodes(text, largest),
        threshold=DEFAULT_THRESHOLD,
        timeout_s=math.inf if timeout_s is None else timeout_s,
        provides_python=bool(planned.plan.get("setup") or planned.plan.get("container")),
        say=say,
    )
    _, result = job.perform(
        lambda found: write_unfit(planned.folder, nodes=found["exclude"], job_id=found["job_id"])
    )
    for line in (*findings(result), *notes(result)):
        say(line)
    fit = sum(node["fit"] for node in result["nodes"])
    say(f"preflight: {fit} of {len(result['nodes'])} nodes are fit")


def show_result(result: Mapping[str, Any], *, excluded: str | None) -> None:
    """Print the table of nodes, the problems found, and the ``exclude:`` line for the matrix."""
    names = list(dict.fromkeys(check["check"] for node in result["nodes"] for check in node["checks"]))
    rows = []
    for node in result["nodes"]:
        cells = {check["check"]: cell_text(check) for check in node["checks"]}
        rows.append((node["node"], "yes" if node["fit"] else "NO", *(cells.get(name) for name in names)))
    columns = [check_name(name) for name in names]
    print_table(f"Preflight of {count(len(rows), 'node')}", ["node", "fit", *columns], rows, right=columns)
    for line in findings(result):
        show(line)
    for line in notes(result):
        say(line)
    if result["exclude"]:
        listed = ",".join([*filter(None, [excluded]), *result["exclude"]])
        show(f'in the matrix, below cluster:\n  exclude: "{listed}"')


def _plan(matrix: str | None, site: str | None) -> Plan:
    """Return the plan of ``matrix``, or of a new matrix for the default partition or this machine."""
    from ..matrix.load import find_site
    from ..plan import make_plan
    from ..shipped import find_matrix

    path = find_matrix(matrix) if matrix is not None else _own_matrix()
    return make_plan(path, site=find_site(site))


def _own_matrix() -> Path:
    """Write a matrix for the default partition (without Slurm: for this machine); return its path."""
    try:
        found = partitions(Slurm().nodes())
        text = cluster_matrix(next((one for one in found if one.default), found[0])) if found else ""
    except SlurmMissingError:
        text = local_matrix(usable_cores())
    except SlurmUnavailableError as absent:
        raise PreflightError(absent.message, remedy=absent.remedy) from None
    if not text:
        raise PreflightError("no partition is in service", remedy="see sinfo")
    path = OWN_FOLDER / "matrix.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def _root(plan: Plan, results: Path | None) -> Path:
    """Return the folder for preflights, which is in the study if the matrix has been planned."""
    study = StudyFolder(results_folder(results) / plan.matrix.study)
    return study.preflights if study.is_planned else OWN_FOLDER


def _job(
    plan: Plan, root: Path, *, nodes: int | None, threshold: float, timeout_s: float, all_idle: bool
) -> PreflightJob:
    from ..plan import preflight_script as render

    cluster = plan.matrix.cluster
    if cluster.scheduler.preflight is None:
        what = "`bench preflight` checks the nodes of a Slurm job, but the matrix's executor is"
        raise BenchError(
            f"{what} {cluster.executor}", remedy="run `bench preflight` on each host, and compare the rates"
        )
    text = render(plan)
    largest = None if all_idle else max(cell.nodes for cell in plan.cells)
    return PreflightJob(
        root=root,
        text=text,
        nodes=str(nodes) if nodes else _nodes(text, largest),
        threshold=threshold,
        timeout_s=timeout_s,
        provides_python=bool(cluster.setup or cluster.container),
        say=say,
    )


def _nodes(text: str, largest: int | None) -> str:
    try:
        return nodes_to_check(Slurm().nodes(), text, largest=largest)
    except SlurmUnavailableError as absent:
        raise PreflightError(absent.message, remedy=absent.remedy) from None


def _check_this_machine(
    root: Path, threshold: float, nodes: int | None
) -> tuple[PreflightFolder, dict[str, Any]]:
    """Measure this machine in this process."""
    if nodes is not None and nodes > 1:
        raise BenchError("--nodes requires Slurm; executor local has one node", remedy="omit --nodes")
    from ..preflight.program import check_this_machine

    folder = next_folder(root)
    check_this_machine(folder, threshold=threshold)
    result = read_result(folder)
    assert result is not None, f"{folder.result} was just written"
    return folder, result


_NO_ANSWER = "it did not start, or stopped answering"
_NAMES = {
    "gpus": "GPUs",
    "matrix-product": "matrix product",
    "memory": "memory",
    "exchange": "exchange",
    "gpu-clock": "GPU clock",
    "gpu-slowdown": "GPUs slowed down",
    "gpu-errors": "GPU memory errors",
    "pcie-width": "PCIe width",
    "answered": "answered",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def check_name(check: str) -> str:
    """Return the name of a check in words."""
    return _NAMES.get(check, check)


def value_text(check: Mapping[str, Any]) -> str:
    """Format the value of a check, such as ``13.3 GFLOP/s``, or a dash if there is no value."""
    return "-" if check["value"] is None else _with_unit(check["value"], check["unit"])


def _with_unit(value: float, unit: str) -> str:
    if "/" not in unit and unit != "Hz":
        return f"{value:g} {unit}".strip()
    factor, prefix = next(((f, p) for f, p in _PREFIXES if value >= f), (1e3, "k"))
    return f"{value / factor:.3g} {prefix}{unit}"


def cell_text(check: Mapping[str, Any]) -> str:
    """Format a check for a table, with its percentage of the median: ``13.3 GFLOP/s (99 %)``."""
    text = value_text(check)
    if check["value"] is None or not check["median"]:
        return text
    return f"{text} ({100 * check['value'] / check['median']:.0f} %)"


def findings(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each failed check and each slow link."""
    for node in result["nodes"]:
        for check in node["checks"]:
            if not check["fit"]:
                yield f"{node['node']} is unfit: {_failure(check)}"
    yield from _link_findings(result)


def _link_findings(result: Mapping[str, Any]) -> Iterator[str]:
    broken = [link for link in result["links"] if link["value"] is None]
    if broken and not result["pairs"] and len(result["nodes"]) > 2:
        a, b = broken[0]["nodes"]
        yield f"no pair of nodes exchanged messages; the first pair, {a} and {b}: {broken[0]['reason']}"
        broken = []
    for link in broken:
        a, b = link["nodes"]
        yield f"{a} and {b} exchanged no messages: {link['reason']}; {_advice(result, 'faulty')}"
    for link in result["links"]:
        if link["value"] is None:
            continue
        a, b = link["nodes"]
        rate, other = _with_unit(link["value"], "B/s"), _with_unit(link["median"], "B/s")
        if len(result["nodes"]) == 2:
            what = f"{a} and {b} exchange {rate} in one direction, and {other} in the other"
        else:
            what = f"the link between {a} and {b} is slow: {rate}, the median is {other}"
        yield f"{what}; {_advice(result, 'slow')}"


def _advice(result: Mapping[str, Any], fault: str) -> str:
    if len(result["nodes"]) == 2:
        return f"check a third node together with them to find out which node is {fault}"
    return "avoid one of these nodes"


def _failure(check: Mapping[str, Any]) -> str:
    name = check_name(check["check"])
    if check["check"] == "answered":
        return f"it could not be measured: {check['reason']}" if "reason" in check else _NO_ANSWER
    if check["value"] is None:
        isolated = check["check"] == "exchange"
        return f"it exchanged messages with no other node: {check['reason']}" if isolated else f"no {name}"
    if not check["median"]:
        return f"{name}: {value_text(check)}"
    median = _with_unit(check["median"], check["unit"])
    return f"{name} {cell_text(check)} of the median, {median})".replace(") of", " of")


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the limits of the result: too few nodes, or pairs of nodes that did not exchange messages."""
    count = len([node for node in result["nodes"] if node["check"] != "answered"])
    if count == 1:
        yield "one node: there is nothing to compare it with"
    elif count == 2:
        yield "two nodes: the rate of their exchange cannot be compared with that of other pairs"
    pairs = count * (count - 1) // 2
    if count > 2 and result["pairs"] < pairs:
        known = f"{result['pairs']} of {pairs} pairs of nodes exchanged messages"
        yield f"{known}; the links between the other pairs are unknown"
