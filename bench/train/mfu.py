"""Model FLOPs utilisation (MFU): the share of the devices' stated peak rate that a training step reaches.

    MFU = FLOPs of the step / (step time x peak FLOP/s)

Source: Chowdhery et al., "PaLM", 2022, appendix B.

docs/measuring.md lists the counted operations. torch counts them in one step on the meta device, whose
tensors have no data, so counting takes no memory or time on the real device. ``peaks.toml`` contains the
vendors' dense rates by precision. Matrix products and convolutions can use different precisions, because by
default torch allows TF32 in cuDNN's convolutions only. The step's time at peak is the sum of the times of
both kinds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .models import DataShape
from .options import TrainOptions
from .training import build_task, zero_batch


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step on one rank, including all micro-batches.

    Convolutions are counted separately, because cuDNN has its own precision setting.
    """

    matmul: int
    convolution: int
    samples: int

    @property
    def total(self) -> int:
        """The number of all counted operations."""
        return self.matmul + self.convolution

    @property
    def per_sample(self) -> float:
        """The mean number of operations per sample."""
        return self.total / self.samples


def count_step(options: TrainOptions, shape: DataShape, per_gpu_batch: int) -> StepFlops:
    """Count the FLOPs of one step on one rank, without changing torch's random state."""
    # fp32 gives the same count as other precisions, and autocast would need the real device.
    plain = replace(options, activation_checkpointing=False, precision="fp32", device="cpu", compile=False)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        task = build_task(plain, shape)
        inputs, targets = zero_batch(task, shape, per_gpu_batch, torch.device("meta"))
        with FlopCounterMode(display=False) as counter:
            task(inputs, targets).backward()
    counts = counter.get_flop_counts().get("Global", {})
    convolution = sum(flops for operation, flops in counts.items() if "convolution" in str(operation))
    total = sum(counts.values())
    steps = options.grad_accum
    return StepFlops((total - convolution) * steps, convolution * steps, per_gpu_batch * steps)


@dataclass(frozen=True)
class Peak:
    """The dense peak rates of a device (FLOP/s) by precision, and the source of the numbers."""

    rates: Mapping[str, float]
    source: str

    def rate(self, precision: str) -> float | None:
        """Return a precision's rate, or None if unknown. On devices without TF32, tf32 has fp32's rate."""
        if precision == "tf32" and "tf32" not in self.rates:
            precision = "fp32"
        return self.rates.get(precision)


@cache
def peaks() -> Mapping[str, Peak]:
    """Return the peak rates of all known devices, by the name that torch gives the device."""
    content = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))
    found: dict[str, Peak] = {}
    for device in content["device"]:
        rates = {name: value * 1e12 for name, value in device.items() if isinstance(value, float)}
        found |= dict.fromkeys(device["names"], Peak(rates, device["source"]))
    return found


@dataclass(frozen=True)
class Precisions:
    """The precision of matrix products and of convolutions: fp32, tf32, bf16 or fp16."""

    matmul: str
    convolution: str


def precisions_in_use(precision: str, env: Mapping[str, str]) -> Precisions:
    """Return the precisions that this process uses for the option ``precision``."""
    if precision in ("bf16", "fp16"):
        return Precisions(precision, precision)
    if env.get("NVIDIA_TF32_OVERRIDE") == "0":  # takes precedence over torch's settings
        return Precisions("fp32", "fp32")
    matmul = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return Precisions(matmul, "tf32" if torch.backends.cudnn.allow_tf32 else "fp32")


@dataclass(frozen=True)
class MfuBasis:
    """The basis of MFU. ``ideal_s`` is a step's time at peak FLOP/s; if it is None, ``reason`` says why."""

    flops: StepFlops
    precisions: Precisions
    ideal_s: float | None
    reason: str | None
    peaks: Mapping[str, Peak]

    def as_json(self) -> dict[str, Any]:
        """Return the value of ``flops`` in env.json."""
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


def mfu_basis(
    flops: StepFlops, precise: Precisions, devices: Sequence[str | None], *, ranks: int
) -> MfuBasis:
    """Compute the time of a step if every device ran at its stated peak, as the basis of MFU.

    ``devices`` are the names of the distinct devices (ranks may share one), or None for a CPU.
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
                return MfuBasis(flops, precise, None, _no_peak_reason(name, precision), known)
            together += rate
        ideal_s += count * ranks / together
    return MfuBasis(flops, precise, ideal_s, None, known)


def _no_peak_reason(name: str | None, precision: str) -> str:
    if name is None:
        return "no peak rate is known for CPUs"
    if name not in peaks():
        return f"the peak of {name!r} is not known: see bench/train/peaks.toml"
    return f"no {precision} peak rate is known for {name!r}"
