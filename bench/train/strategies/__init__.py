"""Strategies of parallel training, one file each."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from torch import nn

from ...matrix.strategies import STRATEGIES
from .spec import Parts, Strategy

__all__ = ["Parts", "Strategy", "find_strategy", "strategy_of"]


@cache
def strategy_of(name: str) -> Strategy:
    """Return a strategy by its name."""
    spec: Strategy = import_module(f"{__name__}.{STRATEGIES[name].module}").SPEC
    return spec


def find_strategy(model: nn.Module | None) -> tuple[Strategy | None, Parts]:
    """Return the strategy of a user's model, or None if it shows none, and what measures its steps.

    Wrappers within ``model`` count, such as those within a compiled model. A module within a sharded model is
    recognised, too. A strategy whose communication cannot be timed takes precedence.
    """
    whole = nn.Module() if model is None else model
    modules = list(whole.modules())
    found = [
        (strategy, strategy.parts(wrapped))
        for strategy in map(strategy_of, STRATEGIES)
        if (wrapped := strategy.find(modules)) is not None
    ]
    return min(found, key=lambda one: not one[0].untimed, default=(None, Parts(whole)))
