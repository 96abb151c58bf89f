"""Model FLOPs utilisation: the share of the devices' stated peak that a training step uses.

    MFU = FLOPs of the step / (step time x peak FLOP/s)

Source: Chowdhery et al., "PaLM", 2022, appendix B. Peaks are dense, from the vendors' datasheets
(``peaks.toml``), for the precision in which products are computed. What computes in two precisions
(torch lets cuDNN's convolutions use TF32 and matrix products not) has the peaks of both: the time
that the step takes at peak is the sum over its parts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.workload.flops import StepFlops

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
