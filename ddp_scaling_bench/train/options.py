"""The options of the built-in training, with their types, defaults, limits and help.

A matrix sets them in its section `workload` or as axes, and a rank reads them from the run's cell.json. Ranks
need only the standard library for this; the matrix derives its validation from :data:`OPTIONS`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..errors import BenchError
from ..known_models import MODELS, default_sizes
from ..known_strategies import DEFAULT, STRATEGIES, gathered_dtype, wire_dtype

if TYPE_CHECKING:
    Model = str
    StrategyName = str
else:
    Model = Literal[tuple(MODELS)]
    StrategyName = Literal[tuple(name for name, one in STRATEGIES.items() if not one.recognised)]


@dataclass(frozen=True)
class Limits:
    """The bounds of a number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


@dataclass(frozen=True)
class TrainOptions:
    """The options of the built-in training. The string below an option is its help."""

    device: Literal["cuda", "cpu"] = "cuda"
    """The device of the tensors; nccl needs cuda. A command has no default: set the device that it uses."""
    model: Model = "transformer"
    """The neural network; `transformer`, `llama` and `mlp` take their size from `parameters`."""
    strategy: StrategyName = DEFAULT
    """How ranks train together (docs/strategies.md); `none`: the model alone, on one rank."""
    parameters: Annotated[int, Limits(ge=1_000, le=10**12)] | None = None
    """Approximate number (10M, 1.5B); default of transformer and llama: 124M (on a CPU 10M), of mlp: 8M."""
    seq_len: Annotated[int, Limits(ge=2, le=1_000_000)] | None = None
    """Tokens per sample of transformer and llama; default 1,024 (on a CPU 128)."""
    image_size: Annotated[int, Limits(ge=32, le=4096)] = 224
    """Pixels along each side of resnet50's images."""
    data: str = "synthetic"
    """`synthetic` (fresh random batches), or a folder with inputs.pt and targets.pt."""
    steps_per_epoch: Annotated[int, Limits(ge=1, le=10**7)] = 50
    """Optimizer steps per epoch; they are timed together and give the epoch's throughput."""
    epochs: Annotated[int, Limits(ge=1, le=10**5)] = 3
    """Epochs; each has a throughput window, then an attribution window (in which step parts are timed)."""
    warmup_steps: Annotated[int, Limits(ge=3, le=10**6)] = 10
    """Minimum number of steps before the first window; DDP rebuilds its buckets in the first step."""
    attribution_steps: Annotated[int, Limits(ge=0, le=10**5)] = 10
    """Steps in each attribution window; with 0, the parts of a step are not measured."""
    probe_steps: Annotated[int, Limits(ge=0, le=10**5)] = 6
    """Steps that time the all-reduce of every bucket after training; 0 for none."""
    sweep_time: Annotated[float, Limits(ge=0, le=3600)] = 10.0
    """Seconds for the sweep of collectives after training, which may omit large messages. 0 for no sweep."""
    sweep_max_mb: Annotated[float, Limits(ge=0.004, le=16_384)] | None = None
    """Largest message of the sweep in MiB, except for buckets. Default: gradients (16 to 64), NCCL 1024."""
    trace_steps: Annotated[int, Limits(ge=0, le=1_000)] = 0
    """Steps that rank 0 records with the profiler after all measurements; 0 for none."""
    val_steps: Annotated[int, Limits(ge=0, le=10**6)] = 2
    """Validation batches after each epoch, untimed; with 0, the columns val_* are empty."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """fp32: torch's defaults (TF32 in convolutions); tf32: also in matrix products; bf16, fp16: 16 bits."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """The order of an image's values in memory, for convnet and resnet50; Tensor Cores like channels_last."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The optimizer."""
    learning_rate: Annotated[float, Limits(gt=0, lt=1e3)] = 0.01
    """The optimizer's learning rate."""
    grad_accum: Annotated[int, Limits(ge=1)] = 1
    """Micro-batches per optimizer step: global batch = per-GPU batch x ranks x grad_accum."""
    bucket_cap_mb: Annotated[float, Limits(gt=0, le=10_000)] | None = None
    """DDP's bucket size in MiB. Default: torch's, a first bucket of 1 MiB and then 25 MiB."""
    comm_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The type of gradients between ranks with DDP; default: comm_hook's, or fp32."""
    comm_hook: Literal["none", "fp16", "bf16"] = "none"
    """DDP's hook that sends gradients as fp16 or bf16 (nccl only); the same as comm_dtype."""
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The type in which FSDP gathers weights and computes; default: that of precision (resnet50: fp32)."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type in which FSDP reduces gradients."""
    fsdp_wrap: Literal["block", "root"] = "block"
    """What FSDP gathers at once: the weights of one block, or those of the whole model (root)."""
    compile: bool = False
    """Run the model through torch.compile."""
    activation_checkpointing: bool = False
    """Recompute the blocks' activations in backward."""
    checkpoint: bool = False
    """Rank 0 writes a checkpoint after each epoch; its time is recorded separately."""
    num_workers: Annotated[int, Limits(ge=0, le=1024)] = 0
    """DataLoader workers per rank."""
    pin_memory: bool = True
    """Pinned host memory for batches of files and workers, which are copied during a step (cuda only)."""
    seed: Annotated[int, Limits(ge=0, le=2**31 - 1)] = 0
    """Seed of weights and data."""
    join_timeout: Annotated[int, Limits(ge=1, le=86_400)] = 300
    """Maximum time that ranks wait for each other at the start (seconds, or 5m)."""

    def __post_init__(self) -> None:
        """Set the sizes that nobody has given."""
        vars(self).update(default_sizes(vars(self)))

    @property
    def wire_dtype(self) -> str:
        """The type of gradients between ranks: fp32, bf16 or fp16, whatever the precision."""
        return wire_dtype(vars(self))

    @property
    def gathered_dtype(self) -> str:
        """The type in which the weights are gathered and used: fp32 without FSDP."""
        return gathered_dtype(vars(self))


