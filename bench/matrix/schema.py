"""The schema of a matrix file: every key, its type, its limits and its default.

`bench schema` prints it as JSON Schema for editors. Conditions on several values, such as
divisible batches, are checked in :mod:`bench.matrix.checks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)

from ddp_scaling_bench.train.options import OPTIONS
from ddp_scaling_bench.units import DURATION_FORMS, parse_duration_s

from .cell import SAME_SETTING, Mode, value_text
from .field_types import (
    BY_SIZE,
    ENV_NAME,
    MAX_TASKS_PER_NODE,
    Batch,
    DirectiveLine,
    DirectiveValue,
    EnvName,
    EnvValue,
    Form,
    Forms,
    Line,
    Memory,
    Nodes,
    RanksPerNode,
    RanksPerReplica,
    Section,
    SrunWord,
    Switches,
    at_size,
    env_name,
    split_line,
)
from .schedulers import DEFAULT, SCHEDULERS, SchedulerSpec
from .workload import OPTION_TYPES, RECORDER, WORDS, CommandOption, MetricsOption, names_in

#: Host names that ssh accepts and that cannot be mistaken for options or shell code.
_HOST_NAME = Form(
    "a host name",
    re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*"),
    "NAME or USER@NAME with letters, digits, '.', '_' and '-' (set ports, keys and jump hosts in "
    "~/.ssh/config)",
)
HOST_ADDRESS = Form(
    "an address",
    re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*"),
    "a name or an IPv4 address, with letters, digits, '.', '_' and '-'",
)


if TYPE_CHECKING:
    Executor = str
else:
    Executor = Literal[tuple(SCHEDULERS)]


def _check_setup_line(value: str) -> str:
    """Reject a set-up line that would continue on the next line (open quote or final backslash)."""
    if value.startswith("#SBATCH"):
        raise ValueError(
            f"{value!r} is a comment there; write the option as a key of cluster, or in directives"
        )
    split_line(value, kind="a complete shell line")
    return value


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


def _check_one_word(value: str) -> str:
    """Reject several options of a container's runtime in one entry."""
    if re.match(r"-[\w-]*\s", value):
        raise ValueError(f"{value!r} is more than one word; write each word as an entry, or --name=value")
    return value


class Container(Section):
    """The container in which the ranks run."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """apptainer and singularity wrap the command; pyxis adds srun's --container options."""
    image: Line
    """An image file, or a URI that the runtime supports."""
    mounts: list[Line] = Field(default=[])
    """Bind mounts in the syntax of the runtime (`/scratch:/scratch`)."""
    options: list[Annotated[Line, AfterValidator(_check_one_word)]] = Field(default=[])
    """Further options for the runtime, one word each (`--cleanenv`)."""


