"""Render one script per cell from the Jinja templates in ``slurm_templates/``.

Scripts contain no path of this machine, no date and no environment, so that the same matrix
gives the same bytes everywhere. Only this module quotes values of the matrix for the shell; the
schema rejects values that an ``#SBATCH`` line cannot contain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import jinja2

from ddp_scaling_bench.cell_json import CellFile
from ddp_scaling_bench.units import slurm_time

from .matrix.cell import Cell, Resources, common_resources, gpu_option
from .matrix.schema import Cluster, Container, Matrix
from .matrix.workload import command_values, names_in, options_in_file, quote, shell_word, task_words
from .package import package_name
from .shipped import shipped


class Renderer:
    """Render the cells of one matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(shipped("slurm_templates")),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 (shell, not HTML: values are quoted below)
            auto_reload=False,
        )
        self._cores = matrix.cluster.cpus_per_task or 1
        self._options: dict[int, tuple[dict[str, Any], list[str]]] = {}  # as lines of cell.json

    def render(self, cell: Cell) -> str:
        """Return the script that runs ``cell``."""
        matrix, cluster = self.matrix, self.matrix.cluster.at(cell.size)
        ranks, device = cell.ranks_per_node, cell.device
        most, mixed = max(ranks), isinstance(cell.tasks_per_node, list)
        per_rank, is_own = cell.launcher == "srun", cell.launcher == "own"
        once = cell.command_per == "job"
        srun_options = [*map(quote, cluster.srun_options), *_container_options(cluster.container)]
        return self._environment.get_template(cluster.scheduler.template).render(
            title=f"Study {matrix.study}: one cell of its matrix.",
            cell_id=cell.cell_id,
            launcher=cell.launcher,
            backend=cell.backend,
            nodes=cell.nodes,
            tasks_per_node=cell.tasks_per_node,
            world_size=cell.world_size,
            ranks_per_node=" ".join(map(str, ranks)),
            ranks_per_node_max=most,
            mixed=mixed,
            alone=not per_rank and cell.nodes == 1,
            once=once,
            by_shell=not srun_options and (once or (cell.launcher == "torchrun" and cell.nodes == 1)),
            hostfile=is_own or not {"hosts", "hostfile"}.isdisjoint(names_in(cell.argv)),
            step_nodes=1 if once else cell.nodes,
            slurm_tasks=",".join(map(str, ranks)) if mixed else f"{most}(x{cell.nodes})",
            global_batch=cell.global_batch,
            per_gpu_batch=cell.per_gpu_batch,
            model_parallel=cell.model_parallel,
            grad_accum=cell.workload["grad_accum"],
            join_timeout=cell.workload["join_timeout"],
            waits=cell.launcher == "torchrun" or "join_timeout" in options_in_file(cell),
            cell_json=self._cell_json(cell),
            command=self._command_lines(cell),
            samples=cell.is_unrecorded,
            setup=cluster.setup,
            env_from=cluster.env_from,
            env=[(name, quote(value)) for name, value in cell.env.items()],
            directives=list(_directives(cluster, device=device, mixed=mixed, nodes=cell.nodes, gpus=most)),
            cpus=self._cores,
            threads=self._cores,
            tasks=cell.tasks_per_node if per_rank else 1,
            task_cpus=self._cores if per_rank else self._cores * most,
            step_gpus=f" {gpu_option(cluster.gpu_request, cluster.gpu_type)}{most}" * (device == "cuda"),
            time_limit=cluster.time_limit,
            stops=cluster.stop_after_measurement and not cell.is_unrecorded,
            epochs=cell.workload["epochs"],
            python=self._python,
            package=package_name(),
            srun_options=srun_options,
            explicit_binding=cluster.explicit_binding,
            container=_container_command(cluster.container, device),
            passes_words=isinstance(cluster.container, list),
            env_names="".join(f" {name}" for name in cell.env),
        )

    def render_pack(self, cells: Sequence[Cell]) -> str:
        """Return the script of packs: allocations in which many runs are executed.

        The directives request the resources of the largest of ``cells``, and time for all runs of the study.
        For fewer runs, `bench submit` passes a size and a time limit to sbatch as options, which override the
        directives, and resources that differ between cells.
        """
        matrix, common = self.matrix, common_resources(cells)
        most = max(max(cell.ranks_per_node) for cell in cells)
        total = sum(cell.repeats * cell.resources.time_limit_s for cell in cells)
        resources = {name: common.get(name) for name in Resources._fields if name != "time_limit_s"}
        whole = matrix.cluster.model_copy(update={**resources, "time_limit": total})
        nodes = max(cell.nodes for cell in cells)
        return self._environment.get_template("pack.sbatch.j2").render(
            title=f"Study {matrix.study}: runs of its cells, one after another in one allocation.",
            directives=list(_directives(whole, device=cells[0].device, mixed=True, nodes=nodes, gpus=most)),
            tasks_per_node=most,
            cpus=self._cores,
        )

    @property
    def _python(self) -> str:
        """The Python of a script: the Python of `bench submit` unless cluster.setup or a container is set."""
        cluster = self.matrix.cluster
        return "python" if cluster.setup or cluster.container else '"${BENCH_PYTHON:-python}"'

    def _cell_json(self, cell: Cell) -> list[str]:
        """Return the lines of cell.json as words of the script, with one value per line."""
        key = id(cell.workload)  # cells share it
        if key not in self._options:
            *options, last = options_in_file(cell).items()
            lines = [_member("    ", *option, end=",") for option in options]
            self._options[key] = cell.workload, [*lines, _member("    ", *last)]
        names = (field.name for field in fields(CellFile) if field.name != "workload")
        sizes = [_member("  ", name, getattr(cell, name), end=",") for name in names]
        return [quote("{"), *sizes, quote('  "workload": {'), *self._options[key][1], "'  }'", "'}'"]

    def _command_lines(self, cell: Cell) -> str:
        """Return the cell's command as lines of the script, with one option and its value per line."""
        values = command_values(cell, self.matrix.study)
        words = [shell_word(word, values) for word in task_words(cell.argv)]
        return "".join(f"\n  {word}" if word.startswith("-") else f" {word}" for word in words).strip()


