"""Scaling laws: the time per step as a function of the ranks, with parameters that mean something.

With N ranks and T the time per step (per global batch):

==============  =======================================  =====================================
law             strong scaling (global batch constant)   weak scaling (batch per rank constant)
==============  =======================================  =====================================
ideal           T = T₁/N                                 T = T₁
Amdahl          T = T₁ (s + (1−s)/N)
Gustafson                                                T = T₁ N/(N − s(N−1))
USL             T = T₁ (1 + σ(N−1) + κN(N−1))/N          T = T₁ (1 + σ(N−1) + κN(N−1))
ring            the same curve as USL                    T = c + a(N−1) + b(N−1)/N
ring, overlap   T = C + max(0, R − ωC), C = c + w/N      T = c + max(0, R − h)
tree            T = c + w/N + a log₂N                    T = c + a log₂N
probed          T = C + max(t_last, t_all − ωC)          the same, C constant
==============  =======================================  =====================================

Sources: G. M. Amdahl 1967; J. L. Gustafson 1988; N. J. Gunther, *Guerrilla Capacity Planning*,
2007 (the universal scalability law); the ring's 2(N−1)α + 2(N−1)/N·nβ after Patarasuk and Yuan,
J. Parallel Distrib. Comput. 69, 2009. R = a(N−1) + b(N−1)/N is the ring with what the step
times alone can tell of it. In strong scaling the ring's curve without overlap,
c + w/N + a(N−1) + b(N−1)/N, has three free terms (1, 1/N, N), as USL has: one stands for both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from analysis.stats.estimate import Floats
from analysis.stats.laws.communication import (
    FIXED,
    OVERLAP,
    WORK,
    Fabric,
    Law,
    Parameter,
    communication_laws,
    constant,
    linear_fit,
    linear_law,
    with_each,
)

_TINY = 1e-300

_T1 = Parameter("T₁", "time per step on one rank", "s")
_LATENCY = Parameter("a", "communication that grows with every further rank", "s")
_BYTES = Parameter("b", "communication bound by bandwidth, at many ranks", "s")


def laws_of(mode: str, *, fabric: Fabric | None = None) -> list[Law]:
    """Return the laws that apply to ``strong`` or ``weak`` scaling, the simplest first."""
    laws = _STRONG if mode == "strong" else _WEAK
    return [*laws, *(communication_laws(mode, fabric) if fabric else ())]


def with_crossing(law: Law, *, largest_within: int) -> Law:
    """Return the law with a term for what leaving the node adds to every step.

    Args:
        law: one without it.
        largest_within: the largest number of ranks within one node.
    """
    added = Parameter("d", "added to every step as soon as it leaves the node", "s")

    def curve(theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(law.curve(theta[:-1], ranks) + theta[-1] * (ranks > largest_within))

    def start(ranks: Floats, times: Floats) -> Floats:
        across = ranks > largest_within
        starts = np.atleast_2d(law.start(ranks, times))
        return np.array(
            [[*theta, float(np.mean((times - law.curve(theta, ranks))[across]))] for theta in starts]
        )

    formula = f"{law.formula} + d beyond one node"
    return Law(law.name, f"{law.title} + leaving the node", formula, (*law.parameters, added), curve, start)


def _positive(value: float, times: Floats) -> float:
    return float(max(value, 1e-6 * float(np.min(times))))


def _scaled_start(*terms: Callable[[Floats], Floats]) -> Callable[[Floats, Floats], Floats]:
    """Return a start for T₁ and parameters that are shares of it."""

    def start(ranks: Floats, times: Floats) -> Floats:
        found = linear_fit(ranks, times, *terms)
        first = _positive(found[0], times)
        return np.concatenate([[first], found[1:] / first])

    return start


def _amdahl_start(ranks: Floats, times: Floats) -> Floats:
    shared, fixed = linear_fit(ranks, times, lambda n: 1 / n, constant)
    return np.array([_positive(shared + fixed, times), fixed / _positive(shared + fixed, times)])


def _gustafson_start(ranks: Floats, times: Floats) -> Floats:
    # 1/T is linear in (N-1)/N.
    rate, loss = np.linalg.lstsq(
        np.stack([constant(ranks), -(ranks - 1) / ranks], axis=1) * times[:, None],
        constant(times),
        rcond=None,
    )[0]
    rate = max(float(rate), _TINY)
    return np.array([1 / rate, loss / rate])


_SERIAL = Parameter("s", "serial share", "", 0.0, 1.0)
_CONTENTION = Parameter("σ", "contention: what is done one rank after another")
_COHERENCE = Parameter("κ", "coherence: what every pair of ranks costs")

_STRONG: tuple[Law, ...] = (
    linear_law("ideal", "Ideal", "T = T₁/N", (_T1,), (lambda n: 1 / n,)),
    Law(
        "amdahl",
        "Amdahl",
        "T = T₁(s + (1−s)/N)",
        (_T1, _SERIAL),
        lambda p, n: p[0] * (p[1] + (1 - p[1]) / n),
        _amdahl_start,
    ),
    linear_law(
        "tree",
        "Tree all-reduce",
        "T = c + w/N + a·log₂N",
        (FIXED, WORK, Parameter("a", "communication that every doubling adds", "s")),
        (constant, lambda n: 1 / n, np.log2),
    ),
    Law(
        "usl",
        "USL (and ring all-reduce)",
        "T = T₁(1 + σ(N−1) + κN(N−1))/N",
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)) / n,
        _scaled_start(lambda n: 1 / n, lambda n: (n - 1) / n, lambda n: n - 1),
    ),
    Law(
        "ring-overlap",
        "Ring all-reduce, partly hidden",
        "T = C + max(0, a(N−1) + b(N−1)/N − ωC), C = c + w/N",
        (FIXED, WORK, _LATENCY, _BYTES, OVERLAP),
        lambda p, n: (c := p[0] + p[1] / n) + np.maximum(0.0, p[2] * (n - 1) + p[3] * (n - 1) / n - p[4] * c),
        lambda n, t: with_each(
            np.abs(linear_fit(n, t, constant, lambda n: 1 / n, lambda n: n - 1, lambda n: (n - 1) / n)),
            (0.1, 0.5, 0.9),
        ),
    ),
)

_WEAK: tuple[Law, ...] = (
    linear_law("ideal", "Ideal", "T = T₁", (_T1,), (constant,)),
    Law(
        "gustafson",
        "Gustafson",
        "T = T₁·N/(N − s(N−1))",
        (_T1, _SERIAL),
        lambda p, n: p[0] / np.maximum(1 - p[1] * (n - 1) / n, 1e-9),
        _gustafson_start,
    ),
    linear_law(
        "tree",
        "Tree all-reduce",
        "T = c + a·log₂N",
        (FIXED, Parameter("a", "communication that every doubling adds", "s")),
        (constant, np.log2),
    ),
    linear_law(
        "ring-bandwidth",
        "Ring all-reduce, bandwidth",
        "T = c + b(N−1)/N",
        (FIXED, _BYTES),
        (constant, lambda n: (n - 1) / n),
    ),
    linear_law(
        "ring-latency",
        "Ring all-reduce, latency",
        "T = c + a(N−1)",
        (FIXED, _LATENCY),
        (constant, lambda n: n - 1),
    ),
    linear_law(
        "ring",
        "Ring all-reduce",
        "T = c + a(N−1) + b(N−1)/N",
        (FIXED, _LATENCY, _BYTES),
        (constant, lambda n: n - 1, lambda n: (n - 1) / n),
    ),
    Law(
        "usl",
        "USL",
        "T = T₁(1 + σ(N−1) + κN(N−1))",
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)),
        _scaled_start(constant, lambda n: n - 1, lambda n: n * (n - 1)),
    ),
    Law(
        "ring-overlap",
        "Ring all-reduce, partly hidden",
        "T = c + max(0, a(N−1) + b(N−1)/N − h)",
        (FIXED, _LATENCY, _BYTES, Parameter("h", "communication that computation hides", "s")),
        lambda p, n: p[0] + np.maximum(0.0, p[1] * (n - 1) + p[2] * (n - 1) / n - p[3]),
        lambda n, t: np.append(
            np.abs(linear_fit(n, t, constant, lambda n: n - 1, lambda n: (n - 1) / n)), 0.0
        ),
    ),
)