def _container(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(value, str):
        return check(value)
    words = WORDS.validate_python(value)
    if unknown := set(names_in(words)) - {"run_dir", "package"}:
        raise ValueError(f"{{{min(unknown)}}} has no value here; allowed: {{run_dir}}, {{package}}")
    return words


#: A mapping, or a text: the words in front of the launch, as a list.
ContainerOption = Annotated[
    Container,
    WrapValidator(_container),
    Forms({"type": "string", "minLength": 1}, Container),
]


class Host(Section):
    """A host of executor ssh."""

    host: Annotated[str, Field(min_length=1), AfterValidator(_HOST_NAME.check)]
    """The name for ssh: NAME, USER@NAME, or an alias in ~/.ssh/config."""
    processes: Annotated[int, Field(strict=True, ge=1, le=MAX_TASKS_PER_NODE)] | None = None
    """The maximum number of ranks on this host, and the default number if the axes set none."""
    address: Annotated[str, Field(min_length=1), AfterValidator(HOST_ADDRESS.check)] | None = None
    """The address at which the other hosts reach this host; default: the HostName that ssh uses."""


HostEntry = Annotated[
    Host,
    BeforeValidator(_host_entry),
    Forms({"type": "string", "minLength": 1}, Host),
]
HostList = Annotated[list[HostEntry], Field(min_length=1), AfterValidator(_check_distinct_hosts)]


def _check_gpu_type(value: str) -> str:
    if ":" in value:
        words = [word for word in value.split(":") if word != "gpu" and not word.isdigit()]
        remedy = f"write only the type{f': {words[0]}' if words else ''}; axes.gpus_per_node is the number"
        raise ValueError(f"{value!r} is a --gres; {remedy}")
    return value


GpuType = Annotated[DirectiveValue, AfterValidator(_check_gpu_type)]
_EXPLICIT_BINDING = re.compile("--cpu[-_]bind=(?:quiet,|verbose,)?(?:map_|mask_|rank)")


class Cluster(Section):
    """The executor, resources, hosts, container and environment of the runs."""

    executor: Executor = DEFAULT
    """slurm submits one job per run. local (this machine) and ssh (`hosts`) execute one run at a time."""
    hosts: HostList | None = None
    """The hosts of executor ssh; a cell with n nodes uses the first n."""
    partition: Annotated[DirectiveValue | None, BY_SIZE] = None
    """sbatch --partition."""
    account: Annotated[DirectiveValue | None, BY_SIZE] = None
    """sbatch --account."""
    qos: Annotated[DirectiveValue | None, BY_SIZE] = None
    """sbatch --qos."""
    reservation: DirectiveValue | None = None
    """sbatch --reservation."""
    constraint: Annotated[DirectiveValue | None, BY_SIZE] = None
    """sbatch --constraint."""
    nodelist: DirectiveValue | None = None
    """sbatch --nodelist: nodes that the job must include."""
    exclude: DirectiveValue | None = None
    """sbatch --exclude: nodes to avoid."""
    switches: Switches | None = None
    """sbatch --switches: the maximum number of leaf switches, and the maximum wait for it (`1@2:00:00`)."""
    mem: Memory | None = None
    """sbatch --mem, per node (`64G`; `0` is all memory)."""
    gpu_type: Annotated[GpuType | None, BY_SIZE] = None
    """Slurm's name for the GPU type: --gres=gpu:TYPE:N."""
    gpu_request: Literal["gres", "gpus-per-node"] = "gres"
    """The sbatch option that requests GPUs at this site."""
    cpus_per_task: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """CPU cores per rank; with torchrun, the only task on a node gets the cores of all ranks there."""
    time_limit: Annotated[Duration, BY_SIZE] = 1800
    """Maximum wall time of one run."""
    stop_after_measurement: Annotated[bool, Field(strict=True)] = False
    """End a run after its last window; the command must use the recorder."""
    exclusive: Annotated[bool, Field(strict=True), BY_SIZE] = True
    """Allocate whole nodes, so that no other job disturbs the measurement."""
    srun_options: list[SrunWord] = Field(default=[])
    """Options of the srun that starts the ranks, one word each (`--cpu-bind=cores`)."""
    node_gpus: Annotated[int, Field(strict=True, ge=1, le=MAX_TASKS_PER_NODE)] | None = None
    """GPUs of a node, for the cost of whole nodes; the number of GPUs in use comes from the axes."""
    container: ContainerOption | None = None
    """The container in which the ranks run, or the words that start it (`shifter --image=IMAGE`)."""
    directives: list[DirectiveLine] = Field(default=[])
    """Further #SBATCH options (`--mail-type=END`)."""
    setup: list[SetupLine] = Field(default=[])
    """Shell lines to run before the launch, in the folder from which the job was submitted."""
    env: dict[EnvName, EnvValue] = Field(default={})
    """Environment variables of the job; values are not expanded."""
    env_from: list[EnvName] = Field(default=[])
    """Names of variables that pass from the shell of `bench submit` to the job, with the values there."""

    @field_validator("env_from")
    @classmethod
    def _check_env_from(cls, names: list[str], info: ValidationInfo) -> list[str]:
        env = info.data.get("env", {})
        for name in names:
            if name in env or names.count(name) > 1:
                where = "in env_from and in env" if name in env else "twice in env_from"
                raise ValueError(f"{name} is {where}; keep one of them")
        return names

    def at(self, size: int) -> Cluster:
        """Return the settings for a run that requests ``size`` GPUs (``size`` nodes on device cpu)."""
        sizes = {name: value for name, value in self if isinstance(value, dict) and name != "env"}
        return self.model_copy(update={name: at_size(value, size) for name, value in sizes.items()})

    @property
    def scheduler(self) -> SchedulerSpec:
        """The scheduler that the executor names."""
        return SCHEDULERS[self.executor]

    @property
    def explicit_binding(self) -> bool:
        """True if srun rejects or ignores its --cpu-bind unless the step has all CPUs of its nodes."""
        return any(map(_EXPLICIT_BINDING.match, self.srun_options))


def _check_max_running(value: Any) -> Any:
    if value != 1 or isinstance(value, bool):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{shown} is not possible; write 1 for one job after another, or remove the key")
    return value


MaxRunning = Annotated[
    int, BeforeValidator(_check_max_running), Field(strict=True), WithJsonSchema({"const": 1})
]
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STUDY_NAME_RULE = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"


def _check_study_name(name: str) -> str:
    if not STUDY_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is not a safe folder name; allowed: {STUDY_NAME_RULE}")
    return name


#: The keys of a batch, with their scaling mode.
BATCH_KEYS: dict[str, Mode] = {"global_batch": "strong", "per_gpu_batch": "weak", "per_replica_batch": "weak"}


class Scaling(Section):
    """A scaling mode and its batches."""

    mode: Mode
    """strong: the global batch is constant. weak: the batch per rank or replica is constant."""
    global_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples per optimizer step, summed over all ranks (mode strong)."""
    per_gpu_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples per micro-batch on each rank (mode weak)."""
    per_replica_batch: Annotated[list[Batch], Field(min_length=1)] | None = None
    """Samples per micro-batch on each replica of the model (mode weak), which has model_parallel ranks."""

    @model_validator(mode="after")
    def _check_batch_of_mode(self) -> Scaling:
        allowed = [key for key, mode in BATCH_KEYS.items() if mode == self.mode]
        given = [key for key in BATCH_KEYS if getattr(self, key) is not None]
        if others := [key for key in given if key not in allowed]:
            mode, key = BATCH_KEYS[others[0]], others[0]
            example = f"{{mode: {mode}, {key}: {getattr(self, key)}}}"
            raise ValueError(
                f"{key} is for mode {mode}; write {example}, or {allowed[0]} for mode {self.mode}"
            )
        if len(given) != 1:
            example = f"{allowed[0]}: [{352 if self.mode == 'strong' else 22}]"
            found = " and ".join(given) or "nothing"
            remedy = "; write one entry for each batch" if len(given) > 1 else ""
            raise ValueError(f"mode {self.mode} needs one batch, such as {example}; given: {found}{remedy}")
        return self

    @property
    def batch_key(self) -> str:
        """The key of the batches."""
        return next(key for key in BATCH_KEYS if getattr(self, key) is not None)

    @property
    def batches(self) -> list[int]:
        """The global batches of mode strong, or the batches per replica of mode weak."""
        return list(getattr(self, self.batch_key))


_model: Any = create_model  # its overloads do not take computed fields
Workload: Any = _model(
    "Workload",
    __base__=Section,
    __doc__="The options of the built-in training, or a command that runs instead of it.",
    **{
        name: (OPTION_TYPES[name], Field(option.default, description=option.help))
        for name, option in OPTIONS.items()
    },
    command=(
        CommandOption | None,
        Field(
            None,
            description="A command instead of the built-in training; placeholders such as `{nodes}` are "
            "filled in.",
        ),
    ),
    metrics=(
        MetricsOption,
        Field(RECORDER, description="The source of a command's metrics: recorder, none, csv or output."),
    ),
    command_per=(
        Literal["node", "job"],
        Field(
            "node",
            description="Launcher own: whether each node (node) or the first one (job) starts the command.",
        ),
    ),
    exchange=(
        Literal["rare"] | None,
        Field(None, description="rare: the ranks of the command do not exchange gradients in every step."),
    ),
)
_OPTION_AXES = {
    name: kind for name, kind in {**OPTION_TYPES, "command": CommandOption | None}.items() if name != "device"
}
_SIZE_AXES: dict[str, Any] = {
    "nodes": Nodes,
    "gpus_per_node": RanksPerNode,
    "tasks_per_node": RanksPerNode,
    "model_parallel": RanksPerReplica,
    "backend": Literal["nccl", "gloo"],
    "launcher": Literal["srun", "torchrun", "own"],
}
#: ``tasks_per_node: cores`` is 1, 2, 4, ... processes, as many as this machine has cores for.
CORES = "cores"
_AXIS_TYPES: dict[str, Any] = {**_SIZE_AXES, **_OPTION_AXES}


#: The error text for an unknown axis; pydantic cannot forbid extra keys here because of `env.*` and `args.*`.
UNKNOWN_KEY = "unknown key"
_ARGUMENT = re.compile(r"args\.[A-Za-z_][A-Za-z0-9_.-]*")


def _check_axis_name(name: str) -> str:
    if name.startswith("env."):
        env_name(name.removeprefix("env."))
    elif not _ARGUMENT.fullmatch(name):
        raise ValueError(UNKNOWN_KEY)
    return name


TextAxis = Annotated[str, AfterValidator(_check_axis_name)]


class _KeysAndText(BaseModel):
    """A section of the matrix that also accepts keys of the forms `env.NAME` and `args.NAME`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the file sets to a value, in the order of the schema."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        found = {**own, **(self.__pydantic_extra__ or {})}
        return {name: value for name, value in found.items() if value is not None}


class _AxesBase(_KeysAndText):
    __pydantic_extra__: dict[TextAxis, Annotated[list[EnvValue], Field(min_length=1)]]


class _SelectionBase(_KeysAndText):
    __pydantic_extra__: dict[TextAxis, EnvValue]


def _list_of(kind: Any) -> Any:
    return Annotated[list[kind], Field(min_length=1)]


Axes: Any = _model(
    "Axes",
    __base__=_AxesBase,
    __doc__="Lists of values; the study measures every combination of them.",
    **{name: (_list_of(kind) | None, None) for name, kind in _AXIS_TYPES.items()},
)
_BATCH_TYPES: dict[str, Any] = {"mode": Mode, **dict.fromkeys(BATCH_KEYS, Batch)}
Selection: Any = _model(
    "Selection",
    __base__=_SelectionBase,
    __doc__="One value for each axis in the entry, and optionally the mode and the batch.",
    **{name: (kind | None, None) for name, kind in (_AXIS_TYPES | _BATCH_TYPES).items()},
)


#: The values that a target limits from below; the others are limited from above.
_AT_LEAST = ("efficiency", "throughput_per_gpu", "share")
LIMITS = (*_AT_LEAST, "step_time_sec", "memory_gib")
_MATCHED_TYPES = ["string", "number", "boolean"]


def _alternatives(value: Any) -> list[Any]:
    """Return a value, or a list of values, as a list."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str | int | float) for one in values):
        raise ValueError("write a value, or a list of values")
    return values


Alternatives = Annotated[
    Any,
    AfterValidator(_alternatives),
    WithJsonSchema({"type": [*_MATCHED_TYPES, "array"], "items": {"type": _MATCHED_TYPES}, "minItems": 1}),
]


class _TargetBase(_KeysAndText):
    __pydantic_extra__: dict[TextAxis, Alternatives]

    @model_validator(mode="after")
    def _check_limit(self) -> _TargetBase:
        limits = [name for name in LIMITS if name in self.given]
        if len(limits) != 1:
            found = " and ".join(limits) or "nothing"
            remedy = "; write one entry for each" if limits else ""
            raise ValueError(f"a target needs exactly one of {', '.join(LIMITS)}; given: {found}{remedy}")
        for key, owner in (("of", "share"), ("unit", "throughput_per_gpu")):
            if key in self.given and limits != [owner]:
                raise ValueError(f"`{key}` is for {owner} only; remove it")
        most = {"efficiency": 1, "share": 2}.get(limits[0], math.inf)
        if self.limit > most:
            raise ValueError(
                f"{limits[0]} {self.limit:g} is above {most}; write a share, such as 0.75 for 75 %"
            )
        if limits == ["share"] and "of" not in self.given:
            raise ValueError("share needs `of: STUDY`, the study to compare with")
        return self

    @property
    def limited(self) -> str:
        """The value that the target limits, one of :data:`LIMITS`."""
        return next(name for name in LIMITS if name in self.given)

    @property
    def is_least(self) -> bool:
        """True if the value is limited from below."""
        return self.limited in _AT_LEAST

    @property
    def limit(self) -> float:
        """The limit."""
        return float(self.given[self.limited])

    @property
    def matched(self) -> dict[str, list[Any]]:
        """The allowed values of each setting of the cells that the target is for; empty for all cells."""
        return {name: own for name, own in self.given.items() if name not in (*LIMITS, "of", "unit")}

    def is_for(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the target is for a cell with these settings (see :attr:`Cell.settings`)."""
        return all(
            _comparable(settings.get(SAME_SETTING.get(name, name))) in map(_comparable, values)
            for name, values in self.matched.items()
        )


def _comparable(value: Any) -> str:
    """Return a value as text: 25.0 equals 25, and [4, 4], four ranks on each of two nodes, equals 4."""
    if isinstance(value, list) and len({*map(str, value)}) == 1:
        value = value[0]
    return value_text(int(value) if isinstance(value, float) and value.is_integer() else value)


_LIMIT = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_LIMIT_HELP = {
    "efficiency": "The least parallel efficiency.",
    "throughput_per_gpu": "The least throughput of a rank, in the study's unit (samples/s or tokens/s).",
    "share": "The least throughput, as a share of that of the equal cell of another study.",
    "step_time_sec": "The longest time per global batch, in seconds.",
    "memory_gib": "The largest memory of a rank in any run, in GiB.",
}
Target: Any = _model(
    "Target",
    __base__=_TargetBase,
    __doc__="A limit of one measured value; the other keys select cells by their settings.",
    **{name: (_LIMIT | None, Field(None, description=_LIMIT_HELP[name])) for name in LIMITS},
    of=(Line | None, Field(None, description="The study of `share`: a name or a folder.")),
    unit=(
        Literal["samples/s", "tokens/s"] | None,
        Field(None, description="The unit of `throughput_per_gpu`; an error if the study has another one."),
    ),
    **dict.fromkeys(("gpus", *_AXIS_TYPES, *_BATCH_TYPES), (Alternatives | None, None)),
)


def _target_list(value: Any) -> Any:
    """Convert a mapping to a list with a target for each limit in it; its other keys apply to all."""
    if not isinstance(value, dict):
        return value
    others = {key: own for key, own in value.items() if key not in LIMITS}
    return [{key: value[key], **others} for key in value if key in LIMITS] or [value]


class _TargetForms:
    """Marks targets: a list, or one mapping."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        target = Target.model_json_schema()
        pattern = rf"^(env\.{ENV_NAME.pattern}|{_ARGUMENT.pattern})$"
        target["patternProperties"] = {pattern: target["additionalProperties"]}
        target["additionalProperties"] = False
        return {"anyOf": [{"type": "array", "items": target}, target]}


TargetList = Annotated[list[Target], BeforeValidator(_target_list), _TargetForms()]


class TargetsFile(Section):
    """The content of a file with targets."""

    targets: TargetList
    """Limits of measured values."""


class Expected(Section):
    """What a run probably takes, for the expected cost; no measurement uses it."""

    step_time: Annotated[float, Field(gt=0, allow_inf_nan=False), BY_SIZE] | None = None
    """Seconds per step at the smallest size; `{1: 2.0, 65: 0.4}`: also at the first size from 65 on."""
    start_up: Annotated[float, Field(ge=0, allow_inf_nan=False), BY_SIZE] = 60.0
    """Seconds from the start of a job to its first step."""


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
    repeats: Annotated[int, Field(strict=True, ge=1, le=1000), BY_SIZE] = 3
    """Number of runs per cell; confidence intervals need at least 3."""
    max_running: MaxRunning | None = None
    """1: one job of the study executes at a time. Left out: all at once."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of the random order in which runs are started."""
    expected: Expected = Expected()
    """The step time and the start-up, for the expected cost of the plan."""
    exclude: list[Selection] = Field(default=[])
    """Cells to leave out: an entry removes the cells that match all its keys."""
    include: list[Selection] = Field(default=[])
    """Cells to add; an axis that an entry does not name takes all its values."""
    targets: TargetList = Field(default=[])
    """Limits of measured values, which `bench report` judges; they change no run."""

    @property
    def size_axis(self) -> str:
        """The key of the ranks per node: ``gpus_per_node`` on cuda, ``tasks_per_node`` on cpu."""
        return "gpus_per_node" if self.workload.device == "cuda" else "tasks_per_node"


class SiteWorkload(Section):
    """The workload options that depend on the cluster."""

    device: Literal["cuda", "cpu"] | None = None
    """The device of this cluster's nodes."""


class AskAbove(Section):
    """Limits above which `bench submit` asks before it starts runs; null means no limit."""

    gpu_hours: Annotated[float, Field(ge=0)] | None = 1000.0
    """GPU-hours of one call, at most."""
    node_hours: Annotated[float, Field(ge=0)] | None = 1000.0
    """Node-hours of one call, at most."""
    jobs: Annotated[int, Field(strict=True, ge=0)] | None = 1000
    """Jobs of one call."""


class Site(Section):
    """A site file: defaults for all matrices of a cluster."""

    cluster: Cluster = Cluster()
    """Defaults for the matrix's `cluster` section; keys that the matrix sets take precedence."""
    workload: SiteWorkload = SiteWorkload()
    """Defaults for the matrix's `workload` section; only `device` is allowed."""
    ask_above: AskAbove = AskAbove()
    """The cost of one call above which `bench submit` asks."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a matrix file, for editors."""
    schema = Matrix.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Matrix of a scaling study"
    schema["required"] = ["scaling"]
    schema["$defs"]["Axes"]["properties"]["tasks_per_node"]["anyOf"].insert(0, {"const": CORES})
    patterns = {
        rf"^env\.{ENV_NAME.pattern}$": {"type": ["string", "number"]},
        f"^{_ARGUMENT.pattern}$": {"type": ["string", "number", "boolean"]},
    }
    lists = {name: {"type": "array", "items": kind, "minItems": 1} for name, kind in patterns.items()}
    for name, allowed in (("Axes", lists), ("Selection", patterns)):
        schema["$defs"][name] |= {"additionalProperties": False, "patternProperties": allowed}
    return schema


def site_schema() -> dict[str, Any]:
    """Return the JSON Schema of a site file, for editors."""
    schema = Site.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Site defaults of scaling studies"
    return schema
