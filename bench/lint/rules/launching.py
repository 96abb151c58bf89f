"""Rules about how a program is started on the nodes: launchers, numbers, addresses and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from ...findings import Edit, Remark, Severity
from ...units import count
from ..geometry import Geometry, number
from ..launch import REACHES_NODES, Launch, program_name
from ..options import whole_number
from ..script import Script
from ..walk import Command
from ..words import Unknown, Word
from . import rule

# RFC 6761 and RFC 1122: names and addresses of the own host, with an optional port.
_LOOPBACK = re.compile(r"(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?)(?::|\Z)", re.I)
# hostname(1) without a further command: the name of the node that expands it.
_OWN_NAME = re.compile(r"(?:\$\(|`)\s*(?:\S*/)?hostname\b[^|;&$`]*(?:\)|`)\Z")
_RANK_OPTIONS = ("node_rank", "machine_rank", "local_rank", "rank")
_FIRST_HOST = 'use the first host of the job: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
#: Starts one task on each node. With --nodes instead of --ntasks, Slurm 22.05 starts all tasks of the job.
_SRUN_PER_NODE = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
_ALONE = frozenset({"no_ssh", "node_rank", "include"})


@rule(Severity.ERROR)
def missing_srun(script: Script) -> Iterator[Remark]:
    """A job has several nodes, but only the batch shell starts the program.

    The batch script runs on the first node, and only srun or a similar launcher reaches the others. The rule
    applies to launchers of several nodes, and to a Python program that is the last command.

    Bad: python train.py
    Good: srun python train.py
    """
    if not _several(script.job) or _reaches_nodes(script):
        return
    for command in script.launchers("torchrun", "accelerate"):
        launch, expected = command.launch, number(command.launch.node_count, script.job) or 1
        if not launch.via and expected > 1 and not _uses_pdsh(launch):
            message = f"only the first node runs this command, which waits for {expected} nodes"
            remedy = f"start one launcher on each node: {_SRUN_PER_NODE} COMMAND (see missing-node-rank)"
            yield Remark(command.outer.line, f"{message}: its rendezvous times out", remedy)
    programs = [one for one in script.commands if one.launch.kind not in ("builtin", "nothing")]
    started = any(one.launch.launcher or one.launch.via for one in programs)
    for command in [one for one in programs if "substitution" not in one.place][-1:]:
        if command.launch.kind == "python" and not started:
            line, name = command.outer.line, command.outer.name
            edit = Edit(line, name, f"srun {name}") if name and name in script.line(line) else None
            tasks = f"1 of {script.job.ntasks or 'all'} processes will start"
            remedy = "put srun before the command: it starts one process per task"
            yield Remark(line, f"only the first node runs this command: {tasks}", remedy, edit)


def _several(geometry: Geometry) -> bool:
    return (geometry.nodes or 1) > 1


def _reaches_nodes(script: Script) -> bool:
    """Return whether a command may start processes on other nodes while a launcher runs on the first."""
    reaching = [one for one in script.commands if _may_reach_nodes(one)]
    # A srun in the foreground has ended before the launcher starts.
    return any(one.launch.via != "srun" or "background" in one.outer.place for one in reaching)


def _may_reach_nodes(command: Command) -> bool:
    """Return whether a command may reach other nodes: a launcher, a function of srun, or a user's script."""
    launch, word, place = command.launch, command.words[0], command.place
    if launch.via or launch.kind == "shell" or command.name == "eval":
        return launch.via != "srun" or "substitution" not in place
    if launch.kind == "inner":
        return launch.program is None or launch.program.literal is None
    if command.name == "export":
        return any(word.literal == "-f" for word in command.words)
    folder = word.shown.rpartition("/")[0]
    installed = word.literal is not None and (not folder or folder.endswith(("/bin", "/sbin")))
    users = "substitution" not in place and (not installed or "background" in place)
    named = not REACHES_NODES.isdisjoint(program_name(one) for one in command.words)
    return launch.kind == "unknown" and (users or named)


