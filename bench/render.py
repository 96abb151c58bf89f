"""Render one script per cell from the Jinja templates in ``slurm_templates/``.

Scripts contain no path of this machine, no date and no environment, so that the same matrix
gives the same bytes everywhere. Only this module quotes values of the matrix for the shell; the
schema rejects values that an ``#SBATCH`` line cannot contain.

The scripts of most cells have the same lines (the same shape) with different values. For speed, a template
is rendered once per shape with a mark in place of each value. For each cell, its values replace the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from .matrix.cell import Cell
from .matrix.field_types import SRUN_KEYS, key_of_word, srun_option
from .matrix.schema import Cluster, Container, Matrix
from .matrix.workload import command_values, quote, shell_word, task_words, to_arguments, torchrun_words
from .shipped import shipped
from .start import AGENT
from .units import slurm_time

#: Time limit of a preflight's job.
PREFLIGHT_LIMIT_S = 180
#: The mark on both sides of a value's name in a rendered shape. The schema rejects NUL in a matrix.
_MARK = "\0"


class _Shape(NamedTuple):
    """The properties of a cell that decide which lines its script contains."""

    launcher: str
    device: str
    mixed: bool
    #: True if torchrun runs on one node, without srun.
    alone: bool
    #: True if a user's command runs instead of the built-in training.
    command: bool
    #: True if the command uses the recorder.
    records: bool
    env_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a cell.

    Scripts of the same ``kind`` differ only in names, values of environment variables, workload options and
    sizes. A size that is 1 in one of them is 1 in all of them. All compute the sizes in the same way (tasks =
    GPUs = ranks of a node, cores = cores of a rank x ranks).
    """

    text: str
    kind: tuple[Any, ...]


