"""The strategies of parallel training, as a matrix and the report need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .known_models import MODELS, read_specs


@dataclass(frozen=True)
class StrategyFacts:
    """What is known of a strategy without importing torch: the literals of its ``SPEC``.

    Attributes:
        name: the name in a matrix and in env.json.
        title: the name in sentences; empty for a strategy that cannot be in a matrix.
        options: the workload options that this strategy uses and not every strategy does.
        sharded: those of ``weights``, ``gradients`` and ``states`` (of the optimizer) of which each rank has
            only a part. A strategy with sharded weights moves the model to its device.
        within_hosts: for a strategy whose sharded tensors are divided over the ranks of a host, and are equal
            on all hosts: the strategies that take its place on a single host, and with one rank per host.
        untimed: the name in sentences, if nothing can tell its communication from computation yet.
        one_rank: True if the strategy does not communicate.
        recognised: True if the strategy is recognised in a user's training only, and cannot be in a matrix.
        module: the name of its module.
    """

    name: str
    title: str = ""
    options: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    within_hosts: tuple[str, ...] = ()
    untimed: str = ""
    one_rank: bool = False
    recognised: bool = False
    module: str = ""


#: All strategies by their name in a matrix or in env.json.
STRATEGIES = {
    name: StrategyFacts(name, module=module, **own) for module, name, own in read_specs("strategies")
}
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

    It does not depend on ``precision``: gradients between ranks are fp32 by default.
    """
    if values["strategy"] in strategies_using("reduce_dtype"):
        return str(values["reduce_dtype"])
    hook = values["comm_hook"] if values["strategy"] in strategies_using("comm_hook") else "none"
    return str(values["comm_dtype"] or (hook if hook != "none" else "fp32"))


def gathered_dtype(values: Mapping[str, Any]) -> str:
    """Return the type in which a strategy gathers weights and computes with them; fp32 if it gathers none."""
    if values["strategy"] not in strategies_using("param_dtype"):
        return "fp32"
    stays = values["precision"] == "tf32" or MODELS[values["model"]].fp32_weights
    return str(values["param_dtype"] or ("fp32" if stays else values["precision"]))


def wire_problem(values: Mapping[str, Any], backend: str) -> tuple[tuple[str, ...], str, str] | None:
    """Return why ranks cannot exchange gradients in the type that the options select, or None if they can.

    Returns:
        The options (first the one to change), the problem, and its remedy.
    """
    strategy, given, hook = values["strategy"], values["comm_dtype"], values["comm_hook"]
    wire, model, precision = wire_dtype(values), values["model"], values["precision"]
    weights = gathered_dtype(values)
    if strategy in strategies_using("param_dtype"):
        for option, value in (("comm_dtype", given), ("comm_hook", hook)):
            if value not in (None, "none"):
                what = f"{option} {value} is an option of DDP, not of strategy {strategy}"
                remedy = "set param_dtype (weights) and reduce_dtype (gradients) in its place"
                return (option,), what, remedy
    if strategy in strategies_using("comm_hook"):
        if given and hook not in ("none", given):
            what = f"comm_hook {hook} sends gradients as {hook}, but comm_dtype is {given}"
            return ("comm_hook", "comm_dtype"), what, "set only one"
        if wire == "bf16" and backend == "gloo":
            what = f"strategy {strategy} sends bf16 with torch's bf16 hook, which needs nccl, not gloo"
            return ("comm_dtype" if given else "comm_hook", "backend"), what, "use fp16 or fp32"
    if weights not in ("fp32", precision):
        what = f"strategy {strategy} gathers weights as {weights} and computes with them, not in {precision}"
        return ("param_dtype", "precision"), what, f"use param_dtype fp32, or precision {weights}"
    if weights != "fp32" and MODELS[model].fp32_weights:
        what = f"model {model} has batch normalisation, which needs weights in fp32, not {weights}"
        return ("param_dtype", "model"), what, "use param_dtype fp32"
    return None
