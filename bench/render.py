"""Render one script per cell from the Jinja templates in ``slurm_templates/``.

Scripts contain no path of this machine, no date and no environment, so that the same matrix
gives the same bytes everywhere. Only this module quotes values of the matrix for the shell; the
schema rejects values that an ``#SBATCH`` line cannot contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jinja2

from .matrix.cell import Cell
from .matrix.schema import Cluster, Container, Matrix
from .matrix.workload import command_values, quote, shell_word, task_words, to_arguments, torchrun_words
from .shipped import shipped
from .start import AGENT
from .units import slurm_time


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
        self._arguments: dict[tuple[Any, ...], str] = {}

    def render(self, cell: Cell) -> str:
        """Return the script that runs ``cell``."""
        matrix, cluster, command = self.matrix, self.matrix.cluster, cell.command
        template = self._environment.get_template(cluster.scheduler.template.format(launcher=cell.launcher))
        ranks, device = cell.ranks_per_node, cell.device
        most, mixed = max(ranks), isinstance(cell.tasks_per_node, list)
        alone = cell.launcher == "torchrun" and cell.nodes == 1
        records = cell.metrics.get("source") == "recorder"
        return template.render(
            {name: cell.workload[name] for name in _RECORDER_VALUES},
            cell_id=cell.cell_id,
            nodes=cell.nodes,
            tasks_per_node=cell.tasks_per_node,
            world_size=cell.world_size,
            ranks_per_node=" ".join(map(str, ranks)),
            ranks_per_node_max=most,
            cpus_per_node=self._cores * most,
            backend=cell.backend,
            global_batch=cell.global_batch,
            per_gpu_batch=cell.per_gpu_batch,
            join_timeout=cell.workload["join_timeout"],
            arguments=self._command_lines(cell) if command else self._argument_lines(cell),
            title=f"Study {matrix.study}: one cell of its matrix.",
            setup=cluster.setup,
            env_from=cluster.env_from,
            env=[(name, quote(value)) for name, value in cell.env.items()],
            directives=list(_directives(cluster, device=device, mixed=mixed, nodes=cell.nodes, gpus=most)),
            mixed=mixed,
            alone=alone,
            command=command is not None,
            records=records,
            samples=command is not None and not records,
            # A step with one task per node gets as many cores per task as the job's tasks have.
            node_task_cpus=self._cores * most if cell.launcher == "torchrun" else self._cores,
            program=_program(cell),
            watch=_WATCH * (command is not None),
            agent=_agent(cell),
            step_gpus=f" {gpu_option(cluster)}{most}" * (device == "cuda"),
            cpus=self._cores,
            threads=self._cores,
            time_limit=cluster.time_limit,
            python=self._python,
            matrix_options=_lines([quote(word) for word in cluster.srun_options]),
            container_options=_lines(_container_options(cluster.container)),
            explicit_binding=cluster.explicit_binding,
            container=_container_command(cluster.container, device),
        )

    def render_pack(self, cells: Sequence[Cell], *, runs: int) -> str:
        """Return the script of a pack: one allocation in which many runs are executed.

        The directives request the resources of the largest of ``cells``, and time for all ``runs`` of the
        study. For fewer runs, `bench submit` passes a size and a time limit to sbatch as options, which
        override the directives.
        """
        matrix, cluster = self.matrix, self.matrix.cluster
        most = max(max(cell.ranks_per_node) for cell in cells)
        whole = cluster.model_copy(update={"time_limit": cluster.time_limit * runs})
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

    def _argument_lines(self, cell: Cell) -> str:
        """Return the workload options as lines of the script, with one option and its value per line."""
        key = (cell.launcher, cell.backend, cell.per_gpu_batch, *cell.workload.values())
        lines = self._arguments.get(key)
        if lines is None:
            head = ["--launcher", cell.launcher, "--backend", cell.backend]
            words = [*head, "--per-gpu-batch", str(cell.per_gpu_batch), *to_arguments(cell.workload)]
            lines = "".join(
                f"\n  {quote(word)}" if word.startswith("--") else f" {quote(word)}" for word in words
            ).strip()
            if len(self._arguments) < 10_000:
                self._arguments[key] = lines
        return lines

    def _command_lines(self, cell: Cell) -> str:
        """Return the cell's command as lines of the script, with one option and its value per line."""
        words = [shell_word(text, command_values(cell, self.matrix.study)) for text in self._own_words(cell)]
        return "".join(f"\n  {word}" if word.startswith("-") else f" {word}" for word in words).strip()

    @staticmethod
    def _own_words(cell: Cell) -> list[str]:
        words = cell.command or []
        return torchrun_words(words) if cell.launcher == "torchrun" else task_words(words)


