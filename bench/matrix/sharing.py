"""Warn about runs of a study that can share a node or the network, and find GPUs that stay idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.matrix.cell import PER_NODE, Cell, Point
from bench.matrix.document import Document
from bench.matrix.schema import Matrix
from bench.units import count

#: Number of cells that a warning names.
NAMED_CELLS = 6


def check_node_gpus(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem if a point needs more GPUs on a node than `cluster.node_gpus` says there are."""
    has, per_node = matrix.cluster.node_gpus, point.values[PER_NODE]
    most = max(per_node) if isinstance(per_node, list) else per_node
    if has is not None and matrix.workload.device == "cuda" and most > has:
        what = f"gpus_per_node {most}: cluster.node_gpus says that a node has {count(has, 'GPU')}"
        document.add_problem(("axes", "gpus_per_node"), what, "correct one of the two")


def check_dependency(matrix: Matrix, document: Document) -> None:
    """Record a problem if cluster.directives sets a dependency, which concurrent_runs would replace."""
    if matrix.cluster.concurrent_runs is None:
        return
    for index, line in enumerate(matrix.cluster.directives):
        if any(word.startswith(("-d", "--dep")) for word in line.split()):
            what = f"{line!r} has no effect with concurrent_runs, which sets the dependency of each job"
            document.add_problem(("cluster", "directives", index), what, "remove one of the two")


def idle_gpus(cell: Cell, *, node_gpus: int | None) -> int:
    """Return the number of GPUs that a run reserves but does not use.

    ``node_gpus`` is the number of GPUs of a node if the run has whole nodes, otherwise None.
    """
    used = cell.world_size if cell.device == "cuda" else 0
    return cell.reserved_gpus(node_gpus=node_gpus) - used


def sharing_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a warning if jobs can share nodes, and if runs can share the network between nodes."""
    cluster = matrix.cluster
    if cluster.executor != "slurm":
        return
    if not cluster.exclusive:
        yield _shared_nodes(matrix, document, cells)
    limit = cluster.concurrent_runs
    if limit is not None:
        before = "the run before it" if limit == 1 else f"the run {limit} places before it"
        yield (
            f"concurrent_runs {limit}: each job waits for {before} and gains queue age, and so priority, "
            "only after that run has ended; `bench submit --pack` waits in the queue only once"
        )
    several = [cell for cell in cells if cell.nodes > 1]
    runs = min(len(several) * matrix.repeats, limit or len(several) * matrix.repeats)
    if runs > 1:
        yield (
            f"up to {runs} runs on several nodes can execute side by side and share the network, which "
            "disturbs their communication times; `bench submit --pack` (one job, one run after another) "
            "avoids this, and so does cluster.concurrent_runs: 1"
        )


def _shared_nodes(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> str:
    """Return the warning about `exclusive: false`, which names the cells whose runs can meet on a node."""
    key = ("cluster", "exclusive")
    where, remedy = document.location(key), "remove this line for whole nodes"
    if document.site is not None and document.inherited("cluster.exclusive"):
        where = document.site.path
    elif key not in document.lines:  # the value is that of the study's plan.json
        remedy = "give the matrix another `study:` name for whole nodes"
    what = f"{where}: cluster.exclusive is false: other jobs can run on the same nodes and disturb a run"
    limit = matrix.cluster.concurrent_runs
    meeting = [] if limit == 1 else _cells_that_meet(matrix, cells)
    if not meeting:
        return f"{what}; {remedy}"
    names = ", ".join(cell.cell_id for cell in meeting[:NAMED_CELLS])
    if len(meeting) > NAMED_CELLS:
        names += f" and {len(meeting) - NAMED_CELLS} more"
    remedy = f"{remedy}, or use `bench submit --pack` or cluster.concurrent_runs: 1"
    return f"{what}. Runs of these cells can also meet on a node: {names}; {remedy}"


def _cells_that_meet(matrix: Matrix, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose runs fit on a node together with another run of the study.

    Only GPUs are counted, because the plan does not know the cores and the memory of a node.
    """
    node_gpus = matrix.cluster.node_gpus
    # The two runs with the fewest GPUs per node: a run with few GPUs cannot meet itself.
    runs = [cell for cell in cells for _ in range(min(matrix.repeats, 2))]
    fewest = sorted(runs, key=lambda cell: cell.requested_gpus)[:2]
    if len(fewest) < 2:
        return []
    found = []
    for cell in cells:
        other = fewest[1] if cell is fewest[0] else fewest[0]
        if node_gpus is None or cell.requested_gpus + other.requested_gpus <= node_gpus:
            found.append(cell)
    return found
