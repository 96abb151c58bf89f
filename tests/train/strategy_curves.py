"""Train with several strategies, one after another in the same ranks; rank 0 writes what each one found."""

import json
import os
from dataclasses import astuple, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.matrix.strategies import STRATEGIES
from bench.measure.exchange import Collectives
from bench.measure.node import host_name
from bench.measure.torch_internals import parameter_groups
from bench.train.data import DataShard, open_feed
from bench.train.failures import SetupError
from bench.train.options import TrainOptions
from bench.train.rank import _validation_batches
from bench.train.rendezvous import launch_from
from bench.train.training import Trainer, build_task, parameters_of, wrap
from tests.train.conftest import folder_of_test

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
    "plain": {},
    "accumulated": {"grad_accum": 3},
    "recomputed": {
        "activation_checkpointing": True,
        "fsdp_wrap": "root",
        "optimizer": "adamw",
        "learning_rate": 1e-3,
    },
    "fp16 wire": {"precision": "fp16", "comm_dtype": "fp16"},
    "fp16 root": {"precision": "fp16", "comm_dtype": "fp16", "fsdp_wrap": "root"},
}


def train(options: TrainOptions) -> dict[str, Any]:
    """Return the mean losses, validation sums, sizes, and the sum of each tensor of a checkpoint."""
    collectives, cpu = Collectives(torch.device("cpu"), "gloo"), torch.device("cpu")
    # Rank 0 has one more batch of validation than the other ranks, as with some sizes of a data set.
    own = replace(options, val_steps=1 + (collectives.rank == 0))
    feed = open_feed(own, 2, DataShard(collectives.rank, collectives.world_size, cpu))
    task = build_task(options, feed.shape)
    try:
        trainer = Trainer(wrap(task, options), feed, options)
    except SetupError as error:
        return {"refused": str(error)}
    losses = []
    for _ in range(STEPS):
        trainer.step()
        losses.append(collectives.sums([trainer.take_loss()])[0])
    batches = _validation_batches(trainer, task, collectives)
    validation = sum(sum(astuple(task.validate(*batch))) * counts for *batch, counts in batches)
    trainer.parts.validated()
    trainer.step()
    state = trainer.state()
    tensors = {} if collectives.rank else {**state["model"], **_tensors(state["optimizer"]["state"])}
    return {
        "losses": [loss / collectives.world_size for loss in losses],
        "validation": collectives.sums([validation]),
        "sizes": parameters_of(trainer.model),
        "own": sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in task.parameters()),
        "timeouts": [
            one._get_backend(cpu).options._timeout.total_seconds()
            for found in parameter_groups(trainer.model)
            for one in (found.shards, found.replicas)
            if one is not None
        ],
        "state": {name: float(one.double().abs().sum()) for name, one in tensors.items()},
    }


def _tensors(states: dict[int, dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = {f"{index}.{key}": one for index, own in states.items() for key, one in own.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def curves(*names: str) -> int:
    """Train with the named settings, by default all, and write curves.json into the folder of the run."""
    launch = launch_from(os.environ)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, launch.world_size, is_master=launch.rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=launch.rank, world_size=launch.world_size, timeout=TIMEOUT
    )
    torch.set_num_threads(1)
    hosts: list[str] = [""] * launch.world_size
    dist.all_gather_object(hosts, host_name(os.environ))
    strategies = [
        name
        for name in PLANNED
        if (launch.world_size == 1 or not STRATEGIES[name].one_rank)
        and (len({*hosts}) > 1 or not STRATEGIES[name].within_hosts)
    ]
    found: dict[str, Any] = {
        setting: {
            strategy: train(TrainOptions(**{**OPTIONS, "strategy": strategy, **SETTINGS[setting]}))
            for strategy in strategies
        }
        for setting in names or SETTINGS
    }
    if launch.rank == 0:
        (folder_of_test() / "curves.json").write_text(json.dumps(found))
    dist.barrier()
    return 0
