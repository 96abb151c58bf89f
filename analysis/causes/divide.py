"""Divide the step of a run into its ideal part and the shares of the causes that lengthen it.

The ideal step only computes (forward, backward, optimizer), at the speed of the baseline. Everything else is
loss: loading data, time outside of all timers, exposed communication, waiting, and computation that takes
longer per sample than at the baseline. Only a cause whose time was measured has a share. All shares are
fractions of the cell's step time, and for every cell::

    loss = sum of the shares,    E(N) = (1 - loss(N)) / (1 - loss(N₀))

exactly, because the ideal step at N takes (1 - loss(N₀)) · E(N) of the step. At the baseline itself, slower
computation is part of the ideal step unless a cause with a share explains it.

A part of the step of which no cause takes a share remains ``other`` or ``not-explained``. The latter can be
negative, if something takes less time per sample than at the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.causes.catalogue import NOT_EXPLAINED, OTHER
from analysis.stats.columns import PARTS
from ddp_scaling_bench.finding import Finding

#: Parts that are work. A run whose parts are unknown has the single part ``step``.
COMPUTING = ("forward", "backward", "optimizer")
WHOLE = "step"
#: All other parts are lost time at any size.
LOST = tuple(part for part in PARTS if part not in COMPUTING)
#: Minimum share of a named cause.
LEAST_SHARE = 0.02

#: The fraction of the step that each part takes, by the part's name.
Parts = Mapping[str, float]


@dataclass(frozen=True)
class Claim:
    """A cause in one run, with its evidence.

    Attributes:
        cause: name of the cause.
        evidence: the measured facts.
        pools: the parts of the step from which the cause takes its share, in this order.
        share: fraction of the step; NaN if the time of the cause was not measured.
        node: node at fault; empty if no single node is.
        rank: rank at fault; None if no single rank is.
        part: the part of the step.
        alternative: another cause that the evidence does not distinguish from this one, if any.
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
    alternative: str = ""
    counted: bool = False
    timeless: bool = False

    @property
    def key(self) -> Key:
        """Identity of the cause in its cell: claims with equal keys, from several runs, are one cause.

        The key of a rank contains no node, because the rank may run on other nodes in other runs.
        """
        return Key(self.cause, self.node if self.rank is None else "", self.rank, self.alternative)


@dataclass(frozen=True)
class Key:
    """A cause, with the rank or node at fault if one is known, and with its alternative."""

    cause: str
    node: str = ""
    rank: int | None = None
    alternative: str = ""


@dataclass(frozen=True)
class Division:
    """The division of one run.

    Attributes:
        shares: each cause's fraction of the step; their sum is the loss.
        ideal: the ideal part of the step, by part.
        rests: the row ``not-explained`` by part: the fraction of each part that no cause takes.
        relative: the causes whose shares depend on the baseline's step.
    """

    shares: dict[Key, float]
    ideal: dict[str, float]
    rests: dict[str, float]
    relative: frozenset[Key] = frozenset()


def divide(parts: Parts, claims: Sequence[Claim], *, reference: Parts | None = None) -> Division:
    """Divide the step of one run.

    ``parts`` are relative to the cell's mean step time; their sum is 1 if the run is as fast as the mean.
    ``claims`` are the causes found in the run; they get their shares in this order.
    ``reference`` contains the ideal parts of the baseline's step, relative to the step of this cell; it is
    None for a baseline.
    """
    left, total = _pools(parts, reference)
    shares: dict[Key, float] = {}
    relative = {Key(NOT_EXPLAINED)}
    for claim in claims:
        wanted = 0.0 if math.isnan(claim.share) else claim.share
        for part in (*claim.pools, WHOLE):
            amount = min(wanted, max(left.get(part, 0.0), 0.0))
            if amount > 0:
                left[part] -= amount
                wanted -= amount
                shares[claim.key] = shares.get(claim.key, 0.0) + amount
                relative.update([] if part in LOST else [claim.key])
    claimed = sum(shares.values())
    computing = [part for part in left if part not in LOST]
    ideal = {part: left.pop(part) for part in computing} if reference is None else dict(reference)
    rests = {part: amount for part, amount in left.items() if amount}
    outside = max(rests.pop(OTHER, 0.0), 0.0)
    shares[Key(OTHER)] = outside
    shares[Key(NOT_EXPLAINED)] = total - sum(ideal.values()) - claimed - outside
    return Division(shares, ideal, rests, frozenset(relative))


def _pools(parts: Parts, reference: Parts | None) -> tuple[dict[str, float], float]:
    """Return the fraction of each part that causes can take, and the sum of all parts."""
    left, total = dict(parts), sum(parts.values())
    if reference is None:
        return left, total
    if WHOLE in parts or WHOLE in reference:
        return {WHOLE: total - sum(reference.values())}, total
    growth = {part: parts[part] - reference.get(part, 0.0) for part in COMPUTING}
    net, positive = sum(growth.values()), sum(max(value, 0.0) for value in growth.values())
    # Time that moves from one part to another is no loss: only the sum of all three parts is divided.
    for part, value in growth.items():
        left[part] = max(value, 0.0) * net / positive if net > 0 else net / len(growth)
    return left, total