def _uses_pdsh(launch: Launch) -> bool:
    """Return whether accelerate possibly starts the other nodes with pdsh, as DeepSpeed does."""
    standard = launch.options.get("deepspeed_multinode_launcher")
    deepspeed = {"use_deepspeed", "deepspeed_hostfile", "config_file"} & launch.options.keys()
    return bool(deepspeed) and (standard is None or standard.literal != "standard")


def _is_static(launch: Launch) -> bool:
    """Return whether torchrun certainly uses the static rendezvous, which needs a node rank."""
    backend = launch.options.get("rdzv_backend")
    return (backend is None or backend.literal == "static") and "rdzv_conf" not in launch.options


def _spread(script: Script, *names: str) -> Iterator[Command]:
    """Yield the launchers that one srun starts on several nodes; torchrun also reads PET_ variables."""
    for command in script.launchers(*names):
        several = command.launch.via == "srun" and _several(script.geometry(command))
        once = "loop" not in command.outer.place and "conditional" not in command.place
        if several and once and not any(name.startswith("PET_") for name in script.walk.scalars):
            yield command


@rule(Severity.ERROR)
def one_launcher_per_gpu(script: Script) -> Iterator[Remark]:
    """A launcher that starts several workers is started several times on a node.

    There are too many workers: they share ports and GPUs, and the job fails or hangs. ``deepspeed`` starts
    one worker per GPU of the node unless ``--num_gpus`` is given.

    Bad: srun --ntasks-per-node=4 torchrun --nproc_per_node=4 train.py
    Good: srun --ntasks-per-node=1 torchrun --nproc_per_node=4 train.py
    """
    for command in script.launchers():
        launch, geometry = command.launch, script.geometry(command)
        tasks, workers = geometry.tasks_per_node or 1, launch.workers(geometry) or 1
        once = launch.via != "srun" or "conditional" in command.place or geometry.isolates_gpus
        if not once and tasks > 1 and workers > 1:
            line = geometry.line("ntasks-per-node", "ntasks") or command.line
            message = f"srun starts {launch.launcher} {tasks} times on each node, each with {workers} workers"
            yield Remark(line, message, "start one launcher per node: --ntasks-per-node=1")


@rule(Severity.WARNING)
def deepspeed_nodes(script: Script) -> Iterator[Remark]:
    """DeepSpeed's launcher gets no list of the nodes, or every node starts a launcher for all of them.

    ``deepspeed`` runs once, reads the nodes from ``--hostfile``, and starts the workers of all nodes itself.
    Without a hostfile, it knows only its own node. With ``--no_ssh``, each node starts its own launcher.

    Bad: deepspeed --num_nodes 2 train.py
    Good: deepspeed --num_nodes 2 --hostfile hosts train.py
    """
    remedy = "write the job's hosts to a file, and start deepspeed --hostfile FILE once, without srun"
    for command in _spread(script, "deepspeed"):
        options, geometry = command.launch.options, script.geometry(command)
        if not options.keys() & _ALONE and geometry.tasks_per_node == 1:
            knows = (
                "starts the workers of all" if "hostfile" in options else "without a hostfile knows no other"
            )
            yield Remark(
                command.line,
                f"each of the {geometry.nodes} nodes starts a launcher that {knows} nodes",
                remedy,
            )
    for command in script.launchers("deepspeed") if _several(script.job) else ():
        options, one_node = command.launch.options, number(command.launch.node_count, script.job) == 1
        known = one_node or command.launch.via or options.keys() & {*_ALONE, "hostfile"}
        if not known and "conditional" not in command.outer.place and not _reaches_nodes(script):
            message = "only the first node starts workers, because no hostfile names the other nodes"
            yield Remark(command.line, message, remedy)


