"""The section `cluster` of a matrix: where and how the runs are started."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from bench.matrix.field_types import (
    MAX_TASKS_PER_NODE,
    EnvName,
    EnvValue,
    Line,
    Section,
    one_line,
    shell_words,
)
from bench.units import DURATION_FORMS, parse_duration_s

#: A host's name as ssh takes it. It can begin no option and reach no shell.
HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
HOST_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: What may stand in an #SBATCH directive: no space, quote, backslash, $, ;, # or backtick,
#: so a value can neither end its directive nor reach a shell.
DIRECTIVE_VALUE = re.compile(r"[A-Za-z0-9_.,:@+=/\[\]|&*!()%-]+")


def _directive_value(value: str) -> str:
    if not DIRECTIVE_VALUE.fullmatch(value) or value.startswith("-"):
        raise ValueError(
            f"{value!r} cannot stand in an #SBATCH line; "
            "allowed: letters, digits and _ . , : @ + = / [ ] | & * ! ( ) % -"
        )
    return value


def _command_line(value: str) -> str:
    """Refuse a set-up line that would swallow the lines after it."""
    _words(value, of="shell")
    return value


def _words(value: str, *, of: str) -> list[str]:
    one_line(value)
    try:
        return shell_words(value, comments=True)
    except ValueError as error:
        raise ValueError(f"{error}; each entry is a whole line of {of}") from None


def _directive_line(value: str) -> str:
    """Refuse a line whose first word is no option, or any of whose words is one of ours."""
    words = [word for word in _words(value, of="#SBATCH options") if word.startswith("-")]
    if not re.match(r"--?[A-Za-z]", value):
        raise ValueError(f"{value!r} is not an option of sbatch; write it as --name=value")
    owner = next((owner for word in words if (owner := _owner(word))), None)
    if owner:
        raise ValueError(f"{value!r} would change what the plan counts with; {owner}")
    return value


#: sbatch's options of one letter that take no value: others may follow in the same word.
_FLAGS = "HhIkOQsVv"


def _owner(word: str) -> str | None:
    """Return who sets an option of ours; sbatch takes unique prefixes, and ``-Hn2`` for ``-H -n2``."""
    found = re.match(rf"--([A-Za-z][A-Za-z-]*)|-[{_FLAGS}]*([A-Za-z])", word)
    if found is None:
        return None
    long, letter = found.groups()
    for names, owner in _OWNED_DIRECTIVES.items():
        if letter in names.split() or (long and any(name.startswith(long) for name in names.split())):
            return owner
    return None


#: Options that scripts set themselves: where the matrix says the same, or why it cannot.
_OWNED_DIRECTIVES = {
    "nodes N": "use axes.nodes",
    "ntasks n ntasks-per-node tasks-per-node": "use axes.tasks_per_node or axes.gpus_per_node",
    "ntasks-per-gpu ntasks-per-tres": "use axes.gpus_per_node",
    "gres gpus G gpus-per-node gpus-per-task gpus-per-socket": "use axes.gpus_per_node and cluster.gpu_type",
    "cpus-per-task c": "use cluster.cpus_per_task",
    "time t time-min": "use cluster.time_limit",
    "partition p": "use cluster.partition",
    "account A": "use cluster.account",
    "qos q": "use cluster.qos",
    "reservation": "use cluster.reservation",
    "constraint C": "use cluster.constraint",
    "nodelist w nodefile F": "use cluster.nodelist",
    "exclude x": "use cluster.exclude",
    "mem": "use cluster.mem",
    "exclusive": "use cluster.exclusive",
    "export": "use cluster.env",
    "output o error e job-name J chdir D parsable": "bench submit sets it for each run",
    "clusters cluster M": "bench follows the jobs of one cluster: type it on that one's login node",
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


DirectiveValue = Annotated[str, AfterValidator(_directive_value)]
CommandLine = Annotated[str, Field(min_length=1), AfterValidator(_command_line)]
DirectiveLine = Annotated[str, AfterValidator(_directive_line)]
Duration = Annotated[
    int, BeforeValidator(_time_limit), WithJsonSchema({"type": "string", "examples": ["20m", "1h30m"]})
]


class Container(Section):
    """The container that ranks run in."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """apptainer and singularity wrap the command; pyxis adds srun's --container options."""
    image: Line
    """An image file, or what the runtime takes as a URI."""
    mounts: list[Line] = Field(default=[])
    """Bind mounts, each as the runtime writes them (`/scratch:/scratch`)."""
    options: list[Line] = Field(default=[])
    """Further options of the runtime, one word each (`--cleanenv`)."""


class Host(Section):
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


class Cluster(Section):
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
    directives: list[DirectiveLine] = Field(default=[])
    """Further #SBATCH options as they are (`--mail-type=END`)."""
    setup: list[CommandLine] = Field(default=[])
    """Shell lines before the launch, run in the folder of submission."""
    env: dict[EnvName, EnvValue] = Field(default={})
    """Environment variables of the job; values arrive literally."""
