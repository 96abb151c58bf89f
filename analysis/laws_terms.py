"""What scaling laws are made of: curves with parameters that mean something, and where a fit starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.estimate import Floats


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
