"""The schema of a matrix file: every key, its type, its limits and its default.

`bench schema` prints it as JSON Schema for editors. Conditions on several values, such as
divisible batches, are checked in :mod:`bench.matrix.checks`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from bench.matrix.cell import Mode
from bench.matrix.cluster import Cluster
from bench.matrix.command import RECORDER, Command, MetricsOption
from bench.matrix.field_types import ENV_NAME, Batch, EnvValue, Nodes, RanksPerNode, Section, env_name
from bench.matrix.workload import WorkloadOptions

STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STUDY_NAME_RULE = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"


def _check_study_name(name: str) -> str:
    if not STUDY_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is not a safe folder name; allowed: {STUDY_NAME_RULE}")
    return name


class Scaling(Section):
    """A scaling mode and its batches."""

    mode: Mode
    """strong: the global batch is constant. weak: the per-GPU batch is constant."""
    global_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples per optimizer step, summed over all ranks (mode strong)."""
    per_gpu_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples per micro-batch on each rank (mode weak)."""

    @model_validator(mode="after")
    def _check_batch_of_mode(self) -> Scaling:
        wanted, other = (
            ("global_batch", "per_gpu_batch") if self.mode == "strong" else ("per_gpu_batch", "global_batch")
        )
        if getattr(self, wanted) is None:
            raise ValueError(
                f"mode {self.mode} needs {wanted}, a list such as [{352 if self.mode == 'strong' else 22}]"
            )
        if getattr(self, other) is not None:
            raise ValueError(f"mode {self.mode} uses {wanted}; remove {other}, which is computed from it")
        return self

    @property
    def batches(self) -> list[int]:
        """The global batches of mode strong, or the per-GPU batches of mode weak."""
        return (self.global_batch if self.mode == "strong" else self.per_gpu_batch) or []


class Workload(WorkloadOptions):
    """The options of the built-in training, or a command that runs instead of it."""

    command: Command | None = None
    """A command instead of the built-in training; `{name}` is replaced by a value of the cell."""
    metrics: MetricsOption = RECORDER
    """The source of a command's metrics: recorder, none, csv, jsonl or output."""

    def resolved(self) -> dict[str, Any]:
        """Return the workload options for a cell, including the command and its metrics if it is set."""
        own = {name: getattr(self, name) for name in WorkloadOptions.model_fields}
        return own if self.command is None else own | self.command_options(self.command)

    def command_options(self, command: list[str]) -> dict[str, Any]:
        """Return a command and its metrics as workload options of a cell."""
        return {"command": command, "metrics": self.metrics.as_json()}


def _option_type(name: str) -> Any:
    """Return the type of a workload option with all its constraints."""
    info = Workload.model_fields[name]
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


AXIS_OPTIONS = tuple(name for name in Workload.model_fields if name not in ("device", "metrics"))
_SIZE_AXES: dict[str, Any] = {
    "nodes": Nodes,
    "gpus_per_node": RanksPerNode,
    "tasks_per_node": RanksPerNode,
    "backend": Literal["nccl", "gloo"],
    "launcher": Literal["srun", "torchrun"],
}
_AXIS_TYPES: dict[str, Any] = {**_SIZE_AXES, **{name: _option_type(name) for name in AXIS_OPTIONS}}


#: The error text for an unknown axis; pydantic cannot forbid extra keys here because of `env.*`.
UNKNOWN_KEY = "UNKNOWN_KEY"


def _check_axis_name(name: str) -> str:
    if not name.startswith("env."):
        raise ValueError(UNKNOWN_KEY)
    env_name(name.removeprefix("env."))
    return name


EnvAxis = Annotated[str, AfterValidator(_check_axis_name)]


class _KeysAndEnv(BaseModel):
    """A model that also accepts keys of the form `env.NAME`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the file sets to a value, in the order of the schema."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        found = {**own, **(self.__pydantic_extra__ or {})}
        return {name: value for name, value in found.items() if value is not None}


class _AxesBase(_KeysAndEnv):
    __pydantic_extra__: dict[EnvAxis, Annotated[list[EnvValue], Field(min_length=1)]]


class _SelectionBase(_KeysAndEnv):
    __pydantic_extra__: dict[EnvAxis, EnvValue]


def _list_of(kind: Any) -> Any:
    return Annotated[list[kind], Field(min_length=1)]


_model: Any = create_model  # its overloads do not take computed fields
Axes: Any = _model(
    "Axes",
    __base__=_AxesBase,
    __doc__="Lists of values; the study measures every combination of them.",
    **{name: (_list_of(kind) | None, None) for name, kind in _AXIS_TYPES.items()},
)
_BATCH_TYPES: dict[str, Any] = {"mode": Mode, "global_batch": Batch, "per_gpu_batch": Batch}
Selection: Any = _model(
    "Selection",
    __base__=_SelectionBase,
    __doc__="One value for each of some axes, and optionally the mode and the batch.",
    **{name: (kind | None, None) for name, kind in (_AXIS_TYPES | _BATCH_TYPES).items()},
)


class Matrix(Section):
    """The content of a matrix file, which defines a study."""

    study: Annotated[str, AfterValidator(_check_study_name)]
    """The name of the study and of its folder; default: the file name without suffix."""
    cluster: Cluster = Cluster()
    """The executor, resources, hosts, container and environment of the runs."""
    axes: Axes = Field(default_factory=Axes)
    """Lists of values; every combination of them is a cell."""
    scaling: Annotated[list[Scaling], Field(min_length=1)]
    """The scaling modes and their batches."""
    workload: Workload = Workload()
    """The options of the built-in training, or a command that runs instead of it."""
    repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """Number of runs per cell; confidence intervals need at least 3."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of the random order in which runs are started."""
    exclude: list[Selection] = Field(default=[])
    """Cells to leave out: an entry removes the cells that match all its keys."""
    include: list[Selection] = Field(default=[])
    """Cells to add; an axis that an entry does not name takes all its values."""

    @property
    def size_axis(self) -> str:
        """The key of the ranks per node: ``gpus_per_node`` on cuda, ``tasks_per_node`` on cpu."""
        return "gpus_per_node" if self.workload.device == "cuda" else "tasks_per_node"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a matrix file, for editors."""
    schema = Matrix.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Matrix of a scaling study"
    schema["required"] = ["scaling"]
    env = {"type": ["string", "number"]}
    for name, value in (("Axes", {"type": "array", "items": env, "minItems": 1}), ("Selection", env)):
        definition = schema["$defs"][name]
        definition["additionalProperties"] = False
        definition["patternProperties"] = {rf"^env\.{ENV_NAME.pattern}$": value}
    return schema
