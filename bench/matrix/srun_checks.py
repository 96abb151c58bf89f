"""Check the options of srun in a matrix as a whole: contradictions, and bindings that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.matrix.cell import Cell, Point
from bench.matrix.document import Document, Place
from bench.matrix.schema import Matrix
from bench.matrix.slurm_options import key_of_word

#: Options that srun does not accept beside --hint.
_EXCLUDED_BY_HINT = re.compile(r"--(?:threads-per-core|ntasks-per-core|extra-node-info)\b|-B")
#: Values of gpu_bind that hide GPUs from each task.
_HIDING = ("map", "map_gpu", "per_task", "single")


def check_srun_options(matrix: Matrix, document: Document) -> None:
    """Record a problem for each option of srun that is set twice, and for options that exclude each other."""
    cluster = matrix.cluster
    words: dict[str, str] = {}
    for i, word in enumerate(cluster.srun_options):
        found = key_of_word(word)
        if found is None:
            continue
        key, place = found[0], ("cluster", "srun_options", i)
        if getattr(cluster, key) is not None:
            what = f"{word} in cluster.srun_options contradicts cluster.{key}: {getattr(cluster, key)}"
            document.add_problem(place, what, "keep one of them")
        elif key in words:
            what = f"{word} in cluster.srun_options contradicts {words[key]}"
            document.add_problem(place, what, "keep one of them")
        words[key] = word
    _check_hint(matrix, document)


def _check_hint(matrix: Matrix, document: Document) -> None:
    cluster = matrix.cluster
    if cluster.srun_value("hint") is None:
        return
    excluded = [word for word in cluster.srun_options if _EXCLUDED_BY_HINT.match(word)]
    binding = cluster.binding("cpu_bind")
    if binding is not None and binding.kind not in ("verbose", "quiet"):
        excluded.append("cpu_bind")
    for name in excluded:
        what = f"hint and {name} exclude each other: srun derives the binding of tasks from the hint"
        document.add_problem(_place_of("hint", matrix), what, "remove one of them")


def check_one_task_per_node(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem if a binding cannot work with launcher torchrun, which has one task per node."""
    cluster = matrix.cluster
    cpus, gpus = cluster.binding("cpu_bind"), cluster.binding("gpu_bind")
    if cpus is not None and cpus.differs_per_task:
        what = (
            f"cpu_bind {cpus.kind} lists {len(cpus.entries)} values, one per task, but launcher torchrun "
            "starts one task per node, whose ranks would all get the first"
        )
        remedy = "use launcher [srun], or one value for all ranks of a node"
        document.add_problem(_place_of("cpu_bind", matrix), what, remedy)
    if gpus is None or matrix.workload.device == "cpu" or point.ranks == point.values["nodes"]:
        return
    if gpus.kind in _HIDING or gpus.differs_per_task:
        what = (
            f"gpu_bind {cluster.srun_value('gpu_bind')} restricts each task to some GPUs, but launcher "
            "torchrun starts one task per node, whose ranks need all of them"
        )
        remedy = "use launcher [srun], or gpu_bind: none"
        document.add_problem(_place_of("gpu_bind", matrix), what, remedy)


def binding_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a warning if Slurm would ignore a binding, or if several ranks of a node would share cores."""
    cpus = matrix.cluster.binding("cpu_bind")
    if cpus is None or matrix.cluster.executor != "slurm":
        return
    where = document.location(_place_of("cpu_bind", matrix))
    if cpus.explicit and not matrix.cluster.exclusive:
        yield (
            f"{where}: Slurm rejects or ignores cpu_bind {cpus.kind} unless the job has all "
            "CPUs of its nodes; set cluster.exclusive: true"
        )
    most = max(max(cell.ranks_per_node) for cell in cells)
    if cpus.differs_per_task and len(cpus.entries) < most:
        yield (
            f"{where}: cpu_bind {cpus.kind} lists {len(cpus.entries)} values for up to {most} ranks on a "
            "node; Slurm starts again from the first, so that ranks share cores"
        )


def _place_of(key: str, matrix: Matrix) -> Place:
    """Return the place of a key of srun, or of the word of srun_options that sets it."""
    for i, word in enumerate(matrix.cluster.srun_options):
        found = key_of_word(word)
        if found is not None and found[0] == key and getattr(matrix.cluster, key) is None:
            return ("cluster", "srun_options", i)
    return ("cluster", key)
