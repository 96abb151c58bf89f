"""How many nodes, tasks and GPUs a job and its steps have.

As sbatch and srun decide it: what is not asked for is one node and one task per node, ``--ntasks``
with ``--ntasks-per-node`` makes nodes, a step inherits the job's numbers, and what stands on the
srun line overrides them (sbatch(1), srun(1)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from bench.lint.directives import Option
from bench.lint.values import gpus_of_gres, gpus_of_list, whole

#: What decides the geometry; other options do not matter to the rules.
RELEVANT = frozenset(
    {
        "array",
        "constraint",
        "cpus-per-gpu",
        "cpus-per-task",
        "distribution",
        "exclusive",
        "export",
        "gpu-bind",
        "gpus",
        "gpus-per-node",
        "gpus-per-socket",
        "gpus-per-task",
        "gres",
        "nodelist",
        "nodes",
        "ntasks",
        "ntasks-per-core",
        "ntasks-per-gpu",
        "ntasks-per-node",
        "ntasks-per-socket",
        "ntasks-per-tres",
        "partition",
        "tres-bind",
        "tres-per-task",
    }
)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_HOSTS = 4096
_GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
_NO_BINDING = frozenset({"none", "no", "n"})


@dataclass(frozen=True)
class Geometry:
    """Nodes, tasks and GPUs of a job or a step; None is "cannot be told from the script".

    ``options`` are the last of each name; each knows the line it stands on.
    """

    options: Mapping[str, Option] = field(default_factory=dict)
    heterogeneous: bool = False

    def value(self, name: str) -> str | None:
        """Return the value of an option, or None where it is not given."""
        option = self.options.get(name)
        return option.value if option else None

    def line(self, *names: str) -> int | None:
        """Return the line of the first of these options that is given."""
        return next((self.options[name].line for name in names if name in self.options), None)

    def number(self, name: str) -> int | None:
        """Return an option's value as a whole number, or None."""
        return whole(self.value(name))

    @cached_property
    def node_range(self) -> tuple[int, int | None]:
        """The fewest and the most nodes that ``--nodes`` or ``--nodelist`` allow (None: no limit)."""
        match = _RANGE.fullmatch(self.value("nodes") or "")
        if match:
            low = int(match.group(1)[:9])
            return low, int(match.group(2)[:9]) if match.group(2) else low
        if self.value("nodes") is not None:
            return 1, None
        hosts = expand_hosts(self.value("nodelist") or "")
        return (len(hosts), len(hosts)) if hosts else (1, None)

    @cached_property
    def nodes(self) -> int | None:
        """The number of nodes, where it is one number."""
        low, high = self.node_range
        if low == high:
            return low
        if "nodes" in self.options:
            return None
        return self._nodes_from_tasks()

    def _nodes_from_tasks(self) -> int | None:
        ntasks, per_node = self.number("ntasks"), self.number("ntasks-per-node")
        gpus, gpus_each = gpus_of(self.value("gpus")), gpus_of(self.value("gpus-per-node"))
        if ntasks and per_node:
            return -(-ntasks // per_node)
        if gpus and gpus_each and gpus % gpus_each == 0:
            return gpus // gpus_each
        if (ntasks or 1) == 1 and ("ntasks" in self.options) == (ntasks is not None):
            return 1
        return None

    @property
    def several_nodes(self) -> bool:
        """Whether the job surely has more than one node."""
        return (self.nodes or self.node_range[0]) > 1 and not self.heterogeneous

    @cached_property
    def tasks_per_node(self) -> int | None:
        """Tasks on each node, where it is the same number on all of them."""
        if self.heterogeneous:
            return None
        nodes, ntasks, per_node = self.nodes, self.number("ntasks"), self.number("ntasks-per-node")
        if per_node and not (ntasks and "nodes" not in self.options and ntasks < per_node):
            return per_node  # where --ntasks contradicts it, this is what was meant
        if ntasks and nodes:
            return ntasks // nodes if ntasks % nodes == 0 else None
        if {"ntasks", "ntasks-per-node"} & set(self.options):
            return None
        each, on_node = self.gpus_per_task, gpus_of(self.value("gpus-per-node"))
        if each and on_node:  # Slurm then starts as many tasks as the GPUs allow
            return on_node // each
        by_gpu = self.number("ntasks-per-gpu") or self.number("ntasks-per-tres")
        if by_gpu:
            return by_gpu * self.gpus_per_node if self.gpus_per_node else None
        if {"ntasks-per-gpu", "ntasks-per-tres", "ntasks-per-socket", "ntasks-per-core"} & set(self.options):
            return None
        return 1

    @property
    def tasks_on_a_node(self) -> int:
        """Tasks on the fullest node; 1 where nothing says that there are more."""
        if self.tasks_per_node:
            return self.tasks_per_node
        ntasks = self.number("ntasks")
        return -(-ntasks // self.nodes) if ntasks and self.nodes and not self.heterogeneous else 1

    @cached_property
    def ntasks(self) -> int | None:
        """All tasks."""
        given = self.number("ntasks")
        if given:
            return given
        if self.nodes and self.tasks_per_node:
            return self.nodes * self.tasks_per_node
        return None

    @property
    def asks_for_gpus(self) -> bool:
        """Whether any option asks for GPUs."""
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
        """GPUs on each node: 0 where none are asked for, None where it cannot be told."""
        if self.heterogeneous:
            return None
        if "gpus-per-node" in self.options:
            return gpus_of(self.value("gpus-per-node"))
        gres = self.value("gres")
        if gres is not None and gpus_of_gres(gres) != 0:
            return gpus_of_gres(gres)
        if "gpus-per-task" in self.options or "tres-per-task" in self.options:
            each = self.gpus_per_task
            if each == 0 and "gpus" not in self.options:
                return 0
            return each * self.tasks_per_node if each and self.tasks_per_node else None
        total = gpus_of(self.value("gpus"))
        if total is not None:
            return total // self.nodes if self.nodes and total % self.nodes == 0 else None
        return None if self.asks_for_gpus else 0

    @property
    def gpus_per_task(self) -> int | None:
        """GPUs that ``--gpus-per-task`` gives each task; None where it is not used."""
        if "gpus-per-task" in self.options:
            return gpus_of(self.value("gpus-per-task"))
        each = self.value("tres-per-task")
        return gpus_of_gres(each) if each else None

    @property
    def isolation(self) -> Option | None:
        """Return the option that shows each task only its own GPUs, if one does."""
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
        """Return the geometry of a step that srun starts with ``options`` in this job."""
        own = {option.name: option for option in options}
        inherited = dict(self.options)
        if {"nodes", "nodelist"} & set(own) and "ntasks" not in own:
            inherited.pop("ntasks", None)
        if "nodes" in own or "nodelist" in own:
            inherited.pop("nodelist", None)
            inherited.pop("nodes", None)
        elif "ntasks" in own and self.nodes:
            fewer = min(self.nodes, whole(own["ntasks"].value) or self.nodes)
            inherited["nodes"] = own["ntasks"]._replace(name="nodes", value=str(fewer))
        if "ntasks" in own and "ntasks-per-node" not in own:
            each, nodes = whole((inherited.get("ntasks-per-node") or own["ntasks"]).value), self.nodes
            if not each or not nodes or whole(own["ntasks"].value) != each * nodes:
                inherited.pop("ntasks-per-node", None)
        if set(own) & {"gpus", "gpus-per-node", "gres", "gpus-per-task"}:
            for name in ("gpus", "gpus-per-node", "gres", "gpus-per-task"):
                inherited.pop(name, None)
        return Geometry({**inherited, **own}, heterogeneous=self.heterogeneous or "het-group" in own)


def gpus_of(value: str | None) -> int | None:
    """Return the number of GPUs in ``[type:]number``; None where it is not given or unclear."""
    return None if value is None else gpus_of_list(value)


@lru_cache(maxsize=256)
def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm host list such as ``n[01-04,7],login``; () where it is unclear."""
    hosts: list[str] = []
    if text.count("[") != text.count("]"):
        return ()
    for item in _split_hosts(text):
        expanded = [""]
        for piece in re.split(r"(\[[^\]]*\])", item):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            if not choices or len(expanded) * len(choices) > _MOST_HOSTS:
                return ()
            expanded = [start + choice for start in expanded for choice in choices]
        hosts.extend(expanded)
        if len(hosts) > _MOST_HOSTS or "$" in item or "<" in item or "{" in item:
            return ()
    return tuple(host for host in hosts if host)


def _split_hosts(text: str) -> list[str]:
    return re.findall(r"(?:[^,\[]++|\[[^\]]*+\])++", text[:10_000])


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        if not match:
            return []
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) - int(low) >= _MOST_HOSTS:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
