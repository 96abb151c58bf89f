"""Divide the loss of a run among the causes that lengthen its step.

The loss of a size is what its step takes longer than at the rate of the baseline, part by part: its excess.
All shares are fractions of the cell's step time, and for every cell with a baseline::

    loss = sum of the shares = 1 - E

exactly, because the step at the rate of the baseline takes E of the step. The baseline itself cannot be
compared: loading data, time outside of all timers, exposed communication and waiting are lost at any size,
and its computation is lost only as far as a cause with a measured time explains it.

The excess of a part of which no cause takes a share is ``not-explained``. It is negative if something takes
less time per sample than at the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from analysis.data.columns import PARTS
from ddp_scaling_bench.finding import Finding

#: Rows that are not causes: loss not assigned to a cause, and the row that replaces all rows with a share if
#: the cell has an error (see :mod:`analysis.checks.assessment`).
NOT_EXPLAINED, NOT_VALID = "not-explained", "not-valid"
RESTS = (NOT_EXPLAINED, NOT_VALID)
#: Parts that are work. A run whose parts are unknown has the single part ``step``.
COMPUTING = ("forward", "backward", "optimizer")
WHOLE = "step"
#: All other parts are lost time at any size.
LOST = tuple(part for part in PARTS if part not in COMPUTING)
#: Minimum share of a named cause.
LEAST_SHARE = 0.02

#: The fraction of the step that each part takes, by the part's name.
Parts = Mapping[str, float]


class Key(NamedTuple):
    """A cause, with the rank or node at fault if one is known."""

    cause: str
    node: str = ""
    rank: int | None = None


#: The fraction of the step that each cause takes of each part.
Division = Mapping[Key, Parts]


@dataclass(frozen=True)
class Claim:
    """A cause in one run, with its evidence.

    Attributes:
        cause: name of the cause.
        evidence: the measured facts.
        pools: the parts of the step from which the cause takes its share, in this order.
        share: fraction of the step; NaN if the time of the cause was not measured, infinite if it is all that
            other causes leave of the pools.
        node: node at fault; empty if no single node is.
        rank: rank at fault; None if no single rank is.
        part: the part of the step; empty if it is the one from which the cause takes most.
        counted: true if the evidence is a count, such as events per step. The cause is then present even if
            noise hides its share.
        timeless: true if the evidence does not depend on times, such as a setting, a warning in the log, or a
            count. The cause is then present even if times are not valid.
    """

    cause: str
    evidence: tuple[Finding, ...]
    pools: tuple[str, ...] = ()
    share: float = math.nan
    node: str = ""
    rank: int | None = None
    part: str = ""
    counted: bool = False
    timeless: bool = False

    @property
    def timed(self) -> bool:
        """True if the time of the cause was measured."""
        return not math.isnan(self.share)

    @cached_property
    def key(self) -> Key:
        """Identity of the cause in its cell: claims with equal keys, from several runs, are one cause.

        The key of a rank contains no node, because the rank may run on other nodes in other runs.
        """
        return Key(self.cause, self.node if self.rank is None else "", self.rank)


def divide(
    parts: Parts, claims: Sequence[Claim], *, reference: Parts | None = None, factor: float = 1.0
) -> Division:
    """Return what each cause takes of each part, and the rest as ``not-explained``; the sum is the loss.

    ``parts`` are relative to the cell's mean step time; their sum is 1 if the run is as fast as the mean.
    ``claims`` are the causes found in the run; they get their shares, times ``factor``, in this order.
    ``reference`` contains the parts of the step at the rate of the baseline, relative to the step of this
    cell; it is None for a baseline.
    """
    left = dict(parts) if reference is None else _excess(parts, reference)
    division: dict[Key, dict[str, float]] = {}
    for claim in claims:
        wanted = claim.share * factor if claim.timed else 0.0
        for part in (*claim.pools, WHOLE):
            amount = min(wanted, max(left.get(part, 0.0), 0.0))
            if amount > 0:
                left[part] -= amount
                wanted -= amount
                own = division.setdefault(claim.key, {})
                own[part] = own.get(part, 0.0) + amount
    # At a baseline, computation is lost only as far as a cause with a measured time explains it.
    lost = left if reference is not None else [part for part in left if part in LOST]
    division[Key(NOT_EXPLAINED)] = {part: left[part] for part in lost if left[part]}
    return division


def _excess(parts: Parts, reference: Parts) -> dict[str, float]:
    """Return by how much each part exceeds the reference; the sum is the loss."""
    if WHOLE in parts or WHOLE in reference:
        return {WHOLE: sum(parts.values()) - sum(reference.values())}
    excess = {part: value - reference.get(part, 0.0) for part, value in parts.items()}
    growth = [excess[part] for part in COMPUTING]
    net, positive = sum(growth), sum(max(value, 0.0) for value in growth)
    # Time that moves from one part to another is no loss: only the sum of all three parts is divided.
    for part, value in zip(COMPUTING, growth, strict=True):
        excess[part] = max(value, 0.0) * net / positive if net > 0 else net / len(growth)
    return excess
