"""How the processes of a script find each other: the words for it, and where they stand."""

from __future__ import annotations

import re

from bench.lint.environment import MARK, Value
from bench.lint.launch import Launch
from bench.lint.script import Script, spawns_workers
from bench.lint.walk import Step

LOOPBACK = re.compile(
    r"(?:tcp://)?(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?|ip6-localhost)(?::|/|\Z)", re.I
)
ADDRESS_VARIABLE = re.compile(
    r"(?i:(?:pet_)?(?:master|main|head|rank_?0|rdzv|leader|chief|coordinator)_?(?:node_?)?(?:process_?)?"
    r"(?:addr(?:ess)?|ip|host(?:name)?|endpoint|node|url)?)\Z"
)
ADDRESS_OPTIONS = frozenset(
    {
        "master_addr",
        "master_address",
        "master_ip",
        "master_host",
        "main_process_ip",
        "main_address",
        "main_addr",
        "rdzv_endpoint",
        "dist_url",
        "init_method",
        "dist_init_method",
        "coordinator_address",
        "head_node_ip",
        "host_addr",
    }
)
RANK_OPTIONS = frozenset(
    {
        "node_rank",
        "machine_rank",
        "rank",
        "local_rank",
        "global_rank",
        "world_rank",
        "node_id",
        "nodeid",
        "proc_id",
        "procid",
        "process_id",
        "host_rank",
        "base_rank",
        "localid",
        "local_id",
        "trainer.node_rank",
    }
)
#: Backends of a rendezvous that give out the ranks themselves.
MEETING = frozenset({"c10d", "etcd", "etcd-v2", "etcd_v2", "zeus"})


def spans_nodes(script: Script, step: Step) -> bool:
    """Return whether what a step starts is to join with other nodes."""
    expected = expected_nodes(script, step.launch)
    if spawns_workers(step.launch):
        return expected is None or expected > 1
    nodes = script.geometry(step).nodes
    if nodes is None or nodes > 1:
        return True
    return any(
        name in RANK_OPTIONS or name == "world_size" for name, _ in script.options_of_program(step.launch)
    )


def expected_nodes(script: Script, launch: Launch) -> int | None:
    """Return how many nodes a launcher is told of: torchrun's default is 1."""
    for name in ("nnodes", "num_machines", "num_nodes"):
        if name in launch.options:
            text = launch.options[name].text.rpartition(":")[2]
            return script.number(Value(text, launch.options[name].lines), script.job)
    return 1 if launch.launcher in ("torchrun", "launch") else None


def addresses(script: Script, launch: Launch) -> list[Value]:
    """Return the master addresses that a launcher or a program is given."""
    found = [value for name, value in launch.options.items() if name in ADDRESS_OPTIONS]
    found += [value for name, value in script.options_of_program(launch) if name in ADDRESS_OPTIONS]
    return [value for value in found if value.text]


def prefixed(step: Step) -> list[Value]:
    """Return the master addresses that stand before a command."""
    return [value for name, value in step.prefix.items() if ADDRESS_VARIABLE.match(name)]


def meets_by_itself(launch: Launch) -> bool:
    """Return whether the launcher's rendezvous gives out the ranks, whatever it is told."""
    options = launch.options
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else ""
    conf = options["rdzv_conf"].text if "rdzv_conf" in options else ""
    return backend in MEETING or "c10d" in conf or bool(MARK.search(backend))
