"""Rules about numbers that must agree: nodes, tasks, GPUs, and what the launcher is told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.engine import Edit, Remark, rule
from bench.lint.geometry import Geometry
from bench.lint.launch import Launch
from bench.lint.script import Script, spawns_workers
from bench.lint.walk import Step

_CPU = re.compile(r"gloo|\bcpu\b|mpi\b", re.IGNORECASE)
_GPU_LINES = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")
#: Options of programs that start a process for each GPU themselves.
_STARTS_OTHERS = frozenset(
    {"multiprocessing_distributed", "dist_url", "nproc_per_node", "gpus_per_node", "ngpus"}
)
_EVALUATES = re.compile(r"eval|infer|predict|test|score", re.IGNORECASE)
_NODE_OPTIONS = frozenset({"num_nodes", "trainer.num_nodes", "nnodes", "trainer.nnodes"})
_DEVICE_OPTIONS = frozenset({"devices", "trainer.devices", "gpus", "trainer.gpus", "trainer.n_gpus"})


@rule(Severity.ERROR)
def task_gpu_mismatch(script: Script) -> Iterator[Remark]:
    """Tasks, GPUs, and the numbers that the launcher or the program is told, do not agree.

    With one process per GPU, tasks per node = GPUs per node; a launcher's workers per node must
    not exceed the GPUs, and its number of nodes is that of the job. Too many processes share a
    GPU ("Duplicate GPU detected", "invalid device ordinal"); a launcher that expects more nodes
    than there are waits for them until its time-out.

    Bad:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:2
        srun python train.py

    Good:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gres=gpu:4
        srun python train.py
    """
    for step in script.training:
        launch, geometry = step.launch, script.geometry(step)
        if launch.opaque or geometry.heterogeneous or _runs_on_cpus(script, launch):
            continue
        if spawns_workers(launch):
            yield from _workers(script, step, geometry)
            yield from _launcher_nodes(script, step, geometry)
        elif launch.via == "srun" and launch.kind == "python":
            yield from _tasks(script, step, geometry)
            yield from _told(script, step, geometry)


def _runs_on_cpus(script: Script, launch: Launch) -> bool:
    return any(_CPU.search(value.text[:100]) for _, value in script.options_of_program(launch)) or (
        "cpu" in launch.options
    )


def _tasks(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare tasks per node with GPUs per node, for a program of one process per task."""
    tasks, gpus = geometry.tasks_per_node, geometry.gpus_per_node
    if not tasks or not gpus or tasks == gpus or geometry.gpus_per_task:
        return
    tasks_line = geometry.line("ntasks-per-node", "ntasks")
    gpus_line = geometry.line(*_GPU_LINES)
    main = tasks_line or gpus_line or step.line
    remedy = f"ask for as many tasks as GPUs on each node: --ntasks-per-node={gpus}"
    severity: Severity | None = Severity.WARNING
    if tasks > gpus:
        severity = None
        message = f"{tasks} processes share {_gpus(gpus)} on each node: NCCL refuses duplicate GPUs"
        remedy = f"ask for {tasks} GPUs per node, or for --ntasks-per-node={gpus}"
    elif tasks == 1:
        given = {name for name, _ in script.options_of_program(step.launch)}
        if given & _STARTS_OTHERS or _EVALUATES.search(
            step.launch.program.text if step.launch.program else ""
        ):
            return
        message = f"srun starts 1 process where {gpus} GPUs are: unless it starts others, the rest idle"
    else:
        message = f"{tasks} processes leave {gpus - tasks} of {gpus} GPUs on each node idle"
    yield Remark(main, message, remedy, severity)
    if gpus_line and gpus_line != main and tasks > gpus:
        yield Remark(gpus_line, f"{gpus} per node here, but {tasks} tasks per node", remedy, Severity.INFO)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _told(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare what a program is told about nodes and devices with what srun starts."""
    for name, value in script.options_of_program(step.launch):
        told = script.number(value, geometry)
        if told is None or told < 1:
            continue
        surely = None if name.startswith("trainer.") else Severity.WARNING
        nodes, tasks = geometry.nodes, geometry.tasks_per_node
        if name in _NODE_OPTIONS and nodes and told != nodes and "nodes" in geometry.options:
            message = f"the program is told of {told} nodes, srun starts it on {nodes}"
            yield Remark(value.line, message, f"tell it {nodes}, or use $SLURM_NNODES", surely)
        elif name in _DEVICE_OPTIONS and told > 1 and tasks and told != tasks:
            message = f"the program is told of {told} devices per node, srun starts {tasks} tasks on each"
            yield Remark(
                value.line, message, f"ask for --ntasks-per-node={told}: one task per device", surely
            )


def _workers(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare the workers of a launcher with the GPUs that it sees."""
    options, gpus = step.launch.options, geometry.gpus_per_node
    value = options.get("nproc_per_node") or options.get("num_gpus")
    workers = script.number(value, geometry)
    nodes = max(script.job.nodes or 0, geometry.nodes or 0)
    if value is None and "num_processes" in options and nodes and geometry.nodes:
        value, total = options["num_processes"], script.number(options["num_processes"], geometry)
        machines = script.number(options.get("num_machines"), geometry) or 1
        workers = total // machines if total and total % machines == 0 else None
    tasks = geometry.tasks_per_node or 1
    if not workers or not gpus or value is None or (tasks > 1 and not geometry.isolation):
        return
    seen = geometry.gpus_per_task or gpus
    if workers > seen:
        message = f"{step.launch.launcher} starts {workers} workers on {_gpus(seen)}"
        yield Remark(
            value.line, f"{message}: the others fail with an invalid device", f"start {seen}, or ask for more"
        )
        line = geometry.line(*_GPU_LINES)
        if line and line != value.line:
            yield Remark(
                line, f"{seen} here, but {workers} workers are started", "ask for more", Severity.INFO
            )
    elif workers < seen and not script.mentions(_VISIBLE):
        message = (
            f"{step.launch.launcher} starts {workers} workers where {seen} GPUs are visible: the others idle"
        )
        yield Remark(value.line, message, f"start {seen}, or ask for fewer GPUs", Severity.WARNING)


_VISIBLE = re.compile(r"(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES=")


def _launcher_nodes(script: Script, step: Step, geometry: Geometry) -> Iterator[Remark]:
    """Compare the number of nodes that a launcher expects with those that there are."""
    launch = step.launch
    if launch.via != "srun" and not (script.job.nodes == 1 and not script.reaches_nodes):
        return
    value = (
        launch.options.get("nnodes") or launch.options.get("num_machines") or launch.options.get("num_nodes")
    )
    expected, nodes = script.number(value, geometry), geometry.nodes
    if value is None or not expected or not nodes or not script.job.nodes:
        return
    most = max(nodes, script.job.nodes)
    tasks = (geometry.tasks_per_node or 1) if geometry.isolation else 1
    if expected > most * tasks:
        given = "nodes" in script.job.options or "nodes" in geometry.options or "ntasks" in geometry.options
        message = f"{launch.launcher} waits for {expected} nodes, the job has {most}"
        remedy = f"use --nnodes=$SLURM_NNODES, or ask for --nodes={expected}"
        yield Remark(
            value.line, f"{message}: it ends after its time-out", remedy, None if given else Severity.WARNING
        )
    elif expected < nodes and launch.via == "srun":
        message = f"srun starts {launch.launcher} on {nodes} nodes, each told of {expected}"
        outcome = "each trains a copy of its own" if expected == 1 else "those that come too late are refused"
        yield Remark(value.line, f"{message}: {outcome}", "use --nnodes=$SLURM_NNODES", Severity.WARNING)


@rule(Severity.ERROR)
def ntasks_conflict(script: Script) -> Iterator[Remark]:
    """``--ntasks`` contradicts ``--nodes`` times ``--ntasks-per-node``.

    With both given, ``--ntasks`` wins and ``--ntasks-per-node`` is at most a limit: fewer
    processes start than meant, or Slurm refuses the job. With fewer tasks than nodes, Slurm
    reduces the nodes.

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
            names = {option.name for option in step.launch.srun}
            if {"ntasks", "ntasks-per-node"} <= names:
                yield from _conflict(script, own, job=False)
            yield from _more_than_the_job(script, step)


def _conflict(script: Script, geometry: Geometry, *, job: bool) -> Iterator[Remark]:
    ntasks, each = geometry.number("ntasks"), geometry.number("ntasks-per-node")
    if not ntasks or geometry.heterogeneous:
        return
    line = geometry.line("ntasks")
    low, high = geometry.node_range
    fixed = low if low == high and "nodes" in geometry.options else None
    if fixed and ntasks < fixed and job:
        message = f"--ntasks={ntasks} is less than {fixed} nodes: Slurm reduces the job to {ntasks} of them"
        yield Remark(line, message, "leave --ntasks out, and say --ntasks-per-node", edit=None)
    elif fixed and each and ntasks != fixed * each:
        few = "some of the tasks you meant never start" if ntasks < fixed * each else "Slurm refuses the job"
        message = (
            f"--ntasks={ntasks} contradicts {fixed} nodes x {each} tasks per node = {fixed * each}: {few}"
        )
        remedy = f"leave --ntasks out, or make it {fixed * each}"
        edit = Edit(line, str(ntasks), str(fixed * each)) if line else None
        yield Remark(line, message, remedy, edit=edit)
        other = geometry.line("ntasks-per-node")
        if other != line:
            yield Remark(
                other, f"{each} per node on {fixed} nodes here, but --ntasks={ntasks}", remedy, Severity.INFO
            )
    elif each and ntasks < each and not fixed:
        message = f"--ntasks={ntasks} is less than --ntasks-per-node={each}: {ntasks} start, not {each}"
        yield Remark(line, message, "leave --ntasks out", Severity.WARNING)


def _more_than_the_job(script: Script, step: Step) -> Iterator[Remark]:
    """Compare the nodes of a step with those of its job."""
    asked = next((option for option in step.launch.srun if option.name == "nodes"), None)
    own = script.geometry(step).node_range[0] if asked else 0
    low, high = script.job.node_range
    if asked and "nodes" in script.job.options and low == high and own > low:
        message = f"srun asks for {own} nodes in a job of {low}: it fails"
        yield Remark(asked.line, message, f"ask for --nodes={own} in the directives")


@rule(Severity.WARNING)
def ntasks_not_per_node(script: Script) -> Iterator[Remark]:
    """``--ntasks`` over several nodes without saying how many go on each.

    Slurm then fills the nodes as it likes: eight tasks on two nodes of four GPUs may be placed
    seven and one, and the local ranks no longer match the GPUs.

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
        ntasks, nodes = geometry.number("ntasks"), geometry.nodes
        if not ntasks or step.launch.opaque or geometry.heterogeneous or _placed(geometry):
            continue
        gpus = geometry.gpus_per_node
        if nodes and nodes > 1 and ntasks > nodes and not spawns_workers(step.launch):
            each = ntasks // nodes if ntasks % nodes == 0 else gpus
            message = f"Slurm may put the {ntasks} tasks unevenly on the {nodes} nodes"
        elif nodes is None and gpus and ntasks > gpus and "nodes" not in geometry.options:
            each = gpus
            message = f"Slurm may put more of the {ntasks} tasks on a node than it has GPUs ({gpus})"
        else:
            continue
        option = geometry.options["ntasks"]
        suggestion = f"--ntasks-per-node={each}" if each else "--ntasks-per-node=GPUS"
        edit = Edit(option.line, option.written, suggestion) if nodes and each else None
        yield Remark(
            option.line, message, f"write {suggestion}" + (" and --nodes" if nodes is None else ""), edit=edit
        )


def _placed(geometry: Geometry) -> bool:
    """Return whether something besides ``--ntasks`` decides how many tasks go on a node."""
    names = {
        "ntasks-per-node",
        "ntasks-per-gpu",
        "ntasks-per-socket",
        "ntasks-per-tres",
        "ntasks-per-core",
        "gpus-per-task",
        "tres-per-task",
    }
    plane = (geometry.value("distribution") or "").startswith(("plane", "arbitrary"))
    return bool(names & set(geometry.options)) or plane


@rule(Severity.ERROR)
def ntasks_per_node_ignored(script: Script) -> Iterator[Remark]:
    """A step is given ``--ntasks-per-node`` that contradicts the tasks it inherits from the job.

    srun takes the number of tasks from the job unless it gets ``--nodes`` or ``--ntasks`` of its
    own, warns "can't honor --ntasks-per-node", and starts the job's number of tasks.

    Bad:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=8
        srun --ntasks-per-node=1 torchrun ...

    Good:
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=8
        srun --nodes=2 --ntasks-per-node=1 torchrun ...
    """
    job = script.job
    inherited, nodes = job.ntasks, job.nodes
    if not inherited or not nodes or not {"ntasks", "ntasks-per-node"} & set(job.options):
        return
    for step in script.sruns:
        own = {option.name: option for option in step.launch.srun}
        each = own.get("ntasks-per-node")
        if each is None or {"nodes", "nodelist", "ntasks"} & set(own) or step.launch.opaque:
            continue
        asked = script.geometry(step).number("ntasks-per-node")
        if asked and asked * nodes != inherited:
            told = f"it inherits {inherited} tasks on {nodes} nodes from the job"
            message = f"srun ignores --ntasks-per-node={asked}: {told}"
            edit = Edit(each.line, each.written, f"--nodes=$SLURM_NNODES {each.written}")
            yield Remark(
                each.line, message, "give srun --nodes as well: srun --nodes=$SLURM_NNODES", edit=edit
            )