#: Values of cell.json that the script has in a variable, because another line of the script uses them, too.
_VARIABLES = {
    "per_gpu_batch": "BENCH_PER_GPU_BATCH",
    "grad_accum": "BENCH_GRAD_ACCUM",
    "world_size": "world_size",
    "join_timeout": "join_timeout",
}


def _member(indent: str, name: str, value: Any, *, end: str = "") -> str:
    """Return a member of a JSON object as a word of the script, with ASCII characters only."""
    start = f"{indent}{json.dumps(name)}: "
    if name in _VARIABLES:
        return f'{quote(start)}"${_VARIABLES[name]}{end}"'
    return quote(f"{start}{json.dumps(value)}{end}")


_PLACEMENT = (
    ("partition", "The partition of the study."),
    ("account", "The account that pays."),
    ("qos", "The quality of service."),
    ("reservation", "The reserved nodes."),
    ("constraint", "Nodes with these features only: sizes are compared on equal hardware."),
    ("nodelist", "Nodes that the job must include."),
    ("exclude", "Nodes to avoid."),
    ("switches", "The most leaf switches that connect the nodes: sizes are compared on one network."),
    ("mem", "Memory per node."),
)


def _directives(
    cluster: Cluster, *, device: str, mixed: bool, nodes: int, gpus: int
) -> Iterator[tuple[str, str]]:
    """Yield (reason, directive) for the directives that do not depend on the launcher."""
    yield "The cell's nodes.", f"--nodes={nodes}"
    if device == "cuda":
        reason = (
            "Slurm allocates the GPUs of the largest node on every node." if mixed else "One GPU per rank."
        )
        yield reason, f"{gpu_option(cluster.gpu_request, cluster.gpu_type)}{gpus}"
    for key, reason in _PLACEMENT:
        value = getattr(cluster, key)
        if value is not None:
            yield reason, f"--{key}={value}"
    if cluster.exclusive:
        yield "Whole nodes: no other job disturbs the measurement.", "--exclusive"
    yield "The time limit of one run.", f"--time={slurm_time(cluster.time_limit)}"
    yield "Replaced at submission by a file in the run's folder.", "--output=%x-%j.out"
    for line in cluster.directives:
        yield "From the matrix.", line


def _container_options(container: Container | list[str] | None) -> list[str]:
    """Return the options of srun that start the container with pyxis, or ``[]`` for other containers."""
    if not isinstance(container, Container) or container.runtime != "pyxis":
        return []
    own = '"$run_dir:$run_dir"${package:+,"$package:$package"}'
    mounts = ",".join([own, *map(quote, container.mounts)])
    words = [f"--container-image={quote(container.image)}", f"--container-mounts={mounts}"]
    return words + [quote(option) for option in container.options]


#: An image can set a PYTHONPATH of its own, and options such as --cleanenv drop that of the job.
_IN_CONTAINER = (
    """bash --norc -c '[ -z "$0" ] || export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"; exec "$@"'"""
    ' "$package"'
)


def _container_command(container: Container | list[str] | None, device: str) -> str:
    """Return the words in front of the launch that start the container, quoted for the shell."""
    if isinstance(container, list):
        return " ".join(shell_word(word, {}) for word in container) + " \\\n  "
    if container is None:
        return ""
    if container.runtime == "pyxis":
        return f"{_IN_CONTAINER} \\\n  "
    words = [container.runtime, "exec", *(["--nv"] if device == "cuda" else []), "--bind", '"$run_dir"']
    words.append('${package:+--bind "$package"}')
    for mount in container.mounts:
        words += ["--bind", quote(mount)]
    words += [quote(option) for option in container.options]
    words += [quote(container.image), _IN_CONTAINER]
    return " ".join(words) + " \\\n  "
