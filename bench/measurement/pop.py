"""Load balance, communication efficiency and parallel efficiency, exact for DDP.

Source: the POP Centre of Excellence's multiplicative model (https://pop-coe.eu/node/69), with
DDP's exposed communication as the time outside of computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PopEfficiencies:
    """The factors of one window; parallel_efficiency = load_balance x comm_efficiency."""

    load_balance: float
    comm_efficiency: float
    parallel_efficiency: float


def pop_efficiencies(step_totals_s: Sequence[float], exposed_totals_s: Sequence[float]) -> PopEfficiencies:
    """Return the efficiencies of one window from every rank's totals over the same steps.

    With U_r the sum of (step - exposed) of rank r and T the longest rank's sum of steps (the
    sum of the steps' maxima would exceed the wall time):
    load balance = mean U / max U, communication efficiency = max U / T,
    parallel efficiency = mean U / T, their product.

    Args:
        step_totals_s: per rank, the sum of its steps (s).
        exposed_totals_s: per rank, the sum of its exposed communication (s).
    """
    useful = [step - exposed for step, exposed in zip(step_totals_s, exposed_totals_s, strict=True)]
    longest, most_useful = max(step_totals_s), max(useful)
    balance = sum(useful) / len(useful) / most_useful
    communication = most_useful / longest
    return PopEfficiencies(balance, communication, balance * communication)
