"""Scaling laws: the time per step as a function of the ranks, with meaningful parameters.

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
J. Parallel Distrib. Comput. 69, 2009. The other letters are the parameters that the fit determines; each
``Parameter`` explains one. C is the computation of a step, R = a(N−1) + b(N−1)/N the part of the ring that
step times alone can identify. t_all and t_last are the measured times of the all-reduces of all buckets and
of the last bucket (:class:`Fabric`). For strong scaling, the ring's curve without overlap,
c + w/N + a(N−1) + b(N−1)/N, has the same three free terms (1, 1/N, N) as USL, so one law represents both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.estimate import Floats

_TINY = 1e-300

#: A term of a law: a function of the ranks.
Term = Callable[[Floats], Floats]
#: A function of parameters and ranks (``Law.curve``), or of ranks and times (``Law.start``).
Curve = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True)
class Parameter:
    """One parameter: its meaning, its unit (empty for a number), and its bounds."""

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
        title: name on the page.
        formula: T(N), as text.
        parameters: in the order of the vector that ``curve`` takes.
        curve: seconds per step, from the parameters and the ranks (float array).
        start: starting parameters of a fit, from ranks and times; the parameters may exceed their bounds. For
            a curve with a kink, the result has one row for each of several starting points.
    """

    name: str
    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    curve: Curve
    start: Curve


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


def laws_of(mode: str, *, fabric: Fabric | None = None) -> list[Law]:
    """Return the laws for ``strong`` or ``weak`` scaling, the simplest first.

    ``fabric`` is the measured all-reduce; if given, the communication model is added.
    """
    laws = _STRONG if mode == "strong" else _WEAK
    return [*laws, *(_communication_laws(mode, fabric) if fabric else ())]


def with_crossing(law: Law, *, largest_within: int) -> Law:
    """Return the law with a term for the cost of leaving the node."""
    added = Parameter("d", "added to every step over several nodes", "s")

    def curve(theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(law.curve(theta[:-1], ranks) + theta[-1] * (ranks > largest_within))

    def start(ranks: Floats, times: Floats) -> Floats:
        across = ranks > largest_within
        starts = np.atleast_2d(law.start(ranks, times))
        costs = [float(np.mean((times - law.curve(theta, ranks))[across])) for theta in starts]
        return np.column_stack([starts, costs])

    formula = f"{law.formula} + d beyond one node"
    return Law(law.name, f"{law.title} + leaving the node", formula, (*law.parameters, added), curve, start)


def _one(ranks: Floats) -> Floats:
    return np.ones_like(ranks)


def _inverse(ranks: Floats) -> Floats:
    return np.asarray(1 / ranks)


def _others(ranks: Floats) -> Floats:
    return np.asarray(ranks - 1)


def _share_of_others(ranks: Floats) -> Floats:
    return np.asarray((ranks - 1) / ranks)


def _linear_fit(ranks: Floats, times: Floats, *terms: Term) -> Floats:
    """Return the coefficients of ``terms`` whose sum fits ``times``: least squares of the relative error."""
    design = np.stack([term(ranks) for term in terms], axis=1) / times[:, None]
    return np.asarray(np.linalg.lstsq(design, np.ones_like(times), rcond=None)[0], dtype=float)


def _linear_law(
    name: str, title: str, formula: str, parameters: tuple[Parameter, ...], terms: tuple[Term, ...]
) -> Law:
    """Return a law that is a sum of terms with one coefficient each."""

    def curve(theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(sum(c * term(ranks) for c, term in zip(theta, terms, strict=True)))

    return Law(name, title, formula, parameters, curve, lambda n, t: _linear_fit(n, t, *terms))


def _with_last(theta: Floats, last: Sequence[float]) -> Floats:
    """Return one row of parameters for each value of the last parameter."""
    return np.array([[*theta, value] for value in last])


def _positive(value: float, times: Floats) -> float:
    return float(max(value, 1e-6 * float(np.min(times))))


def _scaled_start(*terms: Term) -> Curve:
    """Return the ``start`` of a law whose parameters are T₁ (time on one rank) and multiples of T₁."""

    def start(ranks: Floats, times: Floats) -> Floats:
        found = _linear_fit(ranks, times, *terms)
        first = _positive(found[0], times)
        return np.concatenate([[first], found[1:] / first])

    return start


def _amdahl_start(ranks: Floats, times: Floats) -> Floats:
    shared, fixed = _linear_fit(ranks, times, _inverse, _one)
    first = _positive(shared + fixed, times)
    return np.array([first, fixed / first])


def _gustafson_start(ranks: Floats, times: Floats) -> Floats:
    # 1/T is linear in (N-1)/N.
    design = np.stack([_one(ranks), -_share_of_others(ranks)], axis=1) * times[:, None]
    rate, loss = np.linalg.lstsq(design, _one(times), rcond=None)[0]
    rate = max(float(rate), _TINY)
    return np.array([1 / rate, loss / rate])


_T1 = Parameter("T₁", "time per step on one rank", "s")
_FIXED = Parameter("c", "part of the step that stays the same at every size", "s")
_WORK = Parameter("w", "part of the step that is divided among the ranks, as time on one rank", "s")
_DOUBLING = Parameter("a", "communication added by each doubling of the ranks", "s")
_LATENCY = Parameter("a", "communication added by each further rank", "s")
_BYTES = Parameter("b", "bandwidth-bound communication, limit for many ranks", "s")
_HIDDEN = Parameter("h", "communication that computation hides", "s")
_OVERLAP = Parameter("ω", "share of the computation that hides communication", "", 0.0, 1.0)
_SERIAL = Parameter("s", "serial share", "", 0.0, 1.0)
_CONTENTION = Parameter("σ", "contention: work that ranks do one after another")
_COHERENCE = Parameter("κ", "coherence: cost of every pair of ranks")
_OVERLAP_STARTS = (0.1, 0.5, 0.9)

_STRONG: tuple[Law, ...] = (
    _linear_law("ideal", "Ideal", "T = T₁/N", (_T1,), (_inverse,)),
    Law(
        *("amdahl", "Amdahl", "T = T₁(s + (1−s)/N)"),
        (_T1, _SERIAL),
        lambda p, n: p[0] * (p[1] + (1 - p[1]) / n),
        _amdahl_start,
    ),
    _linear_law(
        *("tree", "Tree all-reduce", "T = c + w/N + a·log₂N"),
        (_FIXED, _WORK, _DOUBLING),
        (_one, _inverse, np.log2),
    ),
    Law(
        *("usl", "USL (and ring all-reduce)", "T = T₁(1 + σ(N−1) + κN(N−1))/N"),
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)) / n,
        _scaled_start(_inverse, _share_of_others, _others),
    ),
    Law(
        *(
            "ring-overlap",
            "Ring all-reduce, partly hidden",
            "T = C + max(0, a(N−1) + b(N−1)/N − ωC), C = c + w/N",
        ),
        (_FIXED, _WORK, _LATENCY, _BYTES, _OVERLAP),
        lambda p, n: (c := p[0] + p[1] / n) + np.maximum(0.0, p[2] * (n - 1) + p[3] * (n - 1) / n - p[4] * c),
        lambda n, t: _with_last(
            np.abs(_linear_fit(n, t, _one, _inverse, _others, _share_of_others)), _OVERLAP_STARTS
        ),
    ),
)

