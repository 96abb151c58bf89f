"""Rules about how processes find each other: address, port and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ..expansion import MARK, Assigned, Unknown, Value
from ..geometry import Geometry, Range, range_of
from ..launch import Launch
from ..options import names
from ..script import Script, starts_workers
from ..walk import Step
from . import rule
from .launching import passes_unknown_options

_LOOPBACK = re.compile(
    r"(?:tcp://)?(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?|ip6-localhost)(?::|/|\Z)", re.I
)
#: A command that prints the local host if another command fails.
_FALLS_BACK = re.compile(r"\|\|[\s\\{]*(?:echo\s+[\"']?(?:localhost|127\.0\.0\.1)|hostname)")
#: A command that prints the name or the address of its own node, and signs that it is not its own.
_OWN_NAME = re.compile(
    r"\$\(\s*(?:/bin/|/usr/bin/)?"
    r"(?:hostname\b|uname -n|cat /etc/hostname|ip (?:-\S+ )*a|ifconfig|python3? -c .*gethost)"
)
_OF_THE_JOB = re.compile(r"scontrol|NODELIST|\bsrun\b|\bssh\b|[;&]")
_NODES_OF_SLURM = frozenset({"SLURM_NNODES", "SLURM_JOB_NUM_NODES"})
_DEEPSPEED = re.compile("deepspeed", re.IGNORECASE)
#: Ranks that start at 1, because rank 0 runs elsewhere.
_RANKS_FROM_ONE = re.compile(r"SLURM_(?:PROCID|NODEID)\}?\s*\+\s*[1-9]")
_HOST = re.compile(
    r"(?:tcp://)?((?:\d{1,3}\.){3}\d{1,3}|(?=[A-Za-z0-9.-]*[0-9.-])[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*)(?::(?:\d+|[^:]*))?\Z"
)
_ADDRESS_VARIABLE = re.compile(
    r"(?i:(?:pet_)?(?:master|main|head|rank_?0|rdzv|leader|chief|coordinator)_?(?:node_?)?(?:process_?)?"
    r"(?:addr(?:ess)?|ip|host(?:name)?|endpoint|node|url)|master|head)\Z"
)
_COPIES_FUNCTIONS = re.compile(r"\b(?:typeset|declare|export) -f")
_ADDRESS_OPTIONS = names(
    """master_addr master_address master_ip master_host main_process_ip main_address main_addr
    rdzv_endpoint dist_url init_method dist_init_method coordinator_address head_node_ip host_addr"""
)
_PORT_OPTIONS = _ADDRESS_OPTIONS | names(
    "port master_port main_process_port main_port dist_port distributed_port"
)
_PORT_VARIABLE = re.compile(r"(?i:[a-z_]*port[a-z_]*|rdzv_endpoint|dist_url|init_method|[a-z_]*endpoint)\Z")
_PORT = re.compile(r"(?:\A|:)(\d{4,5})\Z")
_RANK_OPTIONS = names(
    """node_rank machine_rank rank local_rank global_rank world_rank node_id nodeid proc_id procid
    process_id host_rank base_rank localid local_id trainer.node_rank"""
)
_SLURM_RANKS = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_GTIDS"})
_RANK_VARIABLES = names(
    """RANK LOCAL_RANK NODE_RANK GROUP_RANK GLOBAL_RANK MACHINE_RANK NODE_ID NODEID PET_NODE_RANK
    CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES"""
)
#: Variables that a program reads together with WORLD_SIZE.
_RANKS_OF_TASKS = frozenset({"RANK", "LOCAL_RANK"})
#: Rendezvous backends that assign the ranks themselves.
_ASSIGNS_RANKS = frozenset({"c10d", "etcd", "etcd-v2", "etcd_v2", "zeus"})
#: Programs that take their ranks from Slurm.
_OWN_RANKS = re.compile(r"lightning|submitit", re.IGNORECASE)
_CALLS_ITSELF = re.compile(r"srun\b.*(?:\$\{?0|BASH_SOURCE)")
_FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
#: Ports that only root may use, and ephemeral ports, which Linux gives to outgoing connections.
_ROOT_ONLY = range(1024)
_EPHEMERAL = (32768, 60999)
#: $RANDOM is at most 32767; IDs of jobs and processes have no useful limit.
_RANDOM = (0, 32767)
_ANY = (0, 2**31)
#: Commands that draw a number between two limits: shuf, Python, jot, and awk from 0.
_DRAWN = re.compile(
    r"shuf\s+(?:-n\s*1\s+)?(?:-i\s*|--input-range=)(\d+)-(\d+)|seq\s+(\d+)\s+(\d+)\s*\|\s*shuf"
    r"|rand(?:int|range)\(\s*(\d+)\s*,\s*(\d+)\s*\)(?!\s*[+*])|jot\s+-r\s+1\s+(\d+)\s+(\d+)"
    r"|print\s+int\(\s*rand\(\)\s*\*\s*(\d+)\s*\)(?!\s*[+*])"
)
#: An index of ``--array``, but not the step in ``0-9:3``.
_INDEX = re.compile(r"(?<![:\d])\d+")
_LAST_DIGITS = re.compile(r"tail\s+-c\s*(\d)|cut\s+-c\s*\d+-(\d)")
_CALLED = re.compile(r"\$\(\s*(\w+)")
_IDS = re.compile(r"JOB_?ID|TASK_ID|\bUID\b|\bPPID\b|SECONDS|\A\$\Z")


def _spans_nodes(script: Script, step: Step) -> bool:
    """Return whether the processes of a step communicate with processes on other nodes."""
    if starts_workers(step.launch):
        expected = _expected_nodes(script, step.launch)
        return expected is None or expected > 1
    nodes = script.geometry(step).nodes
    if nodes is None or nodes > 1:
        return True
    return any(
        name in _RANK_OPTIONS or name == "world_size" for name, _ in script.options_of_program(step.launch)
    )


def _expected_nodes(script: Script, launch: Launch) -> int | None:
    """Return the number of nodes in a launcher's options; the default of torchrun is 1."""
    count = launch.node_count
    if count:
        return script.number(Value(count.text.rpartition(":")[2], count.lines), script.job)
    return 1 if launch.launcher in ("torchrun", "launch") else None


