"""The strategies of parallel training, as a matrix and the report need them."""

from __future__ import annotations

from dataclasses import dataclass

from .models import read_specs


@dataclass(frozen=True)
class StrategyFacts:
    """A strategy: the name of its module, and the literals of its ``SPEC``.

    The built-in training cannot train with a strategy that is only ``recognised`` in a user's training.
    """

    module: str
    title: str
    times_parts: bool = True
    one_rank: bool = False
    recognised: bool = False


#: All strategies by their name in a matrix or in env.json.
STRATEGIES = {name: StrategyFacts(module, **own) for module, name, own in read_specs("strategies", "title")}
DEFAULT = "ddp"
