"""Types of the values in a matrix, with their checks and limits: names, numbers, and options of Slurm."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

MAX_NODES = 100_000
MAX_TASKS_PER_NODE = 1_024
MAX_BATCH = 10**9

#: Words that people write instead of words of the matrix, by these.
_WRITTEN = {
    "study": "name",
    "nodes": "num_nodes",
    "gpus_per_node": "num_gpus devices",
    "model_parallel": "tensor_parallel",
    "partition": "queue",
    "time_limit": "time walltime",
    "account": "project",
    "executor": "scheduler",
    "setup": "module modules conda_env",
    "command": "cmd script",
    "per_gpu_batch": "batch batch_size",
    "grad_accum": "gradient_accumulation_steps accumulate_grad_batches",
    "steps_per_epoch": "steps max_steps num_steps",
    "epochs": "num_train_epochs",
    "learning_rate": "lr",
    "optimizer": "optim",
    "num_workers": "dataloader_num_workers",
    "activation_checkpointing": "gradient_checkpointing",
    "cuda": "gpu",
    "fp32": "32 float32 float",
    "bf16": "bfloat16",
    "fp16": "16 float16 half",
    "fsdp": "zero3 zero-3 full_shard",
    "fsdp-keep": "zero2 zero-2 shard_grad_op",
    "hsdp": "hybrid_shard",
}
_SYNONYMS = {word: key for key, words in _WRITTEN.items() for word in words.split()}
#: A longer list of allowed words is not part of a message.
_LONGEST_LIST = 120

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Section(BaseModel):
    """A section of the matrix. The string below an attribute is its description in the JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Pydantic's `use_attribute_docstrings` would read them at each start of `bench`.
        described = handler(schema)
        for name, text in _texts_below(cls).items():
            handler.resolve_ref_schema(described)["properties"][name]["description"] = text
        return described


def _texts_below(kind: type) -> dict[str, str]:
    """Return the strings below the attributes of a class."""
    with suppress(OSError):  # made by create_model: it has no text, and its fields have descriptions
        (node,) = ast.parse(inspect.getsource(kind)).body
        return {
            one.target.id: inspect.cleandoc(str(below.value.value))
            for one, below in pairwise(getattr(node, "body", ()))
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        }
    return {}


class Forms:
    """Marks a value that can be written in one of several forms: JSON Schemas, or sections."""

    def __init__(self, *forms: dict[str, Any] | type[BaseModel]) -> None:
        self._forms = forms

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [one if isinstance(one, dict) else one.model_json_schema() for one in self._forms]}


def synonym_of(word: str) -> str:
    """Return the word of the matrix that means ``word``, or ``word`` itself."""
    return _SYNONYMS.get(word.lower(), word)


def did_you_mean(text: str, allowed: Sequence[str], *, cutoff: float, all_in: str = "docs/matrix.md") -> str:
    """Return a hint: the word that ``text`` probably means, if there is one, and all allowed words if few.

    ``all_in`` is the document that lists many words.
    """
    same = [word for word in allowed if word.lower() == text.lower()]
    synonym = synonym_of(re.sub(r"^torch\.|-(?:mixed|true)$", "", text))  # bf16-mixed: as Lightning names it
    near = same or [synonym] * (synonym in allowed)
    near = near or difflib.get_close_matches(text.lower(), allowed, n=1, cutoff=cutoff)
    # batch_per_gpu: the same parts in another order.
    near = near or [word for word in allowed if sorted(word.split("_")) == sorted(text.split("_"))]
    longer = [word for word in allowed if word.startswith(f"{text}_")]
    near = near or (longer if len(longer) == 1 else [])
    words = f"allowed: {', '.join(allowed)}"
    if len(words) > _LONGEST_LIST:
        words = ("" if near else f"allowed are {', '.join(allowed[:4])} and others; ") + f"{all_in} lists all"
    return (f"did you mean '{near[0]}'? " if near else "") + words


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
        is_quote = "quotation" in str(error)
        what = "a quote that is never closed; close it" if is_quote else "a backslash at its end; remove it"
        raise ValueError(f"{value!r} has {what}") from None


def _env_text(value: Any) -> Any:
    """Convert a number to text; reject a YAML boolean."""
    if isinstance(value, bool):
        what = f"{str(value).lower()} is a YAML boolean"
        raise ValueError(f"{what}; write {int(value)}, or put it in quotes if the program wants that word")
    return str(value) if isinstance(value, int | float) else value


