"""Scaling laws: the time per step as a function of the ranks, with meaningful parameters.

With N ranks and T the time per step (per global batch):

===================  =======================================  =====================================
law                  strong scaling (global batch constant)   weak scaling (batch per rank constant)
===================  =======================================  =====================================
Amdahl               T = T₁ (s + (1−s)/N)
USL                  T = T₁ (1 + σ(N−1) + κN(N−1))/N          T = T₁ (1 + σ(N−1) + κN(N−1))
ring                 the same curve as USL                    T = c + a(N−1) + b(N−1)/N
power law            T = T₁ N^(−p)                            T = T₁ N^p
communication model  T = C + max(t_last, t_all − ωC)          the same, C constant
===================  =======================================  =====================================

Sources: G. M. Amdahl 1967; N. J. Gunther, *Guerrilla Capacity Planning*, 2007 (the universal scalability
law); the ring's 2(N−1)α + 2(N−1)/N·nβ after Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009. The
other letters are the parameters that the fit determines; each ``Parameter`` explains one. C = c + w/N is the
computation of a step. t_all and t_last are the measured times of the all-reduces of all buckets and of the
last bucket (:class:`Fabric`). For strong scaling, the ring's curve w/N + a(N−1) + b(N−1)/N is that of USL
with w = T₁, a = κT₁ and b = σT₁, so one law represents both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.stats.estimate import Floats


@dataclass(frozen=True)
class Parameter:
    """One parameter of a law.

    Attributes:
        name: its letter.
        meaning: shown on the page.
        unit: ``s``, or empty for a number.
        starts: starting values of a fit; seconds are multiples of the time at the smallest size.
        low, high: its bounds.
    """

    name: str
    meaning: str
    unit: str
    starts: tuple[float, ...]
    low: float = 0.0
    high: float = np.inf


@dataclass(frozen=True)
class Law:
    """A curve with parameters.

    Attributes:
        name: short, unique within a mode.
        title: name on the page.
        formula: T(N), as text.
        parameters: in the order of the vector that ``curve`` takes.
        curve: seconds per step, from the parameters and the ranks (float array).
    """

    name: str
    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    curve: Callable[[Floats, Floats], Floats]


@dataclass(frozen=True)
class Fabric:
    """The all-reduce of one step, as the probes measured it.

    Attributes:
        alpha_s: latency of one ring step, seconds.
        beta_s_per_byte: inverse bandwidth of one ring step, seconds per byte.
        payload_bytes: size of the gradients of one training step, over all buckets.
        last_bucket_bytes: size of the bucket that is ready last; no computation is left to hide its
            all-reduce.
        buckets: number of all-reduces per step.
    """

    alpha_s: float
    beta_s_per_byte: float
    payload_bytes: float
    last_bucket_bytes: float
    buckets: int = 1

    def all_reduce_s(self, ranks: Floats) -> Floats:
        """Return the seconds that the all-reduces of all buckets of a step take, one after another."""
        return self._ring(ranks, self.payload_bytes, self.buckets)

    def last_bucket_s(self, ranks: Floats) -> Floats:
        """Return the seconds that the all-reduce of the last bucket takes."""
        return self._ring(ranks, self.last_bucket_bytes, 1)

    def _ring(self, ranks: Floats, size: float, times: int) -> Floats:
        latency = 2 * (ranks - 1) * self.alpha_s * times
        return np.asarray(latency + 2 * (ranks - 1) / ranks * size * self.beta_s_per_byte)


def laws_of(mode: str, *, fabric: Fabric | None = None, largest_within: int = 0) -> list[Law]:
    """Return the laws for ``strong`` or ``weak`` scaling.

    ``fabric`` is the measured all-reduce; if given, the communication model is added. With
    ``largest_within`` (ranks of the largest size within one node), each law has a term for leaving the node.
    """
    strong = mode == "strong"
    laws = [
        *(_STRONG if strong else _WEAK),
        *([_communication_model(fabric, strong=strong)] if fabric else []),
    ]
    return [_with_crossing(law, largest_within) for law in laws] if largest_within else laws


def _with_crossing(law: Law, largest_within: int) -> Law:
    def curve(theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(law.curve(theta[:-1], ranks) + theta[-1] * (ranks > largest_within))

    title, formula = f"{law.title} + leaving the node", f"{law.formula} + d beyond one node"
    return Law(law.name, title, formula, (*law.parameters, _CROSSING), curve)


def _communication_model(fabric: Fabric, *, strong: bool) -> Law:
    def curve(theta: Floats, ranks: Floats) -> Floats:
        compute_s = theta[0] + (theta[1] / ranks if strong else 0 * ranks)
        exposed_s = fabric.all_reduce_s(ranks) - theta[-1] * compute_s
        return np.asarray(compute_s + np.maximum(fabric.last_bucket_s(ranks), exposed_s))

    formula = f"T = C + max(t_last, t_all − ωC), C = {'c + w/N' if strong else 'c'}"
    parameters = (_FIXED, _WORK, _OVERLAP) if strong else (_FIXED, _OVERLAP)
    return Law("probed", "Communication model", formula, parameters, curve)


_T1 = Parameter("T₁", "time per step on one rank", "s", (1.0,))
_FIXED = Parameter("c", "part of the step that stays the same at every size", "s", (0.02,))
_WORK = Parameter("w", "part of the step that is divided among the ranks, as time on one rank", "s", (1.0,))
_LATENCY = Parameter("a", "communication added by each further rank", "s", (0.01,))
_BYTES = Parameter("b", "bandwidth-bound communication, limit for many ranks", "s", (0.1,))
_CROSSING = Parameter("d", "added to every step over several nodes", "s", (0.01,))
_OVERLAP = Parameter("ω", "share of the computation that hides communication", "", (0.1, 0.5, 0.9), high=1.0)
_SERIAL = Parameter("s", "serial share", "", (0.05,), high=1.0)
_CONTENTION = Parameter("σ", "contention: work that ranks do one after another", "", (0.05,))
_COHERENCE = Parameter("κ", "coherence: cost of every pair of ranks", "", (0.001,))
_SPEEDUP_POWER = Parameter("p", "exponent of the speedup; 1 is ideal", "", (0.9,), high=2.0)
_LOSS_POWER = Parameter("p", "exponent of the time per step; 0 is ideal", "", (0.1,), low=-1.0, high=1.0)

_STRONG = (
    Law(
        *("amdahl", "Amdahl", "T = T₁(s + (1−s)/N)"),
        (_T1, _SERIAL),
        lambda p, n: p[0] * (p[1] + (1 - p[1]) / n),
    ),
    Law(
        *("usl", "USL (and ring all-reduce)", "T = T₁(1 + σ(N−1) + κN(N−1))/N"),
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)) / n,
    ),
    Law("power", "Power law", "T = T₁·N^(−p)", (_T1, _SPEEDUP_POWER), lambda p, n: p[0] * n ** -p[1]),
)
_WEAK = (
    Law(
        *("usl", "USL", "T = T₁(1 + σ(N−1) + κN(N−1))"),
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)),
    ),
    Law(
        *("ring", "Ring all-reduce", "T = c + a(N−1) + b(N−1)/N"),
        (_FIXED, _LATENCY, _BYTES),
        lambda p, n: p[0] + p[1] * (n - 1) + p[2] * (n - 1) / n,
    ),
    Law("power", "Power law", "T = T₁·N^p", (_T1, _LOSS_POWER), lambda p, n: p[0] * n ** p[1]),
)