#: Starts a process that notes the ranks on this node, until the shell, or the program that replaces it, ends.
_WATCH = (
    '("$BENCH_WATCHER" -P -m ddp_scaling_bench.start measure.process_watch "$BENCH_RUN_DIR" $$ '
    "</dev/null >/dev/null 2>&1 &)"
)
#: Sets the same rank variables as torchrun in each srun task. Single quotes leave expansion to the task.
_WITH_RANK_VARIABLES = (
    "bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    f'LOCAL_WORLD_SIZE=%s; [ "$SLURM_LOCALID" != 0 ] || {_WATCH}; exec "$@"\' '
    'bash "${command[@]}"'
)


def _agent(cell: Cell) -> str:
    """Return the options with which python starts torchrun's agent."""
    # The python of a command without the recorder can lack this package, and be older than 3.11.
    return f"-m {AGENT}" if cell.is_unrecorded else f"-P -m ddp_scaling_bench.start {AGENT}"


def _program(cell: Cell) -> str:
    """Return the end of the launch line: the program that torchrun, or each task of srun, starts."""
    if cell.command is not None:
        by_task = _WITH_RANK_VARIABLES % cell.tasks_per_node
        return '"${command[@]}"' if cell.launcher == "torchrun" else by_task
    words = "-P -u" if cell.launcher == "torchrun" else "-P"
    program = f'"$python" {words} -m ddp_scaling_bench.start workload "${{workload[@]}}"'
    return f"--no-python {program}" if cell.launcher == "torchrun" else program


#: Workload options that also control the recorder in a command.
_RECORDER_VALUES = ("grad_accum", "warmup_steps", "steps_per_epoch", "attribution_steps", "epochs")
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
        yield reason, f"{gpu_option(cluster)}{gpus}"
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


def gpu_option(cluster: Cluster) -> str:
    """Return Slurm's option for GPUs per node, without the number: ``--gres=gpu:l40s:``."""
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    return f"{'--gres=gpu:' if cluster.gpu_request == 'gres' else '--gpus-per-node='}{kind}"


def _container_options(container: Container | None) -> list[str]:
    """Return the options of srun that start the container with pyxis, or ``[]`` for other containers."""
    if container is None or container.runtime != "pyxis":
        return []
    mounts = ",".join(['"$run_dir:$run_dir"', *(quote(mount) for mount in container.mounts)])
    words = [f"--container-image={quote(container.image)}", f"--container-mounts={mounts}"]
    return words + [quote(option) for option in container.options]


def _lines(words: Sequence[str]) -> str:
    """Return the words of a command, with one word per line of the script."""
    return "".join(f" \\\n  {word}" for word in words)


def _container_command(container: Container | None, device: str) -> str:
    if container is None or container.runtime == "pyxis":
        return ""
    words = [container.runtime, "exec", *(["--nv"] if device == "cuda" else []), "--bind", '"$run_dir"']
    for mount in container.mounts:
        words += ["--bind", quote(mount)]
    words += [quote(option) for option in container.options]
    words.append(quote(container.image))
    return " ".join(words) + " \\\n  "