@rule(Severity.ERROR)
def missing_node_rank(script: Script) -> Iterator[Remark]:
    """A launcher with a static rendezvous gets no node rank, so that every node has rank 0.

    Without ``--rdzv_backend=c10d``, torchrun takes the rank of its node from ``--node_rank``, whose
    default is 0. All nodes then have the same ranks, and the job fails or hangs.

    Bad: srun torchrun --nnodes=2 --master_addr=$HOST --master_port=$PORT ...
    Good: srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$HOST:$PORT ...
    """
    for command in _spread(script, "torchrun"):
        launch, geometry = command.launch, script.geometry(command)
        rank, expected = launch.options.get("node_rank"), number(launch.node_count, geometry) or 1
        known = "standalone" in launch.options or (rank is not None and rank.literal is None)
        if expected > 1 and _is_static(launch) and not known:
            given = f"--node_rank={rank.literal}" if rank else "no --node_rank, and so has rank 0"
            message = f"torchrun gets {given} on each of the {geometry.nodes} nodes"
            remedy = "use --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, or "
            line = (rank or launch.node_count or command.words[0]).line
            yield Remark(line, message, f"{remedy}srun bash -c '... --node_rank=$SLURM_NODEID ...'")


@rule(Severity.WARNING)
def world_size_mismatch(script: Script) -> Iterator[Remark]:
    """The number of nodes or processes that a program waits for is not the number that srun starts.

    torchrun waits for ``--nnodes`` agents (default: 1), and a program for WORLD_SIZE processes, until the
    rendezvous times out. ``--num_processes`` of accelerate counts the processes of all machines.

    Bad: export WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    Good: export WORLD_SIZE=$SLURM_NTASKS
    """
    for command in script.commands if "nodes" in script.job.options else ():
        place, geometry = command.outer.place, script.geometry(command)
        value = command.exported("WORLD_SIZE") if geometry.tasks_per_node != 1 else None
        size, tasks = number(value, geometry), geometry.ntasks
        together = not command.starts("python") or "background" in place or "loop" in place
        if value and size and tasks and size != tasks and not together:
            message = f"WORLD_SIZE is {size}, but srun starts {tasks} processes"
            yield Remark(value.line, message, "write WORLD_SIZE=$SLURM_NTASKS")
    for command in _spread(script, "torchrun", "accelerate"):
        nodes = script.geometry(command).nodes or 1
        message = _wrong_nodes(script, command, nodes)
        if message and nodes == script.job.nodes and "background" not in command.outer.place:
            yield Remark(command.line, message, "pass the numbers of the job, such as $SLURM_NNODES")


def _wrong_nodes(script: Script, command: Command, nodes: int) -> str:
    """Compare the nodes that a launcher expects with those on which srun starts it."""
    launch, geometry = command.launch, script.geometry(command)
    name, expected = launch.launcher, number(launch.node_count, geometry)
    total = number(launch.options.get("num_processes"), geometry)
    joins = {"rdzv_endpoint", "master_addr", "node_rank", "rdzv_backend"} & launch.options.keys()
    if launch.node_count is None and name == "torchrun" and joins:
        return f"torchrun without --nnodes expects 1 node, but srun starts it on {nodes}"
    if expected and expected > nodes * (geometry.tasks_per_node or 1):
        return f"{name} waits for {expected} nodes, but srun starts it on {nodes}: its rendezvous times out"
    if expected and 1 < expected < nodes:
        return f"srun starts {name} on {nodes} nodes, but each expects {expected}: the last cannot join"
    if expected and expected > 1 and total and total == geometry.gpus_per_node:
        return f"--num_processes counts all nodes: {total} processes on {expected} nodes leave GPUs idle"
    return ""


