"""The matrix file's schema: every key, its type, its limits and its default.

Checked by pydantic; `bench schema` prints it as JSON Schema for editors. What a value
means together with others (divisible batches, nccl without GPUs) is checked in
:mod:`bench.matrix.expansion`, where the cells are known.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from bench.matrix.options import Workload
from bench.units import DURATION_FORMS, parse_duration_s

MAX_NODES = 100_000
MAX_TASKS_PER_NODE = 1_024
MAX_BATCH = 10**9

STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: A host's name as ssh takes it. It can begin no option and reach no shell.
HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
HOST_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
STUDY_NAME_RULE = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What may stand in an #SBATCH directive: no space, quote, backslash, $, ;, # or backtick,
#: so a value can neither end its directive nor reach a shell.
DIRECTIVE_VALUE = re.compile(r"[A-Za-z0-9_.,:@+=/\[\]|&*!()%-]+")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Backend = Literal["nccl", "gloo"]
Launcher = Literal["srun", "torchrun"]


def _study_name(name: str) -> str:
    if not STUDY_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} cannot name a folder safely; allowed: {STUDY_NAME_RULE}")
    return name


def _directive_value(value: str) -> str:
    if not DIRECTIVE_VALUE.fullmatch(value) or value.startswith("-"):
        raise ValueError(
            f"{value!r} cannot stand in an #SBATCH line; "
            "allowed: letters, digits and _ . , : @ + = / [ ] | & * ! ( ) % -"
        )
    return value


def _one_line(value: str) -> str:
    if CONTROL.search(value):
        raise ValueError(f"{value!r} has a line break or control character; write one entry per line")
    return value


def _command_line(value: str) -> str:
    """Refuse a set-up line that would swallow the lines after it."""
    _one_line(value)
    try:
        shlex.split(value, comments=True)
    except ValueError as error:
        what = "a quote that is never closed" if "quotation" in str(error) else "a backslash at its end"
        raise ValueError(f"{value!r} has {what}; each entry is a whole line of shell") from None
    return value


def _directive_line(value: str) -> str:
    _one_line(value)
    option = re.match(r"--([A-Za-z][A-Za-z-]*)|-([A-Za-z])", value)
    if not option:
        raise ValueError(f"{value!r} is not an option of sbatch; write it as --name=value")
    name = option[1] or option[2]
    owner = next((owner for names, owner in _OWNED_DIRECTIVES.items() if name in names.split()), None)
    if owner:
        raise ValueError(f"{value!r} would change what the plan counts with; {owner}")
    return value


#: Options that scripts set themselves: where the matrix says the same, or why it cannot.
_OWNED_DIRECTIVES = {
    "nodes N": "use axes.nodes",
    "ntasks n ntasks-per-node tasks-per-node": "use axes.tasks_per_node or axes.gpus_per_node",
    "gres gpus G gpus-per-node gpus-per-task gpus-per-socket": "use axes.gpus_per_node and cluster.gpu_type",
    "cpus-per-task c": "use cluster.cpus_per_task",
    "time t": "use cluster.time_limit",
    "partition p": "use cluster.partition",
    "account A": "use cluster.account",
    "qos q": "use cluster.qos",
    "reservation": "use cluster.reservation",
    "constraint C": "use cluster.constraint",
    "nodelist w": "use cluster.nodelist",
    "exclude x": "use cluster.exclude",
    "mem": "use cluster.mem",
    "exclusive": "use cluster.exclusive",
    "export": "use cluster.env",
    "output o error e job-name J chdir D parsable": "bench submit sets it for each run",
    "array a hetjob wrap requeue no-requeue test-only wait W": "every run is one job, started once",
}


def _host_name(name: str) -> str:
    if not HOST_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a host's name; allowed: NAME or USER@NAME with letters, digits, '.', '_' "
            "and '-' (ports, keys and jump hosts go into ~/.ssh/config)"
        )
    return name


def _host_address(address: str) -> str:
    if not HOST_ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is not an address; allowed: a name or an IPv4 address, "
            "with letters, digits, '.', '_' and '-'"
        )
    return address


def _host_entry(value: Any) -> Any:
    """Take a plain name as a host without further words."""
    if isinstance(value, str):
        return {"host": value}
    if isinstance(value, dict) and "host" in value:
        return value
    example = "{host: gpu1, processes: 4}"
    if isinstance(value, dict) and len(value) == 1:
        example = "{{host: {}, processes: {}}}".format(*next(iter(value.items())))
    raise ValueError(f"{value!r} is not a host; write its name, or {example}")


def _different_hosts(hosts: list[Host]) -> list[Host]:
    names = [host.host for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice; one entry per host, with `processes` for its ranks")
    return hosts


def _time_limit(value: Any) -> Any:
    if isinstance(value, str):
        return parse_duration_s(value)
    raise ValueError(f"{value!r} has no unit (Slurm would read minutes); write it {DURATION_FORMS}")


def _text(value: Any) -> Any:
    """Take numbers as the text they were written as, but no YAML booleans."""
    if isinstance(value, bool):
        raise ValueError(
            f"{str(value).lower()} is a YAML boolean; quote it if the variable is to hold that word"
        )
    return str(value) if isinstance(value, int | float) else value


def _env_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a NUL character")
    return value


#: Variables that the scripts set themselves: a value from the matrix would be overwritten.
_OWNED_VARIABLES = {
    "OMP_NUM_THREADS": "use cluster.cpus_per_task, which sets the threads of every rank",
    "MASTER_ADDR": "it is the first host of each job",
    "MASTER_PORT": "it follows from each job's id",
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "the launcher sets it for each rank"
    ),
}


def _env_name(name: str) -> str:
    owner = _OWNED_VARIABLES.get(name)
    if name.startswith(("BENCH_", "SLURM_")):
        owner = "names beginning with BENCH_ and SLURM_ belong to the harness and to Slurm"
    if owner:
        raise ValueError(f"{name} is set by the job's script and would be overwritten; {owner}")
    if not ENV_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of an environment variable; allowed: letters, digits and '_'"
        )
    return name


def _layout(value: Any) -> Any:
    """Check ranks per node: a number, or a list with one number per node."""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{number!r} is not a whole number (or a list with one whole number per node)")
        if not 1 <= number <= MAX_TASKS_PER_NODE:
            raise ValueError(f"{number} is not between 1 and {MAX_TASKS_PER_NODE}")
    if isinstance(value, list) and len(value) < 2:
        raise ValueError(f"{value!r} is a list for one node; write {value[0] if value else 1} instead")
    return value


DirectiveValue = Annotated[str, AfterValidator(_directive_value)]
Line = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
CommandLine = Annotated[str, Field(min_length=1), AfterValidator(_command_line)]
DirectiveLine = Annotated[str, AfterValidator(_directive_line)]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[
    str,
    BeforeValidator(_text),
    AfterValidator(_env_value),
    WithJsonSchema({"type": ["string", "number"]}),
]
Duration = Annotated[
    int, BeforeValidator(_time_limit), WithJsonSchema({"type": "string", "examples": ["20m", "1h30m"]})
]
Nodes = Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
_PER_NODE = {"type": "integer", "minimum": 1, "maximum": MAX_TASKS_PER_NODE}
RanksPerNode = Annotated[
    Any,
    BeforeValidator(_layout),
    WithJsonSchema({"anyOf": [_PER_NODE, {"type": "array", "items": _PER_NODE, "minItems": 2}]}),
]
Batch = Annotated[int, Field(strict=True, ge=1, le=MAX_BATCH)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Container(_Section):
    """The container that ranks run in."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """apptainer and singularity wrap the command; pyxis adds srun's --container options."""
    image: Line
    """An image file, or what the runtime takes as a URI."""
    mounts: list[Line] = []
    """Bind mounts, each as the runtime writes them (`/scratch:/scratch`)."""
    options: list[Line] = []
    """Further options of the runtime, one word each (`--cleanenv`)."""


