"""The number of nodes, tasks and GPUs of a job and its steps, and numbers computed from them.

The rules follow sbatch(1) and srun(1). Numbers that the script does not determine are None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .options import EXPANSION, Option, is_placeholder, names, whole_number
from .words import Unknown, Word

_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task")
#: Options that determine the number of tasks in ways that this module does not compute.
_OTHER_TASKS = names("ntasks-per-gpu ntasks-per-tres ntasks-per-socket ntasks-per-core tres-per-task")


class Geometry(NamedTuple):
    """The options of a job or step by name, and its nodes, tasks and GPUs."""

    options: Mapping[str, Option]
    nodes: int | None = None
    ntasks: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None

    def value(self, name: str) -> str:
        """Return the value of an option, or an empty string."""
        return (self.options[name].value or "") if name in self.options else ""

    def line(self, *names: str) -> int | None:
        """Return the script line of the first option in ``names`` that is given, or None."""
        return next((self.options[name].line for name in names if name in self.options), None)

    @property
    def isolates_gpus(self) -> bool:
        """True if an option possibly restricts each task to its own GPUs."""
        return not self.options.keys().isdisjoint({"gpu-bind", "tres-bind", "gpus-per-task"})


def geometry_of(options: Mapping[str, Option]) -> Geometry:
    """Compute the geometry of a job or step."""
    given = Geometry(options)
    ntasks, per_node = whole_number(given.value("ntasks")), whole_number(given.value("ntasks-per-node"))
    low, _, high = given.value("nodes").partition("-")
    nodes = whole_number(low) if high in ("", low) else None
    if not {"nodes", "nodelist"} & options.keys():  # one, or what the numbers of tasks require
        nodes = 1 if ntasks == 1 or "ntasks" not in options else None
        nodes = -(-ntasks // per_node) if ntasks and per_node else nodes
    tasks: int | None = None
    if per_node:  # see ntasks-conflict for contradictions
        tasks = per_node if not ntasks or not nodes or ntasks == nodes * per_node else None
    elif ntasks and nodes:
        tasks = ntasks // nodes if ntasks % nodes == 0 else None
    elif not ({"ntasks", "ntasks-per-node"} | _OTHER_TASKS) & options.keys():
        each, on_node = gpu_count(given.value("gpus-per-task")), gpu_count(given.value("gpus-per-node"))
        tasks = on_node // each if each and on_node else 1  # as many tasks as a node has GPUs for
    option = next((name for name in _GPU_OPTIONS if name in options), "")
    gpus = gpu_count(given.value(option), gres=option == "gres") if option else 0
    if gpus and option == "gpus":
        gpus = gpus // nodes if nodes and gpus % nodes == 0 else None
    elif gpus and option not in ("gpus-per-node", "gres"):
        gpus = gpus * tasks if option == "gpus-per-task" and tasks else None
    return Geometry(options, nodes, ntasks or (nodes * tasks if nodes and tasks else None), tasks, gpus)


def step_of(job: Geometry, given: Sequence[Option]) -> Geometry:
    """Compute the geometry of a step that srun starts with some options; it inherits those of the job."""
    own, inherited, dropped = {option.name: option for option in given}, dict(job.options), set[str]()
    ntasks = whole_number(own["ntasks"].value) if "ntasks" in own else None
    if {"nodes", "nodelist"} & own.keys():
        dropped = {"nodes", "nodelist"} | (set() if ntasks else {"ntasks"})
    elif ntasks and job.nodes:
        inherited["nodes"] = own["ntasks"]._replace(name="nodes", value=str(min(job.nodes, ntasks)))
    if "ntasks" in own and ntasks != job.ntasks:
        dropped |= {"ntasks-per-node"}
    if own.keys() & set(_GPU_OPTIONS):
        dropped |= set(_GPU_OPTIONS)
    return geometry_of({name: one for name, one in inherited.items() if name not in dropped} | own)


def gpu_count(value: str, *, gres: bool = False) -> int | None:
    """Return the number of GPUs in ``[type:]number[,...]``, or None if it is missing or unknown.

    In ``--gres``, each item starts with the name of the resource. A name or type alone means one GPU.
    """
    if not value or is_placeholder(value) or EXPANSION.search(value):
        return None
    items = [item.removeprefix("gres:").replace("=", ":").split(":") for item in value.split(",")]
    counted = [item[-1] for item in items if item[0] == "gpu" or not gres]
    return sum(whole_number(last) or int(not last.isdecimal()) for last in counted)


def number(word: Word | None, geometry: Geometry) -> int | None:
    """Return the whole number that a word has in a job or step, or None if it is unknown."""
    if word is None or (len(word.parts) > 1 and word.unknowns):
        return None
    only = word.parts[0]
    return _number(only, geometry) if isinstance(only, Unknown) else whole_number(word.shown.strip())


def _number(unknown: Unknown, geometry: Geometry) -> int | None:
    """Return the value of a product, or of a variable that Slurm sets."""
    if unknown.product:
        known = [value for factor in unknown.product if (value := number(factor, geometry)) is not None]
        return math.prod(known) if len(known) == len(unknown.product) else None
    match unknown.name:
        case "SLURM_NNODES" | "SLURM_JOB_NUM_NODES":
            return geometry.nodes
        case "SLURM_NTASKS" | "SLURM_NPROCS":
            return geometry.ntasks
        case "SLURM_NTASKS_PER_NODE":
            return whole_number(geometry.value("ntasks-per-node"))
        case "SLURM_GPUS_ON_NODE" | "SLURM_GPUS_PER_NODE":
            return geometry.gpus_per_node or None
    return None
