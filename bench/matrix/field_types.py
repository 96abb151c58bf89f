"""Field types that several sections of a matrix share, with their checks and limits."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_NODES = 100_000
MAX_TASKS_PER_NODE = 1_024
MAX_BATCH = 10**9

#: Words that people write instead of words of the matrix.
_SYNONYMS = {"gpu": "cuda", "batch_size": "per_gpu_batch", "num_gpus": "gpus_per_node", "num_nodes": "nodes"}

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Section(BaseModel):
    """A section of the matrix. The string below a field is its description in the JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def did_you_mean(text: str, allowed: Sequence[str], *, cutoff: float) -> str:
    """Return the allowed words, and first the one that ``text`` most likely means, if there is one."""
    synonym = _SYNONYMS.get(text.lower())
    near = [synonym] if synonym in allowed else difflib.get_close_matches(text, allowed, n=1, cutoff=cutoff)
    return (f"did you mean '{near[0]}'? " if near else "") + f"allowed: {', '.join(allowed)}"


def one_line(value: str) -> str:
    """Return ``value`` unchanged; raise ValueError if it contains a line break or control character."""
    if _CONTROL.search(value):
        raise ValueError(f"{value!r} has a line break or control character; write one entry per line")
    return value


def shell_words(value: str, *, comments: bool = False) -> list[str]:
    """Split a line into words as a shell does, without expansion; ``comments`` drops text after #.

    Raises:
        ValueError: a quote is never closed, or the line ends with a backslash.
    """
    try:
        return shlex.split(value, comments=comments)
    except ValueError as error:
        what = "a quote that is never closed" if "quotation" in str(error) else "a backslash at its end"
        raise ValueError(f"{value!r} has {what}") from None


def _env_text(value: Any) -> Any:
    """Convert a number to text; reject a YAML boolean."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is a YAML boolean; quote it to set the variable to that word")
    return str(value) if isinstance(value, int | float) else value


def _check_env_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("contains a NUL character")
    return value


#: Variables that the scripts set themselves, with a hint for a matrix that sets one.
_OWNED_VARIABLES = {
    "OMP_NUM_THREADS": "use cluster.cpus_per_task, which sets the threads of every rank",
    "MASTER_ADDR": "it is the first host of each job",
    "MASTER_PORT": "it is derived from the job's id",
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "the launcher sets it for each rank"
    ),
}
#: Variables of the scripts' own shell code, which values from the matrix would break.
_SHELL_VARIABLE = re.compile(
    "agent|before|cell|child|command|counts|endpoint|exit_code|file|hosts|interface|is_host|node|placement|"
    "processes|python|rdzv_id|run_dir|sampler|stage|workload|BASHOPTS|BASH_VERSINFO|EUID|IFS|PPID|SHELLOPTS|UID"
)


def env_name(name: str) -> str:
    """Return ``name``; raise ValueError if the name is invalid, or if the job's script uses the variable."""
    owner = _OWNED_VARIABLES.get(name)
    if name.startswith(("BENCH_", "SLURM_")):
        owner = "names beginning with BENCH_ and SLURM_ are reserved for the harness and for Slurm"
    if owner:
        raise ValueError(f"{name} is set by the job's script and would be overwritten; {owner}")
    if _SHELL_VARIABLE.fullmatch(name):
        raise ValueError(f"{name} is a variable of the job's script; choose another name")
    if not ENV_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of an environment variable; allowed: letters, digits and '_'"
        )
    return name


def _check_ranks_per_node(value: Any) -> Any:
    """Check a number, or a list with one number per node."""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{number!r} is not a whole number (or a list with one whole number per node)")
        if not 1 <= number <= MAX_TASKS_PER_NODE:
            raise ValueError(f"{number} is not between 1 and {MAX_TASKS_PER_NODE}")
    if isinstance(value, list) and len(value) < 2:
        raise ValueError(f"{value!r} is a list for one node; write {value[0] if value else 1} instead")
    return value


#: Non-empty text without line breaks.
Line = Annotated[str, Field(min_length=1), AfterValidator(one_line)]
EnvName = Annotated[str, AfterValidator(env_name)]
EnvValue = Annotated[
    str,
    BeforeValidator(_env_text),
    AfterValidator(_check_env_value),
    WithJsonSchema({"type": ["string", "number"]}),
]
Nodes = Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
_PER_NODE = {"type": "integer", "minimum": 1, "maximum": MAX_TASKS_PER_NODE}
RanksPerNode = Annotated[
    Any,
    BeforeValidator(_check_ranks_per_node),
    WithJsonSchema({"anyOf": [_PER_NODE, {"type": "array", "items": _PER_NODE, "minItems": 2}]}),
]
Batch = Annotated[int, Field(strict=True, ge=1, le=MAX_BATCH)]