class Host(_Section):
    """A host that is reached by ssh."""

    host: Annotated[str, Field(min_length=1), AfterValidator(_host_name)]
    """Its name as ssh takes it: NAME, USER@NAME, or an alias of ~/.ssh/config."""
    processes: Annotated[int, Field(strict=True, ge=1, le=MAX_TASKS_PER_NODE)] | None = None
    """The most ranks it takes, and what it starts where the axes name no ranks per node."""
    address: Annotated[str, Field(min_length=1), AfterValidator(_host_address)] | None = None
    """Where the other hosts reach it; default: the HostName that ssh uses."""


HostEntry = Annotated[
    Host,
    BeforeValidator(_host_entry),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, Host.model_json_schema()]}),
]


class Cluster(_Section):
    """Where and how the runs are started."""

    executor: Literal["slurm", "local", "ssh"] = "slurm"
    """slurm submits one job per run; local and ssh run one after another, here or on `hosts`."""
    hosts: Annotated[list[HostEntry], Field(min_length=1), AfterValidator(_different_hosts)] | None = None
    """The hosts of executor ssh: `nodes: n` takes the first n."""
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
    """sbatch --nodelist: these nodes must be among the job's."""
    exclude: DirectiveValue | None = None
    """sbatch --exclude: nodes to stay away from."""
    mem: DirectiveValue | None = None
    """sbatch --mem per node (`64G`; `0` is all of it)."""
    gpu_type: DirectiveValue | None = None
    """The GPU's type in Slurm's words: --gres=gpu:TYPE:N."""
    gpu_request: Literal["gres", "gpus-per-node"] = "gres"
    """How this site wants GPUs asked for."""
    cpus_per_task: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """CPU cores per rank; a torchrun task gets them for all its ranks."""
    time_limit: Duration = 1800
    """Wall time of one run at most."""
    exclusive: Annotated[bool, Field(strict=True)] = False
    """Whole nodes: no neighbour disturbs the measurement."""
    container: Container | None = None
    """The container that ranks run in."""
    directives: list[DirectiveLine] = []
    """Further #SBATCH options as they are (`--mail-type=END`)."""
    setup: list[CommandLine] = []
    """Shell lines before the launch, run in the folder of submission."""
    env: dict[EnvName, EnvValue] = {}
    """Environment variables of the job; values arrive literally."""


class Scaling(_Section):
    """A batch axis by its meaning."""

    mode: Literal["strong", "weak"]
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
    "backend": Backend,
    "launcher": Launcher,
}
_AXIS_TYPES: dict[str, Any] = {**_SIZE_AXES, **{name: _annotated(name) for name in AXIS_OPTIONS}}


#: Marks an unknown key among the axes, where pydantic must let `env.*` pass.
UNKNOWN_KEY = "UNKNOWN_KEY"


def _known_axis(name: str) -> str:
    if not name.startswith("env."):
        raise ValueError(UNKNOWN_KEY)
    _env_name(name.removeprefix("env."))
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
    "mode": Literal["strong", "weak"],
    "global_batch": Batch,
    "per_gpu_batch": Batch,
}
Selection: Any = _model(
    "Selection",
    __base__=_SelectionBase,
    __doc__="One value for some of the axes and the batch.",
    **{name: _optional(kind, as_list=False) for name, kind in (_AXIS_TYPES | _BATCH_TYPES).items()},
)


class Matrix(_Section):
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
    exclude: list[Selection] = []
    """Cells left out: each entry removes what agrees with all it names."""
    include: list[Selection] = []
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
