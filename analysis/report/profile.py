"""Profiles: what a centre asks for in an application, as a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bench.matrix.field_types import Line, Section
from bench.matrix.load import read_section
from ddp_scaling_bench.errors import BenchError

_SHIPPED = Path(__file__).resolve().parent / "profiles"
#: What a text must contain; each is a method of :class:`analysis.report.requirements.Requirements`.
Item = Literal[
    "description",
    "same_input",
    "target_size",
    "machine",
    "wall_time",
    "wall_efficiency",
    "start_up",
    "utilisation",
    "memory",
    "io",
    "hours",
    "job_script",
]


class Hours(Section):
    """The requested hours in the words of the centre."""

    name: Line = "hours"
    """Their name, such as core-hours."""
    unit: Literal["gpu", "node"] = "node"
    """What is charged."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The centre's hours for one GPU-hour or node-hour."""
    periods: Annotated[int, Field(ge=1)] = 1
    """The number of equal periods of the project."""


class Profile(Section):
    """What a centre asks for."""

    title: Line
    """The centre and what is applied for."""
    source: Line
    """The address of the rules."""
    date: Line
    """The date of the rules."""
    threshold: Annotated[float, Field(gt=0, lt=1)]
    """The least efficiency of the requested size."""
    least_sizes: Annotated[int, Field(ge=1)] = 1
    """The least number of different sizes."""
    sizes_of: Literal["nodes", "gpus"] = "nodes"
    """What sizes are: numbers of nodes, or of GPUs."""
    executor: str = ""
    """The executor that the runs must have; empty if it does not matter."""
    cluster: str = ""
    """A word in Slurm's name of the cluster on which the runs must be; empty if it does not matter."""
    least_minutes: Annotated[float, Field(ge=0)] = 0.0
    """The shortest wall time of a size."""
    most_start_up: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest share of the wall time outside the timed steps."""
    hours: Hours = Hours()
    """The unit of the requested hours."""
    contents: list[Item]
    """What the text must contain."""
    by_hand: list[Line] = Field(default=[])
    """What the applicant must add in any case."""


def read_profile(name: str) -> Profile:
    """Return a shipped profile, or that of a YAML file; raise BenchError or InputError if there is none."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = _SHIPPED / f"{name}.yaml"
        if path.parent != _SHIPPED or not path.is_file():
            shipped = ", ".join(sorted(one.stem for one in _SHIPPED.glob("*.yaml")))
            remedy = f"give {shipped}, or a FILE.yaml"
            raise BenchError(f"--profile {name}: there is no such profile", remedy=remedy)
    return read_section(path, Profile, what="profile", example=f"copy {_SHIPPED / 'generic.yaml'}")
