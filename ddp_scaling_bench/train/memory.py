"""The memory that a rank needs for a model and its training, and the memory that it has."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..cores import PROC, read_text
from ..measure.conditions import peak_memory_bytes
from ..measure.failures import ModelTooLarge
from ..measure.ranks import Host
from .failures import SetupError
from .models import DataShape
from .options import TrainOptions
from .session import Session
from .strategies import strategy_of
from .training import STATES_PER_WEIGHT, build_task, parameters_of

_KIB = 2**10


def check_memory(session: Session, shape: DataShape) -> None:
    """Reject a model that does not fit into memory, before the kernel kills ranks or other users' jobs.

    Raises:
        SetupError: the model of the options does not fit.
    """
    options, host = session.options, session.host
    with torch.device("meta"):
        task = build_task(options, shape)
    (parameters, whole), ranks = parameters_of(task), len(host.ranks)
    needed = kept_bytes(options, task, session.joined.hosts)
    what = f"weights, gradients and {options.optimizer}'s states"
    places = []
    if session.device.type == "cuda":
        places = [(what, needed, 1, torch.cuda.get_device_properties(session.device).total_memory)]
        needed, what = 0.0, "the weights in the host's memory, from which each rank takes its part,"
    if "weights" in strategy_of(options.strategy).sharded:
        needed = max(needed, whole)  # each rank builds the whole model in the host's memory
    for states, each, sharing, available in [*places, (what, needed, ranks, host.memory_bytes)]:
        if (total := math.ceil(each * sharing)) > available:
            sizes: Any = {"parameters": parameters, "ranks": sharing, "available_bytes": available}
            raise SetupError(ModelTooLarge(states=states, needed_bytes=total, **sizes))


def kept_bytes(options: TrainOptions, model: nn.Module, hosts: Sequence[Host]) -> float:
    """Return the bytes of weights, gradients and states of the optimizer that a rank on these hosts needs."""
    strategy = strategy_of(options.strategy)
    ranks = len(hosts[0].ranks) if strategy.within_hosts else sum(len(host.ranks) for host in hosts)
    _, trained = parameters_of(model)
    whole = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": trained,
        "states": trained * STATES_PER_WEIGHT[options.optimizer],
    }
    return math.fsum(size / ranks if name in strategy.sharded else size for name, size in whole.items())


def passing_bytes(device: torch.device) -> float:
    """Return the memory that only a step needs, such as activations: the peak so far, and not at rest."""
    if device.type == "cuda":
        return peak_memory_bytes(device) - torch.cuda.memory_allocated(device)
    resident = re.search(r"VmRSS:\s+(\d+)", read_text(PROC / "self/status"))
    return max(0, peak_memory_bytes(device) - int(resident[1]) * _KIB) if resident else 0


def free_bytes(device: torch.device, ranks: int) -> float:
    """Return the memory that each of the ``ranks`` of this host can still allocate; infinite if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    kib = re.search(r"MemAvailable:\s+(\d+)", read_text(PROC / "meminfo"))
    return int(kib[1]) * _KIB // ranks if kib else math.inf
