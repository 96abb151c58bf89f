"""Rules about numbers that must agree: nodes, tasks, GPUs, CPUs, and Slurm's variables for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ...units import count
from ..geometry import number
from ..options import names
from ..script import Script
from . import rule
from .launching import TORCH

_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")
#: Options without which Slurm does not set their variable (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
_NEEDED_OPTIONS = names("cpus-per-task ntasks-per-node gpus gpus-per-node gpus-per-task cpus-per-gpu")
#: Variables that Slurm sets in jobs and tasks, without ``SLURM_`` (sbatch(1), srun(1)).
_SLURM_NAMES = names(
    """ACCOUNT ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN ARRAY_TASK_STEP
    CLUSTER_NAME CONF CONTAINER CPUS_ON_NODE CPUS_PER_GPU CPUS_PER_TASK CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE
    CPU_BIND_VERBOSE CPU_FREQ_REQ DEBUG DISTRIBUTION DIST_PLANESIZE EXACT EXPORT_ENV GPUS GPUS_ON_NODE
    GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GTIDS HET_GROUP HET_SIZE HINT HOSTFILE
    JOBID JOBTMP JOB_ACCOUNT JOB_COMMENT JOB_CONSTRAINTS JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_END_TIME
    JOB_GID JOB_GPUS JOB_GROUP JOB_ID JOB_LICENSES JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_PARTITION JOB_QOS
    JOB_RESERVATION JOB_SCRATCHDIR JOB_START_TIME JOB_TMP JOB_UID JOB_USER KILL_BAD_EXIT LAUNCH_NODE_IPADDR
    LOCALID MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NETWORK NNODES NODEFILE NODEID NODELIST
    NODE_ALIASES NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OOMKILLSTEP
    OVERCOMMIT OVERLAP PARTITION PRIO_PROCESS PROCID PROFILE QOS RESTART_COUNT RLIMIT_STACK SCRATCH
    SCRIPT_CONTEXT SHARDS_ON_NODE SPANK_TASK_ENV SRUN_COMM_HOST SRUN_COMM_PORT STEPID STEP_GPUS STEP_ID
    STEP_LAUNCHER_PORT STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR
    SUBMIT_HOST TASKS TASKS_PER_NODE TASK_PID THREADS_PER_CORE TIMELIMIT TMPDIR TOPOLOGY_ADDR
    TOPOLOGY_ADDR_PATTERN TRES_PER_TASK UMASK UNBUFFEREDIO USER WAIT WCKEY WHOLE WORKING_CLUSTER"""
)


@rule(Severity.WARNING)
def task_gpu_mismatch(script: Script) -> Iterator[Remark]:
    """A node has fewer GPUs than processes that need one each.

    With one process per GPU, a node must have as many GPUs as tasks or as workers of its launcher. Otherwise
    processes share a GPU ("Duplicate GPU detected"), or select one that does not exist ("invalid device
    ordinal"). Programs that use no GPU in some of their processes are not affected.

    Bad: #SBATCH --ntasks-per-node=4 --gpus-per-node=2
    Good: #SBATCH --ntasks-per-node=4 --gpus-per-node=4
    """
    for command in script.commands:
        launch, geometry = command.launch, script.geometry(command)
        gpus, tasks = geometry.gpus_per_node, geometry.tasks_per_node
        if not gpus or launch.opaque or geometry.heterogeneous or command.outer.place.conditional:
            continue
        value = launch.options.get("nproc_per_node")
        workers = number(value, geometry)
        if launch.launcher in TORCH and value and workers:
            visible = geometry.gpus_per_task if launch.via == "srun" and geometry.isolates_gpus else gpus
            if visible and workers > visible:
                message = f"torchrun starts {workers} workers on {count(visible, 'GPU')}"
                remedy = f"start {count(visible, 'worker')}, or request more GPUs"
                yield Remark(value.line, message, remedy)
        elif launch.via == "srun" and launch.kind == "python" and tasks and tasks > gpus:
            message = (
                f"{tasks} processes share {count(gpus, 'GPU')} on each node, which NCCL does not support"
            )
            remedy = f"request {count(tasks, 'GPU')} per node, or --ntasks-per-node={gpus}"
            line = geometry.line("ntasks-per-node", "ntasks", *_GPU_OPTIONS) or command.line
            yield Remark(line, message, remedy)


@rule(Severity.ERROR)
def ntasks_conflict(script: Script) -> Iterator[Remark]:
    """``--ntasks`` contradicts ``--nodes`` times ``--ntasks-per-node``.

    ``--ntasks`` takes precedence: too few processes start, or Slurm refuses the job. With fewer tasks than
    nodes, Slurm reduces the number of nodes. A step must not request more nodes than its job.

    Bad: #SBATCH --nodes=2 --ntasks-per-node=4 --ntasks=4
    Good: #SBATCH --nodes=2 --ntasks-per-node=4
    """
    yield from _conflict(script)
    low, high = script.job.node_range
    inherited = script.job.ntasks if {"ntasks", "ntasks-per-node"} & set(script.job.options) else None
    for command in script.commands:
        asked = command.launch.srun_option("nodes") if command.place.task is None else None
        geometry = script.geometry(command)
        needed = geometry.node_range[0]
        if not asked or "nodes" not in script.job.options or low != high or needed <= low:
            continue
        if (geometry.number("ntasks") or inherited or needed) < needed or geometry.heterogeneous:
            continue  # srun uses only as many nodes as it has tasks
        message = f"srun fails, because it requests {count(needed, 'node')} and the job has only {low}"
        yield Remark(asked.line, message, f"request --nodes={needed} in the directives")


def _conflict(script: Script) -> Iterator[Remark]:
    job = script.job
    ntasks, per_node, line = job.number("ntasks"), job.number("ntasks-per-node"), job.line("ntasks")
    low, high = job.node_range
    if not ntasks or not line or job.heterogeneous or low != high or "nodes" not in job.options:
        return
    if ntasks < low:
        message = (
            f"--ntasks={ntasks} is less than --nodes={low}: Slurm reduces the number of nodes to {ntasks}"
        )
        yield Remark(line, message, "replace --ntasks by --ntasks-per-node")
    elif per_node and ntasks != low * per_node:
        total = low * per_node
        effect = "Slurm refuses the job" if ntasks > total else "too few tasks start"
        product = f"{count(low, 'node')} x {count(per_node, 'task')} per node = {total}"
        message = f"--ntasks={ntasks} contradicts {product}: {effect}"
        yield Remark(line, message, f"remove --ntasks, or change it to {total}")


@rule(Severity.ERROR)
def ntasks_per_node_ignored(script: Script) -> Iterator[Remark]:
    """``--ntasks-per-node`` on srun is ignored, because srun inherits the job's number of tasks.

    Without ``--ntasks``, srun starts as many tasks as the job requests and warns "can't honor
    --ntasks-per-node".

    Bad: srun --ntasks-per-node=1 torchrun ...
    Good: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun ...
    """
    inherited, nodes = script.job.ntasks, script.job.nodes
    if not inherited or not nodes or not {"ntasks", "ntasks-per-node"} & set(script.job.options):
        return
    for command in script.commands:
        launch = command.launch
        option = launch.srun_option("ntasks-per-node") if command.place.task is None else None
        given = {one.name for one in launch.srun}
        if option is None or launch.opaque or given & {"ntasks", "nodes", "nodelist"}:
            continue  # with --nodes, Slurm 24.11 follows the option, and 22.05 does not
        per_node = number(option.expanded, script.job)
        if per_node and per_node * nodes != inherited:
            message = f"srun ignores --ntasks-per-node={per_node}: "
            message += f"it inherits {count(inherited, 'task')} on {count(nodes, 'node')} from the job"
            total = "$SLURM_NNODES" if per_node == 1 else f"$((SLURM_NNODES * {per_node}))"
            edit = Edit(option.line, option.written, f"--ntasks={total} {option.written}")
            yield Remark(option.line, message, f"pass --ntasks={total} to srun as well", edit)


@rule(Severity.WARNING)
def undefined_variable(script: Script) -> Iterator[Remark]:
    """A variable of Slurm is used that Slurm does not set in this job.

    Slurm sets some variables only if an option is given, possibly on the command line of sbatch.

    Bad:
        #SBATCH --ntasks=8
        srun python train.py --gpus $SLURM_NTASKS_PER_NODE
    Good:
        #SBATCH --ntasks-per-node=8
        srun python train.py --gpus $SLURM_NTASKS_PER_NODE
    """
    tested = {use.name for use in script.walk.uses if use.guarded}
    given = set(script.job.options) | {one.name for command in script.sruns for one in command.launch.srun}
    reported = set(tested | script.names)
    for use in script.walk.uses:
        if use.name.startswith("SLURM_") and use.name not in reported and script.header.options:
            remark = _undefined(use.name, use.line, given)
            reported.add(use.name)
            yield from [remark] if remark else []


def _undefined(name: str, line: int, given: set[str]) -> Remark | None:
    short = name.removeprefix("SLURM_")
    option = short.lower().replace("_", "-")
    if option in _NEEDED_OPTIONS - given:
        message = f"Slurm sets ${name} only in jobs with --{option}, which this script does not request"
        return Remark(line, message, f"add --{option}, or write ${{{name}:-NUMBER}}")
    if short in _SLURM_NAMES or "_HET_GROUP_" in name:
        return None
    close = difflib.get_close_matches(short, sorted(_SLURM_NAMES), n=1, cutoff=0.8)
    if not close:
        return None
    meant = f"$SLURM_{close[0]}"
    message = f"Slurm does not set ${name}, so it is empty; did you mean {meant}?"
    return Remark(line, message, f"use {meant}")
