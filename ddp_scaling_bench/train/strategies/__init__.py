"""Strategies of parallel training, one file each."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from torch import nn
from torch.optim import Optimizer

from ...known_strategies import STRATEGIES
from .spec import Parts, Strategy

__all__ = ["Parts", "Strategy", "find_strategy", "strategy_of"]


@cache
def strategy_of(name: str) -> Strategy:
    """Return a strategy by its name."""
    spec: Strategy = import_module(f"{__name__}.{STRATEGIES[name].module}").SPEC
    return spec


def find_strategy(
    model: nn.Module | None, optimizer: Optimizer | None = None
) -> tuple[Strategy | None, Parts]:
    """Return the strategy of a model and its optimizer, if they show one, and what measures its steps.

    Wrappers within ``model`` count, such as those within a compiled model. A module within a sharded model is
    recognised, too. A strategy whose communication cannot be timed takes precedence.
    """
    whole = nn.Module() if model is None else model
    modules = list(whole.modules())
    known = [*map(strategy_of, STRATEGIES)]
    found = [(one, wrapped) for one in known if (wrapped := one.find(modules)) is not None]
    if not found:
        return None, Parts(whole)
    strategy, wrapped = min(found, key=lambda one: not one[0].untimed)
    for one in known:
        if optimizer is not None and one.made(optimizer) and issubclass(one.parts, strategy.parts):
            strategy = one
    parts = strategy.parts(wrapped)
    parts.optimizer = optimizer
    return strategy, parts