class Renderer:
    """Render the cells of one matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        folder = Path(__file__).with_name("jobs") / matrix.cluster.executor
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([shipped("slurm_templates"), folder]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 (shell, not HTML: values are quoted below)
        )
        self._cores = matrix.cluster.cpus_per_task or 1
        self._shapes: dict[_Shape, list[str]] = {}
        self._arguments: dict[tuple[Any, ...], str] = {}

    def render(self, cell: Cell) -> Script:
        """Return the script that runs ``cell``."""
        mixed = isinstance(cell.tasks_per_node, list)
        alone = cell.launcher == "torchrun" and cell.nodes == 1
        command = cell.command
        shape = _Shape(
            cell.launcher,
            cell.workload["device"],
            mixed,
            alone,
            command is not None,
            cell.metrics.get("source") == "recorder",
            tuple(cell.env),
        )
        pieces = self._shapes.get(shape)
        if pieces is None:
            pieces = self._shapes[shape] = self._render_shape(shape)
        most = max(cell.ranks_per_node)
        env = {f"env.{name}": quote(value) for name, value in cell.env.items()}
        values = {
            "cell_id": cell.cell_id,
            "nodes": str(cell.nodes),
            "tasks_per_node": str(cell.tasks_per_node),
            "world_size": str(cell.world_size),
            "ranks_per_node": " ".join(map(str, cell.ranks_per_node)) if mixed else "",
            "ranks_per_node_max": str(most),
            "cpus_per_node": str(self._cores * most),
            "backend": cell.backend,
            "global_batch": str(cell.global_batch),
            "join_timeout": str(cell.workload["join_timeout"]),
            "per_gpu_batch": str(cell.per_gpu_batch),
            **{name: str(cell.workload[name]) for name in _RECORDER_VALUES},
            "arguments": self._command_lines(cell) if command else self._argument_lines(cell),
            **env,
        }
        text = "".join([values[piece] if i % 2 else piece for i, piece in enumerate(pieces)])
        return Script(text, (shape, cell.backend, cell.nodes > 1, most > 1, tuple(command or ())))

    def _render_shape(self, shape: _Shape) -> list[str]:
        """Return a shape's script as a list of pieces: literal text and names of values alternate."""
        matrix, cluster = self.matrix, self.matrix.cluster
        template = self._environment.get_template(cluster.scheduler.template.format(launcher=shape.launcher))
        marked = {name: f"{_MARK}{name}{_MARK}" for name in _VALUES}
        # A step with one task per node gets as many cores per task as the job's tasks have.
        node_task_cpus = marked["cpus_per_node"] if shape.launcher == "torchrun" else str(self._cores)
        text = template.render(
            marked,
            title=f"Study {matrix.study}: one cell of its matrix.",
            setup=cluster.setup,
            env_from=cluster.env_from,
            env=[(name, f"{_MARK}env.{name}{_MARK}") for name in shape.env_names],
            directives=list(_directives(cluster, device=shape.device, mixed=shape.mixed)),
            mixed=shape.mixed,
            alone=shape.alone,
            command=shape.command,
            records=shape.records,
            samples=shape.command and not shape.records,
            node_task_cpus=node_task_cpus,
            program=_program(shape),
            watch=_WATCH * shape.command,
            agent=_agent(shape),
            step_gpus=f" {gpu_option(cluster)}{_MARK}ranks_per_node_max{_MARK}" * (shape.device == "cuda"),
            cpus=self._cores,
            threads=self._cores,
            python=self._python,
            matrix_options=_lines(_matrix_options(cluster, device=shape.device)),
            container_options=_lines(_container_options(cluster.container)),
            explicit_binding=cluster.explicit_binding,
            container=_container_command(cluster.container, shape.device),
        )
        return text.split(_MARK)

    def render_pack(self, cells: Sequence[Cell], *, runs: int) -> str:
        """Return the script of a pack: one allocation in which many runs are executed.

        The directives request the resources of the largest of ``cells``, and time for all ``runs`` of the
        study. For fewer runs, `bench submit` passes a size and a time limit to sbatch as options, which
        override the directives.
        """
        matrix, cluster = self.matrix, self.matrix.cluster
        most = max(max(cell.ranks_per_node) for cell in cells)
        whole = cluster.model_copy(update={"time_limit": cluster.time_limit * runs})
        text = self._environment.get_template("pack.sbatch.j2").render(
            title=f"Study {matrix.study}: runs of its cells, one after another in one allocation.",
            directives=list(_directives(whole, device=cells[0].device, mixed=True)),
            tasks_per_node=most,
            cpus=self._cores,
        )
        values = {"nodes": str(max(cell.nodes for cell in cells)), "ranks_per_node_max": str(most)}
        return "".join([values[piece] if i % 2 else piece for i, piece in enumerate(text.split(_MARK))])

    def render_preflight(self, cells: Sequence[Cell]) -> str:
        """Return the script of a preflight, with the resources per node of the largest of ``cells``.

        `bench preflight` passes the number of nodes to sbatch as an option, which overrides the directive.
        """
        cluster, device = self.matrix.cluster, cells[0].device
        most = max(max(cell.ranks_per_node) for cell in cells)
        gpus = cluster.node_gpus if cluster.exclusive and cluster.node_gpus else most
        options = [
            word for word in cluster.srun_options if (key_of_word(word) or ("", ""))[0] not in SRUN_KEYS
        ]
        short = cluster.model_copy(update={"time_limit": PREFLIGHT_LIMIT_S})
        env = [(name, quote(value)) for name, value in cluster.env.items()]
        text = self._environment.get_template("preflight.sbatch.j2").render(
            title=f"Study {self.matrix.study}: check nodes before its runs.",
            cell_id="preflight",
            setup=cluster.setup,
            env_from=cluster.env_from,
            env=env,
            directives=list(_directives(short, device=device, mixed=False, what="the preflight")),
            exclusive=cluster.exclusive,
            cpus_per_node=self._cores * most,
            step_gpus=f" {gpu_option(cluster)}{gpus}" * (device == "cuda"),
            python=self._python,
            samples=False,
            matrix_options=_lines([quote(word) for word in options]),
            container_options=_lines(_container_options(cluster.container)),
            container=_container_command(cluster.container, device),
        )
        values = {"nodes": str(max(cell.nodes for cell in cells)), "ranks_per_node_max": str(gpus)}
        return "".join([values[piece] if i % 2 else piece for i, piece in enumerate(text.split(_MARK))])

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
    f'LOCAL_WORLD_SIZE={_MARK}tasks_per_node{_MARK}; [ "$SLURM_LOCALID" != 0 ] || {_WATCH}; exec "$@"\' '
    'bash "${command[@]}"'
)