@dataclass(frozen=True)
class Option:
    """The definition of an option.

    Attributes:
        type: int, float, bool, str or a Literal. An option whose default is None can also be None.
        limits: the bounds ``ge``, ``gt``, ``le`` and ``lt`` of a number. Texts must not be empty.
    """

    name: str
    type: Any
    default: Any
    help: str
    limits: Mapping[str, float]


def _options() -> dict[str, Option]:
    types, options = get_type_hints(TrainOptions, include_extras=True), {}
    for name, text in _helps():
        kinds = [kind for kind in get_args(types[name]) if kind is not NoneType]
        kind = kinds[0] if NoneType in get_args(types[name]) else types[name]
        limits = {}
        if get_origin(kind) is Annotated:
            kind, given = get_args(kind)
            limits = {key: value for key, value in vars(given).items() if value is not None}
        options[name] = Option(name, kind, getattr(TrainOptions, name), text, limits)
    return options


def _helps() -> Iterator[tuple[str, str]]:
    """Yield each option's name and help, from the text of this file."""
    for statement in ast.parse((files(__package__) / "options.py").read_text("utf-8")).body:
        if isinstance(statement, ast.ClassDef) and statement.name == TrainOptions.__name__:
            for pair in pairwise(statement.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        yield name, text


#: The definitions of all options by name.
OPTIONS = _options()


def device_problem(values: Mapping[str, Any], backend: str) -> tuple[str, str, str] | None:
    """Return the option that is impossible on the device, the problem, and its remedy, or None."""
    if values["device"] == "cpu" and backend == "nccl":
        return "backend", "backend nccl needs GPUs, but workload.device is cpu", "use gloo, or device: cuda"
    if values["device"] == "cpu" and values["precision"] == "tf32":
        what = "precision tf32 is a mode of NVIDIA's GPUs, but workload.device is cpu"
        return "precision", what, "use fp32, or device: cuda"
    return None


def read_options(values: Mapping[str, Any], *, backend: str, place: str) -> TrainOptions:
    """Check and return the options of a run; missing ones have the defaults of a matrix.

    Raises:
        BenchError: options are unknown, or values are invalid or contradict each other; each line of the
            message begins with ``place``.
    """
    problems = [
        f"{place}: workload.{name} is not an option of the training; allowed: {', '.join(OPTIONS)}"
        for name in values
        if name not in OPTIONS
    ]
    for name, value in values.items():
        if name in OPTIONS and (expected := expected_value(OPTIONS[name], value)):
            problems.append(f"{place}: workload.{name} is {value!r}; it must be {expected}")
    if problems:
        raise BenchError("\n".join(problems))
    floats = {name for name, value in values.items() if OPTIONS[name].type is float and value is not None}
    options = TrainOptions(**{**values, **{name: float(values[name]) for name in floats}})
    if found := device_problem(vars(options), backend):
        raise BenchError(f"{place}: {found[1]}", remedy=found[2])
    return options


#: The words for functions of the module operator.
_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def expected_value(option: Option, value: Any) -> str | None:
    """Return a description of the valid values if ``value`` is not one of them."""
    if value is None and option.default is None:
        return None
    if get_origin(option.type) is Literal:
        allowed = get_args(option.type)
        return None if value in allowed else f"one of {', '.join(allowed)}"
    if option.type is bool:
        return None if isinstance(value, bool) else "true or false"
    if option.type is str:
        return None if isinstance(value, str) and value else "a text that is not empty"
    kinds, noun = ((int,), "a whole number") if option.type is int else ((int, float), "a number")
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and all(getattr(operator, name)(value, limit) for name, limit in option.limits.items()):
        return None
    bounds = " and ".join(f"{_BOUNDS[name]} {limit}" for name, limit in option.limits.items())
    return f"{noun}, {bounds}"