@rule(Severity.WARNING)
def task_gpu_mismatch(script: Script) -> Iterator[Remark]:
    """A node has fewer GPUs than processes that need one each.

    Processes then share a GPU ("Duplicate GPU detected"), or select one that does not exist ("invalid device
    ordinal"). Programs that use no GPU in some of their processes are not affected.

    Bad: #SBATCH --ntasks-per-node=4 --gpus-per-node=2
    Good: #SBATCH --ntasks-per-node=4 --gpus-per-node=4
    """
    for command in script.commands:
        launch, geometry = command.launch, script.geometry(command)
        gpus, tasks, workers = geometry.gpus_per_node, geometry.tasks_per_node, launch.workers(geometry)
        if not gpus or launch.opaque or "conditional" in command.outer.place:
            continue
        if launch.launcher and workers and workers > gpus:
            message = f"{launch.launcher} starts {workers} workers on {count(gpus, 'GPU')}"
            line = command.line
            yield Remark(line, message, f"start {count(gpus, 'worker')}, or request more GPUs")
        elif command.starts("python") and tasks and tasks > gpus:
            message = (
                f"{tasks} processes share {count(gpus, 'GPU')} on each node, which NCCL does not support"
            )
            line = geometry.line("ntasks-per-node", "ntasks", "gpus-per-node", "gres") or command.line
            yield Remark(
                line, message, f"request {count(tasks, 'GPU')} per node, or --ntasks-per-node={gpus}"
            )


@rule(Severity.ERROR)
def ntasks_conflict(script: Script) -> Iterator[Remark]:
    """``--ntasks`` contradicts ``--nodes`` times ``--ntasks-per-node``.

    Too few processes start, or Slurm refuses the job. With too few tasks, Slurm reduces the nodes.

    Bad: #SBATCH --nodes=2 --ntasks-per-node=4 --ntasks=4
    Good: #SBATCH --nodes=2 --ntasks-per-node=4
    """
    job, line = script.job, script.job.line("ntasks")
    nodes, ntasks = job.nodes, whole_number(job.value("ntasks"))
    per_node = whole_number(job.value("ntasks-per-node"))
    if not ntasks or not line or not nodes or "nodes" not in job.options:
        return
    if ntasks < nodes:
        message = f"--ntasks={ntasks} is less than --nodes={nodes}: Slurm reduces the number of nodes"
        yield Remark(line, f"{message} to {ntasks}", "replace --ntasks by --ntasks-per-node")
    elif per_node and ntasks != nodes * per_node:
        effect = "Slurm refuses the job" if ntasks > nodes * per_node else "too few tasks start"
        product = f"{count(nodes, 'node')} x {count(per_node, 'task')} per node = {nodes * per_node}"
        yield Remark(line, f"--ntasks={ntasks} contradicts {product}: {effect}", "remove --ntasks")


def _spanning(script: Script) -> Iterator[tuple[Command, list[Word]]]:
    """Yield the commands whose processes on several nodes form one group, with their master addresses."""
    for command in script.commands:
        launch, geometry = command.launch, script.geometry(command)
        several = _several(geometry) or ("loop" in command.outer.place and _several(script.job))
        given = [launch.options.get(name) for name in ("master_addr", "rdzv_endpoint", "main_process_ip")]
        if several and command.starts("launcher") and (number(launch.node_count, geometry) or 1) > 1:
            yield command, [value for value in given if value]
        elif several and command.starts("python"):
            value = command.exported("MASTER_ADDR")
            yield command, [value] if value else []


@rule(Severity.ERROR)
def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address of a job with several nodes is the local host.

    Every node then connects to itself. torchrun does not read MASTER_ADDR: without an address in its
    options, it uses 127.0.0.1, and the c10d backend uses localhost.

    Bad: export MASTER_ADDR=localhost
    Good: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    for command, addresses in _spanning(script):
        for value in addresses:
            if _LOOPBACK.match(value.start):
                message = f"{value.shown[:60]} is another host on every node: the nodes never connect"
                yield Remark(value.line, message, _FIRST_HOST)
            for own in [one for one in value.unknowns if one.in_task]:
                if own.name == "SLURMD_NODENAME" or _OWN_NAME.match(own.source):
                    message = f"each task expands {own.source[:40]} on its own node: the nodes never connect"
                    yield Remark(own.line, message, _FIRST_HOST)
        if _lacks_address(script, command):
            message = "torchrun gets no address and uses the local host: the nodes never connect"
            options = "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
            yield Remark(command.line, message, f"pass {options} with the job's first host as HOST")


