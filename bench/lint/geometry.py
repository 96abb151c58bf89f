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

from ..slurm.parsing import expand_hosts
from .expansion import MARK, Unknown, Unknowns
from .options import EXPANSION, Option, is_placeholder, whole_number

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
_NO_BINDING = frozenset({"none", "no", "n"})
_GPU_NAMES = frozenset({"gpu", "gpus", "dcu", "npu", "hpu", "mlu", "gcd", "xpu"})
_SOCKETS = re.compile(r"\(S:[^)]*\)\Z")
#: Arithmetic with decimal numbers and the names ``_0_``, ``_1_`` and so on.
_EXPRESSION = re.compile(r"(?:_\d+_|\d+\b|[\s()+*/%-]){1,400}")
_MAX_DEPTH = 12
#: SLURM_TASKS_PER_NODE, such as ``4(x2)``, without the text from the parenthesis on.
_TASKS_ON_A_NODE = ("${SLURM_TASKS_PER_NODE%(", "${SLURM_TASKS_PER_NODE%%(", "${SLURM_TASKS_PER_NODE%%[")

#: The lowest and highest value of a number.
Range = tuple[int, int]


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
        """The minimum and maximum number of nodes; a maximum of None means no limit."""
        match = _RANGE.fullmatch(self.value("nodes") or "")
        if match:
            low = int(match.group(1)[:9])
            return low, int(match.group(2)[:9]) if match.group(2) else low
        if self.value("nodes") is not None:
            return 1, None
        hosts = expand_hosts(self.value("nodelist") or "")
        return (len(hosts), len(hosts)) if hosts else (1, None)

    @property
    def too_many_hosts(self) -> bool:
        """True if ``--nodelist`` names more hosts than ``--nodes`` allows."""
        hosts = self.value("nodelist") or ""
        return "$" not in hosts and len(expand_hosts(hosts)) > (self.node_range[1] or 10**9)

    @cached_property
    def nodes(self) -> int | None:
        """The number of nodes, or None if it is unknown or a range."""
        low, high = self.node_range
        if low == high:
            return low
        if "nodes" in self.options:
            return None
        return self._nodes_from_tasks()

    def _nodes_from_tasks(self) -> int | None:
        ntasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        gpus, gpus_each = gpus_of_list(self.value("gpus")), gpus_of_list(self.value("gpus-per-node"))
        if ntasks and per_node:
            return -(-ntasks // per_node)
        if gpus and gpus_each and gpus % gpus_each == 0:
            return gpus // gpus_each
        if (ntasks or 1) == 1 and ("ntasks" in self.options) == (ntasks is not None):
            return 1
        return None

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
        if per_node and not (ntasks and "nodes" not in self.options and ntasks < per_node):
            return per_node  # probably the intended number, even if --ntasks contradicts it
        if ntasks and nodes:
            return ntasks // nodes if ntasks % nodes == 0 else None
        if {"ntasks", "ntasks-per-node"} & set(self.options):
            return None
        each, on_node = self.gpus_per_task, gpus_of_list(self.value("gpus-per-node"))
        if each and on_node:  # Slurm starts as many tasks as a node has GPUs for
            return on_node // each
        by_gpu = self.number("ntasks-per-gpu") or self.number("ntasks-per-tres")
        if by_gpu:
            return by_gpu * self.gpus_per_node if self.gpus_per_node else None
        if {"ntasks-per-gpu", "ntasks-per-tres", "ntasks-per-socket", "ntasks-per-core"} & set(self.options):
            return None
        return 1

    @property
    def tasks_on_a_node(self) -> int:
        """The largest number of tasks on a node, or 1 if it is unknown."""
        if self.tasks_per_node:
            return self.tasks_per_node
        ntasks = self.number("ntasks")
        return -(-ntasks // self.nodes) if ntasks and self.nodes and not self.heterogeneous else 1

    @cached_property
    def ntasks(self) -> int | None:
        """The total number of tasks."""
        given = self.number("ntasks")
        if given:
            return given
        if self.nodes and self.tasks_per_node:
            return self.nodes * self.tasks_per_node
        return None

    @property
    def asks_for_gpus(self) -> bool:
        """True if an option requests GPUs."""
        for name in _GPU_OPTIONS:
            value = self.value(name)
            if value is None:
                continue
            if name in ("gres", "tres-per-task"):
                if gpus_of_gres(value) != 0:
                    return True
            elif value != "0":
                return True
        return False

    @cached_property
    def gpus_per_node(self) -> int | None:
        """The number of GPUs on each node, 0 if the job requests none, or None if it is unknown."""
        if self.heterogeneous:
            return None
        if "gpus-per-node" in self.options:
            return gpus_of_list(self.value("gpus-per-node"))
        gres = self.value("gres")
        if gres is not None and gpus_of_gres(gres) != 0:
            return gpus_of_gres(gres)
        if "gpus-per-task" in self.options or "tres-per-task" in self.options:
            each = self.gpus_per_task
            if each == 0 and "gpus" not in self.options:
                return 0
            return each * self.tasks_per_node if each and self.tasks_per_node else None
        total = gpus_of_list(self.value("gpus"))
        if total is not None:
            return total // self.nodes if self.nodes and total % self.nodes == 0 else None
        return None if self.asks_for_gpus else 0

    @property
    def gpus_per_task(self) -> int | None:
        """The number of GPUs per task, or None without ``--gpus-per-task``."""
        if "gpus-per-task" in self.options:
            return gpus_of_list(self.value("gpus-per-task"))
        each = self.value("tres-per-task")
        return gpus_of_gres(each) if each else None

    @property
    def isolation(self) -> Option | None:
        """The option that restricts each task to its own GPUs, or None."""
        if "allow-task-sharing" in (self.value("gres-flags") or ""):
            return None
        bind = self.options.get("gpu-bind")
        if bind and bind.value:
            kind = bind.value.lower().removeprefix("verbose,").removeprefix("v,").partition(":")[0]
            return None if kind in _NO_BINDING else bind
        tres = self.options.get("tres-bind")
        if tres and tres.value:
            return None if tres.value.lower().endswith("none") else tres
        if "gpus-per-task" in self.options:
            return self.options["gpus-per-task"]
        each = self.options.get("tres-per-task")
        return each if each and self.gpus_per_task else None

    def step(self, options: Iterable[Option]) -> Geometry:
        """Return the geometry of a step of this job that srun starts with ``options``."""
        own = {option.name: option for option in options}
        inherited = dict(self.options)
        if {"nodes", "nodelist"} & set(own) and "ntasks" not in own:
            inherited.pop("ntasks", None)
        if "nodes" in own or "nodelist" in own:
            inherited.pop("nodelist", None)
            inherited.pop("nodes", None)
        elif "ntasks" in own and self.nodes:
            fewer = min(self.nodes, whole_number(own["ntasks"].value) or self.nodes)
            inherited["nodes"] = own["ntasks"]._replace(name="nodes", value=str(fewer))
        if "ntasks" in own and "ntasks-per-node" not in own:
            each, nodes = whole_number((inherited.get("ntasks-per-node") or own["ntasks"]).value), self.nodes
            if not each or not nodes or whole_number(own["ntasks"].value) != each * nodes:
                inherited.pop("ntasks-per-node", None)
        if set(own) & {"gpus", "gpus-per-node", "gres", "gpus-per-task"}:
            for name in ("gpus", "gpus-per-node", "gres", "gpus-per-task"):
                inherited.pop(name, None)
        return Geometry({**inherited, **own}, heterogeneous=self.heterogeneous or "het-group" in own)


def gpus_of_gres(value: str) -> int | None:
    """Return the number of GPUs in a ``--gres`` list, or None if it is unknown."""
    total = 0
    for item in value.split(","):
        item = _SOCKETS.sub("", item.strip().replace("gres/", "", 1))
        pieces = [piece for piece in re.split("[:=]", item) if piece and piece != "gres"]
        if not pieces or pieces[0].lower() not in _GPU_NAMES:
            if is_placeholder(item):
                return None
            continue
        count = _count(pieces[-1]) if len(pieces) > 1 else 1
        if count is None:
            return None
        total += count
    return total


def gpus_of_list(value: str | None) -> int | None:
    """Return the number of GPUs in ``[type:]number[,...]``, or None if it is missing or unknown."""
    if value is None:
        return None
    total = 0
    for item in value.split(","):
        count = _count(item.replace("=", ":").rpartition(":")[2])
        if count is None:
            return None
        total += count
    return total


def _count(text: str) -> int | None:
    """Read a number of GPUs; a type alone, such as ``a100``, means one GPU."""
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if is_placeholder(text) or EXPANSION.search(text):
        return None
    return 1


def evaluate(text: str, unknowns: Unknowns, geometry: Geometry, *, depth: int = 0) -> int | None:
    """Return ``text`` as a whole number, or None; marks in it stand for :class:`Unknown` expansions."""
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if depth > _MAX_DEPTH or len(text) > 400:
        return None
    values = [_value(unknown, unknowns, geometry, depth) for unknown in unknowns.of(text)]
    if not values or None in values:
        return None
    resolved = iter(values)
    return _calculate(MARK.sub(lambda _: str(next(resolved)), text))


def _value(unknown: Unknown, unknowns: Unknowns, geometry: Geometry, depth: int) -> int | None:
    if unknown.kind == "arith":
        plain = (unknown.default or "").strip()
        number = _calculate(plain)
        return evaluate(plain, unknowns, geometry, depth=depth + 1) if number is None else number
    if unknown.kind == "command":
        return _counted(unknown.source, geometry)
    if unknown.op and unknown.default is None:
        return geometry.tasks_per_node if unknown.source.startswith(_TASKS_ON_A_NODE) else None
    known = _of_slurm(unknown.name, geometry)
    if known is None and unknown.origin:
        known = evaluate(unknown.origin, unknowns, geometry, depth=depth + 1)
    if known is not None:
        return known
    return evaluate(unknown.default, unknowns, geometry, depth=depth + 1) if unknown.default else None


def _counted(source: str, geometry: Geometry) -> int | None:
    """Return the number that a command such as ``nvidia-smi -L | wc -l`` prints, or None if unknown."""
    if "wc -l" in source or "grep -c" in source:
        if "nvidia-smi" in source or "rocm-smi" in source:
            return geometry.gpus_per_node or None
        if "scontrol show hostname" in source:
            return geometry.nodes
    if "SLURM_TASKS_PER_NODE" in source and re.search(r"cut -d['\"\\]*\(.* -f *1", source):
        return geometry.tasks_per_node
    return None


def _of_slurm(name: str, geometry: Geometry) -> int | None:
    """Return the value of an environment variable that Slurm sets, or None if it is unknown."""
    if name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        return geometry.nodes
    if name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        return geometry.ntasks
    if name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        return geometry.tasks_per_node
    if name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        return geometry.gpus_per_node or None
    if name == "SLURM_GPUS_PER_TASK":
        return geometry.gpus_per_task
    if name in ("SLURM_GPUS", "SLURM_NGPUS"):
        total = geometry.value("gpus")
        return int(total) if total and total.isdecimal() else None
    return geometry.number("cpus-per-task") if name == "SLURM_CPUS_PER_TASK" else None


def _calculate(expression: str) -> int | None:
    """Evaluate integer arithmetic like the shell; return None if it is invalid."""
    bounds = range_of(expression, {})
    return bounds[0] if bounds and bounds[0] == bounds[1] else None


def range_of(expression: str, ranges: Mapping[str, Range | None]) -> Range | None:
    """Return the lowest and highest value of integer arithmetic, or None if it is unknown or invalid."""
    if not _EXPRESSION.fullmatch(expression):
        return None
    try:
        return _of_node(ast.parse(" ".join(expression.split()), mode="eval").body, ranges)
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
        return None


def _of_node(node: ast.expr, ranges: Mapping[str, Range | None]) -> Range | None:
    match node:
        case ast.Constant(value=int(value)):
            return value, value
        case ast.Name(id=name):
            return ranges.get(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _of_node(operand, ranges)
            return (-inner[1], -inner[0]) if inner else None
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _of_node(left, ranges), _of_node(right, ranges)
            return _combined(op, first, second) if first and second else None
    return None


def _combined(op: ast.operator, first: Range, second: Range) -> Range | None:
    single = second[0] == second[1]
    match op:
        case ast.Add():
            return first[0] + second[0], first[1] + second[1]
        case ast.Sub():
            return first[0] - second[1], first[1] - second[0]
        case ast.Mult():
            return first[0] * second[0], first[1] * second[1]
        case ast.Div() if single:
            return _quotient(first[0], second[0]), _quotient(first[1], second[0])
        case ast.Mod() if single and first[0] == first[1]:
            return (first[0] - _quotient(first[0], second[0]) * second[0],) * 2
        case ast.Mod() if single and second[0] > 0:
            return (0, min(second[0] - 1, first[1])) if first[1] >= second[0] else first
    return None


def _quotient(left: int, right: int) -> int:
    """Divide like the shell, which truncates towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
