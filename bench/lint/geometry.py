"""The numbers of nodes, tasks and GPUs of a job and its steps: sbatch(1) and srun(1). None is unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .options import Option, whole_number
from .words import Word

_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task")


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
    elif not any(name.startswith(("ntasks", "gpus-per-task", "tres-per-task")) for name in options):
        tasks = 1
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
    """Return the number of GPUs in ``[type:]number[,...]``; in ``--gres``, items start with the resource."""
    if not re.fullmatch(r"[\w:.,=-]+", value):  # a variable, or a value that is still to be filled in
        return None
    items = [item.removeprefix("gres:").replace("=", ":").split(":") for item in value.split(",")]
    counted = [item[-1] for item in items if item[0] == "gpu" or not gres]
    return sum(whole_number(last) or int(not last.isdecimal()) for last in counted)


def number(word: Word | None, geometry: Geometry) -> int | None:
    """Return the whole number that a word has in a job or step, or None if it is unknown."""
    if word is None or word.unknowns != list(word.parts):
        return whole_number(word.literal) if word else None
    known = {
        **dict.fromkeys(("NNODES", "JOB_NUM_NODES"), geometry.nodes),
        **dict.fromkeys(("NTASKS", "NPROCS"), geometry.ntasks),
        **dict.fromkeys(("GPUS_ON_NODE", "GPUS_PER_NODE"), geometry.gpus_per_node or None),
        "NTASKS_PER_NODE": whole_number(geometry.value("ntasks-per-node")),
    }
    return known.get(word.unknowns[0].name.removeprefix("SLURM_"))
