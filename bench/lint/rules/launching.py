"""Rules about how a program is started on the nodes: launchers, numbers, addresses and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_scaling_bench.units import count

from ..geometry import Geometry, number
from ..launch import REACHES_NODES, Launch, program_name
from ..mistakes import Remark
from ..options import whole_number
from ..script import Script
from ..walk import Command
from ..words import Word

# RFC 6761 and RFC 1122: names and addresses of the own host, with an optional port.
_LOOPBACK = re.compile(r"(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?)(?::|\Z)", re.I)
_RANK_OPTIONS = ("node_rank", "machine_rank", "local_rank", "rank")
_ADDRESSES = ("master_addr", "rdzv_endpoint", "main_process_ip")
_FIRST_HOST = 'use the first host of the job: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
#: Starts one task on each node. With --nodes instead of --ntasks, Slurm 22.05 starts all tasks of the job.
_SRUN_PER_NODE = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
_ALONE = frozenset({"no_ssh", "node_rank", "include"})


def _several(geometry: Geometry) -> bool:
    return (geometry.nodes or 1) > 1


def missing_srun(script: Script) -> Iterator[Remark]:
    """A job has several nodes, but only the batch shell on the first node starts the program.

    Bad: python train.py
    Good: srun python train.py
    """
    if not _several(script.job) or _reaches_nodes(script):
        return
    for command in script.launchers("torchrun", "accelerate"):
        launch, expected = command.launch, number(command.launch.node_count, script.job) or 1
        pdsh = {"use_deepspeed", "deepspeed_hostfile", "config_file"} & launch.options.keys()
        if not launch.via and expected > 1 and not pdsh and "function" not in command.place:
            message = f"only the first node runs this command, which waits for {expected} nodes"
            remedy = f"start one launcher on each node: {_SRUN_PER_NODE} COMMAND (see missing-node-rank)"
            yield Remark(command.outer.line, f"{message}: its rendezvous times out", remedy)
    programs = [one for one in script.commands if one.launch.kind not in ("builtin", "nothing")]
    started = any(one.launch.launcher or one.launch.via for one in programs)
    for command in [one for one in programs if "substitution" not in one.place][-1:]:
        if command.launch.kind == "python" and not started:
            tasks = f"1 of {script.job.ntasks or 'all'} processes will start"
            remedy = "put srun before the command: it starts one process per task"
            yield Remark(command.outer.line, f"only the first node runs this command: {tasks}", remedy)


def _reaches_nodes(script: Script) -> bool:
    """Return whether a command may start processes on other nodes while a launcher runs on the first."""
    return any(map(_may_reach_nodes, script.commands))


def _may_reach_nodes(command: Command) -> bool:
    launch, word, itself = command.launch, command.words[0], "substitution" not in command.place
    if launch.via == "srun":  # a srun in the foreground has ended before the launcher starts
        return itself and "background" in command.outer.place
    if launch.via or launch.kind == "shell" or command.name == "eval":
        return True
    folder = word.shown.rpartition("/")[0]
    installed = word.literal is not None and (not folder or folder.endswith(("/bin", "/sbin")))
    users = itself and (not installed or "background" in command.place)
    named = not REACHES_NODES.isdisjoint(program_name(one) for one in command.words)
    unknown = launch.kind == "inner" and (launch.program is None or launch.program.literal is None)
    return unknown or (launch.kind == "unknown" and (users or named))


def _is_static(launch: Launch) -> bool:
    """Return whether torchrun certainly uses the static rendezvous, which needs a node rank."""
    backend = launch.options.get("rdzv_backend")
    return (backend is None or backend.literal == "static") and "rdzv_conf" not in launch.options


def _sets_pet(script: Script) -> bool:
    """Return whether the script sets variables from which torchrun takes its options."""
    return any(name.startswith("PET_") for name in script.walk.scalars)


def _spread(script: Script, *names: str) -> Iterator[Command]:
    """Yield the launchers that one srun starts on several nodes."""
    for command in script.launchers(*names):
        several = command.launch.via == "srun" and _several(script.geometry(command))
        once = "loop" not in command.outer.place and "conditional" not in command.place
        if several and once and not _sets_pet(script):
            yield command


def one_launcher_per_gpu(script: Script) -> Iterator[Remark]:
    """A launcher that starts several workers is started several times on a node: they share ports and GPUs.

    Bad: srun --ntasks-per-node=4 torchrun --nproc_per_node=4 train.py
    Good: srun --ntasks-per-node=1 torchrun --nproc_per_node=4 train.py
    """
    for command in script.launchers():
        launch, geometry = command.launch, script.geometry(command)
        tasks, workers = geometry.tasks_per_node or 1, launch.workers(geometry) or 1
        own_gpus = {"gpu-bind", "tres-bind", "gpus-per-task"} & geometry.options.keys()
        once = launch.via != "srun" or "conditional" in command.place or own_gpus
        if not once and tasks > 1 and workers > 1:
            line = geometry.line("ntasks-per-node", "ntasks") or command.line
            message = f"srun starts {launch.launcher} {tasks} times on each node, each with {workers} workers"
            yield Remark(line, message, "start one launcher per node: --ntasks-per-node=1")


def deepspeed_nodes(script: Script) -> Iterator[Remark]:
    """DeepSpeed's launcher gets no ``--hostfile``, or every node starts a launcher for all nodes.

    Bad: deepspeed --num_nodes 2 train.py
    Good: deepspeed --num_nodes 2 --hostfile hosts train.py
    """
    remedy = "write the job's hosts to a file, and start deepspeed --hostfile FILE once, without srun"
    for command in _spread(script, "deepspeed"):
        options, geometry = command.launch.options, script.geometry(command)
        if not options.keys() & _ALONE and geometry.tasks_per_node == 1:
            what = "starts the workers of all" if "hostfile" in options else "knows no hostfile and no other"
            message = f"each of the {geometry.nodes} nodes starts a launcher that {what} nodes"
            yield Remark(command.line, message, remedy)
    for command in script.launchers("deepspeed") if _several(script.job) else ():
        options, one_node = command.launch.options, number(command.launch.node_count, script.job) == 1
        known = one_node or command.launch.via or options.keys() & {*_ALONE, "hostfile"}
        if not known and "conditional" not in command.outer.place and not _reaches_nodes(script):
            message = "only the first node starts workers, because no hostfile names the other nodes"
            yield Remark(command.line, message, remedy)


def missing_node_rank(script: Script) -> Iterator[Remark]:
    """A launcher with a static rendezvous gets no node rank, so that every node has rank 0.

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


