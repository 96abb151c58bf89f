"""A cell (one physical configuration), the series it belongs to, and its runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["strong", "weak"]


@dataclass(frozen=True, slots=True)
class Membership:
    """That a cell belongs to a series: cells that scale together and differ in size only.

    ``batch`` is the global batch of a strong series, the per-GPU batch of a weak one.
    """

    series: str
    mode: Mode
    batch: int


@dataclass(slots=True)
class Cell:
    """One physical configuration; it is run ``repeats`` times.

    ``tasks_per_node`` has one number per node where nodes differ, else one number.
    ``swept`` holds the axes that vary in the matrix, by name, beyond size and batch.
    ``workload`` holds the resolved workload options (global batch = per_gpu_batch x
    world_size x grad_accum), ``env`` the environment variables of the job.
    """

    cell_id: str
    launcher: str
    backend: str
    nodes: int
    tasks_per_node: int | list[int]
    world_size: int
    per_gpu_batch: int
    global_batch: int
    workload: dict[str, Any]
    env: dict[str, str]
    swept: dict[str, Any] = field(default_factory=dict)
    series: list[Membership] = field(default_factory=list)

    @property
    def modes(self) -> list[Mode]:
        """The scaling modes of the cell's series, without repetition."""
        return list(dict.fromkeys(member.mode for member in self.series))

    @property
    def ranks_per_node(self) -> list[int]:
        """Ranks on each node, in the order of the nodes."""
        per_node = self.tasks_per_node
        return per_node if isinstance(per_node, list) else [per_node] * self.nodes

    @property
    def command(self) -> list[str] | None:
        """The words of the matrix's command, braces and all; None for the built-in training."""
        return self.workload.get("command")

    @property
    def metrics(self) -> dict[str, Any]:
        """Where a command's numbers come from: what :class:`bench.matrix.metrics.Metrics` holds."""
        return self.workload.get("metrics") or {}

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return str(self.workload["device"])

    def as_json(self) -> dict[str, Any]:
        """Return what plan.json and run.json keep of the cell."""
        return {
            "cell_id": self.cell_id,
            "modes": self.modes,
            "series": [{"series": m.series, "mode": m.mode, "batch": m.batch} for m in self.series],
            "launcher": self.launcher,
            "backend": self.backend,
            "nodes": self.nodes,
            "tasks_per_node": self.tasks_per_node,
            "world_size": self.world_size,
            "global_batch": self.global_batch,
            "per_gpu_batch": self.per_gpu_batch,
            "workload": self.workload,
            "env": self.env,
            "swept": self.swept,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Cell:
        """Return the cell that :meth:`as_json` described."""
        kept = {k: content[k] for k in cls.__dataclass_fields__ if k in content}
        kept["series"] = [Membership(m["series"], m["mode"], m["batch"]) for m in content["series"]]
        return cls(**kept)


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of one cell: one job. ``order`` is its place in the seeded random order."""

    run_id: str
    cell_id: str
    repeat: int
    order: int


# Names of cells and series: every swept axis is in them, and they are safe as folder names.

MAX_NAME = 150

_WORD = re.compile(r"[A-Za-z0-9_.+]{1,40}")


def canonical(value: Any) -> str:
    """Return a text that is equal for equal values only."""
    return json.dumps(value, sort_keys=True, default=str)


def word(value: Any) -> str:
    """Return a value as a person writes it: ``true``, ``4+2`` for a list, else its text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(str(number) for number in value)
    return str(value)


def name_of(parts: list[str], swept: Mapping[str, Any]) -> str:
    """Return ``parts`` and the swept values joined by ``-``, shortened where it must be.

    A value with letters that a folder's name should not hold is kept apart from its
    neighbours by a digest.
    """
    name = "-".join(
        [*parts, *(f"{axis.removeprefix('env.')}.{_safe_word(value)}" for axis, value in swept.items())]
    )
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{_digest(name)}"


def _safe_word(value: Any) -> str:
    text = word(value)
    if _WORD.fullmatch(text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9_.+]', '_', text)[:24]}_{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
