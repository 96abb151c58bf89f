"""Rules about how the training program is started on the nodes, and about the options of its launcher."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ...units import count
from ..expansion import MARK, Value
from ..geometry import Geometry
from ..launch import ACCELERATE_OPTIONS, TORCHRUN_OPTIONS, TRAINS, Launch, basename
from ..options import Option, canonical, names, sbatch_options, srun_options
from ..script import Script, is_chore, starts_workers
from ..walk import Step
from . import rule

_LIGHTNING = re.compile(r"lightning|\blit_|_lit\b|\bpl_", re.IGNORECASE)
_PARALLEL = re.compile("(?:ddp|fsdp|deepspeed)(?!_spawn|_fork|_notebook)")
_MENTIONS = re.compile(r"lightning", re.IGNORECASE)
#: Starts one task on each node. With --nodes instead of --ntasks, Slurm 22.05 starts all tasks of the job.
_SRUN_PER_NODE = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
_NODE_RANKS = ("node_rank", "machine_rank")
#: Signs that processes form one group: variables, options of programs, and words in the script.
_RENDEZVOUS = frozenset({"MASTER_ADDR", "WORLD_SIZE", "RANK", "NODE_RANK", "MASTER_PORT"})
_RENDEZVOUS_OPTIONS = names(
    """world_size dist_url init_method dist_backend distributed_backend master_addr rank node_rank num_nodes
    nnodes trainer.num_nodes distributed ddp multiprocessing_distributed strategy trainer.strategy"""
)
STARTS_PROCESSES = names("multiprocessing_distributed nproc_per_node gpus_per_node ngpus world_size")
#: Options and names of programs that join a group of processes, which something else starts.
_JOINS_GROUP = names("dist_backend distributed_backend dist_url init_method")
_PARALLEL_PROGRAM = re.compile(r"(?:\A|[_-])ddp(?:[_.-]|\Z)", re.IGNORECASE)
_NODE_COUNTS = names("nodes num_nodes n_nodes nnodes")
_SIZES = names("n np nodes ntasks num_procs num_gpus ngpus")
_LEARNS = re.compile(r"torch|tensorflow|keras|\bjax\b|cuda", re.IGNORECASE)
#: Words of a script whose program reaches servers, or calls srun itself.
_REACHES_SERVERS = re.compile(
    r"hostfile|machinefile|python.*client|=[\"']?srun\b|launcher=[\"']?slurm\b", re.IGNORECASE
)
#: Names of a program's options whose value is a command or a file with commands.
_COMMAND_OPTION = re.compile(r"(?:\A|[_-])(?:cmd|command|sbatch|srun)(?:[_-]|\Z)")
_DATA_PARALLEL = re.compile(r"(?:\A|[_-])dp(?:[_.-]|\Z)")
_GROUP = re.compile(r"lightning|\bddp\b(?!-backend)|torch\.?distributed", re.IGNORECASE)

#: Commands that keep a script running if they are in the foreground.
_KEEPS_RUNNING = frozenset(
    {"sleep", "tail", "srun", "jupyter", "jupyter-notebook", "jupyter-lab", "code-server"}
)
_OPTION_NAME = re.compile(r"--([A-Za-z][\w-]*)(?:=|\Z)")
_NUMBER_OF_TASKS = re.compile(r"SLURM_(?:NTASKS|NPROCS|TASKS_PER_NODE)")
_TORCHRUN = frozenset({"torchrun", "launch"})
#: Modules whose mpirun does not count slots, unlike that of Open MPI.
_OTHER_MPI = re.compile(r"module.*\b(?:mvapich|mpich|impi|intel-?mpi|cray-mpi)", re.IGNORECASE)
_PROCESSES = frozenset({"-n", "-np", "--np", "-c"})
_MORE_SLOTS = re.compile(r"oversubscribe|overcommit|hostfile|machinefile|-hosts?\b|hwthread|-H\Z|-f\Z", re.I)
#: Names of the options for the node rank and the number of nodes, by launcher that assigns no node ranks.
_STATIC_RANKS = {
    "torchrun": ("node_rank", "nnodes"),
    "launch": ("node_rank", "nnodes"),
    "accelerate": ("machine_rank", "num_machines"),
}
_RANKED = "a rank that each node expands itself (see missing-node-rank)"


@rule(Severity.ERROR)
def missing_srun(script: Script) -> Iterator[Remark]:
    """A job has several nodes, but only the batch shell starts the program.

    The batch script runs once, on the first node. Only srun, mpirun or a similar launcher starts processes
    on the other nodes. Without one, the processes on the first node wait for the others until the
    rendezvous times out, and the job fails. A program whose processes do not wait for each other leaves the
    other nodes idle.

    Bad:
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=4
        python train.py

    Good:
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=4
        srun python train.py
    """
    if script.reaches_nodes or script.job.heterogeneous:
        return
    if not script.job.several_nodes and not _tasks_need_nodes(script.job):
        yield from _one_process_for_all_gpus(script)
        return
    for step in _started_on_one_node(script):
        waits = waits_for_others(script, step)
        few = (script.job.number("ntasks") or 0) in range(1, script.job.nodes or 1)  # see ntasks-conflict
        if not waits and (few or not script.job.several_nodes):
            continue  # such a number of tasks is usually meant as a number of cores
        message = f"only the first node runs this command: {_processes(script, step)} will start"
        message += _effect(step) if waits else ", and the other nodes stay idle"
        remedy = _how_to_srun(script, step) if waits else f"request one node, or {_how_to_srun(script, step)}"
        severity = _severity_without_srun(script, step, waits=waits)
        edit = _insert_srun(script, step) if waits else None
        if waits and severity is not Severity.ERROR and step.launch.kind == "python":
            remedy, edit = f"{remedy}, unless the program starts the other processes itself", None
        yield Remark(step.outer.line, message, remedy, severity, edit)


def _effect(step: Step) -> str:
    """Describe what happens to processes that wait for those of the other nodes."""
    if step.launch.launcher == "deepspeed":
        return ", and deepspeed fails, because it finds no host file"
    return " and wait for the others until the rendezvous times out"


def _severity_without_srun(script: Script, step: Step, *, waits: bool) -> Severity:
    if _is_driver(script, step):
        return Severity.INFO
    if waits:
        certain = script.job.several_nodes and not _is_uncertain(script, step)
        return Severity.ERROR if certain else Severity.WARNING
    # Programs that do not learn often start MPI themselves, and a client or host file suggests servers.
    learns = script.job.asks_for_gpus or script.mentions(_LEARNS)
    alone = learns and not script.mentions(_REACHES_SERVERS) and not _gets_size(script, step)
    return Severity.WARNING if alone else Severity.INFO


def _is_driver(script: Script, step: Step) -> bool:
    """Return whether a program gets commands, which it probably starts on the nodes itself."""
    given = script.options_of_program(step.launch) if step.launch.kind == "python" else ()
    return any(_COMMAND_OPTION.search(name) for name, _ in given)


def _gets_size(script: Script, step: Step) -> bool:
    """Return whether a program gets the size of the job, so that it may start the processes itself."""
    sizes = {script.job.nodes, script.job.ntasks, script.job.number("ntasks")} - {None, 1}
    given = script.options_of_program(step.launch) if step.launch.kind == "python" else ()
    return any(name in _SIZES and script.number(value, script.job) in sizes for name, value in given)


def _one_process_for_all_gpus(script: Script) -> Iterator[Remark]:
    """Find a plain Python program in a job with one task per GPU on a single node."""
    ntasks, gpus = script.job.ntasks or 0, script.job.gpus_per_node or 0
    for step in _started_on_one_node(script)[:1]:
        if ntasks < 2 or gpus < 2 or ntasks != gpus or step.launch.kind != "python":
            continue
        given = dict(script.options_of_program(step.launch))
        if step.launch.program and _DATA_PARALLEL.search(basename(step.launch.program.text)):
            continue  # one process of torch.nn.DataParallel uses all GPUs
        exported = {"MASTER_ADDR", "WORLD_SIZE"} & script.walk.exported
        named = step.launch.program and _PARALLEL_PROGRAM.search(basename(step.launch.program.text))
        waits = bool(exported or given.keys() & _JOINS_GROUP or named) and not given.keys() & STARTS_PROCESSES
        message = f"python without srun starts 1 process, but the job requests {ntasks} tasks for {gpus} GPUs"
        strategy = next((given[name].text for name in ("trainer.strategy", "strategy") if name in given), "")
        devices = script.number(given.get("trainer.devices") or given.get("devices"), script.job)
        remedy = "put srun before the command, unless the program starts the other processes itself"
        if _PARALLEL.match(strategy) and devices in (None, ntasks):
            waits, remedy = True, "put srun before the command"
            message += ": Lightning expects a process for each task, and waits for the others"
        severity = Severity.WARNING if waits else Severity.INFO
        yield Remark(step.outer.line, message, remedy, severity, _insert_srun(script, step))


def _tasks_need_nodes(job: Geometry) -> bool:
    """Return whether a job states no number of nodes but has more tasks than a node has GPUs."""
    gpus, ntasks = job.gpus_per_node, job.number("ntasks")
    return bool(job.nodes is None and gpus and ntasks and ntasks > gpus)


def _is_uncertain(script: Script, step: Step) -> bool:
    """Return whether the program, another command or a configuration file may start it on the nodes."""
    if step.launch.kind != "python":
        return "config_file" in step.launch.options
    given = {name for name, _ in script.options_of_program(step.launch)}
    joins = _RENDEZVOUS & set(script.assigned_to) or given & _RENDEZVOUS_OPTIONS
    trains = step.launch.program and "train" in basename(step.launch.program.text).lower()
    if not joins or (given & _NODE_COUNTS and not trains):
        return True  # a program that gets the number of nodes possibly calls srun itself
    return any(other.launch.kind == "unknown" for other in script.training)


def waits_for_others(script: Script, step: Step) -> bool:
    """Return whether the script shows that the processes of a program form one group.

    The signs are a launcher that expects several nodes, Lightning, and the variables or options of a
    rendezvous. Without these signs, the process possibly computes alone.
    """
    if starts_workers(step.launch):
        value = step.launch.node_count
        return value is not None and script.number(value, script.job) != 1
    given = {name for name, _ in script.options_of_program(step.launch)}
    return bool(
        given & _RENDEZVOUS_OPTIONS or _RENDEZVOUS & set(script.assigned_to) or script.mentions(_GROUP)
    )


def _started_on_one_node(script: Script) -> list[Step]:
    """Return the commands that the script should start on all nodes."""
    steps = [step for step in script.training if step.launch.kind in ("python", "launcher")]
    launchers = [step for step in steps if step.launch.kind == "launcher"]
    if launchers:
        return launchers
    named = [
        step for step in steps if step.launch.program and TRAINS.search(basename(step.launch.program.text))
    ]
    if named:
        return named
    return [] if any(step.launch.kind == "script" for step in script.training) else steps[-1:]


def _processes(script: Script, step: Step) -> str:
    """Describe how many of the job's processes a command starts, such as ``1 of 8 processes``."""
    nodes, launch = script.job.nodes, step.launch
    if starts_workers(launch):
        workers = script.number(launch.options.get("nproc_per_node"), script.job)
        if nodes and workers:
            return f"{workers} of {nodes * workers} processes"
        return f"the workers of 1 of {nodes or 'several'} nodes"
    ntasks = script.job.ntasks
    return f"1 of {ntasks or 'all'} processes"