def world_size_mismatch(script: Script) -> Iterator[Remark]:
    """A program waits for another number of nodes or processes than srun starts. torchrun expects 1 node.

    Bad: export WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    Good: export WORLD_SIZE=$SLURM_NTASKS
    """
    for command in script.commands if "nodes" in script.job.options else ():
        geometry, alone = script.geometry(command), command.outer.place.isdisjoint({"background", "loop"})
        value = command.exported("WORLD_SIZE") if geometry.tasks_per_node != 1 else None
        size, tasks = number(value, geometry), geometry.ntasks
        if value and size and tasks and size != tasks and alone and command.starts("python"):
            message = f"WORLD_SIZE is {size}, but srun starts {tasks} processes"
            yield Remark(value.line, message, "write WORLD_SIZE=$SLURM_NTASKS")
    for command in _spread(script, "torchrun", "accelerate"):
        launch, geometry = command.launch, script.geometry(command)
        name, nodes, expected = launch.launcher, geometry.nodes or 1, number(launch.node_count, geometry)
        joins = {"rdzv_endpoint", "master_addr", "node_rank", "rdzv_backend"} & launch.options.keys()
        message = ""
        if launch.node_count is None and name == "torchrun" and joins:
            message = f"torchrun without --nnodes expects 1 node, but srun starts it on {nodes}"
        elif expected and expected > nodes * (geometry.tasks_per_node or 1):
            message = f"{name} waits for {expected} nodes, but srun starts it on {nodes}"
        elif expected and 1 < expected < nodes:
            message = f"srun starts {name} on {nodes} nodes, but each expects {expected}"
        if message and nodes == script.job.nodes and "background" not in command.outer.place:
            yield Remark(command.line, message, "pass the numbers of the job, such as $SLURM_NNODES")


