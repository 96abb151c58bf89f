"""Rules about numbers that must agree: nodes, tasks, GPUs and the options of launchers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ...units import count
from ..geometry import Geometry
from ..launch import TRAINS, Launch, basename
from ..options import names
from ..script import Script, starts_workers
from ..walk import Step
from . import rule
from .launching import STARTS_PROCESSES, passes_unknown_options
from .placement import MORE_CPUS

_CPU = re.compile(r"gloo|\bcpu\b|mpi\b", re.IGNORECASE)
#: Options with which a program selects the device or the backend.
_SELECTS_DEVICE = re.compile(r"backend|device|accelerator|strategy|dist|launch|cpu|trainer|proc|node")
_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")
#: Options of training programs that start a process for each GPU without a launcher.
_STARTS_PROCESSES = STARTS_PROCESSES | names(
    "dist_url tensor_parallel_size pipeline_parallel_size tensor_parallel tp_size"
)
_NOT_A_TRAINING = re.compile(
    r"eval|infer|predict|test|score|valid|serve|generat|vllm|sglang|\bray\b|preflight", re.I
)
_SERVES = re.compile(r"\bray (?:start|job)\b|\bray\.init\b|\bvllm\b|\bsglang\b", re.IGNORECASE)
_DATA_PARALLEL = re.compile(r"ddp|fsdp|deepspeed|distributed|nccl|MASTER_|rdzv|nnodes", re.IGNORECASE)
_OF_LIGHTNING = re.compile(r"lightning|num_nodes|max_epochs", re.IGNORECASE)
_SPAWNS = re.compile(r"ddp\Z|multi|distributed|world_size|spawn|n_?gpus?\Z|num_gpus\Z")
_NODE_OPTIONS = frozenset({"num_nodes", "trainer.num_nodes", "nnodes", "trainer.nnodes"})
_TASK_PLACEMENT = names(
    """ntasks-per-node ntasks-per-gpu ntasks-per-socket ntasks-per-tres ntasks-per-core
    gpus-per-task tres-per-task"""
)
_SETS_VISIBLE_DEVICES = re.compile(r"(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES=")
_DEVICE_OPTIONS = frozenset({"devices", "trainer.devices", "gpus", "trainer.gpus", "trainer.n_gpus"})


@rule(Severity.ERROR)
def task_gpu_mismatch(script: Script) -> Iterator[Remark]:
    """The numbers of tasks, GPUs and nodes do not match each other or the options of the launcher.

    With one process per GPU, tasks per node must equal GPUs per node. A launcher must not start more
    workers than there are GPUs, and its number of nodes must equal the job's. Otherwise processes share
    a GPU ("Duplicate GPU detected", "invalid device ordinal"), or the launcher waits for missing nodes
    until its rendezvous times out. The finding has severity ``info`` if the script sets
    CUDA_VISIBLE_DEVICES, or if the program probably starts further processes itself.

    Bad:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:2
        srun python train.py

    Good:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:4
        srun python train.py
    """
    for step, geometry in script.placed:
        launch = step.launch
        if launch.opaque or geometry.heterogeneous or _runs_on_cpus(script, launch):
            continue
        if starts_workers(launch):
            yield from _workers(script, step, geometry)
            yield from _launcher_nodes(script, step, geometry)
        elif launch.via == "srun" and launch.kind == "python":
            yield from _tasks(script, step, geometry)
            yield from _program_options(script, step, geometry)


def _runs_on_cpus(script: Script, launch: Launch) -> bool:
    return "cpu" in launch.options or any(
        _SELECTS_DEVICE.search(name) and _CPU.search(value.text[:100])
        for name, value in script.options_of_program(launch)
    )


def _tasks(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare tasks per node with GPUs per node for a program with one process per task."""
    tasks, gpus = geometry.tasks_per_node, geometry.gpus_per_node
    if not tasks or not gpus or tasks == gpus or geometry.gpus_per_task or not _trains(script, step):
        return
    if "overcommit" in geometry.options or (step.place.background and step.place.loops):
        return  # the script shares the devices on purpose, or the runs are independent of each other
    tasks_line = geometry.line("ntasks-per-node", "ntasks")
    gpus_line = geometry.line(*_GPU_OPTIONS)
    main = tasks_line or gpus_line or step.line
    remedy = f"request as many tasks as GPUs on each node: --ntasks-per-node={gpus}"
    severity = Severity.WARNING
    if tasks > gpus:
        message = f"{tasks} processes share {count(gpus, 'GPU')} on each node, which NCCL does not support"
        remedy = f"request {count(tasks, 'GPU')} per node, or --ntasks-per-node={gpus}"
    elif tasks == 1:
        # Many programs start one process per GPU themselves, but not if another component has one per GPU.
        alike = any(1 != part.tasks_per_node == (part.gpus_per_node or 0) for part in script.components(step))
        severity = Severity.WARNING if alike else Severity.INFO
        where = "on each node " if (geometry.nodes or 1) > 1 else ""
        message = f"srun starts 1 process {where}for {gpus} GPUs"
        message += f": unless this process starts others, {gpus - 1} stay idle"
    else:
        message = f"{tasks} processes leave {gpus - tasks} of {gpus} GPUs on each node idle"
    if _chooses_gpus(script, step):
        severity = Severity.INFO
    yield Remark(main, message, remedy, severity)
    if gpus_line and gpus_line != main and tasks > gpus:
        message = f"{count(gpus, 'GPU')} per node requested here, but {count(tasks, 'task')} per node"
        yield Remark(gpus_line, message, remedy, Severity.INFO)