def _addresses(script: Script, step: Step) -> list[Value]:
    """Return the master addresses in the options and the environment of a command."""
    launch = step.launch
    found = [value for name, value in launch.options.items() if name in _ADDRESS_OPTIONS]
    found += [value for name, value in script.options_of_program(launch) if name in _ADDRESS_OPTIONS]
    before_command = [value for name, value in step.prefix.items() if _ADDRESS_VARIABLE.match(name)]
    return [value for value in found if value.text] + before_command


def _assigns_ranks(launch: Launch) -> bool:
    """Return whether the rendezvous of a launcher assigns the ranks itself."""
    options = launch.options
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else ""
    conf = options["rdzv_conf"].text if "rdzv_conf" in options else ""
    return backend in _ASSIGNS_RANKS or "c10d" in conf or bool(MARK.search(backend))


@rule(Severity.ERROR)
def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address of a job with several nodes is, or may become, the local host.

    Every node then connects to itself, and the processes of the other nodes never reach the first
    node. torchrun does not read MASTER_ADDR: without an address in its options, it uses 127.0.0.1.
    Without --rdzv_endpoint, the c10d backend uses localhost. DeepSpeed without RANK replaces
    MASTER_ADDR, so that the finding then has severity ``info``. The same applies to $HOSTNAME in a task:
    with Slurm 22.05, 24.11 and 26.05, srun passes on the value of the batch shell, the first node.

    Bad:
        #SBATCH --nodes=2
        export MASTER_ADDR=localhost

    Good:
        #SBATCH --nodes=2
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    yield from _own_name_per_task(script)
    spanning = [step for step in script.training if _spans_nodes(script, step)]
    if not _has_several_nodes(script) or (script.training and not spanning):
        return
    # Without RANK, DeepSpeed asks MPI for the ranks and replaces MASTER_ADDR.
    discovers = script.mentions(_DEEPSPEED) and "RANK" not in script.assigned_to
    uncertain = Severity.INFO if discovers else Severity.WARNING
    for step in spanning:
        if step.place.function and step.place.task is None and script.mentions(_COPIES_FUNCTIONS):
            continue  # the other nodes may call the function with another address
        for value in _addresses(script, step):
            certain = value in step.launch.options.values()  # other programs may find the address themselves
            for remark in _loopback(script, value, in_task=step.place.task is not None):
                yield remark if certain else _at_most(uncertain, remark)
        if step.launch.launcher in ("torchrun", "launch") and not _has_address(script, step.launch):
            remedy = "pass --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT with the job's first host as HOST"
            yield Remark(step.line, _no_address(step.launch), remedy)
    for assigned in script.walk.assigned:
        if _ADDRESS_VARIABLE.match(assigned.name) and assigned.value:
            if not _is_final(script, assigned) and not _is_alternative(script, assigned):
                continue
            if f"{assigned.name}_ip" in script.assigned_to:
                continue  # the name of the node; processes use its address
            for remark in _loopback(script, assigned.value, in_task=assigned.in_task):
                yield _at_most(uncertain, remark)