def _lacks_address(script: Script, command: Command) -> bool:
    """Return whether torchrun certainly gets no address; torchrun also reads PET_ variables."""
    launch, options = command.launch, command.launch.options
    if launch.launcher != "torchrun" or any(name.startswith("PET_") for name in script.walk.scalars):
        return False
    if launch.opaque or _is_static(launch):
        return not launch.opaque and options.keys().isdisjoint({"master_addr", "rdzv_endpoint", "local_addr"})
    backend = options.get("rdzv_backend")
    return "rdzv_endpoint" not in options and backend is not None and backend.literal == "c10d"


@rule(Severity.WARNING)
def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master address is a fixed host, although Slurm chooses the nodes of the job.

    On other nodes, all processes wait until the rendezvous times out. ``--nodelist`` chooses the nodes.

    Bad: export MASTER_ADDR=node001
    Good: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    for command, addresses in _spanning(script):
        backend = command.launch.options.get("rdzv_backend")
        chosen = "nodelist" in script.geometry(command).options or (backend and backend.start[:4] == "etcd")
        for value in addresses if not chosen else ():
            host, colon, _ = value.start.partition(":")
            if host and (colon or value.literal is not None) and not _LOOPBACK.match(value.start):
                message = f"the master address is always {host}, but Slurm may run the job on other nodes"
                yield Remark(value.line, message, _FIRST_HOST)


@rule(Severity.ERROR)
def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The batch shell expands the rank of a node or task, and the rank is always 0 in the batch shell.

    The batch shell expands variables that are unquoted or in double quotes, so every task gets rank 0. A
    c10d rendezvous assigns the ranks itself.

    Bad: srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...
    Good: srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    for command in [one for one in script.commands if one.starts("python", "launcher")]:
        if command.launch.launcher == "torchrun" and not _is_static(command.launch):
            continue
        for name, value in _ranks(command):
            for early in [one for one in value.unknowns if _is_early(script, command, one)][:1]:
                message = f"the batch shell expands {early.source}, so every task gets the same {name}"
                remedy = f"expand the variable in the task: srun bash -c '... ${early.name} ...', "
                yield Remark(early.line, message, f"{remedy}or \\$ within double quotes")


def _ranks(command: Command) -> Iterator[tuple[str, Word]]:
    """Yield the ranks in the options and the environment of a command."""
    launch = command.launch
    yield from ((f"--{name}", launch.options[name]) for name in _RANK_OPTIONS if name in launch.options)
    for word, following in zip_longest(launch.arguments, launch.arguments[1:]):
        option, equals, _ = word.start.partition("=")
        value = word.after(f"{option}=") if equals else following
        if value and option[:2] == "--" and option.lstrip("-").replace("-", "_") in _RANK_OPTIONS:
            yield option, value
    if launch.kind == "python" and (command.task or command.exported("WORLD_SIZE")):
        values = [(name, command.exported(name)) for name in ("RANK", "LOCAL_RANK")]
        yield from ((name, value) for name, value in values if value)


def _is_early(script: Script, command: Command, unknown: Unknown) -> bool:
    """Return whether the batch shell expands a rank that differs between the tasks."""
    step = script.geometry(command)
    counts = {"NODEID": step.nodes, "LOCALID": step.tasks_per_node, "PROCID": step.ntasks}
    return not unknown.in_task and (counts.get(unknown.name.removeprefix("SLURM_")) or 1) > 1
