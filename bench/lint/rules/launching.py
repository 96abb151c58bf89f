"""Rules about how the training program is started on the nodes, and about the options of its launcher."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ..geometry import number
from ..launch import REACHES_NODES, TORCHRUN_OPTIONS, Launch
from ..options import srun_options
from ..script import Script
from ..values import Value
from ..walk import Command
from . import rule

#: Starts one task on each node. With --nodes instead of --ntasks, Slurm 22.05 starts all tasks of the job.
SRUN_PER_NODE = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
TORCH = ("torchrun", "launch")


@rule(Severity.ERROR)
def missing_srun(script: Script) -> Iterator[Remark]:
    """A job has several nodes, but only the batch shell starts the program.

    The batch script runs once, on the first node, and only srun, mpirun or a similar launcher reaches the
    others. The rule applies to launchers that expect several nodes, and to a Python program that is the last
    command, if no other command of the script may reach the nodes.

    Bad: python train.py
    Good: srun python train.py
    """
    reaching = list(filter(_may_reach_nodes, script.commands))
    # A srun in the foreground has ended before the launcher starts.
    ended = all(one.launch.via == "srun" and not one.outer.place.background for one in reaching)
    if not script.job.several_nodes or not ended:
        return
    # `export -f`: srun possibly starts a shell that calls a function of the script.
    passed_on = any(one.name == "export" and "-f" in one.texts for one in script.commands)
    for command in [one for one in script.launchers if not (passed_on and one.place.function)]:
        if command.launch.via or (number(command.launch.node_count, script.job) or 1) < 2:
            continue
        message = "only the first node runs this command, which waits for the launchers of the other nodes: "
        remedy = f"start one launcher on each node: {SRUN_PER_NODE} COMMAND (see missing-node-rank)"
        yield Remark(command.outer.line, f"{message}its rendezvous times out", remedy)
    programs = [one for one in script.commands if one.launch.kind not in ("builtin", "nothing")]
    for command in [one for one in programs if not one.place.substitution][-1:]:
        if command.launch.kind != "python" or script.launchers or reaching:
            continue
        line, name = command.outer.line, command.outer.name
        message = (
            f"only the first node runs this command: 1 of {script.job.ntasks or 'all'} processes will start"
        )
        edit = Edit(line, name, f"srun {name}") if name and name in script.line(line) else None
        yield Remark(line, message, "put srun before the command: it starts one process per task", edit)


def _may_reach_nodes(command: Command) -> bool:
    """Return whether a command may start processes on other nodes: a launcher, or an unknown script."""
    launch, word = command.launch, command.words[0]
    if launch.via or command.name == "eval" or launch.kind == "shell":
        return not (launch.via == "srun" and command.place.substitution)
    if launch.kind == "inner":
        return launch.program is None or launch.program.literal is None
    unknown = word.literal is None or "/" in word.shown or command.place.background
    return launch.kind == "unknown" and (unknown or not REACHES_NODES.isdisjoint(command.texts))


def is_static(launch: Launch) -> bool:
    """Return whether torchrun certainly uses the static rendezvous, which needs a node rank."""
    backend = launch.options.get("rdzv_backend")
    return (backend is None or backend.literal == "static") and "rdzv_conf" not in launch.options


@rule(Severity.ERROR)
def one_launcher_per_gpu(script: Script) -> Iterator[Remark]:
    """A launcher that starts several workers is started several times on a node.

    If every task of a node starts a launcher, there are too many workers: they share ports and GPUs, and the
    job fails or hangs.

    Bad:
        #SBATCH --ntasks-per-node=4
        srun torchrun --nproc_per_node=4 train.py
    Good:
        #SBATCH --ntasks-per-node=1
        srun torchrun --nproc_per_node=4 train.py
    """
    for command in script.launchers:
        launch, geometry = command.launch, script.geometry(command)
        tasks, value = geometry.tasks_per_node or 1, launch.options.get("nproc_per_node")
        if launch.via != "srun" or launch.opaque or command.place.conditional or tasks < 2:
            continue
        every = value is not None and value.literal in ("gpu", "auto")
        workers = geometry.gpus_per_node if every else number(value, geometry)
        if workers and workers > 1 and not geometry.isolates_gpus:
            option = geometry.options.get("ntasks-per-node") or geometry.options["ntasks"]
            message = f"srun starts {launch.launcher} {tasks} times on each node, each with {workers} workers"
            yield Remark(option.line, message, "start one launcher per node: --ntasks-per-node=1")


@rule(Severity.ERROR)
def sequential_sruns(script: Script) -> Iterator[Remark]:
    """A script starts one srun per node, one after the other.

    The processes of the first srun wait for the processes of the second srun. However, the second srun
    starts only after the first srun has ended.

    Bad:
        srun --nodes=1 --nodelist=$FIRST torchrun --node_rank=0 ...
        srun --nodes=1 --nodelist=$SECOND torchrun --node_rank=1 ...
    Good:
        srun --nodes=1 --nodelist=$FIRST torchrun --node_rank=0 ... &
        srun --nodes=1 --nodelist=$SECOND torchrun --node_rank=1 ... &
        wait
    """
    remedy = "end each srun with & and put `wait` after the last one, or use one srun for all nodes"
    for command in _blocking(script):
        message = (
            "these processes wait for those of the next srun, which starts only after this one has ended"
        )
        yield Remark(command.outer.line, message, remedy)


def _blocking(script: Script) -> Iterator[Command]:
    """Yield the foreground commands that start the workers of one of several nodes."""
    ranked: list[Command] = []
    for command in script.launchers:
        place, launch = command.outer.place, command.launch
        rank = launch.options.get("node_rank")
        if launch.via != "srun" or launch.opaque or place.background:
            continue
        if launch.node_count is None or number(launch.node_count, script.job) == 1:
            continue
        per_node = [rank, *(one.expanded for one in launch.srun if one.name in ("nodelist", "relative"))]
        if place.loop and any(_depends_on(value, place.loop) for value in per_node):
            yield command
        elif not place.loop and not place.conditional and rank and (rank.literal or "").isdecimal():
            ranked.append(command)
    different = {(one.launch.options["node_rank"].literal, one.place.function) for one in ranked}
    if len(different) > 1:
        yield from ranked[:-1]


def _depends_on(value: Value | None, name: str) -> bool:
    return value is not None and any(unknown.name == name for unknown in value.unknowns())


@rule(Severity.ERROR)
def unknown_srun_option(script: Script) -> Iterator[Remark]:
    """A script passes an option to srun that srun does not have, so that the job fails at this line.

    An option that resembles none of srun's is not reported, because a plugin of the site may add it.

    Bad: srun --cpubind=cores python train.py
    Good: srun --cpu-bind=cores python train.py
    """
    for command in script.commands:
        for option in command.launch.srun if command.place.task is None else ():
            remark = srun_options().refused(option)
            if remark:
                yield remark


@rule(Severity.ERROR)
def missing_node_rank(script: Script) -> Iterator[Remark]:
    """A launcher with a static rendezvous gets no node rank, so that every node has rank 0.

    Without ``--rdzv_backend=c10d``, torchrun takes the rank of its node from ``--node_rank``, whose
    default is 0. All nodes then have the same ranks, and the job fails or hangs.

    Bad: srun torchrun --nnodes=2 --master_addr=$HOST --master_port=$PORT ...
    Good: srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$HOST:$PORT ...
    """
    for command in _spread(script):
        launch, options = command.launch, command.launch.options
        nodes = script.geometry(command).nodes
        expected = number(launch.node_count, script.geometry(command))
        rank = options.get("node_rank")
        if not nodes or nodes < 2 or not expected or expected < 2 or "standalone" in options:
            continue
        if not is_static(launch) or (rank is not None and rank.literal is None):
            continue
        message = f"torchrun gets no --node_rank, so that each of the {nodes} nodes has rank 0"
        if rank is not None:
            message = f"torchrun gets --node_rank={rank.literal} on each of the {nodes} nodes"
        remedy = "use --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, or "
        remedy += "srun bash -c '... --node_rank=$SLURM_NODEID ...'"
        yield Remark((rank or launch.node_count or command.words[0]).line, message, remedy)


def _spread(script: Script) -> Iterator[Command]:
    """Yield the torchrun commands whose options are known and that one srun starts."""
    set_elsewhere = any(name.startswith("PET_") for name in script.names)  # torchrun reads PET_NNODES etc.
    for command in script.launchers:
        launch, loop = command.launch, command.outer.place.loop
        known = launch.via == "srun" and launch.launcher in TORCH and not launch.opaque
        if known and not set_elsewhere and not loop and not launch.srun_option("het-group"):
            yield command


@rule(Severity.ERROR)
def unknown_torchrun_option(script: Script) -> Iterator[Remark]:
    """Torchrun gets an option that it does not have, and stops with "unrecognized arguments".

    Options of the program belong after the program's name.

    Bad: torchrun --nproc_per_node=4 -c config.yaml train.py
    Good: torchrun --nproc_per_node=4 train.py -c config.yaml
    """
    for command in script.launchers:
        launch = command.launch
        for name, value in launch.options.items() if launch.launcher in TORCH else ():
            attached = len(name) > 1 and name[0] in "mrt" and name[1:].isdigit()
            if name in TORCHRUN_OPTIONS or attached or (name == "use_env" and launch.launcher == "launch"):
                continue
            written = f"--{name}" if len(name) > 1 else f"-{name}"
            close = difflib.get_close_matches(name, TORCHRUN_OPTIONS, n=1, cutoff=0.8)
            message = f"torchrun has no option {written} and stops with 'unrecognized arguments'"
            remedy = f"write --{close[0]}" if close else "put the options of the program after its name"
            yield Remark(value.line, message, remedy)


@rule(Severity.WARNING)
def world_size_mismatch(script: Script) -> Iterator[Remark]:
    """The number of nodes or processes that a launcher waits for is not the number that srun starts.

    torchrun waits for ``--nnodes`` agents, and its default is one node. A program that reads WORLD_SIZE
    waits for that many processes. With fewer processes, the job fails when the rendezvous times out.

    Bad: export WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    Good: export WORLD_SIZE=$SLURM_NTASKS
    """
    stated = "nodes" in script.job.options
    for command in _spread(script) if stated else ():
        yield from _wrong_nodes(script, command)
    for command in script.sruns if stated else ():
        value = command.exported("WORLD_SIZE")
        geometry = script.geometry(command)
        size, tasks = number(value, geometry), geometry.ntasks
        if command.launch.kind != "python" or command.launch.opaque or command.outer.place.background:
            continue
        if value and size and tasks and size != tasks and geometry.tasks_per_node != 1:
            message = f"WORLD_SIZE is {size}, but srun starts {tasks} processes"
            yield Remark(value.line, message, "write WORLD_SIZE=$SLURM_NTASKS")


def _wrong_nodes(script: Script, command: Command) -> Iterator[Remark]:
    """Compare the nodes that torchrun expects with those on which srun starts it."""
    launch, geometry = command.launch, script.geometry(command)
    value, nodes, job = launch.node_count, geometry.nodes, script.job.nodes
    expected = number(value, geometry) if value else None
    if not nodes or nodes != job or geometry.heterogeneous or command.outer.place.background:
        return  # several sruns possibly start the launchers together
    alone = {"rdzv_endpoint", "master_addr", "node_rank", "rdzv_backend"}.isdisjoint(launch.options)
    if value is None and nodes > 1 and not alone:
        message = f"torchrun without --nnodes expects 1 node, but srun starts it on {nodes}"
        yield Remark(command.line, message, "pass --nnodes=$SLURM_NNODES")
    elif expected and expected > nodes * (geometry.tasks_per_node or 1):
        message = (
            f"torchrun waits for {expected} nodes, but srun starts it on {nodes}: its rendezvous times out"
        )
        yield Remark(command.line, message, f"use --nnodes=$SLURM_NNODES, or request --nodes={expected}")
    elif expected and 1 < expected < nodes:
        message = f"srun starts torchrun on {nodes} nodes, but each expects {expected}: the last cannot join"
        yield Remark(command.line, message, "use --nnodes=$SLURM_NNODES")