def _check_env_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("contains a NUL character")
    return value


#: Variables that the scripts set themselves, each with a hint for a matrix that sets the variable.
_OWNED_VARIABLES = {
    "OMP_NUM_THREADS": "use cluster.cpus_per_task, which sets the threads of every rank",
    "MASTER_ADDR": "remove it: it is the first host of each job",
    "MASTER_PORT": "remove it: it is derived from the job's id",
    **dict.fromkeys(("NNODES", "NODE_RANK"), "remove it: with launcher own, the job sets it on each node"),
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "remove it: the launcher sets it for each rank",
    ),
}
#: Variables of the scripts' own shell code, which values from the matrix would break.
_SHELL_VARIABLE = re.compile(
    "agent|before|by|cell|cell_file|cell_json|child|command|container|counts|i|name|endpoint|exit_code|file|guard|host|hosts|"
    "interface|is_host|job|join_timeout|node|owner|package|placement|python|ranks|rdzv_id|run_dir|sampler|"
    "stage|step|"
    "world_size|"
    "BASHOPTS|BASH_VERSINFO|EUID|IFS|PPID|SHELLOPTS|UID"
)


def env_name(name: str) -> str:
    """Return ``name``; raise ValueError if the name is invalid, or if the job's script uses the variable."""
    owner = _OWNED_VARIABLES.get(name)
    if name.startswith(("BENCH_", "SLURM_")):
        owner = "choose a name that does not begin with BENCH_ or SLURM_"
    if owner:
        raise ValueError(f"{name} is set by the job's script and would be overwritten; {owner}")
    if _SHELL_VARIABLE.fullmatch(name):
        raise ValueError(f"{name} is a variable of the job's script; choose another name")
    if "=" in name:  # the value can be a secret
        raise ValueError(f"{name.partition('=')[0]!r} is followed by a value; write only the variable's name")
    if not ENV_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of an environment variable; allowed: letters, digits and '_'"
        )
    return name


def _check_ranks_per_node(value: Any) -> Any:
    """Check a number, or a list with one number per node."""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if number == "cores":
            raise ValueError("cores stands for a list; write it without [ ] as `tasks_per_node: cores`")
        if isinstance(number, bool) or not isinstance(number, int):
            is_text = isinstance(number, str) and number.isdecimal()
            remedy = (
                f"write {int(number)} without quotes" if is_text else "write one such as 4, or a list by node"
            )
            raise ValueError(f"{number!r} is not a whole number; {remedy}")
        if not 1 <= number <= MAX_TASKS_PER_NODE:
            raise ValueError(f"{number} is not between 1 and {MAX_TASKS_PER_NODE}; write such a number")
    if isinstance(value, list) and len(value) < 2:
        raise ValueError(f"{value!r} is a list for one node; write {value[0] if value else 1} instead")
    return value


class _BySize:
    """Marks a setting that can depend on the size of a run.

    The setting is a value, or a mapping such as ``{1: gpusmall, 5: gpularge}``, with the value from each
    number of requested GPUs on (nodes on device cpu); :func:`at_size` selects.
    """

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_wrap_validator_function(_check_sizes, handler(kind))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        one = handler(schema["schema"])
        sizes = {"type": "object", "patternProperties": {"^[1-9][0-9]*$": one}, "additionalProperties": False}
        return {"anyOf": [one, sizes]}


BY_SIZE = _BySize()


