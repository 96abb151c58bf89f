"""Model FLOPs utilisation (MFU): the share of the devices' stated peak rate that a training step reaches.

    MFU = FLOPs of the step / (step time x peak FLOP/s)

Source: Chowdhery et al., "PaLM", 2022, appendix B.

docs/measuring.md lists the counted operations. torch counts them in one step on the meta device, whose
tensors have no data, so counting takes no memory or time on the real device. ``peaks.csv`` contains the
vendors' dense rates by precision. Matrix products and convolutions can use different precisions, because by
default torch allows TF32 in cuDNN's convolutions only. The step's time at peak is the sum of the times of
both kinds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from .models import DataShape
from .options import TrainOptions
from .training import build_task, zero_batch


class StepFlops(NamedTuple):
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
    steps, matmul = options.grad_accum, sum(counts.values()) - convolution
    return StepFlops(matmul * steps, convolution * steps, per_gpu_batch * steps)


class Peak(NamedTuple):
    """The dense peak rates of a device (FLOP/s) by precision, and the source of the numbers."""

    rates: Mapping[str, float]
    source: str


@cache
def peaks() -> Mapping[str, Peak]:
    """Return the peak rates of all known devices, by the name that torch gives the device.

    Each line of ``peaks.csv`` contains complete names from ``torch.cuda.get_device_name``, dense rates in
    TFLOP/s (half of the rates that a datasheet states with structured sparsity), and their source. The rate
    of a precision is empty if the device does not support it. A slice of a device (MIG) has another name.
    Tensor-core rates assume 32-bit accumulation, as in training, which on GeForce devices halves the
    advertised rate. MI200 entries describe one of the two dies. ``fp32`` is the rate without tensor cores on
    NVIDIA devices, and on AMD devices that of the matrix cores, which compute in full fp32.
    """
    found: dict[str, Peak] = {}
    with (files(__package__) / "peaks.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names, source = row.pop("names").split("; "), row.pop("source")
            rates = {precision: float(rate) * 1e12 for precision, rate in row.items() if rate}
            found |= dict.fromkeys(names, Peak(rates, source))
    return found


class Precisions(NamedTuple):
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


def mfu_basis(
    flops: StepFlops, precise: Precisions, devices: Sequence[str | None], *, ranks: int
) -> tuple[float | None, dict[str, Any]]:
    """Return the time of a step (s) if every device ran at its stated peak, and ``flops`` of env.json.

    The time is None if it is not known; ``flops`` then has the reason. ``devices`` are the names of the
    distinct devices (ranks may share one), or None for a CPU.
    """
    known = {name: peaks()[name] for name in devices if name is not None and name in peaks()}
    ideal_s, reason = 0.0, None
    for count, precision in zip(flops[:2], precise, strict=True):
        rates = [_rate(known.get(name or ""), precision) for name in devices] if count else []
        if None in rates:
            name = devices[rates.index(None)]
            reason = f"no {precision} peak rate is known for {name!r}"
            if name is None:
                reason = "no peak rate is known for CPUs"
            elif name not in known:
                reason = f"the peak of {name!r} is not known: see ddp_scaling_bench/train/peaks.csv"
            break
        if count:
            ideal_s += count * ranks / math.fsum(rate for rate in rates if rate)
    return None if reason else ideal_s, {
        "per_step_and_rank": flops.total,
        "per_sample": flops.total / flops.samples,
        "matmul": {"flops": flops.matmul, "precision": precise.matmul},
        "convolution": {"flops": flops.convolution, "precision": precise.convolution},
        "peaks": {
            name: {"flops_per_second": dict(peak.rates), "source": peak.source}
            for name, peak in known.items()
        },
        "mfu_empty_because": reason,
    }


def _rate(peak: Peak | None, precision: str) -> float | None:
    """Return a precision's rate, or None if unknown. On devices without TF32, tf32 has fp32's rate."""
    rates = peak.rates if peak else {}
    return rates.get("fp32" if precision == "tf32" and "tf32" not in rates else precision)