def _how_to_srun(script: Script, step: Step) -> str:
    if step.launch.launcher == "deepspeed":
        return f"pass --hostfile, or start it on each node: {_SRUN_PER_NODE} deepspeed --no_ssh ..."
    if starts_workers(step.launch) and script.job.tasks_per_node != 1:
        remedy = f"start one launcher on each node: {_SRUN_PER_NODE} COMMAND"
        return f"{remedy}, with {_RANKED}" if _lacks_rank(step.launch) else remedy
    if _lacks_rank(step.launch):
        return f"put srun before the command, and use {_RANKED}"
    return "put srun before the command, so that it starts one process per task"


def _lacks_rank(launch: Launch) -> bool:
    """Return whether a launcher would have the same node rank on every node if srun started it."""
    options = launch.options
    if launch.launcher not in _STATIC_RANKS or {"config_file", "rdzv_conf"} & set(options):
        return False
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
    rank = options.get(_STATIC_RANKS[launch.launcher][0])
    return backend == "static" and (rank is None or rank.text.isdecimal())


def _insert_srun(script: Script, step: Step) -> Edit | None:
    """Return the edit that puts srun before the command, or None if the edit is not possible."""
    node = step.outer
    first = node.words[0].literal if node.words else None
    if not first or first not in script.line(node.line) or _lacks_rank(step.launch):
        return None
    srun = "srun"
    if starts_workers(step.launch) and script.job.tasks_per_node != 1:
        srun = _SRUN_PER_NODE
    return Edit(node.line, first, f"{srun} {first}")


