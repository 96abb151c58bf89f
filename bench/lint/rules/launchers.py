"""Rules about the options of torchrun, accelerate and mpirun."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from bench.findings import Edit, Remark, Severity
from bench.lint.expansion import MARK
from bench.lint.launch import Launch, basename
from bench.lint.options import names, whole_number
from bench.lint.rules import rule
from bench.lint.script import Script
from bench.lint.walk import Step

#: Options of torchrun up to torch 2.10 (torch/distributed/run.py), without those of torch.distributed.launch.
_OPTIONS = names(
    """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts
    monitor_interval start_method event_log_handler role m module no_python run_path log_dir r redirects t
    tee local_ranks_filter node_rank master_addr master_port local_addr logs_specs numa_binding
    signals_to_handle virtual_local_rank duplicate_stdout_filters duplicate_stderr_filters
    shutdown_timeout h help use_env"""
)
_TORCHRUN = frozenset({"torchrun", "launch"})
_PROCESSES = frozenset({"-n", "-np", "--np", "-c"})
_MORE_SLOTS = re.compile(r"oversubscribe|overcommit|hostfile|machinefile|-hosts?\b|hwthread|-H\Z|-f\Z", re.I)


def passes_unknown_options(script: Script, launch: Launch) -> bool:
    """Return whether variables with unknown values may contain further options of a launcher."""
    values = {value.text for value in launch.options.values()} | {option.value for option in launch.srun}
    before_arguments = launch.words[: len(launch.words) - len(launch.arguments)]
    environment = any(name.startswith(("PET_", "ACCELERATE_")) for name in script.walk.exported)
    return (
        launch.opaque
        or environment
        or any(MARK.fullmatch(word.text) and word.text not in values for word in before_arguments)
    )


@rule(Severity.ERROR)
def missing_node_rank(script: Script) -> Iterator[Remark]:
    """A launcher with a static rendezvous gets no node rank, so that every node has rank 0.

    Without ``--rdzv_backend=c10d``, torchrun takes the rank of its node from ``--node_rank``, whose
    default is 0. ``accelerate launch`` uses ``--machine_rank`` in the same way. Without the option, all
    nodes have the same ranks, and the job fails or hangs.

    Bad:
        #SBATCH --nodes=2
        srun torchrun --nnodes=2 --master_addr=$HOST --master_port=$PORT ...

    Good:
        #SBATCH --nodes=2
        srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$HOST:$PORT ...
    """
    for step in script.sruns:
        launch, options = step.launch, step.launch.options
        nodes = script.geometry(step).nodes or (2 if script.job.several_nodes else 1)
        if nodes < 2 or launch.launcher not in _STATIC_RANKS or passes_unknown_options(script, launch):
            continue
        rank, count = _STATIC_RANKS[launch.launcher]
        backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
        if (
            backend != "static"
            or rank in options
            or {"config_file", "standalone", "rdzv_conf"} & set(options)
        ):
            continue
        if count not in options or script.number(options[count], script.geometry(step)) == 1:
            continue
        message = f"{launch.launcher} gets no --{rank}, so that each of the {nodes} nodes has rank 0"
        remedy = f"srun bash -c '... --{rank}=$SLURM_NODEID ...'"
        if launch.launcher == "torchrun":
            remedy = f"use --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, or {remedy}"
        yield Remark(options[count].line, message, remedy)


#: Launchers that do not assign the node ranks themselves: names of the options for the rank and the nodes.
_STATIC_RANKS = {
    "torchrun": ("node_rank", "nnodes"),
    "launch": ("node_rank", "nnodes"),
    "accelerate": ("machine_rank", "num_machines"),
}


@rule(Severity.ERROR)
def unknown_torchrun_option(script: Script) -> Iterator[Remark]:
    """Torchrun gets an option that it does not have, and stops with "unrecognized arguments".

    Options of the program belong after the program's name.

    Bad:
        torchrun --nproc_per_node=4 -c config.yaml train.py

    Good:
        torchrun --nproc_per_node=4 train.py -c config.yaml
    """
    for step in script.training:
        launch = step.launch
        if launch.launcher not in _TORCHRUN or not launch.program:
            continue
        for name, value in launch.options.items():
            known = name in _OPTIONS or any(option.startswith(name) for option in _OPTIONS if len(name) > 1)
            attached = len(name) > 1 and name[0] in "mrt" and name[1:].isdigit()
            if known or attached or MARK.search(name):
                continue
            written = f"--{name}" if len(name) > 1 else f"-{name}"
            close = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.8)
            message = f"torchrun has no option {written} and stops with 'unrecognized arguments'"
            remedy = f"write --{close[0]}" if close else "put the options of the program after its name"
            certain = bool(close) or len(name) == 1
            yield Remark(value.line, message, remedy, None if certain else Severity.WARNING)


@rule(Severity.WARNING)
def mpirun_slots(script: Script) -> Iterator[Remark]:
    """Mpirun starts more processes than the job has tasks.

    Under Slurm, Open MPI takes one slot per task. With more processes, it fails with "There are not
    enough slots available". Other versions of mpirun let processes share the CPUs of a task.

    Bad:
        #SBATCH --ntasks=2
        mpirun -n 6 python train.py

    Good:
        #SBATCH --ntasks=6
        mpirun -n 6 python train.py
    """
    slots = script.job.ntasks
    whole_nodes = {"nodes", "exclusive"} & set(script.job.options)
    if whole_nodes and not {name for name in script.job.options if "tasks" in name}:
        return  # sites that allocate whole nodes give each core a slot
    if not {"nodes", "ntasks"} & set(script.job.options):
        return  # the number of nodes is given on the command line
    if not slots or script.job.heterogeneous or "overcommit" in script.job.options:
        return
    for step in script.walk.steps:
        words = [word.text for word in step.launch.words]
        if not any(name.startswith(("mpirun", "mpiexec")) for name in step.launch.wrappers):
            continue
        if any(_MORE_SLOTS.search(word) for word in words):
            continue
        count = _mpi_processes(script, step)
        if count and count > slots:
            message = f"mpirun starts {count} processes, but the job has {slots} task{'s' * (slots > 1)}"
            remedy = f"request --ntasks={count}, or start mpirun -n $SLURM_NTASKS"
            yield Remark(step.line, f"{message}: Open MPI reports too few slots", remedy)


def _mpi_processes(script: Script, step: Step) -> int | None:
    """Return the number of processes in the options of mpirun, or None."""
    words = step.launch.words
    start = next(
        (at for at, word in enumerate(words) if basename(word.text).startswith(("mpirun", "mpiexec"))), 0
    )
    for word, following in itertools.pairwise(words[start + 1 :]):
        if word is step.launch.program or ("/" in word.text and not word.text.startswith("-")):
            return None  # the options of the program begin
        if word.text in _PROCESSES:
            return whole_number(following.text)
        name, _, value = word.text.partition("=")
        if name in ("--np", "--n"):
            return whole_number(value)
    return None


@rule(Severity.WARNING)
def world_size_mismatch(script: Script) -> Iterator[Remark]:
    """WORLD_SIZE is not the number of processes that srun starts.

    A program that reads WORLD_SIZE waits for that many processes. If WORLD_SIZE is the number of tasks of
    one node, the ranks of the other nodes are out of range. torchrun and similar launchers set WORLD_SIZE
    themselves.

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        export WORLD_SIZE=$SLURM_NTASKS_PER_NODE
        srun python train.py

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        export WORLD_SIZE=$SLURM_NTASKS
        srun python train.py
    """
    steps = [step for step in script.sruns if step.launch.kind in ("python", "script")]
    for assigned in script.assigned_to.get("WORLD_SIZE", ()):
        exported = assigned.exported or assigned.name in script.walk.exported
        for step in steps if exported and assigned.value and not assigned.branches else ():
            geometry = script.geometry(step)
            size, ntasks = script.number(assigned.value, geometry), geometry.ntasks
            if size and ntasks and geometry.tasks_per_node != 1 and size != ntasks and not step.launch.opaque:
                message = f"WORLD_SIZE is {size}, but srun starts {ntasks} processes"
                remedy = "write WORLD_SIZE=$SLURM_NTASKS"
                edit = Edit(assigned.line, "=$SLURM_NTASKS_PER_NODE", "=$SLURM_NTASKS")
                fits = script.line(assigned.line).endswith(edit.old)
                yield Remark(assigned.line, message, remedy, edit=edit if fits else None)
                break
