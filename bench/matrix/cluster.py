"""The `cluster` section of a matrix: the executor, resources, hosts, container and environment."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from bench.matrix.field_types import (
    MAX_TASKS_PER_NODE,
    Binding,
    CpuBind,
    DirectiveLine,
    DirectiveValue,
    Distribution,
    EnvName,
    EnvValue,
    GpuBind,
    Line,
    Section,
    SrunWord,
    Switches,
    key_of_word,
    parse_binding,
    split_line,
)
from bench.units import DURATION_FORMS, parse_duration_s

#: Host names that ssh accepts and that cannot be mistaken for options or shell code.
HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
HOST_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _check_setup_line(value: str) -> str:
    """Reject a set-up line that would continue on the next line (open quote or final backslash)."""
    split_line(value, kind="a complete shell line")
    return value


def _check_host_name(name: str) -> str:
    if not HOST_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a host name; allowed: NAME or USER@NAME with letters, digits, '.', '_' "
            "and '-' (set ports, keys and jump hosts in ~/.ssh/config)"
        )
    return name


def _check_host_address(address: str) -> str:
    if not HOST_ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is not an address; allowed: a name or an IPv4 address, "
            "with letters, digits, '.', '_' and '-'"
        )
    return address


def _host_entry(value: Any) -> Any:
    """Convert a plain name to an entry with that host."""
    if isinstance(value, str):
        return {"host": value}
    if isinstance(value, dict) and "host" in value:
        return value
    example = "{host: gpu1, processes: 4}"
    if isinstance(value, dict) and len(value) == 1:
        example = "{{host: {}, processes: {}}}".format(*next(iter(value.items())))
    raise ValueError(f"{value!r} is not a valid host; write a host name, or {example}")


def _check_distinct_hosts(hosts: list[Host]) -> list[Host]:
    names = [host.host for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice} is listed twice; write one entry per host, with `processes` for its number of ranks"
        )
    return hosts


def _parse_time_limit(value: Any) -> Any:
    if isinstance(value, str):
        return parse_duration_s(value)
    raise ValueError(f"{value!r} has no unit (Slurm would read minutes); write a duration {DURATION_FORMS}")


SetupLine = Annotated[str, Field(min_length=1), AfterValidator(_check_setup_line)]
Duration = Annotated[
    int, BeforeValidator(_parse_time_limit), WithJsonSchema({"type": "string", "examples": ["20m", "1h30m"]})
]


class Container(Section):
    """The container in which the ranks run."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """apptainer and singularity wrap the command; pyxis adds srun's --container options."""
    image: Line
    """An image file, or a URI that the runtime supports."""
    mounts: list[Line] = Field(default=[])
    """Bind mounts in the syntax of the runtime (`/scratch:/scratch`)."""
    options: list[Line] = Field(default=[])
    """Further options for the runtime, one word each (`--cleanenv`)."""


class Host(Section):
    """A host of executor ssh."""

    host: Annotated[str, Field(min_length=1), AfterValidator(_check_host_name)]
    """The name for ssh: NAME, USER@NAME, or an alias in ~/.ssh/config."""
    processes: Annotated[int, Field(strict=True, ge=1, le=MAX_TASKS_PER_NODE)] | None = None
    """The maximum number of ranks on this host; if the axes set no number of ranks, this number."""
    address: Annotated[str, Field(min_length=1), AfterValidator(_check_host_address)] | None = None
    """The address at which the other hosts reach this host; default: the HostName that ssh uses."""


HostEntry = Annotated[
    Host,
    BeforeValidator(_host_entry),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, Host.model_json_schema()]}),
]
HostList = Annotated[list[HostEntry], Field(min_length=1), AfterValidator(_check_distinct_hosts)]


class Cluster(Section):
    """The executor, resources, hosts, container and environment of the runs."""

    executor: Literal["slurm", "local", "ssh"] = "slurm"
    """slurm submits one job per run. local (this machine) and ssh (`hosts`) execute one run at a time."""
    hosts: Annotated[list[HostEntry], Field(min_length=1), AfterValidator(_check_distinct_hosts)] | None = (
        None
    )
    """The hosts of executor ssh; a cell with n nodes uses the first n."""
    partition: DirectiveValue | None = None
    """sbatch --partition."""
    account: DirectiveValue | None = None
    """sbatch --account."""
    qos: DirectiveValue | None = None
    """sbatch --qos."""
    reservation: DirectiveValue | None = None
    """sbatch --reservation."""
    constraint: DirectiveValue | None = None
    """sbatch --constraint."""
    nodelist: DirectiveValue | None = None
    """sbatch --nodelist: nodes that the job must include."""
    exclude: DirectiveValue | None = None
    """sbatch --exclude: nodes to avoid."""
    switches: Switches | None = None
    """sbatch --switches: the maximum number of leaf switches, and the maximum wait for it (`1@2:00:00`)."""
    mem: DirectiveValue | None = None
    """sbatch --mem, per node (`64G`; `0` is all memory)."""
    gpu_type: DirectiveValue | None = None
    """Slurm's name for the GPU type: --gres=gpu:TYPE:N."""
    gpu_request: Literal["gres", "gpus-per-node"] = "gres"
    """The sbatch option that requests GPUs at this site."""
    cpus_per_task: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """CPU cores per rank; with torchrun, the only task on a node gets the cores of all ranks there."""
    time_limit: Duration = 1800
    """Maximum wall time of one run."""
    exclusive: Annotated[bool, Field(strict=True)] = True
    """Allocate whole nodes, so that no other job disturbs the measurement."""
    cpu_bind: CpuBind | None = None
    """srun --cpu-bind: the cores of each task (`cores`, `mask_cpu:0x0f,0xf0`)."""
    gpu_bind: GpuBind | None = None
    """srun --gpu-bind: the GPUs that each task sees (`closest`, `none`)."""
    distribution: Distribution | None = None
    """srun --distribution: the order of tasks on nodes, sockets and cores (`block:cyclic`)."""
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = None
    """sbatch and srun --hint: `nomultithread` counts cores instead of hardware threads."""
    srun_options: list[SrunWord] = Field(default=[])
    """Further options of the srun that starts the ranks, one word each (`--mem-bind=local`)."""
    node_gpus: Annotated[int, Field(strict=True, ge=1, le=MAX_TASKS_PER_NODE)] | None = None
    """GPUs of a node, for the cost of whole nodes; the number of GPUs in use comes from the axes."""
    concurrent_runs: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    """Maximum number of runs that execute at once; default: no limit."""
    container: Container | None = None
    """The container in which the ranks run."""
    directives: list[DirectiveLine] = Field(default=[])
    """Further #SBATCH options (`--mail-type=END`)."""
    setup: list[SetupLine] = Field(default=[])
    """Shell lines to run before the launch, in the folder from which the job was submitted."""
    env: dict[EnvName, EnvValue] = Field(default={})
    """Environment variables of the job; values are not expanded."""

    def srun_value(self, key: str) -> str | None:
        """Return the value of a key of :data:`SRUN_KEYS`, which a word of `srun_options` can set, too."""
        value: str | None = getattr(self, key)
        if value is not None:
            return value
        given = filter(None, map(key_of_word, self.srun_options))
        return next((text for name, text in given if name == key), None)

    def binding(self, key: Literal["cpu_bind", "gpu_bind"]) -> Binding | None:
        """Return `cpu_bind` or `gpu_bind`, or None if the matrix does not set it."""
        value = self.srun_value(key)
        return None if value is None else parse_binding(value)
