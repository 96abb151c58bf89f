"""The options of the built-in training, and the command line that passes them to a job.

One model validates the matrix, writes the launch line of a script, and parses it in the
job. Each option can also be an axis of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from bench.matrix.field_types import Section
from bench.units import parse_count, parse_duration_s

Count = Annotated[int, Field(strict=True, ge=1)]
Model = Literal["mlp", "convnet", "resnet50", "transformer", "traffic"]


def _count(value: Any) -> Any:
    return parse_count(value) if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    return parse_duration_s(value) if isinstance(value, str) else value


class WorkloadOptions(Section):
    """The options of the built-in DDP training."""

    device: Literal["cuda", "cpu"] = "cuda"
    """The device of the tensors; nccl needs cuda. A command has no default: set the device that it uses."""
    model: Model = "transformer"
    """The network. transformer and mlp take their size from `parameters`."""
    parameters: Annotated[int, BeforeValidator(_count), Field(strict=True, ge=1_000, le=10**12)] | None = None
    """Approximate number of parameters of transformer and mlp (10M, 1.5B); default 10M and 8M."""
    seq_len: Annotated[int, Field(strict=True, ge=2, le=1_000_000)] = 128
    """Tokens per sample of the transformer."""
    image_size: Annotated[int, Field(strict=True, ge=32, le=4096)] = 224
    """Pixels along each side of resnet50's images."""
    data: Annotated[str, Field(min_length=1)] = "synthetic"
    """`synthetic` (fresh random batches), or a folder of .npy arrays or of MNIST's IDX files."""
    steps_per_epoch: Annotated[int, Field(strict=True, ge=1, le=10**7)] = 50
    """Optimizer steps per epoch; they are timed together and give the epoch's throughput."""
    epochs: Annotated[int, Field(strict=True, ge=1, le=10**5)] = 3
    """Epochs; each has a throughput window, then an attribution window (in which step parts are timed)."""
    warmup_steps: Annotated[int, Field(strict=True, ge=3, le=10**6)] = 10
    """Minimum number of steps before the first window; DDP rebuilds its buckets in the first step."""
    attribution_steps: Annotated[int, Field(strict=True, ge=0, le=10**5)] = 10
    """Steps in each attribution window; with 0, the parts of a step are not measured."""
    probe_steps: Annotated[int, Field(strict=True, ge=0, le=10**5)] = 6
    """Steps of each of the five probes that measure communication after training; 0 for none."""
    sweep_time: Annotated[float, BeforeValidator(_duration), Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """Seconds for the all-reduce sweep after training, which may omit large messages. 0 for no sweep."""
    sweep_max_mb: Annotated[float, Field(ge=0.004, le=16_384, allow_inf_nan=False)] | None = None
    """Largest message of the sweep in MiB, except for larger buckets. Default: gradient size (16 to 64)."""
    trace_steps: Annotated[int, Field(strict=True, ge=0, le=1_000)] = 0
    """Steps that rank 0 records with the profiler after all measurements; 0 for none."""
    val_steps: Annotated[int, Field(strict=True, ge=0, le=10**6)] = 2
    """Validation batches after each epoch, untimed; with 0, the columns val_* are empty."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 use autocast; fp16 also scales the loss."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The optimizer."""
    learning_rate: Annotated[float, Field(gt=0, lt=1e3, allow_inf_nan=False)] = 0.01
    """The optimizer's learning rate."""
    grad_accum: Count = 1
    """Micro-batches per optimizer step: global batch = per-GPU batch x ranks x grad_accum."""
    bucket_cap_mb: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] = 25.0
    """DDP's bucket size in MiB."""
    compile: Annotated[bool, Field(strict=True)] = False
    """Run the model through torch.compile."""
    activation_checkpointing: Annotated[bool, Field(strict=True)] = False
    """Recompute the blocks' activations in backward."""
    checkpoint: Annotated[bool, Field(strict=True)] = False
    """Rank 0 writes a checkpoint after each epoch; its time is recorded separately."""
    num_workers: Annotated[int, Field(strict=True, ge=0, le=1024)] = 0
    """DataLoader workers per rank."""
    pin_memory: Annotated[bool, Field(strict=True)] = False
    """Pinned host memory for batches (cuda only)."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of weights and data."""
    join_timeout: Annotated[int, BeforeValidator(_duration), Field(strict=True, ge=1, le=86_400)] = 300
    """Maximum time that ranks wait for each other at the start (seconds, or 5m)."""


_FLAGS = {name: "--" + name.replace("_", "-") for name in WorkloadOptions.model_fields}


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert ``options`` to command-line arguments of ``python -m bench.workload``.

    Default values are written, too, so that a later version's defaults cannot change an existing
    script. Options that are None are omitted. The arguments are not yet quoted for a shell.
    """
    words: list[str] = []
    for name, value in options.items():
        flag = _FLAGS[name]
        if value is None:
            continue
        text = ("true" if value else "false") if isinstance(value, bool) else str(value)
        # A value that starts with a dash would be read as the next option.
        words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words
