"""What a study cannot answer as it is planned, and settings that do nothing: in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.matrix.cell import Cell
from bench.matrix.command_check import command_remarks
from bench.matrix.loading import Document
from bench.matrix.schema import Matrix

FORECAST_SIZES = 5
INTERVAL_REPEATS = 3

#: What every executor heeds; `hosts` is told by itself.
_FOR_ALL_EXECUTORS = {"executor", "hosts", "cpus_per_task", "time_limit", "setup", "env"}
_ONLY_FOR_MODELS = {
    "seq_len": ("transformer",),
    "image_size": ("resnet50",),
    "parameters": ("transformer", "mlp"),
}


def remarks(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> list[str]:
    """Return the plan's warnings, the ones about the answers first."""
    return [
        *_unanswerable(matrix, cells),
        *_surprising(matrix, document, cells),
        *command_remarks(matrix, document),
        *_ignored(matrix, document),
    ]


def _unanswerable(matrix: Matrix, cells: Sequence[Cell]) -> Iterator[str]:
    sizes: dict[str, set[int]] = {}
    for cell in cells:
        for member in cell.series:
            sizes.setdefault(member.series, set()).add(cell.world_size)
    alone = [series for series, found in sizes.items() if len(found) == 1]
    if len(alone) == len(sizes):
        yield "every series has one size only: throughput is measured, but no speedup and no efficiency"
    elif alone:
        shown = ", ".join(alone[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
        yield f"series with one size only, so without efficiency: {shown}"
    most = max(len(found) for found in sizes.values())
    if most < FORECAST_SIZES:
        sizes_word = "size" if most == 1 else "sizes"
        needed = f"a fitted model needs {FORECAST_SIZES} or more"
        yield f"at most {most} {sizes_word} per series: no forecast ({needed})"
    if matrix.repeats < INTERVAL_REPEATS:
        noun = "repeat" if matrix.repeats == 1 else "repeats"
        yield f"{matrix.repeats} {noun}: no intervals (they need {INTERVAL_REPEATS} or more)"
    if len({cell.nodes for cell in cells}) == 1:
        yield f"one node count ({cells[0].nodes}): no efficiency over nodes, only within them"


def _surprising(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a remark for each setting that does something else than people expect."""
    cluster, path = matrix.cluster, document.path
    for name, value in cluster.env.items():
        if "$" in value and not document.inherited(f"cluster.env.{name}"):
            line = document.line(("cluster", "env", name))
            yield (
                f"{path}:{line}: cluster.env.{name} holds a $ and arrives literally; "
                "to build on another variable, write a set-up line with export"
            )
    if cluster.container and matrix.workload.data != "synthetic" and not cluster.container.mounts:
        line = document.line(("workload", "data"))
        yield f"{path}:{line}: the container sees workload.data only if cluster.container.mounts binds it"
    if cluster.executor == "slurm" and matrix.workload.device == "cuda":
        for per_node in {tuple(c.tasks_per_node) for c in cells if isinstance(c.tasks_per_node, list)}:
            most = max(per_node)
            yield f"mixed nodes {list(per_node)}: Slurm is asked for {most} GPUs on each; some stay idle"


def _ignored(matrix: Matrix, document: Document) -> Iterator[str]:
    """Yield a remark for each setting that has no effect here."""
    cluster, workload, path = matrix.cluster, matrix.workload, document.path
    axes = matrix.axes.given
    models = set(axes.get("model") or [workload.model])
    by = f"is ignored by executor {cluster.executor}"
    if cluster.executor != "slurm":
        for name in sorted(cluster.model_fields_set - _FOR_ALL_EXECUTORS):
            if document.inherited(f"cluster.{name}"):
                continue
            yield f"{path}:{document.line(('cluster', name))}: cluster.{name} {by}"
    if cluster.hosts and cluster.executor != "ssh" and not document.inherited("cluster.hosts"):
        yield f"{path}:{document.line(('cluster', 'hosts'))}: cluster.hosts {by}"
    if workload.device == "cpu":
        yield from _only_for_gpus(matrix, document)
    if workload.command is not None or "command" in axes:
        return  # the models' options are told with the command
    for name, wanted in _ONLY_FOR_MODELS.items():
        given = name in workload.model_fields_set or name in axes
        if given and not models & set(wanted):
            place = ("workload", name) if name in workload.model_fields_set else ("axes", name)
            readers = (
                f"model {wanted[0]} reads it"
                if len(wanted) == 1
                else f"models {' and '.join(wanted)} read it"
            )
            yield f"{path}:{document.line(place)}: {name} is ignored: only {readers}"


def _only_for_gpus(matrix: Matrix, document: Document) -> Iterator[str]:
    """Yield a remark for each setting that has no effect on a CPU."""
    places = [("workload", name) for name in ("pin_memory",) if name in matrix.workload.model_fields_set]
    places += [("axes", name) for name in ("pin_memory",) if name in matrix.axes.given]
    if matrix.cluster.executor == "slurm":  # other executors ignore them on any device
        given = matrix.cluster.model_fields_set
        places = [("cluster", name) for name in ("gpu_type", "gpu_request") if name in given] + places
    for section, name in places:
        if not document.inherited(f"{section}.{name}"):
            line = document.line((section, name))
            yield f"{document.path}:{line}: {section}.{name} is ignored on device cpu"
