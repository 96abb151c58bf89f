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