def task_gpu_mismatch(script: Script) -> Iterator[Remark]:
    """A node has fewer GPUs than processes that need one each ("Duplicate GPU detected").

    Bad: #SBATCH --ntasks-per-node=4 --gpus-per-node=2
    Good: #SBATCH --ntasks-per-node=4 --gpus-per-node=4
    """
    for command in script.commands:
        launch, geometry = command.launch, script.geometry(command)
        gpus, tasks, workers = geometry.gpus_per_node, geometry.tasks_per_node, launch.workers(geometry)
        if not gpus or launch.opaque or "conditional" in command.outer.place:
            continue
        have = count(gpus, "GPU")
        if launch.launcher and workers and workers > gpus:
            message = f"{launch.launcher} starts {workers} workers on {have}"
            yield Remark(command.line, message, f"start {count(gpus, 'worker')}, or request more GPUs")
        elif command.starts("python") and tasks and tasks > gpus:
            message = f"{tasks} processes share {have} on each node, which NCCL does not support"
            line = geometry.line("ntasks-per-node", "ntasks", "gpus-per-node", "gres") or command.line
            remedy = f"request {count(tasks, 'GPU')} per node, or --ntasks-per-node={gpus}"
            yield Remark(line, message, remedy)


def ntasks_conflict(script: Script) -> Iterator[Remark]:
    """``--ntasks`` contradicts ``--nodes`` times ``--ntasks-per-node``: too few processes or nodes.

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
        joined = (number(launch.node_count, geometry) or 1) > 1
        if several and command.starts("launcher") and joined:
            yield command, [launch.options[name] for name in _ADDRESSES if name in launch.options]
        elif several and command.starts("python"):
            value = command.exported("MASTER_ADDR")
            yield command, [value] if value else []


def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address of a job with several nodes is the local host, also torchrun's if none is given.

    Bad: export MASTER_ADDR=localhost
    Good: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    for command, addresses in _spanning(script):
        for value in addresses:
            own = any(one.in_task and one.source.startswith("$(hostname") for one in value.unknowns)
            if own or _LOOPBACK.match(value.start):
                message = f"{value.shown[:60]} is another host on every node: the nodes never connect"
                yield Remark(value.line, message, _FIRST_HOST)
        launch, backend = command.launch, command.launch.options.get("rdzv_backend")
        known = _is_static(launch) or (backend and backend.literal == "c10d")
        given = {*_ADDRESSES, "local_addr"} & launch.options.keys() or _sets_pet(script)
        if launch.launcher == "torchrun" and not launch.opaque and known and not given:
            message = "torchrun gets no address and uses the local host: the nodes never connect"
            options = "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
            yield Remark(command.line, message, f"pass {options} with the job's first host as HOST")


def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master address is a fixed host, although Slurm chooses the nodes of the job.

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


def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The batch shell expands the rank of a node or task, so that every task gets rank 0.

    Bad: srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...
    Good: srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    for command in [one for one in script.commands if one.starts("python", "launcher")]:
        if command.launch.launcher == "torchrun" and not _is_static(command.launch):
            continue
        step = script.geometry(command)
        counts = {"NODEID": step.nodes, "LOCALID": step.tasks_per_node, "PROCID": step.ntasks}
        for name, value in _ranks(command):
            for early in value.unknowns[:1]:
                if not early.in_task and (counts.get(early.name.removeprefix("SLURM_")) or 1) > 1:
                    message = f"the batch shell expands {early.source}, so every task gets the same {name}"
                    remedy = f"expand the variable in the task: srun bash -c '... ${early.name} ...', "
                    yield Remark(early.line, message, f"{remedy}or \\$ within double quotes")


def _ranks(command: Command) -> Iterator[tuple[str, Word]]:
    """Yield the ranks in the options and the environment of a command."""
    launch = command.launch
    yield from ((f"--{name}", launch.options[name]) for name in _RANK_OPTIONS if name in launch.options)
    for word, following in zip(launch.arguments, [*launch.arguments[1:], None], strict=False):
        option, equals, _ = word.start.partition("=")
        value = word.after(f"{option}=") if equals else following
        if value and option[:2] == "--" and option.lstrip("-").replace("-", "_") in _RANK_OPTIONS:
            yield option, value
    if launch.kind == "python" and (command.task or command.exported("WORLD_SIZE")):
        values = [(name, command.exported(name)) for name in ("RANK", "LOCAL_RANK")]
        yield from ((name, value) for name, value in values if value)
