"""HSDP: FSDP2 within each node; nodes are replicas and all-reduce their gradients."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...measure.exchange import Collectives
from ...measure.node import host_name
from ...measure.torch_internals import collective_timeout_s
from ..failures import SetupError
from ..options import TrainOptions
from . import fsdp


def wrap(model: nn.Module, options: TrainOptions) -> nn.Module:
    """Shard the model over the ranks of each node.

    Raises:
        SetupError: nodes have different numbers of ranks, or torch or the backend lacks something.
    """
    from torch.distributed.device_mesh import DeviceMesh

    everyone = Collectives(torch.device(options.device), dist.get_backend())
    hosts = everyone.objects(host_name(os.environ))
    ranks = [[rank for rank, one in enumerate(hosts) if one == host] for host in dict.fromkeys(hosts)]
    if len({*map(len, ranks)}) > 1:
        found = ", ".join(str(len(own)) for own in ranks)
        what = f"strategy {options.strategy} needs the same number of ranks on every node, not {found}"
        raise SetupError(what, remedy="use strategy fsdp")
    replicas = [list(own) for own in zip(*ranks, strict=True)]
    timeout_s = collective_timeout_s(torch.device(options.device))
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    divide: Any = dist.new_subgroups_by_enumeration
    groups = [divide(own, timeout)[0] for own in (replicas, ranks)]
    names = ("replicate", "shard")
    mesh = DeviceMesh.from_group(groups, options.device, mesh=ranks, mesh_dim_names=names)
    return fsdp.shard(model, options, mesh=mesh)


SPEC = replace(fsdp.SPEC, name="hsdp", title="HSDP", within_hosts=("fsdp", "ddp"), wrap=wrap)
