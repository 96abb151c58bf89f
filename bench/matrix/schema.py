"""The matrix file's schema: every key, its type, its limits and its default.

Checked by pydantic; `bench schema` prints it as JSON Schema for editors. What a value
means together with others (divisible batches, nccl without GPUs) is checked in
:mod:`bench.matrix.expansion`, where the cells are known.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from bench.matrix.cell import Mode
from bench.matrix.cluster import Cluster
from bench.matrix.field_types import ENV_NAME, Batch, EnvValue, Nodes, RanksPerNode, Section, env_name
from bench.matrix.workload import Workload

STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STUDY_NAME_RULE = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"


def _study_name(name: str) -> str:
    if not STUDY_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} cannot name a folder safely; allowed: {STUDY_NAME_RULE}")
    return name


class Scaling(Section):
    """A batch axis by its meaning."""

    mode: Mode
    """strong keeps the global batch, weak the per-GPU batch."""
    global_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples of one optimizer step over all ranks (strong)."""
    per_gpu_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples of one micro-batch on one rank (weak)."""

    @model_validator(mode="after")
    def _batch_fits_mode(self) -> Scaling:
        wanted, other = (
            ("global_batch", "per_gpu_batch") if self.mode == "strong" else ("per_gpu_batch", "global_batch")
        )
        if getattr(self, wanted) is None:
            raise ValueError(
                f"mode {self.mode} needs {wanted}, a list such as [{352 if self.mode == 'strong' else 22}]"
            )
        if getattr(self, other) is not None:
            raise ValueError(f"mode {self.mode} keeps {wanted}; {other} follows from it, remove it")
        return self

    @property
    def batches(self) -> list[int]:
        """The batches of the mode's own kind."""
        return (self.global_batch if self.mode == "strong" else self.per_gpu_batch) or []


def _annotated(name: str) -> Any:
    """Return an option's type with all its constraints, as a list item or a single value."""
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
_AXIS_TYPES: dict[str, Any] = {**_SIZE_AXES, **{name: _annotated(name) for name in AXIS_OPTIONS}}


#: Marks an unknown key among the axes, where pydantic must let `env.*` pass.
UNKNOWN_KEY = "UNKNOWN_KEY"


def _known_axis(name: str) -> str:
    if not name.startswith("env."):
        raise ValueError(UNKNOWN_KEY)
    env_name(name.removeprefix("env."))
    return name


class _Named(BaseModel):
    """Keys of the schema, and `env.NAME` beside them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def given(self) -> dict[str, Any]:
        """What the file names and does not leave empty, in the schema's order."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        return {
            name: value
            for name, value in {**own, **(self.__pydantic_extra__ or {})}.items()
            if value is not None
        }


class _AxesBase(_Named):
    __pydantic_extra__: dict[
        Annotated[str, AfterValidator(_known_axis)], Annotated[list[EnvValue], Field(min_length=1)]
    ]


class _SelectionBase(_Named):
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_known_axis)], EnvValue]


def _optional(kind: Any, *, as_list: bool) -> tuple[Any, None]:
    return (Annotated[list[kind], Field(min_length=1)] if as_list else kind) | None, None


_model: Any = create_model  # its overloads do not take computed fields
Axes: Any = _model(
    "Axes",
    __base__=_AxesBase,
    __doc__="What is enumerated: the product of all lists.",
    **{name: _optional(kind, as_list=True) for name, kind in _AXIS_TYPES.items()},
)
_BATCH_TYPES: dict[str, Any] = {
    "mode": Mode,
    "global_batch": Batch,
    "per_gpu_batch": Batch,
}
Selection: Any = _model(
    "Selection",
    __base__=_SelectionBase,
    __doc__="One value for some of the axes and the batch.",
    **{name: _optional(kind, as_list=False) for name, kind in (_AXIS_TYPES | _BATCH_TYPES).items()},
)


class Matrix(Section):
    """A study to be planned."""

    study: Annotated[str, AfterValidator(_study_name)]
    """The study's name, and its folder's; default: the file's stem."""
    cluster: Cluster = Cluster()
    """Where and how the runs are started."""
    axes: Axes = Field(default_factory=Axes)
    """What is enumerated."""
    scaling: Annotated[list[Scaling], Field(min_length=1)]
    """The batch axis, by its meaning."""
    workload: Workload = Workload()
    """What a cell runs: the built-in training, or a command."""
    repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """Runs of each cell; intervals need 3."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of the order in which runs are started."""
    exclude: list[Selection] = Field(default=[])
    """Cells left out: each entry removes what agrees with all it names."""
    include: list[Selection] = Field(default=[])
    """Cells added; an axis that an entry does not name takes all its values."""

    @property
    def size_axis(self) -> str:
        """``gpus_per_node`` or ``tasks_per_node``, by the device."""
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