@rule(Severity.ERROR)
def one_launcher_per_gpu(script: Script) -> Iterator[Remark]:
    """A launcher that starts one worker per GPU is started several times on a node.

    torchrun and similar launchers start one worker for each GPU of the node. If every task of a node
    starts such a launcher, each GPU gets several workers. The job then fails because a port is in use,
    or because NCCL reports "Duplicate GPU detected".

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        srun torchrun --nnodes=2 --nproc_per_node=4 ...

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=1
        srun torchrun --nnodes=2 --nproc_per_node=4 ...
    """
    for step in script.sruns:
        launch, geometry = step.launch, script.geometry(step)
        if not starts_workers(launch) or launch.opaque or _only_one_task(script, step):
            continue
        tasks = geometry.tasks_on_a_node
        if geometry.ntasks and geometry.nodes:  # --ntasks takes precedence over --ntasks-per-node
            tasks = min(tasks, -(-geometry.ntasks // geometry.nodes))
        if tasks < 2 or _one_worker_per_gpu(script, launch, geometry):
            continue
        workers = script.number(launch.options.get("nproc_per_node"), geometry)
        message = f"srun starts {launch.launcher} {tasks} times on each node"
        several = "ntasks-per-node" in geometry.options and (workers or 0) > 1
        # In a branch, the number of tasks is possibly meant for a command in another branch.
        certain = several and "standalone" not in launch.options and not step.place.branches
        severity = None if certain else Severity.WARNING
        line = geometry.line("ntasks-per-node", "ntasks") or step.line
        remedy, edit = "start the launcher once per node: --ntasks-per-node=1", _one_task(geometry)
        if {"ntasks", "ntasks-per-node"} <= geometry.options.keys():
            remedy, edit = f"{remedy}, without --ntasks", None
        given = launch.options.get("nproc_per_node")
        used = script.unknowns.within(given.text) if given else []
        if any(_NUMBER_OF_TASKS.match(unknown.name) for unknown in used):
            remedy, edit = f"{remedy}, and --nproc_per_node=gpu: the number now depends on the tasks", None
        shared = [] if "standalone" in launch.options else ["ports"]
        shared += [] if geometry.isolation else ["GPUs"]
        effect = f"all use the same {' and '.join(shared)}" if shared else "each trains alone"
        yield Remark(line, f"{message}, and {effect}", remedy, severity, edit)
        if line != step.line:
            message += f" because of line {line}"
            yield Remark(step.line, message, "start the launcher once per node", Severity.INFO)


def _only_one_task(script: Script, step: Step) -> bool:
    """Return whether the task's shell tests SLURM_LOCALID, so that only one task per node continues."""
    return step.place.task is not None and any(
        "SLURM_LOCALID" in test and place.task is not None for test, place in script.walk.tests
    )


def _one_worker_per_gpu(script: Script, launch: Launch, geometry: Geometry) -> bool:
    """Return whether each task has its own GPUs and its launcher starts one worker per GPU."""
    own = geometry.gpus_per_task if geometry.isolation else None
    workers = launch.options.get("nproc_per_node") or launch.options.get("num_processes")
    if own is None:
        return False
    if workers is None:
        return own == 1
    if workers.text in ("gpu", "auto"):
        return True
    number = script.number(workers, geometry)
    return number is None or number == own or "num_processes" in launch.options


def _one_task(geometry: Geometry) -> Edit | None:
    """Return the edit that replaces the requested number of tasks by one task per node."""
    option = geometry.options.get("ntasks-per-node") or geometry.options.get("ntasks")
    return Edit(option.line, option.written, "--ntasks-per-node=1") if option else None


@rule(Severity.ERROR)
def sequential_sruns(script: Script) -> Iterator[Remark]:
    """A script starts one srun per node, one after the other.

    The processes of the first srun wait for the processes of the second srun. However, the second srun
    starts only after the first srun has ended. Use one srun for all nodes, or end each line with ``&`` and
    add ``wait`` at the end.

    Bad:
        srun --nodes=1 --nodelist=$FIRST torchrun --node_rank=0 ...
        srun --nodes=1 --nodelist=$SECOND torchrun --node_rank=1 ...

    Good:
        srun --nodes=1 --nodelist=$FIRST torchrun --node_rank=0 ... &
        srun --nodes=1 --nodelist=$SECOND torchrun --node_rank=1 ... &
        wait
    """
    steps = [step for step in script.sruns if step.place.task is None or step.launch.srun_line]
    for step in _blocking(script, steps):
        line = step.launch.srun_line or step.line
        message = (
            "these processes wait for those of the next srun, which starts only after this srun has ended"
        )
        remedy = "end each srun with & and put `wait` after the last one, or use one srun for all nodes"
        yield Remark(line, message, remedy, edit=_in_background(script, step))
    in_background = [step for step in steps if step.place.background]
    if in_background and not script.walk.waits and not _something_follows(script, in_background[-1]):
        line = in_background[-1].launch.srun_line or in_background[-1].line
        message = "the script ends while this srun runs in the background, and Slurm then kills its processes"
        following = script.walk.steps[script.walk.steps.index(in_background[-1]) + 1 :]
        later = any(step.line >= line and not step.place.background for step in following)
        yield Remark(line, message, "put `wait` after the last srun", Severity.INFO if later else None)


def _blocking(script: Script, steps: list[Step]) -> list[Step]:
    """Return the foreground steps that start the processes of only one of several nodes."""
    looped = [
        step
        for step in steps
        if step.place.loops and not step.place.background and _rank_depends_on_loop(script, step)
    ]
    ranks: dict[str, list[Step]] = {}
    for step in steps:
        rank = _rank(script, step.launch)
        if rank is not None and not step.place.loops and not step.place.branches:
            ranks.setdefault(rank, []).append(step)
    if len(ranks) < 2 or len({id(step.outer) for same in ranks.values() for step in same}) < 2:
        return looped  # `srun A : B` starts all of them together
    numbered = [step for same in ranks.values() for step in same]
    numbered.sort(key=lambda step: step.line)
    return looped + [step for step in numbered[:-1] if not step.place.background]


def _rank(script: Script, launch: Launch) -> str | None:
    """Return the node rank in the options if it is a literal number, else None."""
    options = dict(script.options_of_program(launch)) | launch.options
    ranks = (options[name].text for name in _NODE_RANKS if name in options)
    return next(filter(str.isdecimal, ranks), None)


def _rank_depends_on_loop(script: Script, step: Step) -> bool:
    """Return whether the node or its rank depends on the variable of a loop."""
    options = dict(script.options_of_program(step.launch)) | step.launch.options
    values = [options[name].text for name in _NODE_RANKS if name in options]
    nodes = [option.value or "" for option in step.launch.srun if option.name in ("nodelist", "relative")]
    if not values and not (nodes and starts_workers(step.launch) and "nnodes" in step.launch.options):
        return False
    counted = {assigned.name for assigned in script.walk.assigned if assigned.looped}
    counted |= {assigned.name for assigned in script.walk.assigned if assigned.value is None}
    used = {unknown.name for value in values + nodes for unknown in script.unknowns.within(value)}
    return bool(used & counted)


def _something_follows(script: Script, step: Step) -> bool:
    """Return whether a later command in the foreground keeps the script running."""
    keeping = frozenset({"sleep", "tail"}) if step.place.loops else _KEEPS_RUNNING
    return any(
        other.line > step.line
        and not other.place.background
        and (other.launch.is_training or basename(other.node.words[0].literal or "") in keeping)
        for other in script.walk.steps
    )


def _in_background(script: Script, step: Step) -> Edit | None:
    if step.place.task is not None or step.end > len(script.lines):
        return None
    text = script.line(step.end).rstrip()
    same_line = step.end == (step.launch.srun_line or step.line)
    return Edit(step.end, "", f"{text} &") if same_line and "#" not in text else None


@rule(Severity.INFO)
def lightning_under_torchrun(script: Script) -> Iterator[Remark]:
    """A Slurm job starts a Lightning program with torchrun.

    Lightning detects Slurm and reads its ranks from Slurm's variables instead of torchrun's. All
    workers of a node then have the same rank, or Lightning reports a wrong number of tasks. Newer
    versions of Lightning prefer torchrun's variables.

    Bad:
        #SBATCH --ntasks-per-node=1
        srun torchrun --nproc_per_node=4 train_lightning.py

    Good:
        #SBATCH --ntasks-per-node=4
        srun python train_lightning.py
    """
    for step in script.training:
        launch = step.launch
        if launch.launcher not in ("torchrun", "launch") or not launch.program or is_chore(launch):
            continue
        words = [launch.program.text, *(word.text for word in launch.arguments[:200])]
        named = any(
            _LIGHTNING.search(word[:300]) or word.lstrip("-+").startswith("trainer.") for word in words
        )
        if named or script.mentions(_MENTIONS):
            yield Remark(
                step.launch.srun_line or step.line,
                "Lightning reads ranks from Slurm, not from torchrun: several workers may get the same rank",
                "start one task per GPU (--ntasks-per-node), and run `srun python PROGRAM` without torchrun",
            )


@rule(Severity.ERROR)
def unknown_srun_option(script: Script) -> Iterator[Remark]:
    """A script passes an option to srun that srun does not have, so that the job fails at this line.

    srun accepts a prefix of an option's name only if the prefix is unique. An option that neither srun
    nor a common plugin has is reported as a warning, because a plugin of the site may add it.

    Bad:
        srun --cpubind=cores python train.py

    Good:
        srun --cpu-bind=cores python train.py
    """
    seen = set()
    for step in script.sruns:
        for option in step.launch.srun[: step.launch.srun_certain]:
            name = _OPTION_NAME.match(option.written)
            if name is None or (option.line, option.written) in seen:
                continue
            seen.add((option.line, option.written))
            remark = _unknown_option(name[1], option)
            if remark is not None:
                yield remark


def _unknown_option(written: str, option: Option) -> Remark | None:
    table = srun_options()
    matches = sorted({canonical(name) for name in table.matches(written)})
    if len(matches) == 1:
        return None
    word = option.written.partition("=")[0]
    if matches:
        candidates = ", ".join(f"--{name}" for name in matches[:6])
        message = f"srun refuses `{word}`, because it is ambiguous: {candidates}"
        return Remark(option.line, message, "write the option's name in full")
    if written in sbatch_options().long:
        message = f"srun refuses `{word}`, which is an option of sbatch only"
        return Remark(option.line, message, f"write `#SBATCH {option.written}`, or remove the option")
    close = table.closest(written)
    if close:
        edit = Edit(option.line, word, f"--{close}")
        severity = None if written.replace("_", "-") == close else Severity.WARNING  # or a plugin's option
        message = f"srun refuses `{word}`: it has no such option"
        return Remark(option.line, message, f"write --{close}", severity, edit)
    message = f"srun refuses `{word}`, unless a plugin of the site adds this option"
    remedy = "check the spelling with `srun --help`, or remove the option"
    return Remark(option.line, message, remedy, Severity.INFO)


def passes_unknown_options(script: Script, launch: Launch) -> bool:
    """Return whether variables with unknown values may contain further options of a launcher."""
    values = {value.text for value in launch.options.values()} | {option.value for option in launch.srun}
    before_arguments = launch.words[launch.start : len(launch.words) - len(launch.arguments)]
    named = script.unknowns.of(launch.program.text) if launch.program else []
    programs = [one.value for name in named[:1] for one in script.assigned_to.get(name.name, ())]
    if programs and all(value and value.text.endswith(".py") for value in programs):
        before_arguments = before_arguments[:-1]  # one of several programs
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
    for step in script.training:
        launch, options = step.launch, step.launch.options
        if launch.via != "srun" and not _starts_on_each_node(step):
            continue
        alone = script.geometry(step).nodes == 1 and not step.place.loops
        nodes = 1 if alone else script.job.nodes or (2 if script.job.several_nodes else 1)
        if nodes < 2 or launch.launcher not in _STATIC_RANKS or passes_unknown_options(script, launch):
            continue
        rank, nodes_option = _STATIC_RANKS[launch.launcher]
        backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
        if (
            backend != "static"
            or rank in options
            or {"config_file", "standalone", "rdzv_conf"} & set(options)
        ):
            continue
        # In a loop over the nodes, each step has one node, but the batch shell expands the job's number.
        geometry = script.geometry(step) if step.place.task else script.job
        if nodes_option not in options or script.number(options[nodes_option], geometry) == 1:
            continue
        message = f"{launch.launcher} gets no --{rank}, so that each of the {nodes} nodes has rank 0"
        remedy = f"srun bash -c '... --{rank}=$SLURM_NODEID ...'"
        if step.place.loops and script.geometry(step).nodes == 1:  # SLURM_NODEID is 0 in each of these steps
            remedy = f"count the nodes in the loop and pass the number as --{rank}"
        if launch.launcher == "torchrun":
            remedy = f"use --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, or {remedy}"
        # accelerate reads other settings from the user's configuration file.
        severity = Severity.WARNING if launch.launcher == "accelerate" else None
        yield Remark(options[nodes_option].line, message, remedy, severity)


def _starts_on_each_node(step: Step) -> bool:
    """Return whether mpirun, pdsh, or ssh in a loop starts the same command on each node."""
    names = step.launch.wrappers
    by_mpi = any(name.startswith(("mpirun", "mpiexec")) or name in ("pdsh", "clush") for name in names)
    return by_mpi or ("ssh" in names and bool(step.place.loops))


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
        if launch.launcher not in _TORCHRUN or not (launch.program or "c" in launch.options):
            continue
        old = launch.launcher == "launch"
        for name, value in launch.options.items():
            attached = len(name) > 1 and name[0] in "mrt" and name[1:].isdigit()
            of_launch = name == "use_env"
            if name in TORCHRUN_OPTIONS or attached or MARK.search(name) or (of_launch and old):
                continue
            written = f"--{name}" if len(name) > 1 else f"-{name}"
            close = difflib.get_close_matches(name, TORCHRUN_OPTIONS, n=1, cutoff=0.8)
            message = f"torchrun has no option {written} and stops with 'unrecognized arguments'"
            remedy = f"write --{close[0]}" if close else "put the options of the program after its name"
            if name in ACCELERATE_OPTIONS:
                message = f"{message}: it is an option of accelerate launch"
                remedy = "remove it, or start the program with accelerate launch"
            elif of_launch:
                message = f"{message}: it is an option of torch.distributed.launch"
                remedy = "remove it: torchrun always passes the local rank as LOCAL_RANK"
            certain = bool(close) or len(name) == 1 or name in ACCELERATE_OPTIONS or of_launch
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
    if (
        not slots
        or script.job.heterogeneous
        or "overcommit" in script.job.options
        or script.mentions(_OTHER_MPI)
    ):
        return
    for step in script.walk.steps:
        words = [word.text for word in step.launch.words]
        if not any(name.startswith(("mpirun", "mpiexec")) for name in step.launch.wrappers):
            continue
        if any(_MORE_SLOTS.search(word) for word in words):
            continue
        started = _mpi_processes(script, step)
        if started and started > slots:
            message = f"mpirun starts {started} processes, but the job has {count(slots, 'task')}"
            options, nodes = f"--ntasks={started}", script.job.nodes
            if nodes and "ntasks-per-node" in script.job.options:
                each = -(-started // nodes)
                total = f" and --ntasks={each * nodes}" if "ntasks" in script.job.options else ""
                options = f"--ntasks-per-node={each}{total}"
            remedy = f"request {options}, or start mpirun -n $SLURM_NTASKS"
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
            return script.number(following, script.job)
        name, _, value = word.text.partition("=")
        if name in ("--np", "--n"):
            return script.number(Value(value, word.lines), script.job)
    return None


def _of_one_node(script: Script, value: Value) -> bool:
    """Return whether a number is that of the tasks on one node."""
    return any(
        one.name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        for one in script.unknowns.within(value.text)
    )


@rule(Severity.WARNING)
def world_size_mismatch(script: Script) -> Iterator[Remark]:
    """WORLD_SIZE is not the number of processes that srun starts.

    A program that reads WORLD_SIZE waits for that many processes. If WORLD_SIZE is the number of tasks of
    one node, the ranks of the other nodes are out of range. torchrun and similar launchers set WORLD_SIZE
    themselves. In a heterogeneous job, SLURM_NTASKS is the number of tasks of the first component.

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
    assigned = [
        one.value
        for one in script.assigned_to.get("WORLD_SIZE", ())
        if one.value and not one.branches and (one.exported or "WORLD_SIZE" in script.walk.exported)
    ]
    background = sum(step.place.background for step in script.sruns)
    for step in script.sruns:
        if step.launch.kind not in ("python", "script") or step.launch.opaque:
            continue
        if step.place.background and (step.place.loops or background > 1):
            continue  # several sruns start the processes together
        if any(word.literal == ":" for word in step.outer.words):
            continue  # srun starts another program on another component
        components = script.components(step)
        parts = components if len(components) > 1 else [script.geometry(step)]
        given = [step.prefix["WORLD_SIZE"]] if "WORLD_SIZE" in step.prefix else assigned
        options = list(script.options_of_program(step.launch))
        if not (STARTS_PROCESSES - {"world_size"}) & {name for name, _ in options}:
            sizes = [value for name, value in options if name == "world_size"]
            given = [*given, *(value for value in sizes if _of_one_node(script, value))]
        if all(part.ntasks for part in parts) and any(part.tasks_per_node != 1 for part in parts):
            yield from _wrong_size(script, step, parts, given)


def _wrong_size(script: Script, step: Step, parts: list[Geometry], given: list[Value]) -> Iterator[Remark]:
    """Compare the values of WORLD_SIZE with the number of tasks in all components of a step."""
    ntasks = sum(part.ntasks or 0 for part in parts)
    for value in given:
        if len(parts) > 1 and any(unknown.in_task for unknown in script.unknowns.within(value.text)):
            continue
        # A function that is called several times gives the variable several values in the same line.
        sizes = {script.number(one, parts[0]) for one in given if one.line == value.line}
        size = script.number(value, parts[0])
        if not size or ntasks in sizes:
            continue
        message = f"WORLD_SIZE is {size}, but srun starts {ntasks} processes"
        message += " in all components" if len(parts) > 1 else ""
        edit = Edit(value.line, "=$SLURM_NTASKS_PER_NODE", "=$SLURM_NTASKS")
        fitting = edit if script.line(value.line).endswith(edit.old) else None
        remedy = f"write WORLD_SIZE={'$SLURM_NTASKS' if len(parts) == 1 else ntasks}"
        if size == sum((part.nodes or 0) * (part.gpus_per_node or 0) for part in parts):
            remedy, fitting = "request one task per GPU: WORLD_SIZE is the number of GPUs", None
        severity = Severity.INFO if step.launch.kind == "script" else None  # the script may set it
        yield Remark(value.line, message, remedy, severity, fitting)
