"""The strategies of parallel training, as a matrix and the report need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .models import MODELS, read_specs


@dataclass(frozen=True)
class StrategyFacts:
    """A strategy: the name of its module, and the literals of its ``SPEC``.

    The built-in training cannot train with a strategy that is only ``recognised`` in a user's training.
    """

    module: str
    title: str = ""
    options: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    within_hosts: tuple[str, ...] = ()
    untimed: str = ""
    one_rank: bool = False
    recognised: bool = False


#: All strategies by their name in a matrix or in env.json.
STRATEGIES = {name: StrategyFacts(module, **own) for module, name, own in read_specs("strategies")}
DEFAULT = "ddp"


def strategies_using(option: str) -> tuple[str, ...]:
    """Return the strategies that use an option; empty for an option that concerns every strategy."""
    return tuple(name for name, one in STRATEGIES.items() if option in one.options)


def on_hosts(strategy: str, ranks_per_host: Sequence[int]) -> str:
    """Return the strategy that takes the place of another one on hosts with these numbers of ranks."""
    on_one_host, with_one_rank = STRATEGIES[strategy].within_hosts or (strategy, strategy)
    if len(ranks_per_host) == 1:
        return on_one_host
    return with_one_rank if max(ranks_per_host) == 1 else strategy


def wire_dtype(values: Mapping[str, Any]) -> str:
    """Return the type of gradients between ranks, from the workload options of a cell.

    It does not depend on ``precision``: autocast leaves weights and gradients in fp32.
    """
    hook = values["comm_hook"] if values["strategy"] in strategies_using("comm_hook") else "none"
    return str(values["comm_dtype"] or (hook if hook != "none" else "fp32"))


def wire_problem(values: Mapping[str, Any], backend: str) -> tuple[tuple[str, ...], str, str] | None:
    """Return why ranks cannot exchange gradients in the type that the options select, or None if they can.

    Returns:
        The options (first the one to change), the problem, and its remedy.
    """
    strategy, given, hook = values["strategy"], values["comm_dtype"], values["comm_hook"]
    wire, model, precision = wire_dtype(values), values["model"], values["precision"]
    if strategy in strategies_using("comm_hook"):
        if given and hook not in ("none", given):
            what = f"comm_hook {hook} sends gradients as {hook}, but comm_dtype is {given}"
            return ("comm_hook", "comm_dtype"), what, "set only one; every strategy understands comm_dtype"
        if wire == "bf16" and backend == "gloo":
            what = f"strategy {strategy} sends bf16 with torch's bf16 hook, which needs nccl, not gloo"
            return ("comm_dtype" if given else "comm_hook", "backend"), what, "use fp16 or fp32"
    if "weights" not in STRATEGIES[strategy].sharded or wire == "fp32":
        return None
    if wire != precision:
        what = f"strategy {strategy} gathers weights as {wire} and computes with them in {precision}"
        return ("comm_dtype", "precision"), what, f"use comm_dtype fp32, or precision {wire}"
    if MODELS[model].fp32_weights:
        what = f"model {model} has batch normalisation, which needs weights in fp32, not {wire}"
        return ("comm_dtype", "model"), what, "use comm_dtype fp32"
    return None
