"""What scaling laws are made of: curves with parameters that mean something, and where a fit starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.estimate import Floats


@dataclass(frozen=True)
class Parameter:
    """One parameter: what it means, its unit (empty for a number), and its bounds."""

    name: str
    meaning: str
    unit: str = ""
    low: float = 0.0
    high: float = np.inf


@dataclass(frozen=True)
class Law:
    """A curve with parameters.

    Attributes:
        name: short, unique within a mode.
        title: as people call it.
        formula: T(N), in words of the page.
        parameters: in the order of the vector that ``curve`` takes.
        curve: seconds per step, from the parameters and the ranks (float array).
        start: parameters to start the fit from, of ranks and times; need not be feasible. A curve
            with a kink has several starts, one per row.
    """

    name: str
    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    curve: Callable[[Floats, Floats], Floats]
    start: Callable[[Floats, Floats], Floats]


FIXED = Parameter("c", "part of the step that stays the same at every size", "s")
WORK = Parameter("w", "part of the step that is divided among the ranks, on one of them", "s")
OVERLAP = Parameter("ω", "communication that computation hides, as a share of it", "", 0.0, 1.0)


def constant(ranks: Floats) -> Floats:
    """Return the term that is the same at every size: 1."""
    return np.ones_like(ranks)


def linear_fit(ranks: Floats, times: Floats, *terms: Callable[[Floats], Floats]) -> Floats:
    """Return the coefficients of the terms, by least squares of the relative error."""
    design = np.stack([term(ranks) for term in terms], axis=1) / times[:, None]
    return np.asarray(np.linalg.lstsq(design, np.ones_like(times), rcond=None)[0], dtype=float)


def with_each(theta: Floats, last: Sequence[float]) -> Floats:
    """Return one row per value of the last parameter, after the others."""
    return np.array([[*theta, value] for value in last])


def linear_law(
    name: str,
    title: str,
    formula: str,
    parameters: tuple[Parameter, ...],
    terms: tuple[Callable[[Floats], Floats], ...],
) -> Law:
    """Return a law that is a sum of terms, each with its own coefficient."""

    def curve(theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(sum(c * term(ranks) for c, term in zip(theta, terms, strict=True)))

    return Law(name, title, formula, parameters, curve, lambda n, t: linear_fit(n, t, *terms))


# The communication model: a step's computation and the all-reduce of its gradients as it was probed.


@dataclass(frozen=True)
class Fabric:
    """The all-reduce as the probes measured it.

    Attributes:
        alpha_s: latency of one ring step, seconds.
        beta_s_per_byte: inverse bandwidth of one ring step.
        payload_bytes: gradients of one step, all buckets.
        last_bucket_bytes: the bucket that is ready last, which no computation can hide.
        buckets: how many all-reduces a step has.
    """

    alpha_s: float
    beta_s_per_byte: float
    payload_bytes: float
    last_bucket_bytes: float
    buckets: int = 1

    def all_reduce_s(self, ranks: Floats) -> Floats:
        """Return the seconds that all of a step's buckets take, one after another."""
        return self._ring(ranks, self.payload_bytes, self.buckets)

    def last_bucket_s(self, ranks: Floats) -> Floats:
        """Return the seconds that the last bucket takes."""
        return self._ring(ranks, self.last_bucket_bytes, 1)

    def _ring(self, ranks: Floats, size: float, times: int) -> Floats:
        latency = 2 * (ranks - 1) * self.alpha_s * times
        return np.asarray(latency + 2 * (ranks - 1) / ranks * size * self.beta_s_per_byte)


@dataclass(frozen=True)
class _Step:
    """A step of C seconds of computation, c + w/N (strong scaling) or c (weak), and its all-reduce."""

    fabric: Fabric
    strong: bool

    def compute_s(self, theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(theta[0] + theta[1] / ranks if self.strong else theta[0] * constant(ranks))

    def hidden(self, theta: Floats, ranks: Floats) -> Floats:
        return self.compute_s(theta, ranks) + self.fabric.last_bucket_s(ranks)

    def exposed(self, theta: Floats, ranks: Floats) -> Floats:
        return self.compute_s(theta, ranks) + self.fabric.all_reduce_s(ranks)

    def partly_hidden(self, theta: Floats, ranks: Floats) -> Floats:
        own_s = self.compute_s(theta[:-1], ranks)
        beyond_s = self.fabric.all_reduce_s(ranks) - theta[-1] * own_s
        return np.asarray(own_s + np.maximum(self.fabric.last_bucket_s(ranks), beyond_s))

    def start(self, ranks: Floats, times: Floats) -> Floats:
        rest = np.maximum(times - self.fabric.last_bucket_s(ranks), 1e-3 * times)
        terms = (constant, lambda n: 1 / n) if self.strong else (constant,)
        return np.abs(linear_fit(ranks, rest, *terms))

    def starts(self, ranks: Floats, times: Floats) -> Floats:
        return with_each(self.start(ranks, times), (0.1, 0.5, 0.9))


def communication_laws(mode: str, fabric: Fabric) -> tuple[Law, ...]:
    """Return the model with all but the last bucket hidden, with nothing hidden, and with ωC hidden."""
    step = _Step(fabric, mode == "strong")
    work = (FIXED, WORK) if step.strong else (FIXED,)
    told = "C = c + w/N" if step.strong else "C = c"
    name = "Communication model"
    hidden, partly = f"T = C + t_last, {told}", f"T = C + max(t_last, t_all − ωC), {told}"
    return (
        Law(
            "probed-hidden", f"{name}, hidden but for the last bucket", hidden, work, step.hidden, step.start
        ),
        Law(
            "probed-exposed",
            f"{name}, nothing hidden",
            f"T = C + t_all, {told}",
            work,
            step.exposed,
            step.start,
        ),
        Law("probed", name, partly, (*work, OVERLAP), step.partly_hidden, step.starts),
    )


# Scaling laws: the time per step as a function of the ranks, with parameters that mean something.
#
# With N ranks and T the time per step (per global batch):
#
# ==============  =======================================  =====================================
# law             strong scaling (global batch constant)   weak scaling (batch per rank constant)
# ==============  =======================================  =====================================
# ideal           T = T₁/N                                 T = T₁
# Amdahl          T = T₁ (s + (1−s)/N)
# Gustafson                                                T = T₁ N/(N − s(N−1))
# USL             T = T₁ (1 + σ(N−1) + κN(N−1))/N          T = T₁ (1 + σ(N−1) + κN(N−1))
# ring            the same curve as USL                    T = c + a(N−1) + b(N−1)/N
# ring, overlap   T = C + max(0, R − ωC), C = c + w/N      T = c + max(0, R − h)
# tree            T = c + w/N + a log₂N                    T = c + a log₂N
# probed          T = C + max(t_last, t_all − ωC)          the same, C constant
# ==============  =======================================  =====================================
#
# Sources: G. M. Amdahl 1967; J. L. Gustafson 1988; N. J. Gunther, *Guerrilla Capacity Planning*,
# 2007 (the universal scalability law); the ring's 2(N−1)α + 2(N−1)/N·nβ after Patarasuk and Yuan,
# J. Parallel Distrib. Comput. 69, 2009. R = a(N−1) + b(N−1)/N is the ring with what the step
# times alone can tell of it. In strong scaling the ring's curve without overlap,
# c + w/N + a(N−1) + b(N−1)/N, has three free terms (1, 1/N, N), as USL has: one stands for both.

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