def _check_sizes(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a value, or a mapping from sizes to values."""
    if not isinstance(value, dict):
        return check(value)
    example = "write a mapping such as {1: A, 65: B}, with the value from each number of GPUs on"
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            remedy = f"write {int(size)}" if str(size).lstrip("0").isdecimal() else example
            raise ValueError(f"{size!r} is not a number of GPUs (of nodes on device cpu); {remedy}")
    if 1 not in value:
        raise ValueError(f"there is no value for the smallest sizes; {example}, and 1 as the first number")
    checked = {}
    for size in sorted(value):
        try:
            checked[size] = check(value[size])
        except ValidationError as error:
            found = [{**one, "loc": (size, *one["loc"])} for one in error.errors()]
            raise ValidationError.from_exception_data(error.title, found) from None  # type: ignore[arg-type]
    return checked


def at_size(value: Any, size: int) -> Any:
    """Return the value for a size: that of the largest key up to it, or a value without sizes itself."""
    return value[max(key for key in value if key <= size)] if isinstance(value, dict) else value


#: Non-empty text without line breaks.
Line = Annotated[str, Field(min_length=1), AfterValidator(one_line)]
EnvName = Annotated[str, AfterValidator(env_name)]
#: The text of a variable, or of an argument, whose numbers, true and false the document keeps as written.
EnvValue = Annotated[
    str,
    BeforeValidator(_env_text),
    AfterValidator(_check_env_value),
    WithJsonSchema({"type": ["string", "number"]}),
]
Nodes = Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
RanksPerReplica = Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
_PER_NODE = {"type": "integer", "minimum": 1, "maximum": MAX_TASKS_PER_NODE}
RanksPerNode = Annotated[
    Any,
    BeforeValidator(_check_ranks_per_node),
    WithJsonSchema({"anyOf": [_PER_NODE, {"type": "array", "items": _PER_NODE, "minItems": 2}]}),
]
Batch = Annotated[int, Field(strict=True, ge=1, le=MAX_BATCH)]


class Form(NamedTuple):
    """The allowed texts of a value: as a pattern, and in words for messages."""

    what: str
    pattern: re.Pattern[str]
    allowed: str

    def check(self, value: str) -> str:
        """Return ``value``; raise ValueError if it does not match the pattern."""
        if not self.pattern.fullmatch(value):
            raise ValueError(f"{value!r} is not {self.what}; allowed: {self.allowed}")
        return value


#: Without spaces, quotes, backslashes, $, ;, # and backticks, a value can neither end its directive nor be
#: run by a shell.
_DIRECTIVE_VALUE = Form(
    "a value for an #SBATCH line",
    re.compile(r"(?!-)[A-Za-z0-9_.,:@+=/\[\]|&*!()%-]+"),
    "letters, digits and _ . , : @ + = / [ ] | & * ! ( ) % -",
)
#: The scripts quote these words, so that a shell expands neither * nor [.
_SRUN_WORD = Form(
    "a word for srun",
    re.compile(r"--?[A-Za-z][A-Za-z0-9_.,:@+=/\[\]*%-]*"),
    "an option with letters, digits and _ . , : @ + = / [ ] * % -",
)
#: One-letter options without a value; another option can follow in the same word (-Hn2).
_SBATCH_FLAGS = "HhIkOQsVv"
_SRUN_FLAGS = "EHhkKlOQsuVvXZ"

#: Options that the scripts set themselves, and the key to use instead.
_SIZES = {
    "nodes N": "use axes.nodes",
    "ntasks n ntasks-per-node tasks-per-node": "use axes.tasks_per_node or axes.gpus_per_node",
    "ntasks-per-gpu ntasks-per-tres": "use axes.gpus_per_node",
    "gres gpus G gpus-per-node gpus-per-task gpus-per-socket": "use axes.gpus_per_node and cluster.gpu_type",
    "cpus-per-task c": "use cluster.cpus_per_task",
}
_KEYS_OF_THE_JOB = {
    "time t time-min": "use cluster.time_limit",
    "partition p": "use cluster.partition",
    "account A": "use cluster.account",
    "qos q": "use cluster.qos",
    "reservation": "use cluster.reservation",
    "constraint C": "use cluster.constraint",
    "nodelist w nodefile F": "use cluster.nodelist",
    "exclude x": "use cluster.exclude",
    "switches switch": "use cluster.switches",
    "export": "use cluster.env",
}
_OWN_DIRECTIVES = {
    **_SIZES,
    **_KEYS_OF_THE_JOB,
    "mem": "use cluster.mem",
    "exclusive": "use cluster.exclusive",
    "output o error e job-name J chdir D parsable": "bench submit sets it for each run",
    "clusters cluster M": "bench tracks jobs of one cluster only: run bench on that cluster's login node",
    "array a hetjob wrap requeue no-requeue test-only wait W": "every run is one job that starts once",
}
#: Options of the srun that starts the ranks.
_OWN_SRUN_OPTIONS = {
    **_SIZES,
    "export": "use cluster.env",
    "nodelist w": "use cluster.nodelist",
    "kill-on-bad-exit K": "the end of one rank ends all others",
    "job-name J": "bench submit sets it for each run",
    "container-image container-mounts": "use cluster.container with runtime: pyxis",
}


def _directive_value(value: str) -> str:
    """Return ``value``; raise ValueError if it cannot follow an option in an #SBATCH line."""
    if value == "None":
        raise ValueError("None is a word in YAML; write null, or remove the key")
    if _DIRECTIVE_VALUE.pattern.fullmatch(value):
        return value
    if written := re.fullmatch(r"--?[A-Za-z][\w-]*(?:=|\s+)(\S+)", value.strip()):
        raise ValueError(f"{value!r} is an option with its value; write only {written[1]}")
    if "$" in value:
        raise ValueError(f"{value!r} contains a variable, which is not replaced here; write its value")
    if _DIRECTIVE_VALUE.pattern.fullmatch(value.replace(" ", "")):
        raise ValueError(f"{value!r} contains a blank; write the value of sbatch without blanks")
    return _DIRECTIVE_VALUE.check(value)


def _own_option(word: str, table: Mapping[str, str], flags: str) -> str | None:
    """Return the remedy in ``table`` for the option ``word``, or None if the option is not listed.

    Unique prefixes of options and ``-Hn2`` for ``-H -n2`` are recognised, because Slurm accepts them.
    """
    found = re.match(rf"--([A-Za-z][A-Za-z_-]*)|-[{flags}]*([A-Za-z])", word)
    if found is None:
        return None
    long, letter = (found[1] or "").replace("_", "-"), found[2]
    for names, remedy in table.items():
        if letter in names.split() or (long and any(name.startswith(long) for name in names.split())):
            return remedy
    return None


def _check_directive_line(value: str) -> str:
    """Reject a line that does not begin with an option, or contains an option that the scripts set."""
    words = split_line(value, kind="a complete line of #SBATCH options")
    if not re.match(r"--?[A-Za-z]", value):
        raise ValueError(f"{value!r} is not an option of sbatch; write it as --name=value")
    for word in words:
        remedy = _own_option(word, _OWN_DIRECTIVES, _SBATCH_FLAGS) if word.startswith("-") else None
        if remedy:
            raise ValueError(f"{value!r} would override a setting of the plan; {remedy}")
    return value


def option_of_sbatch(name: str, *, value: str = "=VALUE") -> str:
    """Return how a matrix sets an option of sbatch, or why it cannot."""
    own = _own_option(f"--{name}", _OWN_DIRECTIVES, _SBATCH_FLAGS)
    return own or f"write `directives: [--{name}{value}]` below `cluster:`"


def split_line(value: str, *, kind: str) -> list[str]:
    """Split a line into words as a shell does; ``kind`` describes a valid entry in error messages."""
    one_line(value)
    try:
        return shell_words(value, comments=True)
    except ValueError as error:
        raise ValueError(f"{error}; each entry must be {kind}") from None


_SWITCHES = Form(
    "a value of sbatch --switches",
    re.compile(r"[1-9]\d*(?:@(?:\d+-)?\d+(?::\d+){0,2})?"),
    "COUNT, or COUNT@TIME with the longest wait, such as 1@2:00:00",
)


def _check_srun_word(word: str) -> str:
    if not word.startswith("-"):
        raise ValueError(f"{word!r} is not an option of srun; write options and values as --name=value")
    if re.fullmatch(r"--?[A-Za-z][\w-]*\s+\S+", word):
        raise ValueError(f"{word!r} is more than one word; write options and values as --name=value")
    _SRUN_WORD.check(word)
    if remedy := _own_option(word, _OWN_SRUN_OPTIONS, _SRUN_FLAGS):
        raise ValueError(f"{word!r} would override a setting of the plan; {remedy}")
    return word


def _switches(value: Any) -> Any:
    """Convert a number to text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_MEMORY = Form(
    "an amount of memory",
    re.compile(r"\d+[KMGTkmgt]?[Bb]?"),
    "a number of MB, or with a unit K, M, G or T: 64G",
)


def _memory(value: Any) -> Any:
    """Convert 0, which is all memory, to text; reject another number without a unit."""
    if type(value) is int and value > 0:
        raise ValueError(f"{value} has no unit (Slurm would read MB); write {value}G or {value}M")
    return "0" if value == 0 and type(value) is int else value


DirectiveValue = Annotated[str, AfterValidator(_directive_value)]
Memory = Annotated[str, BeforeValidator(_memory), AfterValidator(_MEMORY.check)]
DirectiveLine = Annotated[str, AfterValidator(_check_directive_line)]
SrunWord = Annotated[str, AfterValidator(_check_srun_word)]
Switches = Annotated[
    str,
    BeforeValidator(_switches),
    AfterValidator(_SWITCHES.check),
    WithJsonSchema({"type": ["string", "integer"], "examples": [1, "1@2:00:00"]}),
]