def _own_name_per_task(script: Script) -> Iterator[Remark]:
    """Find tasks that use their own host name as the rendezvous address.

    The finding is a warning if the number of nodes is only known at submission.
    """
    if "nodes" in script.job.options and script.job.nodes is not None:
        return
    for step in script.sruns:
        count = step.launch.node_count
        used = script.unknowns.within(count.text) if count else []
        if step.place.task is not None and any(unknown.name in _NODES_OF_SLURM for unknown in used):
            for value in _addresses(script, step):
                for remark in _loopback(script, value, in_task=True):
                    yield _at_most(Severity.WARNING, remark)


def _at_most(severity: Severity, remark: Remark) -> Remark:
    """Lower the severity of a finding to ``severity``; hints stay hints."""
    return remark if remark.severity is Severity.INFO else remark._replace(severity=severity)


def _has_several_nodes(script: Script) -> bool:
    steps = [script.geometry(step) for step in script.sruns]
    return script.job.several_nodes or any((one.nodes or 1) > 1 and not one.heterogeneous for one in steps)


def _is_final(script: Script, assigned: Assigned) -> bool:
    """Return whether programs see the assigned value: no later assignment, and no branch, replaces it."""
    others = script.assigned_to.get(assigned.name, [])
    if any(other.line > assigned.line and not other.branches for other in others):
        return False
    if not assigned.branches or len({other.line for other in others}) == 1:
        return True
    depth = len(assigned.branches)
    return any(
        step.place.branches[:depth] == assigned.branches and _spans_nodes(script, step)
        for step in script.training
    )


def _is_alternative(script: Script, assigned: Assigned) -> bool:
    """Return whether a value is assigned only if the command that finds the address gives none."""
    name = assigned.name
    test = re.compile(
        rf"-z\s+[\"']?\$\{{?{name}\b|!\s*{name}=|\|\|\s*(?:export\s+)?{name}=|!\s*-n\s+\"?\${name}\b"
    )
    text = "\n".join(script.lines[max(0, assigned.line - 4) : assigned.line])
    if not assigned.branches or not test.search(text):
        return False
    others = (one.value for one in script.assigned_to.get(name, ()) if one.line < assigned.line and one.value)
    return any(one.kind == "command" for value in others for one in script.unknowns.of(value.text))


def _loopback(script: Script, value: Value, *, in_task: bool) -> Iterator[Remark]:
    """Yield a finding if an address is, or may become, the local host."""
    remedy = f"use the first host of the job: {_FIRST_HOST}"
    if _LOOPBACK.match(value.text):
        message = f"{script.unknowns.shown(value.text)[:60]} refers to a different host on every node: "
        message += "the nodes never connect, and the job fails when the rendezvous times out"
        yield Remark(value.line, message, remedy)
        return
    for unknown in script.unknowns.behind(value.text):
        if in_task and unknown.in_task and _is_own_name(unknown):
            if unknown.name == "HOSTNAME":  # srun passes on the value of the batch shell
                message = "srun passes on the first node's HOSTNAME, but a login shell sets the own node's"
                yield Remark(unknown.line, message, remedy, Severity.INFO)
                continue
            message = f"each task expands {unknown.source[:40]} on its own node, so the nodes never connect"
            yield Remark(unknown.line, message, remedy)
        elif unknown.kind == "command" and (line := _falls_back(script, unknown)):
            message = "if the command fails, the address is this host, and the nodes never connect"
            remedy = "remove the alternative, use `set -euo pipefail`, and write `export` in its own line, "
            remedy += "below the assignment: the job then stops with a clear error"
            yield Remark(line, message, remedy, Severity.WARNING)
        elif _LOOPBACK.match(unknown.default or "") and not _is_set_elsewhere(script, unknown):
            message = f"if {unknown.name} is empty, each node uses {unknown.default} as the master"
            yield Remark(unknown.line, message, remedy, Severity.WARNING)