def _chooses_gpus(script: Script, step: Step) -> bool:
    """Return whether the script selects the GPUs, or the program starts further processes itself."""
    given = (name for name, _ in script.options_of_program(step.launch))
    return script.mentions(_SETS_VISIBLE_DEVICES) or any(map(_SPAWNS.match, given))


def _trains(script: Script, step: Step) -> bool:
    """Return whether a Python program is probably a training with one process per GPU.

    Programs that serve a model, evaluate it, or distribute work with Ray use the GPUs in other ways.
    """
    given = {name for name, _ in script.options_of_program(step.launch)}
    program = step.launch.program.text if step.launch.program else ""
    if given & _STARTS_PROCESSES or _NOT_A_TRAINING.search(program) or script.mentions(_SERVES):
        return False
    return bool(TRAINS.search(basename(program)))


def _program_options(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare nodes and devices in the options of a program with the nodes and tasks of its step."""
    options = list(script.options_of_program(step.launch))
    ranked = any(name == "node_rank" for name, _ in options)  # each node gets its own srun
    severity, nodes, tasks = Severity.WARNING, geometry.nodes, geometry.tasks_per_node
    for name, value in options:
        given = script.number(value, geometry)
        if given is None or given < 1 or (ranked and given == script.job.nodes):
            continue
        if name in _NODE_OPTIONS and nodes and given != nodes and "nodes" in geometry.options:
            message = f"this option says {count(given, 'node')}, but srun starts the program on {nodes}"
            yield Remark(value.line, message, f"change the number to {nodes}, or to $SLURM_NNODES", severity)
        elif name in _DEVICE_OPTIONS and given > 1 and tasks and given != tasks:
            message = (
                f"this option says {given} devices per node, but srun starts {count(tasks, 'task')} per node"
            )
            remedy = f"request --ntasks-per-node={given}: one task per device"
            lightning = name.startswith("trainer.") or script.mentions(_OF_LIGHTNING)
            if not lightning or nodes == 1:  # the program, or an older Lightning, may start the processes
                severity = Severity.INFO
            yield Remark(value.line, message, remedy, severity)


def _workers(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare the workers of a launcher with the GPUs that are visible to it."""
    options, name, gpus = step.launch.options, step.launch.launcher, geometry.gpus_per_node
    value = options.get("nproc_per_node") or options.get("num_gpus")
    workers = script.number(value, geometry)
    nodes = max(script.job.nodes or 0, geometry.nodes or 0)
    # With a machine rank but no number of machines, the number is in accelerate's configuration file.
    counted = "num_machines" in options or "machine_rank" not in options
    if value is None and "num_processes" in options and nodes and geometry.nodes and counted:
        value, total = options["num_processes"], script.number(options["num_processes"], geometry)
        machines = script.number(options.get("num_machines"), geometry) or 1
        workers = total // machines if total and total % machines == 0 else None
    tasks = geometry.tasks_per_node or 1
    alone = value is None and name in ("torchrun", "launch") and tasks == 1
    if alone and gpus and gpus > 1 and not passes_unknown_options(script, step.launch):
        message = f"{name} without --nproc_per_node starts 1 worker: {gpus - 1} of {gpus} GPUs"
        message += " stay idle" if gpus > 2 else " stays idle"
        # One process can also use all GPUs of its node, for example by placing layers of a model on each.
        alike = nodes > 1 or script.mentions(_DATA_PARALLEL)
        likely = alike and not _chooses_gpus(script, step)
        yield Remark(
            step.line, message, "pass --nproc_per_node=gpu", Severity.WARNING if likely else Severity.INFO
        )
    if not workers or not gpus or value is None or (tasks > 1 and not geometry.isolation):
        return
    visible = (geometry.gpus_per_task if step.launch.via == "srun" else None) or gpus
    if workers > visible:
        message = f"{name} starts {workers} workers on {count(visible, 'GPU')}: the extra workers fail"
        # Sites that do not constrain devices let the script select others.
        severity = Severity.INFO if script.mentions(_SETS_VISIBLE_DEVICES) else None
        yield Remark(value.line, message, f"start {count(visible, 'worker')}, or request more GPUs", severity)
        line = geometry.line(*_GPU_OPTIONS)
        if line and line != value.line:
            message = f"{count(visible, 'GPU')} requested here, but {workers} workers are started"
            yield Remark(line, message, "request more GPUs", Severity.INFO)
    elif workers < visible and not script.mentions(_SETS_VISIBLE_DEVICES):
        message = f"{name} starts {workers} workers for {visible} visible GPUs: some GPUs are idle"
        yield Remark(value.line, message, f"start {visible} workers, or request fewer GPUs", Severity.INFO)


def _launcher_nodes(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare the number of nodes that a launcher expects with the nodes of the job."""
    launch = step.launch
    if launch.via != "srun" and not (script.job.nodes == 1 and not script.reaches_nodes):
        return
    value = launch.node_count
    expected, nodes = script.number(value, geometry), geometry.nodes
    if script.one_job_per_node(launch):
        return
    if (script.job.number("ntasks") or nodes or 1) < (nodes or 1):
        return  # Slurm reduces the number of nodes, see ntasks-conflict
    if value is None and nodes and nodes > 1 and not passes_unknown_options(script, launch):
        yield from _without_nnodes(step, nodes)
    if value is None or not expected or not nodes or not script.job.nodes:
        return
    available = max(nodes, script.job.nodes)
    tasks = (geometry.tasks_per_node or 1) if geometry.isolation else 1
    if expected > available * tasks:
        given = bool({"nodes", "ntasks"} & {*script.job.options, *geometry.options})
        message = f"{launch.launcher} waits for {count(expected, 'node')}, but the job has {available}"
        message += ": it fails when its rendezvous times out"
        remedy = f"use --nnodes=$SLURM_NNODES, or request --nodes={expected}"
        severity = None if given else Severity.WARNING
        if "node_rank" in launch.options:  # each of several jobs possibly gets its own rank
            severity = Severity.INFO
        yield Remark(value.line, message, remedy, severity)
    elif expected < nodes and launch.via == "srun":
        message = f"srun starts {launch.launcher} on {nodes} nodes, but each launcher expects {expected}: "
        message += "every node trains on its own" if expected == 1 else "the last nodes cannot join"
        yield Remark(value.line, message, "use --nnodes=$SLURM_NNODES", Severity.WARNING)


def _without_nnodes(step: Step, nodes: int) -> Iterator[Remark]:
    """Find torchrun without ``--nnodes``: its default is one node."""
    launch = step.launch
    if launch.launcher not in ("torchrun", "launch"):
        return
    together = {"rdzv_endpoint", "master_addr", "node_rank", "rdzv_backend"} & set(launch.options)
    message = f"{launch.launcher} without --nnodes expects 1 node, but srun starts it on {nodes}: "
    message += "the nodes do not train together" if together else "every node trains on its own"
    severity = None if together else Severity.WARNING
    yield Remark(launch.srun_line or step.line, message, "pass --nnodes=$SLURM_NNODES", severity)


@rule(Severity.ERROR)
def ntasks_conflict(script: Script) -> Iterator[Remark]:
    """``--ntasks`` contradicts ``--nodes`` times ``--ntasks-per-node``.

    ``--ntasks`` takes precedence, and ``--ntasks-per-node`` then only sets a maximum. Therefore too few
    processes start, or Slurm refuses the job. With fewer tasks than nodes, Slurm
    reduces the number of nodes. Slurm 22.05 refuses a job with more hosts in ``--nodelist`` than ``--nodes``;
    Slurm 24.11 chooses some of them. A step must not request more nodes or CPUs than its job.

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        #SBATCH --ntasks=4

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
    """
    yield from _conflict(script, script.job, job=True)
    for step in script.sruns:
        if not step.launch.opaque:
            own = script.job.step(()) if not step.launch.srun else script.geometry(step)
            given = {option.name: option.value for option in step.launch.srun}
            if {"nodes", "ntasks", "ntasks-per-node"} <= given.keys() and given["ntasks"] != "1":
                yield from _conflict(script, own, job=False)
            yield from _more_than_the_job(script, step)
            yield from _more_cpus_than_the_job(script, step)


def _conflict(script: Script, geometry: Geometry, *, job: bool) -> Iterator[Remark]:
    ntasks, per_node = geometry.number("ntasks"), geometry.number("ntasks-per-node")
    if job and geometry.too_many_hosts:
        message = "--nodelist names more hosts than --nodes allows: Slurm 22.05 and older refuse the job"
        remedy = "name fewer hosts, or change --nodes"
        yield Remark(geometry.line("nodelist"), message, remedy, Severity.INFO)
    if not ntasks or geometry.heterogeneous:
        return
    line = geometry.line("ntasks")
    if job and line and not script.line(line).startswith("#SBATCH"):
        return  # sbatch ignores the line, see malformed-directive
    low, high = geometry.node_range
    fixed = low if low == high and "nodes" in geometry.options else None
    if fixed and ntasks < fixed and job:
        message = (
            f"--ntasks={ntasks} is less than --nodes={fixed}: Slurm reduces the number of nodes to {ntasks}"
        )
        spread = any(step.launch.via or step.launch.node_count for step in script.training)
        severity = None if spread else Severity.INFO  # one process on one node is possibly enough
        yield Remark(line, message, "replace --ntasks by --ntasks-per-node", severity)
    elif fixed and per_node and ntasks != fixed * per_node:
        total = fixed * per_node
        started = not job or any(step.launch.via for step in script.training)
        effect = "too few tasks start" if started else f"the job gets CPUs for {count(ntasks, 'task')} only"
        severity = Severity.WARNING if started and script.training else Severity.INFO
        if ntasks > total:
            effect = "Slurm refuses the job" if job else "srun fails, or ignores --ntasks-per-node (22.05)"
            severity = Severity.ERROR if job else Severity.WARNING
        once = ntasks == fixed and any(starts_workers(step.launch) for step in script.training)
        if once or (1 < ntasks < total and -(-ntasks // per_node) == fixed):
            severity = Severity.INFO  # one launcher per node is right, or the tasks need all nodes
        product = f"{count(fixed, 'node')} x {count(per_node, 'task')} per node = {total}"
        message = f"--ntasks={ntasks} contradicts {product}: {effect}"
        remedy = "remove --ntasks-per-node" if once else f"remove --ntasks, or change it to {total}"
        edit = Edit(line, str(ntasks), str(total)) if line and not once else None
        yield Remark(line, message, remedy, severity, edit)
        other = geometry.line("ntasks-per-node")
        if other != line:
            message = f"{product} here, but --ntasks={ntasks}"
            yield Remark(other, message, remedy, Severity.INFO)


def _more_than_the_job(script: Script, step: Step) -> Iterator[Remark]:
    """Compare the number of nodes of a step with the number of nodes of its job."""
    asked = next((option for option in step.launch.srun if option.name == "nodes"), None)
    own, job = script.geometry(step), script.job
    needed = own.node_range[0] if asked else 0
    inherited = job.ntasks if {"ntasks", "ntasks-per-node"} & set(job.options) else None
    if (own.number("ntasks") or inherited or needed) < needed:
        return  # srun uses only as many nodes as it has tasks
    low, high = job.node_range
    if asked and "nodes" in job.options and low == high and needed > low:
        message = f"srun fails, because it requests {count(needed, 'node')} and the job has only {low}"
        yield Remark(asked.line, message, f"request --nodes={needed} in the directives")


def _more_cpus_than_the_job(script: Script, step: Step) -> Iterator[Remark]:
    """Compare the CPUs of a step with those of its job, unless the job may get more than it states."""
    job, own = script.job, script.geometry(step)
    asked = next((option for option in step.launch.srun if option.name == "cpus-per-task"), None)
    given, each = job.number("cpus-per-task"), own.number("cpus-per-task")
    others = (MORE_CPUS - {"cpus-per-task"}) & {*job.options, *own.options}
    if (
        not asked
        or not each
        or others
        or job.heterogeneous
        or not ({"ntasks", "ntasks-per-node"} & {*job.options})
    ):
        return
    cpus = given if "cpus-per-task" in job.options else 1
    available, needed = (cpus or 0) * (job.ntasks or 0), each * (own.ntasks or 0)
    if 0 < available < needed and needed > 2:  # a core of two threads gives two CPUs
        message = (
            f"srun fails, unless the job gets whole nodes: it requests {needed} CPUs, the job {available}"
        )
        remedy = f"request --cpus-per-task={each} in the directives as well"
        yield Remark(asked.line, message, remedy, Severity.WARNING if given else Severity.INFO)


@rule(Severity.INFO)
def ntasks_not_per_node(script: Script) -> Iterator[Remark]:
    """``--ntasks`` alone does not determine the number of tasks on each node.

    Slurm may distribute the tasks unevenly: of eight tasks on two nodes with four GPUs each, seven
    may run on one node. The local ranks then do not match the GPUs. On whole nodes (``--exclusive``),
    or if the tasks need all CPUs of the nodes, the tasks are distributed evenly.

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks=8
        #SBATCH --gres=gpu:4

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:4
    """
    unknown = [step for step in script.training if step.launch.kind == "script" and not step.launch.via]
    for step in script.sruns or unknown:
        geometry = script.geometry(step)
        ntasks, nodes, gpus = geometry.number("ntasks"), geometry.nodes, geometry.gpus_per_node
        if not ntasks or step.launch.opaque or geometry.heterogeneous or _determines_tasks_per_node(geometry):
            continue
        program = step.launch.program.text if step.launch.program else ""
        is_binary = step.launch.kind != "python" and not program.endswith(".sh")
        if "exclusive" in script.job.options or is_binary:
            continue  # on whole nodes, srun distributes tasks evenly; MPI programs need no even distribution
        if nodes and nodes > 1 and ntasks > nodes and gpus and not starts_workers(step.launch):
            per_node = ntasks // nodes if ntasks % nodes == 0 else gpus
            message = f"Slurm may distribute the {ntasks} tasks unevenly over the {nodes} nodes"
        elif not nodes and gpus and ntasks > gpus and step.launch.via and "nodes" not in geometry.options:
            per_node = gpus
            message = f"Slurm may start more of the {ntasks} tasks on a node than the node has GPUs ({gpus})"
        else:
            continue
        option = geometry.options["ntasks"]
        suggestion = f"--ntasks-per-node={per_node or 'GPUS'}"
        edit = Edit(option.line, option.written, suggestion) if nodes and per_node else None
        remedy = f"write {suggestion}" + (" and --nodes" if nodes is None else "")
        yield Remark(option.line, message, remedy, edit=edit)


def _determines_tasks_per_node(geometry: Geometry) -> bool:
    """Return whether an option other than ``--ntasks`` determines the tasks per node."""
    plane = (geometry.value("distribution") or "").startswith(("plane", "arbitrary"))
    return bool(_TASK_PLACEMENT & set(geometry.options)) or plane


@rule(Severity.ERROR)
def ntasks_per_node_ignored(script: Script) -> Iterator[Remark]:
    """``--ntasks-per-node`` on srun is ignored, because srun inherits the job's number of tasks.

    Without ``--ntasks``, srun starts as many tasks as the job requests and warns "can't honor
    --ntasks-per-node". With ``--nodes``, this depends on the release: Slurm 22.05 ignores the option,
    Slurm 24.11 does not. Such a finding has severity ``info``.

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=8
        srun --ntasks-per-node=1 torchrun ...

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=8
        srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun ...
    """
    job = script.job
    inherited, nodes = job.ntasks, job.nodes
    if not inherited or not nodes or not {"ntasks", "ntasks-per-node"} & set(job.options):
        return
    for step in script.sruns:
        own = {option.name: option for option in step.launch.srun}
        option = own.get("ntasks-per-node")
        if option is None or {"nodelist", "ntasks"} & set(own) or step.launch.opaque:
            continue
        per_node = script.geometry(step).number("ntasks-per-node")
        if "nodes" in own and script.geometry(step).nodes != nodes:
            continue
        if per_node and per_node * nodes != inherited:
            message = f"srun ignores --ntasks-per-node={per_node}"
            message += " in some releases (22.05): " if "nodes" in own else ": "
            message += f"it inherits {count(inherited, 'task')} on {count(nodes, 'node')} from the job"
            total = "$SLURM_NNODES" if per_node == 1 else f"$((SLURM_NNODES * {per_node}))"
            edit = Edit(option.line, option.written, f"--ntasks={total} {option.written}")
            remedy = f"pass --ntasks={total} to srun as well"
            severity = None if step.launch.kind in ("python", "launcher") else Severity.WARNING
            severity = Severity.INFO if "nodes" in own else severity
            yield Remark(option.line, message, remedy, severity, edit)
