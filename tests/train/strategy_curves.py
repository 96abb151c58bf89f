"""Train with several strategies, one after another in the same ranks; rank 0 writes what each one found."""

import json
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.measure.exchange import Collectives
from ddp_scaling_bench.measure.node import host_name
from ddp_scaling_bench.measure.torch_internals import parameter_groups
from ddp_scaling_bench.train.data import open_feed
from ddp_scaling_bench.train.failures import SetupError
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.training import Trainer, build_task, parameters_of, wrap
from tests.train.ranks import folder_of_test
from tests.train.scenarios import join_group

STEPS, TIMEOUT = 3, timedelta(seconds=77)
#: A small model of each kind that the strategies must shard; the sizes are odd, so that shards differ.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "model": "transformer",
    "parameters": 20_000,
    "seq_len": 6,
    "learning_rate": 0.1,
}
PLANNED = [name for name, one in STRATEGIES.items() if not one.recognised]
#: By name, the options that differ. Adam hides gradients of a wrong scale, so that only one uses it.
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulated": {"grad_accum": 3},
    "recomputed": {
        "activation_checkpointing": True,
        "fsdp_wrap": "root",
        "optimizer": "adamw",
        "learning_rate": 1e-3,
    },
    "fp16 wire": {"precision": "fp16", "reduce_dtype": "fp16", "comm_dtype": "fp16"},
    "fp16 root": {"precision": "fp16", "fsdp_wrap": "root", "optimizer": "adamw", "learning_rate": 1e-3},
    "llama": {"model": "llama", "precision": "bf16"},
}


def train(options: TrainOptions) -> dict[str, Any]:
    """Return the mean losses, validation sums, sizes, and the sum of each tensor of a checkpoint."""
    collectives, cpu = Collectives(torch.device("cpu"), "gloo"), torch.device("cpu")
    # Rank 0 has one more batch of validation than the other ranks, as with some sizes of a data set.
    own = replace(options, val_steps=1 + (collectives.rank == 0))
    feed = open_feed(own, 2, collectives.rank, collectives.world_size, cpu)
    task = build_task(options, feed.shape)
    try:
        trainer = Trainer(wrap(task, options), feed, options)
    except SetupError as error:
        return {"refused": str(error)}
    losses = [collectives.sums([float(trainer.step())])[0] for _ in range(STEPS)]
    validation = sum(trainer.validate(collectives))
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        trainer.step()
    state = trainer.state()
    tensors = {} if collectives.rank else {**state["model"], **_tensors(state["optimizer"]["state"])}
    return {
        "losses": [loss / collectives.world_size for loss in losses],
        "validation": [validation],
        "sizes": parameters_of(trainer.model),
        "own": sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in task.parameters()),
        "timeouts": [
            one._get_backend(cpu).options._timeout.total_seconds()
            for found in parameter_groups(trainer.model)
            for one in (found.shards, found.replicas)
            if one is not None
        ],
        "broadcasts": broadcast.call_count,
        "state": {name: float(one.double().abs().sum()) for name, one in tensors.items()},
    }


def _tensors(states: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = {f"{index}.{key}": one for index, own in states.items() for key, one in own.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def _options(strategy: str, setting: dict[str, Any]) -> TrainOptions:
    of_ddp = "weights" not in STRATEGIES[strategy].sharded
    own = {name: one for name, one in setting.items() if of_ddp or name != "comm_dtype"}
    return TrainOptions(**{**OPTIONS, "strategy": strategy, **own})


def curves(*names: str) -> int:
    """Train with the named settings, by default all, and write curves.json into the folder of the run."""
    rank, world_size = join_group(timeout=TIMEOUT), dist.get_world_size()
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, host_name(os.environ))
    strategies = ["ddp", "hsdp"]  # on several hosts; all others are compared on one host
    if len({*hosts}) == 1:
        usable = [name for name in PLANNED if not STRATEGIES[name].within_hosts]
        strategies = [name for name in usable if world_size == 1 or not STRATEGIES[name].one_rank]
    found: dict[str, Any] = {
        setting: {strategy: train(_options(strategy, SETTINGS[setting])) for strategy in strategies}
        for setting in names or SETTINGS
    }
    if rank == 0:
        (folder_of_test() / "curves.json").write_text(json.dumps(found))
    dist.barrier()
    return 0