def _falls_back(script: Script, unknown: Unknown) -> int | None:
    """Return the line in which a substitution, or the function that it calls, prints the local host."""
    if _FALLS_BACK.search(unknown.source):
        return unknown.line
    for step in _steps_of_called(script, unknown):
        if _FALLS_BACK.search("\n".join(script.lines[max(0, step.line - 2) : step.end])):
            return step.line
    return None


def _steps_of_called(script: Script, unknown: Unknown) -> list[Step]:
    """Return the commands of the function that a substitution such as ``$(free_port)`` calls."""
    called = _CALLED.match(unknown.source)
    return [step for step in script.walk.steps if called and step.place.function == called[1]]


def _is_own_name(unknown: Unknown) -> bool:
    """Return whether an expansion results in the name of the node on which it is expanded."""
    if unknown.kind == "command":
        return bool(_OWN_NAME.match(unknown.source) and not _OF_THE_JOB.search(unknown.source))
    return unknown.name in ("HOSTNAME", "SLURMD_NODENAME")


def _is_set_elsewhere(script: Script, unknown: Unknown) -> bool:
    others = script.assigned_to.get(unknown.name, [])
    if any(one.kind == "command" for one in script.unknowns.of(unknown.origin)):
        return False  # the output of the command is possibly empty
    return unknown.name.startswith("SLURM") or any(other.line != unknown.line for other in others)


def _has_address(script: Script, launch: Launch) -> bool:
    """Return whether torchrun gets an address, or may get one from an unknown value."""
    options = launch.options
    if passes_unknown_options(script, launch) or script.walk.opaque:
        return True
    if "standalone" in options:
        return False
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
    if backend == "static":
        return bool({"master_addr", "rdzv_endpoint"} & set(options))
    return "rdzv_endpoint" in options or not (backend in _ASSIGNS_RANKS or MARK.search(backend))


def _no_address(launch: Launch) -> str:
    if "standalone" in launch.options:
        return "--standalone uses localhost as the address: the nodes wait for each other and never connect"
    if "rdzv_backend" in launch.options:
        return "c10d without --rdzv_endpoint uses localhost: the nodes wait for each other and never connect"
    name = "torch.distributed.launch" if launch.launcher == "launch" else launch.launcher
    return f"{name} gets no address and uses 127.0.0.1: the nodes wait for each other and never connect"


@rule(Severity.WARNING)
def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master address is a fixed host, although Slurm chooses the nodes of the job.

    If the job runs on other nodes, no process listens on that host, and all processes wait until the
    rendezvous times out. The finding has severity ``info`` if the first process may run in another job: in a
    job that states no number of nodes, or only one, or if no rank of this job is 0.

    Bad:
        export MASTER_ADDR=node001

    Good:
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    lists = [
        option.value for step in script.sruns for option in step.launch.srun if option.name == "nodelist"
    ]
    if script.job.value("nodelist") or not all(MARK.search(hosts or "") for hosts in lists):
        return
    assigned = [one.value for one in script.walk.assigned if _ADDRESS_VARIABLE.match(one.name) and one.value]
    for step in script.training:
        backend = step.launch.options.get("rdzv_backend")
        outside = backend and backend.text.startswith("etcd")  # a server outside the job
        if not outside and not script.one_job_per_node(step.launch):
            assigned += _addresses(script, step)
    for value in assigned:
        match = _HOST.match(value.text)
        if not match or _LOOPBACK.match(value.text) or match.group(1) in ("0.0.0.0", "255.255.255.255"):  # noqa: S104
            continue
        message = f"the master address is always {match.group(1)}, but Slurm may run the job on other nodes"
        severity = Severity.INFO if _is_elsewhere(script) else None
        yield Remark(value.line, message, f"use the first host of the job: {_FIRST_HOST}", severity)


def _is_elsewhere(script: Script) -> bool:
    """Return whether the process with rank 0 possibly runs outside the job, or no other node needs it."""
    ranks = {
        value.text
        for step in script.training
        for name, value in [*step.launch.options.items(), *script.options_of_program(step.launch)]
        if name in ("node_rank", "machine_rank")
    }
    above = bool(ranks) and all(rank.isdecimal() and int(rank[:9]) > 0 for rank in ranks)
    return not script.job.several_nodes or above or script.mentions(_RANKS_FROM_ONE)