def _agent(shape: _Shape) -> str:
    """Return the options with which python starts torchrun's agent."""
    # The python of a command without the recorder can lack this package, and be older than 3.11.
    return f"-m {AGENT}" if shape.command and not shape.records else f"-P -m ddp_scaling_bench.start {AGENT}"


def _program(shape: _Shape) -> str:
    """Return the end of the launch line: the program that torchrun, or each task of srun, starts."""
    if shape.command:
        return '"${command[@]}"' if shape.launcher == "torchrun" else _WITH_RANK_VARIABLES
    words = "-P -u" if shape.launcher == "torchrun" else "-P"
    program = f'"$python" {words} -m ddp_scaling_bench.start workload "${{workload[@]}}"'
    return f"--no-python {program}" if shape.launcher == "torchrun" else program


#: Workload options that also control the recorder in a command.
_RECORDER_VALUES = ("grad_accum", "warmup_steps", "steps_per_epoch", "attribution_steps", "epochs")
_VALUES = (
    "cell_id",
    "nodes",
    "tasks_per_node",
    "world_size",
    "ranks_per_node",
    "ranks_per_node_max",
    "cpus_per_node",
    "backend",
    "global_batch",
    "join_timeout",
    "arguments",
    "per_gpu_batch",
    *_RECORDER_VALUES,
)

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
    ("hint", "How CPUs are counted: the allocation must agree with srun."),
)


def _directives(
    cluster: Cluster, *, device: str, mixed: bool, what: str = "one run"
) -> Iterator[tuple[str, str]]:
    """Yield (reason, directive) for the directives that do not depend on the launcher."""
    yield "The cell's nodes.", f"--nodes={_MARK}nodes{_MARK}"
    if device == "cuda":
        reason = (
            "Slurm allocates the GPUs of the largest node on every node." if mixed else "One GPU per rank."
        )
        yield reason, f"{gpu_option(cluster)}{_MARK}ranks_per_node_max{_MARK}"
    for key, reason in _PLACEMENT:
        value = getattr(cluster, key)
        if value is not None:
            yield reason, f"--{key}={value}"
    if cluster.exclusive:
        yield "Whole nodes: no other job disturbs the measurement.", "--exclusive"
    yield f"The time limit of {what}.", f"--time={slurm_time(cluster.time_limit)}"
    yield "Replaced at submission by a file in the run's folder.", "--output=%x-%j.out"
    for line in cluster.directives:
        yield "From the matrix.", line


def gpu_option(cluster: Cluster) -> str:
    """Return Slurm's option for GPUs per node, without the number: ``--gres=gpu:l40s:``."""
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    return f"{'--gres=gpu:' if cluster.gpu_request == 'gres' else '--gpus-per-node='}{kind}"


def _matrix_options(cluster: Cluster, *, device: str) -> list[str]:
    """Return the options that the matrix adds to srun."""
    keys = [(key, srun_option(key), getattr(cluster, key)) for key in SRUN_KEYS]
    given = [(key, option, value) for key, option, value in keys if value is not None]
    words = [f"--{option}={value}" for key, option, value in given if key != "gpu_bind" or device == "cuda"]
    return [quote(word) for word in [*words, *cluster.srun_options]]


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
