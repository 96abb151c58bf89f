"""The parts of an expanded matrix: points, cells (physical configurations), series, runs and their names."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ddp_scaling_bench.variables import shown_variables

Mode = Literal["strong", "weak"]

#: The settings that are size and batch of a cell.
SIZES = ("nodes", "tasks_per_node", "world_size", "global_batch", "per_gpu_batch")
#: Other names of settings.
SAME_SETTING = {
    "gpus": "world_size",
    "gpus_per_node": "tasks_per_node",
    "per_replica_batch": "per_gpu_batch",
}
#: The command of the built-in training, the default of a matrix.
BUILT_IN = ("python", "-m", "ddp_scaling_bench.train")


class Membership(NamedTuple):
    """The membership of a cell in a series (a set of cells that differ in size only).

    ``batch`` is the global batch of a strong series and the batch per replica of a weak series.
    """

    series: str
    mode: Mode
    batch: int


class Command(NamedTuple):
    """A command: its words with unfilled placeholders, and its name if the matrix gives one."""

    words: tuple[str, ...]
    name: str | None = None

    def __str__(self) -> str:
        return self.name or shown_command(self.words)

    @property
    def swept(self) -> str | list[str]:
        """The value in ``Cell.swept``: the name, or the words of a command without a name."""
        return self.name or list(self.words)


#: Key of the ranks per node in ``Point.values``. A matrix file uses gpus_per_node or tasks_per_node instead.
PER_NODE = "per_node"


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of a value per axis, a scaling mode and a batch.

    ``batch`` is the global batch in mode strong and the batch per replica in mode weak. ``place`` is
    the location of the batch in the matrix file.
    """

    values: dict[str, Any]
    mode: Mode
    batch: int
    place: tuple[str | int, ...]

    @property
    def ranks(self) -> int:
        """The world size."""
        per_node = self.values[PER_NODE]
        return sum(per_node) if isinstance(per_node, list) else self.values["nodes"] * per_node

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return int(self.ranks // self.values["model_parallel"])

    @property
    def key(self) -> str:
        """A text that identifies the point: different points have different keys."""
        return canonical([self.values, self.mode, self.batch])


class Resources(NamedTuple):
    """What a run of a cell requests from the scheduler, besides nodes and ranks.

    ``time_limit_s`` is the maximum wall time in seconds. ``exclusive`` is true if the run has whole nodes.
    """

    time_limit_s: int = 1800
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    gpu_type: str | None = None


NO_RESOURCES = Resources()


def gpu_option(request: str, gpu_type: str | None) -> str:
    """Return Slurm's option for GPUs per node, without the number: ``--gres=gpu:l40s:``.

    ``request`` is the value of ``cluster.gpu_request``.
    """
    kind = f"{gpu_type}:" if gpu_type else ""
    return f"{'--gres=gpu:' if request == 'gres' else '--gpus-per-node='}{kind}"


@dataclass(slots=True)
class Cell:
    """One physical configuration, which is run ``repeats`` times.

    ``tasks_per_node`` is one number, or a list with one number per node if nodes differ.
    ``argv`` is the command of each rank, with unfilled placeholders, and ``name`` the command's name
    if the matrix gives one. ``workload`` contains the options that the command uses, ``metrics`` the
    source of its metrics, without defaults, and ``exchange`` if the matrix sets it, and ``env`` the job's
    environment variables.
    ``planned_epochs`` is the number of epochs in metrics.csv, or None if the command determines it, as well
    as its batch and backend. ``packages`` are the Python packages that the command needs. ``swept`` contains
    the cell's values of the axes that vary in the matrix, except size and batch.
    ``command_per`` is ``node`` or ``job`` if the command starts the ranks (launcher own), else empty.
    ``texts`` are the options that the command contains and the matrix writes as texts, such as 25M.
    ``model_parallel`` is the number of ranks that share one replica of the model (tensor x pipeline x context
    parallel). ``per_gpu_batch`` is the number of samples per replica and micro-batch.
    global_batch = per_gpu_batch x replicas x grad_accum.
    """

    cell_id: str
    launcher: str
    backend: str
    nodes: int
    tasks_per_node: int | list[int]
    world_size: int
    per_gpu_batch: int
    global_batch: int
    argv: list[str]
    metrics: dict[str, Any]
    workload: dict[str, Any]
    env: dict[str, str]
    name: str = ""
    planned_epochs: int | None = None
    packages: list[str] = field(default_factory=list)
    swept: dict[str, Any] = field(default_factory=dict)
    series: list[Membership] = field(default_factory=list)
    model_parallel: int = 1
    command_per: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    repeats: int = 1
    resources: Resources = NO_RESOURCES

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, each of which trains with samples of its own."""
        return self.world_size // self.model_parallel

    @property
    def per_replica_batch(self) -> int:
        """The number of samples per replica and micro-batch; without model parallelism, that of a rank."""
        return self.per_gpu_batch

    @property
    def modes(self) -> list[Mode]:
        """The distinct scaling modes (strong, weak) in which the cell is measured."""
        return list(dict.fromkeys(member.mode for member in self.series))

    @property
    def ranks_per_node(self) -> list[int]:
        """The number of ranks on each node, in the order of the nodes."""
        per_node = self.tasks_per_node
        return per_node if isinstance(per_node, list) else [per_node] * self.nodes

    @property
    def requested_gpus(self) -> int:
        """The number of GPUs that a run requests on each node, or 0 on device cpu."""
        return max(self.ranks_per_node) if self.device == "cuda" else 0

    @property
    def size(self) -> int:
        """The size by which settings can differ: requested GPUs of all nodes, or nodes on device cpu."""
        return self.nodes * self.requested_gpus or self.nodes

    def reserved_gpus(self, *, node_gpus: int | None) -> int:
        """Return the number of GPUs per node that no other job can use during a run.

        ``node_gpus`` is the number of GPUs of a node, all of which a run with whole nodes reserves.
        """
        return max(self.requested_gpus, (node_gpus or 0) * self.resources.exclusive)

    @property
    def program(self) -> str:
        """The command as text for people: its name, or its words as they are typed in a shell."""
        if tuple(self.argv) == BUILT_IN:
            return "the built-in training"
        return self.name or shown_command(self.argv)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by their names in the matrix; a variable whose value is not shown is ``set``."""
        found = {name: getattr(self, name) for name in (*SIZES, "launcher", "backend", "metrics")}
        found |= {"command": self.program, **self.workload}
        variables = shown_variables(self.env, self.swept).items()
        found |= {f"env.{name}": "set" if value is None else value for name, value in variables}
        # A plan made elsewhere may contain axes that are not options of the workload.
        return self.swept | found

    @property
    def command_label(self) -> str:
        """The command's name, or its text in the cell's name; empty if all cells have the same command."""
        if self.name or "command" not in self.swept:
            return self.name
        return safe_text(self.swept["command"])

    @property
    def is_unrecorded(self) -> bool:
        """True if the command does not use the recorder."""
        return self.metrics.get("source") != "recorder"

    @property
    def measures(self) -> bool:
        """False if the matrix asks for no metrics (``metrics: none``)."""
        return self.metrics.get("source") != "none"

    @property
    def reads_values(self) -> bool:
        """True if values are read from the output or a file of the command."""
        return "output" in self.metrics or "csv" in self.metrics

    @property
    def is_average(self) -> bool:
        """True if the command reports one average of the whole run."""
        return self.metrics.get("kind") == "average"

    @property
    def is_exchange_rare(self) -> bool:
        """True if the matrix states that the ranks need not train together in every step."""
        return self.metrics.get("exchange") == "rare"

    @property
    def follows_plan(self) -> bool:
        """True if the plan determines model, batch and backend; False if the command does."""
        return self.planned_epochs is not None

    @property
    def planned_samples(self) -> int | None:
        """The number of samples in each epoch, or None if the command determines it."""
        if self.planned_epochs is None:
            return None
        return self.global_batch * int(self.workload["steps_per_epoch"])

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return str(self.workload["device"])

    def as_json(self) -> dict[str, Any]:
        """Return the cell as a dictionary for plan.json and run.json."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        series = [member._asdict() for member in self.series]
        return own | {"modes": self.modes, "series": series, "resources": self.resources._asdict()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Cell:
        """Create a cell from the dictionary that :meth:`as_json` returned."""
        kept = {k: content[k] for k in cls.__dataclass_fields__ if k in content}
        if "resources" in content:
            kept["resources"] = Resources(**content["resources"])
        kept["series"] = [Membership(m["series"], m["mode"], m["batch"]) for m in content["series"]]
        return cls(**kept)


def common_resources(cells: Iterable[Cell]) -> dict[str, Any]:
    """Return those resources, besides the time limit, that all cells request alike."""
    every = [cell.resources._asdict() for cell in cells]
    names = [name for name in Resources._fields if name != "time_limit_s"]
    return {name: every[0][name] for name in names if all(one[name] == every[0][name] for one in every)}


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of a cell. ``order`` is the run's position (from 1) in the seeded random order."""

    run_id: str
    cell_id: str
    repeat: int
    order: int


class LabelledCommand(NamedTuple):
    """A command with its label in the names of its cells; ``words`` have unfilled placeholders."""

    label: str
    words: list[str]
    cells: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the command as in the output of `bench plan --json`."""
        return {"name": self.label, "words": self.words, "cells": self.cells}


def labelled_commands(cells: Iterable[Cell]) -> list[LabelledCommand]:
    """Return the commands that have a name or differ between cells, in the order of the cells."""
    found: dict[str, LabelledCommand] = {}
    for cell in cells:
        if label := cell.command_label:
            found.setdefault(label, LabelledCommand(label, cell.argv, [])).cells.append(cell.cell_id)
    return list(found.values())


#: The maximum length of a cell's or series' name; folders get these names.
MAX_NAME = 150
_SAFE_TEXT = re.compile(r"[A-Za-z0-9_.+]{1,40}")


def canonical(value: Any) -> str:
    """Return a value as JSON text; different values have different texts."""
    return json.dumps(value, sort_keys=True, default=str)


def shown_command(words: Sequence[str]) -> str:
    """Return a command as it is typed in a shell; braces of placeholders need no quotes."""
    plain = [re.sub(r"[{}]", "x", word) for word in words]
    return " ".join(
        word if shlex.quote(own) == own else shlex.quote(word) for word, own in zip(words, plain, strict=True)
    )


def value_text(value: Any) -> str:
    """Return a value as text, as in a matrix: ``true`` for True, ``null`` for None, ``4+2`` for [4, 2].

    A command (a list of words) is returned as it is typed in a shell.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if not isinstance(value, list):
        return str(value)
    if any(isinstance(word, str) for word in value):
        return shown_command(value)
    return "+".join(str(number) for number in value)


def name_of(parts: list[str], swept: Mapping[str, Any]) -> str:
    """Return ``parts`` and all swept values joined by ``-``, safe as a folder's name.

    Names that are too long and values with unsafe characters are shortened. A digest is appended
    to them, so that different values still have different names.
    """
    name = "-".join(
        [*parts, *(f"{axis.removeprefix('env.')}.{_part(axis, value)}" for axis, value in swept.items())]
    )
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{_digest(name)}"


def _part(axis: str, value: Any) -> str:
    is_name = axis in ("command", "strategy") and isinstance(value, str)  # the matrix checks such names
    return str(value) if is_name else safe_text(value)


def safe_text(value: Any) -> str:
    """Return a value as a part of a folder's name; different values have different texts."""
    text = "+".join(map(str, value)) if isinstance(value, list) else value_text(value)
    if _SAFE_TEXT.fullmatch(text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9_.+]', '_', text)[:24]}_{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