@rule(Severity.INFO)
def hardcoded_port(script: Script) -> Iterator[Remark]:
    """The script uses a fixed rendezvous port.

    If two such jobs run on one node, the second job fails with "Address already in use".

    Bad:
        export MASTER_PORT=29500

    Good:
        export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    """
    remedy = "compute the port from the job ID, below the ephemeral ports: $((10000 + SLURM_JOB_ID % 20000))"
    message = "the port {} is fixed: two jobs on the same node conflict"
    for assigned in script.walk.assigned:
        port = _PORT.search(assigned.value.text) if assigned.value else None
        if port and assigned.value and _PORT_VARIABLE.match(assigned.name):
            edit = _computed_port(script, assigned, port.group(1))
            yield Remark(assigned.value.line, message.format(port.group(1)), remedy, edit=edit)
    for step in script.training:
        options = [*step.launch.options.items(), *script.options_of_program(step.launch)]
        options += [(name.lower(), value) for name, value in step.prefix.items()]
        for name, value in options:
            port = _PORT.search(value.text) if name in _PORT_OPTIONS else None
            if port and name in _ADDRESS_OPTIONS and value.text.isdecimal():
                continue
            if port and port.group(1) in script.line(value.line):
                yield Remark(value.line, message.format(port.group(1)), remedy)


def _computed_port(script: Script, assigned: Assigned, port: str) -> Edit | None:
    written = f"{assigned.name}={port}"
    if assigned.in_task or written not in script.line(assigned.line):
        return None
    return Edit(assigned.line, written, f"{assigned.name}=$((10000 + SLURM_JOB_ID % 20000))")


@rule(Severity.ERROR)
def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The batch shell expands the rank of a node or task, and the rank is always 0 in the batch shell.

    The batch shell runs on the first node only. On the srun line, it expands variables that are
    unquoted or in double quotes, so every task gets rank 0. A variable that is escaped or in single
    quotes is not expanded there; a shell in the task must expand it. The rule does not apply to a
    c10d rendezvous, which assigns the ranks itself. The finding is a warning if the rank is only
    in the environment, beside WORLD_SIZE or before the command. It has severity ``info`` if Lightning,
    submitit, a hook of pyxis or a script may take another rank.

    Bad:
        srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...

    Good:
        srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    steps = [step for step in script.sruns if not _assigns_ranks(step.launch) and not step.launch.opaque]
    for step in steps:
        for name, value in _ranks_given(script, step):
            if value.text.lstrip("\\").startswith("$SLURM_"):
                message = f"srun starts no shell, so {name} is the unexpanded text {value.text}"
                yield Remark(value.line, message, _in_task(script, value.text.lstrip("\\$"), value.line))
            for unknown in script.unknowns.within(value.text):
                severity = _severity_of_early_rank(script.geometry(step), unknown)
                if severity is None:
                    continue
                given = step.place.task.environment if step.place.task else step.prefix
                if value in given.values():  # the program possibly takes Slurm's variables
                    severity = Severity.WARNING
                if step.launch.kind == "script" or _takes_own_ranks(script, step):
                    severity = Severity.INFO
                computed = unknown not in script.unknowns.of(value.text)
                rank = f"the same {name}" if computed else f"{name} 0"
                message = f"the batch shell expands {unknown.source}, so every task gets {rank}"
                own = "SLURM_LOCALID" if name == "local_rank" else unknown.name
                remedy = _in_task(script, own, unknown.line)
                yield Remark(unknown.line, message, remedy, severity)
                if value.line != unknown.line:
                    message += f" (see line {unknown.line})"
                    yield Remark(value.line, message, remedy, Severity.INFO)
    yield from _exported_early(script, steps)
    for use in script.walk.uses:
        place = use.place
        if use.command != "case" or use.name not in _SLURM_RANKS or place.task or place.function:
            continue
        if script.job.ntasks != 1 and not script.mentions(_CALLS_ITSELF):
            message = f"the batch shell runs this `case`, and ${use.name} is always 0 there"
            yield Remark(use.line, message, _in_task(script, use.name, use.line), Severity.WARNING)


def _in_task(script: Script, name: str, line: int) -> str:
    """Return the remedy for a variable that the batch shell expands too early."""
    text = next((first for first, last in script.swallowed if first <= line <= last), 0)
    if "<<" in script.line(text - 1):
        return f"quote the delimiter of the here-document (<<'EOF'), or write \\${name}"
    return f"expand the variable in the task: srun bash -c '... ${name} ...', or \\$ within double quotes"


