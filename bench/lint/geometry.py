"""The number of nodes, tasks and GPUs of a job and its steps, and numbers computed from them.

The rules follow sbatch(1) and srun(1). The default is one node and one task per node.
``--ntasks`` and ``--ntasks-per-node`` together determine the number of nodes. A step inherits the
options of the job, and options of srun override them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..jobs.slurm.parsing import expand_hosts
from .options import EXPANSION, Option, is_placeholder, names, whole_number
from .values import Unknown, Value

# sbatch(1), --nodes=<minnodes>[-maxnodes].
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gres", "gpus-per-task", "gpus-per-socket", "tres-per-task")
#: Options that determine the number of tasks in ways that this module does not compute.
_OTHER_TASKS = names("ntasks-per-gpu ntasks-per-tres ntasks-per-socket ntasks-per-core tres-per-task")
# bash(1), ARITHMETIC EVALUATION: the operators on integers that this module computes.
_EXPRESSION = re.compile(r"(?:\d+\b|[\s()+*/%-]){1,400}")
_MAX_DEPTH = 12


@dataclass(frozen=True)
class Geometry:
    """The nodes, tasks and GPUs of a job or step; numbers that the script does not determine are None.

    ``options`` maps the name of each option to its last occurrence.
    """

    options: Mapping[str, Option] = field(default_factory=dict)
    heterogeneous: bool = False

    def value(self, name: str) -> str | None:
        """Return the value of an option, or None if it is not given."""
        option = self.options.get(name)
        return option.value if option else None

    def line(self, *names: str) -> int | None:
        """Return the script line of the first option in ``names`` that is given, or None."""
        return next((self.options[name].line for name in names if name in self.options), None)

    def number(self, name: str) -> int | None:
        """Return an option's value as a whole number, or None if it is not a whole number."""
        return whole_number(self.value(name))

    @cached_property
    def node_range(self) -> tuple[int, int | None]:
        """The minimum and maximum number of nodes; a maximum of None means that it is unknown."""
        match = _RANGE.fullmatch(self.value("nodes") or "")
        if match:
            return int(match[1]), int(match[2] or match[1])
        hosts = expand_hosts(self.value("nodelist") or "") if "nodes" not in self.options else ()
        return (len(hosts), len(hosts)) if hosts else (1, None)

    @cached_property
    def nodes(self) -> int | None:
        """The number of nodes, or None if it is unknown or a range."""
        low, high = self.node_range
        if low == high or "nodes" in self.options:
            return low if low == high else None
        ntasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        if ntasks and per_node:
            return -(-ntasks // per_node)
        return 1 if ntasks == 1 or "ntasks" not in self.options else None

    @property
    def several_nodes(self) -> bool:
        """True if the job certainly has more than one node."""
        return (self.nodes or self.node_range[0]) > 1 and not self.heterogeneous

    @cached_property
    def tasks_per_node(self) -> int | None:
        """The number of tasks on each node, or None if it is unknown or differs between nodes."""
        if self.heterogeneous:
            return None
        nodes, ntasks, per_node = self.nodes, self.number("ntasks"), self.number("ntasks-per-node")
        if per_node:  # see ntasks-conflict for contradictions
            return per_node if not ntasks or not nodes or ntasks == nodes * per_node else None
        if ntasks and nodes:
            return ntasks // nodes if ntasks % nodes == 0 else None
        if ({"ntasks", "ntasks-per-node"} | _OTHER_TASKS) & self.options.keys():
            return None
        each, on_node = self.gpus_per_task, gpu_count(self.value("gpus-per-node"))
        return on_node // each if each and on_node else 1  # as many tasks as a node has GPUs for

    @cached_property
    def ntasks(self) -> int | None:
        """The total number of tasks."""
        given = self.number("ntasks")
        if given:
            return given
        if self.nodes and self.tasks_per_node:
            return self.nodes * self.tasks_per_node
        return None

    @cached_property
    def gpus_per_node(self) -> int | None:
        """The number of GPUs on each node, 0 if the job requests none, or None if it is unknown."""
        name = next((name for name in ("gpus-per-node", "gres", *_GPU_OPTIONS) if name in self.options), None)
        count = gpu_count(self.value(name), gres=name == "gres") if name else 0
        if count is None or name in (None, "gpus-per-node", "gres"):
            return count
        if name == "gpus":
            return count // self.nodes if self.nodes and count % self.nodes == 0 else None
        return count * self.tasks_per_node if name == "gpus-per-task" and self.tasks_per_node else None

    @property
    def gpus_per_task(self) -> int | None:
        """The number of GPUs per task, or None without ``--gpus-per-task``."""
        return gpu_count(self.value("gpus-per-task"))

    @property
    def isolates_gpus(self) -> bool:
        """True if an option possibly restricts each task to its own GPUs."""
        return bool({"gpu-bind", "tres-bind", "gpus-per-task"} & self.options.keys())

    def step(self, options: Iterable[Option]) -> Geometry:
        """Return the geometry of a step of this job that srun starts with ``options``."""
        own = {option.name: option for option in options}
        inherited = dict(self.options)
        ntasks = whole_number(own["ntasks"].value) if "ntasks" in own else None
        if {"nodes", "nodelist"} & own.keys():
            dropped = {"nodes", "nodelist"} | (set() if "ntasks" in own else {"ntasks"})
        else:
            dropped = set()
            if ntasks and self.nodes:
                fewer = str(min(self.nodes, ntasks))
                inherited["nodes"] = own["ntasks"]._replace(name="nodes", value=fewer)
        if "ntasks" in own and "ntasks-per-node" not in own and ntasks != self.ntasks:
            dropped |= {"ntasks-per-node"}
        if own.keys() & set(_GPU_OPTIONS):
            dropped |= set(_GPU_OPTIONS)
        kept = {name: option for name, option in inherited.items() if name not in dropped}
        return Geometry({**kept, **own}, heterogeneous=self.heterogeneous or "het-group" in own)


def gpu_count(value: str | None, *, gres: bool = False) -> int | None:
    """Return the number of GPUs in ``[type:]number[,...]``, or None if it is missing or unknown.

    In ``--gres``, each item starts with the name of the resource. A name or type alone means one GPU.
    """
    if value is None or is_placeholder(value) or EXPANSION.search(value):
        return None
    items = [item.removeprefix("gres:").replace("=", ":").split(":") for item in value.split(",")]
    if gres:
        items = [item for item in items if item[0] == "gpu"]
    return sum(whole_number(item[-1]) or int(not item[-1].isdecimal()) for item in items)


def number(value: Value | None, geometry: Geometry, *, depth: int = 0) -> int | None:
    """Return the whole number that a value has in a job or step, or None if it is unknown."""
    if value is None or depth > _MAX_DEPTH:
        return None
    text = ""
    for part in value.parts:
        known = part if isinstance(part, str) else _number(part, geometry, depth + 1)
        if known is None:
            return None
        text += str(known)
    return whole_number(text.strip().strip('"'))


def _number(unknown: Unknown, geometry: Geometry, depth: int) -> int | None:
    if unknown.kind == "arithmetic":
        return _calculated(unknown.operand, geometry, depth)
    if unknown.kind != "variable" or (unknown.operator and unknown.operand is None):
        return None
    known = _of_slurm(unknown.name, geometry)
    return number(unknown.operand, geometry, depth=depth) if known is None and unknown.operand else known


def _calculated(expression: Value | None, geometry: Geometry, depth: int) -> int | None:
    """Evaluate the expression of ``$(( ))``, or return None if a part of it is unknown."""
    text = ""
    for part in expression.parts if expression else ():
        known = part if isinstance(part, str) else _number(part, geometry, depth)
        if known is None:
            return None
        text += str(known)
    if not _EXPRESSION.fullmatch(text):
        return None
    try:
        return _of_node(ast.parse(" ".join(text.split()), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
        return None


def _of_node(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _of_node(left), _of_node(right)
            if a is None or b is None or max(abs(a), abs(b)) > 10**9:
                return None
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a // b if a >= 0 else None  # bash rounds towards zero
    return None


def _of_slurm(name: str, geometry: Geometry) -> int | None:
    """Return the value of an environment variable that Slurm sets, or None if it is unknown."""
    if name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        return geometry.nodes
    if name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        return geometry.ntasks
    if name == "SLURM_NTASKS_PER_NODE":
        return geometry.number("ntasks-per-node")
    if name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        return geometry.gpus_per_node or None
    if name == "SLURM_GPUS_PER_TASK":
        return geometry.gpus_per_task
    if name == "SLURM_GPUS":
        return gpu_count(geometry.value("gpus"))
    return geometry.number("cpus-per-task") if name == "SLURM_CPUS_PER_TASK" else None