_WEAK: tuple[Law, ...] = (
    _linear_law("ideal", "Ideal", "T = T₁", (_T1,), (_one,)),
    Law(
        *("gustafson", "Gustafson", "T = T₁·N/(N − s(N−1))"),
        (_T1, _SERIAL),
        lambda p, n: p[0] / np.maximum(1 - p[1] * (n - 1) / n, 1e-9),
        _gustafson_start,
    ),
    _linear_law(*("tree", "Tree all-reduce", "T = c + a·log₂N"), (_FIXED, _DOUBLING), (_one, np.log2)),
    _linear_law(
        *("ring-bandwidth", "Ring all-reduce, bandwidth", "T = c + b(N−1)/N"),
        (_FIXED, _BYTES),
        (_one, _share_of_others),
    ),
    _linear_law(
        *("ring-latency", "Ring all-reduce, latency", "T = c + a(N−1)"), (_FIXED, _LATENCY), (_one, _others)
    ),
    _linear_law(
        *("ring", "Ring all-reduce", "T = c + a(N−1) + b(N−1)/N"),
        (_FIXED, _LATENCY, _BYTES),
        (_one, _others, _share_of_others),
    ),
    Law(
        *("usl", "USL", "T = T₁(1 + σ(N−1) + κN(N−1))"),
        (_T1, _CONTENTION, _COHERENCE),
        lambda p, n: p[0] * (1 + p[1] * (n - 1) + p[2] * n * (n - 1)),
        _scaled_start(_one, _others, lambda n: n * (n - 1)),
    ),
    Law(
        *("ring-overlap", "Ring all-reduce, partly hidden", "T = c + max(0, a(N−1) + b(N−1)/N − h)"),
        (_FIXED, _LATENCY, _BYTES, _HIDDEN),
        lambda p, n: p[0] + np.maximum(0.0, p[1] * (n - 1) + p[2] * (n - 1) / n - p[3]),
        lambda n, t: np.append(np.abs(_linear_fit(n, t, _one, _others, _share_of_others)), 0.0),
    ),
)


@dataclass(frozen=True)
class _ProbedStep:
    """A step: C seconds of computation (c + w/N in strong scaling, c in weak scaling) and an all-reduce."""

    fabric: Fabric
    strong: bool

    def compute_s(self, theta: Floats, ranks: Floats) -> Floats:
        return np.asarray(theta[0] + theta[1] / ranks if self.strong else theta[0] * _one(ranks))

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
        return np.abs(_linear_fit(ranks, rest, *((_one, _inverse) if self.strong else (_one,))))

    def starts(self, ranks: Floats, times: Floats) -> Floats:
        return _with_last(self.start(ranks, times), _OVERLAP_STARTS)


def _communication_laws(mode: str, fabric: Fabric) -> tuple[Law, ...]:
    """Return the model's three forms: computation hides all buckets but the last, none, or up to ωC s."""
    step = _ProbedStep(fabric, mode == "strong")
    work = (_FIXED, _WORK) if step.strong else (_FIXED,)
    compute = "C = c + w/N" if step.strong else "C = c"
    name = "Communication model"
    forms = (
        ("probed-hidden", f"{name}, all hidden but the last bucket", "t_last", work, step.hidden, step.start),
        ("probed-exposed", f"{name}, nothing hidden", "t_all", work, step.exposed, step.start),
        ("probed", name, "max(t_last, t_all − ωC)", (*work, _OVERLAP), step.partly_hidden, step.starts),
    )
    return tuple(
        Law(short, title, f"T = C + {term}, {compute}", parameters, curve, start)
        for short, title, term, parameters, curve, start in forms
    )