def _ranks_given(script: Script, step: Step) -> Iterator[tuple[str, Value]]:
    """Yield the ranks in the options and the environment of a command."""
    for name, value in [*step.launch.options.items(), *script.options_of_program(step.launch)]:
        if name in _RANK_OPTIONS:
            yield name, value
    yield from ((name, value) for name, value in step.prefix.items() if name in _RANK_VARIABLES)


def _severity_of_early_rank(geometry: Geometry, unknown: Unknown) -> Severity | None:
    """Return the severity of expanding a rank in the batch shell, or None if the value is correct."""
    if unknown.in_task or unknown.name not in _SLURM_RANKS:
        return None
    if unknown.name == "SLURM_NODEID":
        count = geometry.nodes
    elif unknown.name == "SLURM_LOCALID":
        count = geometry.tasks_per_node
    else:
        count = geometry.ntasks
    if count == 1:
        return None
    return Severity.WARNING if count is None else Severity.ERROR


def _exported_early(script: Script, steps: list[Step]) -> Iterator[Remark]:
    """Find variables such as RANK to which the batch shell assigns one value for all tasks."""
    if not steps:
        return
    reads = "WORLD_SIZE" in script.walk.exported and all(_reads_environment(script, step) for step in steps)
    for assigned in script.walk.assigned:
        if assigned.name not in _RANK_VARIABLES or not assigned.value:
            continue
        exported = assigned.exported or assigned.name in script.walk.exported
        for unknown in script.unknowns.within(assigned.value.text):
            severities = (_severity_of_early_rank(script.geometry(step), unknown) for step in steps)
            severity = next(filter(None, severities), None)
            if severity is None or not exported:
                continue
            if not assigned.in_task:  # harmless if the program or a container hook takes Slurm's variables
                severity = Severity.WARNING if reads and assigned.name in _RANKS_OF_TASKS else Severity.INFO
            message = f"the batch shell expands {unknown.source}, so every task gets {assigned.name}=0"
            yield Remark(unknown.line, message, _in_task(script, unknown.name, unknown.line), severity)


def _takes_own_ranks(script: Script, step: Step) -> bool:
    """Return whether a program, such as one of Lightning, takes its ranks from Slurm."""
    given = {name.partition(".")[0] for name, _ in script.options_of_program(step.launch)}
    lightning = any(word.text == "fit" for word in step.launch.arguments[:3]) or "trainer" in given
    return lightning or script.mentions(_OWN_RANKS)


def _reads_environment(script: Script, step: Step) -> bool:
    """Return whether a program probably reads RANK: a Python program outside pyxis, whose hook sets RANK."""
    hooked = any(option.name == "container-image" for option in step.launch.srun)
    return step.launch.kind == "python" and not hooked and not _takes_own_ranks(script, step)


@rule(Severity.WARNING)
def port_range(script: Script) -> Iterator[Remark]:
    """The rendezvous port is possibly below 1024, above 65535, or one of the ephemeral ports.

    Only root may listen on ports below 1024. Linux gives the ephemeral ports (32768 to 60999) to outgoing
    connections, so that such a port can already be in use when the job starts. For these ports, the finding
    has severity ``info``.

    Bad:
        export MASTER_PORT=$RANDOM

    Good:
        export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    """
    remedy = "compute the port from the job ID: $((10000 + SLURM_JOB_ID % 20000))"
    for line, text in _rendezvous_ports(script):
        ports = _possible_ports(text, script)
        if not ports:
            continue
        low, high = ports
        span = f"the port is {low}" if low == high else f"the port can be any number from {low} to {high}"
        if low in _ROOT_ONLY or high > 65535:
            limit = "only root may use ports below 1024" if low in _ROOT_ONLY else "the highest port is 65535"
            # A site may give its users numbers in the allowed range.
            severity = Severity.INFO if re.search(r"\bUID\b", script.unknowns.shown(text)) else None
            yield Remark(line, f"{span}, but {limit}", remedy, severity)
        elif high >= _EPHEMERAL[0] and low <= _EPHEMERAL[1]:
            message = f"{span}, and other programs may already use a port from 32768 to 60999"
            yield Remark(line, message, remedy, Severity.INFO)


