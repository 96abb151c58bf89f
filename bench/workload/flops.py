"""How much computation one training step is, counted by torch's flop counter.

Counted are the multiplications and additions (two operations each) of matrix products, convolutions
and attention, forward and backward; everything else (norms, activations, the loss, the optimizer)
is left out, as is usual for MFU. The step runs on torch's meta device: shapes without data, so that
counting costs neither memory nor time on the device, and nothing random is drawn.

Attention counts whole [time, time] products though the decoder is causal, and blocks whose activations
are recomputed count once: these are the *model's* FLOPs (PaLM, Chowdhery et al., 2022, appendix B),
whatever a kernel leaves out or does twice.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.matrix.workload import WorkloadOptions
from bench.workload.task import DataShape, Task, build_task


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step of one rank, all of its micro-batches.

    Convolutions are kept apart: cuDNN has a precision setting of its own.
    """

    matmul: int
    convolution: int
    samples: int

    @property
    def total(self) -> int:
        """All that was counted."""
        return self.matmul + self.convolution

    @property
    def per_sample(self) -> float:
        """The mean of the step's samples."""
        return self.total / self.samples


def count_step(options: WorkloadOptions, shape: DataShape, per_gpu_batch: int) -> StepFlops:
    """Return the FLOPs of a step; the random state of torch is left as it was."""
    # Precision changes how fast an operation is, not what it is; autocast needs the device itself.
    plain = options.model_copy(
        update={"activation_checkpointing": False, "precision": "fp32", "device": "cpu", "compile": False}
    )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        task = build_task(plain, shape)
        inputs, targets = _batch(task, shape, per_gpu_batch)
        with FlopCounterMode(display=False) as counter:
            task(inputs, targets).backward()
    counts = counter.get_flop_counts().get("Global", {})
    convolution = sum(flops for operation, flops in counts.items() if "convolution" in str(operation))
    total = sum(counts.values())
    steps = options.grad_accum
    return StepFlops((total - convolution) * steps, convolution * steps, per_gpu_batch * steps)


def _batch(task: Task, shape: DataShape, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that have shapes and types only."""
    integers, reals = torch.int64, torch.float32
    inputs = torch.empty((samples, *shape.inputs), dtype=integers if task.kind == "tokens" else reals)
    targets = torch.empty((samples, *shape.targets), dtype=reals if task.kind == "values" else integers)
    return inputs, targets


# Model FLOPs utilisation: the share of the devices' stated peak that a training step uses.
#
#     MFU = FLOPs of the step / (step time x peak FLOP/s)
#
# Source: Chowdhery et al., "PaLM", 2022, appendix B. Peaks are dense, from the vendors' datasheets
# (``peaks.toml``), for the precision in which products are computed. What computes in two precisions
# (torch lets cuDNN's convolutions use TF32 and matrix products not) has the peaks of both: the time
# that the step takes at peak is the sum over its parts.

_TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """A device's dense peak rates (FLOP/s) by precision, and where they are stated."""

    rates: Mapping[str, float]
    source: str

    def rate(self, precision: str) -> float | None:
        """Return the rate; fp32 where TF32 is allowed and the device has none; None for what it lacks."""
        if precision == "tf32" and "tf32" not in self.rates:
            precision = "fp32"
        return self.rates.get(precision)


@cache
def peaks() -> Mapping[str, Peak]:
    """Return the known devices' peaks by the name that torch gives a device."""
    content = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))
    found: dict[str, Peak] = {}
    for device in content["device"]:
        rates = {name: value * _TERA for name, value in device.items() if isinstance(value, float)}
        found |= dict.fromkeys(device["names"], Peak(rates, device["source"]))
    return found


@dataclass(frozen=True)
class Precisions:
    """In which precision matrix products and convolutions are computed: fp32, tf32, bf16 or fp16."""

    matmul: str
    convolution: str


def precisions(precision: str, env: Mapping[str, str]) -> Precisions:
    """Return what is in force in this process for a workload of that ``precision``."""
    if precision != "fp32":
        return Precisions(precision, precision)
    if env.get("NVIDIA_TF32_OVERRIDE") == "0":  # the libraries' own switch wins over torch's
        return Precisions("fp32", "fp32")
    matmul = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return Precisions(matmul, "tf32" if torch.backends.cudnn.allow_tf32 else "fp32")


@dataclass(frozen=True)
class Utilisation:
    """What MFU is computed with: ``ideal_s``, or the reason why there is none."""

    flops: StepFlops
    precisions: Precisions
    ideal_s: float | None
    reason: str | None
    peaks: Mapping[str, Peak]

    def as_json(self) -> dict[str, Any]:
        """Return what env.json says of it."""
        return {
            "per_step_and_rank": self.flops.total,
            "per_sample": self.flops.per_sample,
            "matmul": {"flops": self.flops.matmul, "precision": self.precisions.matmul},
            "convolution": {"flops": self.flops.convolution, "precision": self.precisions.convolution},
            "peaks": {
                name: {"flops_per_second": dict(peak.rates), "source": peak.source}
                for name, peak in self.peaks.items()
            },
            "mfu_empty_because": self.reason,
        }


def utilisation(
    flops: StepFlops, precise: Precisions, devices: Sequence[str | None], *, ranks: int
) -> Utilisation:
    """Return the seconds that one step of all ranks takes where every device runs at its peak.

    Args:
        flops: one rank's step.
        precise: how the products are computed.
        devices: the name of each distinct device (ranks may share one); None for a CPU.
        ranks: how many ranks compute such a step.
    """
    known = {name: peaks()[name] for name in dict.fromkeys(devices) if name is not None and name in peaks()}
    parts = [(flops.matmul, precise.matmul), (flops.convolution, precise.convolution)]
    ideal_s = 0.0
    for count, precision in parts:
        if not count:
            continue
        together = 0.0
        for name in devices:
            rate = known[name].rate(precision) if name in known else None
            if rate is None:
                return Utilisation(flops, precise, None, _why_not(name, precision), known)
            together += rate
        ideal_s += count * ranks / together
    return Utilisation(flops, precise, ideal_s, None, known)


def _why_not(name: str | None, precision: str) -> str:
    if name is None:
        return "a CPU has no stated peak"
    if name not in peaks():
        return f"the peak of {name!r} is not known: see bench/workload/peaks.toml"
    return f"no {precision} rate is stated for {name!r}"