def _rendezvous_ports(script: Script) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each port that is set in a variable (MASTER_PORT) or computed in an option."""
    for assigned in script.settings:
        if assigned.value and _PORT_VARIABLE.match(assigned.name) and "MASTER" in assigned.name.upper():
            yield assigned.line, assigned.value.text
    for step in script.training:
        for name, value in [*step.launch.options.items(), *script.options_of_program(step.launch)]:
            _, colon, port = value.text.rpartition(":")
            if name in _PORT_OPTIONS and name != "port" and (colon or name not in _ADDRESS_OPTIONS):
                yield from ((unknown.line, port) for unknown in script.unknowns.of(port)[:1])


@rule(Severity.WARNING)
def gloo_interface_excluded(script: Script) -> Iterator[Remark]:
    """GLOO_SOCKET_IFNAME contains an exclusion such as ^lo, which only NCCL_SOCKET_IFNAME supports.

    gloo expects exact names of interfaces. It finds no interface named ``^lo``, and processes that use
    gloo stop with "Unable to find address for: ^lo".

    Bad:
        export GLOO_SOCKET_IFNAME=^lo,docker

    Good:
        export NCCL_SOCKET_IFNAME=^lo,docker
        export GLOO_SOCKET_IFNAME=ib0
    """
    for assigned in script.settings:
        if assigned.name != "GLOO_SOCKET_IFNAME" or not assigned.value:
            continue
        defaults = [unknown.default or "" for unknown in script.unknowns.of(assigned.value.text)]
        name = next((text for text in [assigned.value.text, *defaults] if text[:1] in ("^", "=")), None)
        if name:
            message = f"gloo has no exclusion: it looks for an interface named {name[:40]}"
            remedy = "write the name of one interface, such as ib0, or remove the line"
            yield Remark(assigned.line, message, remedy)


def _possible_ports(text: str, script: Script) -> Range | None:
    """Return the lowest and highest number of an expression, or None if it is unknown."""
    if text.isascii() and text.isdecimal() and len(text) < 6:
        return int(text), int(text)
    found = script.unknowns.of(text)
    return _of_unknown(found[0], script) if len(found) == 1 and MARK.fullmatch(text) else None


def _of_unknown(unknown: Unknown, script: Script) -> Range | None:
    if unknown.kind == "arith":
        return _of_expression(unknown.default or "", script)
    if unknown.op in (":-", "-", ":=", "=") and unknown.default:
        return _possible_ports(unknown.default, script)
    if unknown.kind == "command":
        commands = [script.line(step.line) for step in _steps_of_called(script, unknown)]
        last = commands[-1] if commands else unknown.source  # a function prints with its last command
        drawn = _DRAWN.search(last.partition("$((")[0])
        if drawn:
            numbers = [int(number[:9]) for number in drawn.groups() if number]
            return numbers[0] if len(numbers) > 1 else 0, numbers[-1]
        return _of_digits(unknown.source)
    if unknown.op == ":":
        digits = re.search(r"-(\d)\)?\}\Z", unknown.source)
        return (0, 10 ** int(digits[1]) - 1) if digits else None
    if unknown.name in ("RANDOM", "SRANDOM"):
        return _RANDOM if unknown.name == "RANDOM" else _ANY
    if unknown.name == "SLURM_ARRAY_TASK_ID":
        ids = [int(one[:9]) for one in _INDEX.findall((script.job.value("array") or "").partition("%")[0])]
        return (min(ids), max(ids)) if ids else None
    return _ANY if _IDS.search(unknown.name) and not unknown.op else None


def _of_digits(source: str) -> Range | None:
    """Return the smallest and largest number that ``$(echo $SLURM_JOB_ID | tail -c 4)`` can give."""
    match = _LAST_DIGITS.search(source)
    if not match or re.search("expr |sed |awk ", source) or not _IDS.search(source):
        return None
    # tail counts the end of the line as a character
    return 0, 10 ** (int(match[1]) - 1 if match[1] else int(match[2])) - 1


def _of_expression(text: str, script: Script) -> Range | None:
    """Return the range of an arithmetic expression."""
    ranges = {f"_{at}_": _of_unknown(one, script) for at, one in enumerate(script.unknowns.of(text))}
    numbered = iter(ranges)
    return range_of(MARK.sub(lambda _: next(numbered), text.replace("10#", "")), ranges)
