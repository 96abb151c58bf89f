"""Rules about how the processes find each other: master address, port and rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.engine import Edit, Remark, rule
from bench.lint.environment import MARK, Assigned, Unknown, Value
from bench.lint.geometry import Geometry
from bench.lint.launch import Launch
from bench.lint.script import Script, spawns_workers
from bench.lint.walk import Step

_LOOPBACK = re.compile(
    r"(?:tcp://)?(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?|ip6-localhost)(?::|/|\Z)", re.I
)
_ADDRESS_VARIABLE = re.compile(
    r"(?i:(?:pet_)?(?:master|main|head|rank_?0|rdzv|leader|chief|coordinator)_?(?:node_?)?(?:process_?)?"
    r"(?:addr(?:ess)?|ip|host(?:name)?|endpoint|node|url)?)\Z"
)
_ADDRESS_OPTIONS = frozenset(
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
_PORT_OPTIONS = frozenset({"master_port", "main_process_port", "main_port", "dist_port"}) | _ADDRESS_OPTIONS
_PORT_VARIABLE = re.compile(r"(?i:[a-z_]*port[a-z_]*|rdzv_endpoint|dist_url|init_method|[a-z_]*endpoint)\Z")
_HOST = re.compile(
    r"(?:tcp://)?((?:\d{1,3}\.){3}\d{1,3}|(?=[A-Za-z0-9.-]*[0-9.-])[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*)(?::(?:\d+|[^:]*))?\Z"
)
_PORT = re.compile(r"(?:\A|:)(\d{4,5})\Z")
_RANK_VARIABLES = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_GTIDS"})
_RANK_OPTIONS = frozenset(
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
_RANK_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "GLOBAL_RANK",
        "MACHINE_RANK",
        "NODE_ID",
        "NODEID",
        "PET_NODE_RANK",
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
    }
)
_MEETING = frozenset({"c10d", "etcd", "etcd-v2", "etcd_v2", "zeus"})
_PADDED_COMMAND = re.compile(
    r"tail\s+(?:-c|--bytes)|cut\s+-c|head\s+-c|\bdate\b[^|]*%0?[SMHdmjNyV]|rev\b.*cut|printf[^|]*%0"
)
_DIGITS_OF_ID = re.compile(r"JOB_?ID|TASK_ID|PROCID|STEP", re.I)


@rule(Severity.ERROR)
def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address is, or can become, the local host, in a job of several nodes.

    Each node then waits at its own door: the processes of the other nodes never meet the first
    one. torchrun takes 127.0.0.1 where it is given no address (it does not read MASTER_ADDR),
    and c10d meets at localhost where it is given no --rdzv_endpoint.

    Bad:
        #SBATCH --nodes=2
        export MASTER_ADDR=localhost

    Good:
        #SBATCH --nodes=2
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    spanning = [step for step in script.training if _spans_nodes(script, step)]
    if not _several(script) or (script.training and not spanning):
        return
    for assigned in script.walk.assigned:
        if _ADDRESS_VARIABLE.match(assigned.name) and assigned.value and _holds(script, assigned):
            for remark in _at_home(script, assigned.value, in_task=assigned.in_task):
                yield remark if _matters(script, assigned.name, spanning) else _doubtful(remark)
    for step in spanning:
        for value in [*_addresses(script, step.launch), *_prefixed(step)]:
            yield from _at_home(script, value, in_task=step.place.task is not None)
        if step.launch.launcher in ("torchrun", "launch") and not _has_address(script, step.launch):
            yield Remark(
                _launcher_line(step),
                _no_address(step.launch),
                "pass --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT, HOST the first of the job",
            )


def _several(script: Script) -> bool:
    job = script.job
    if job.heterogeneous:
        return False
    return job.several_nodes or any((script.geometry(step).nodes or 1) > 1 for step in script.sruns)


def _spans_nodes(script: Script, step: Step) -> bool:
    """Return whether what a step starts is to join with other nodes."""
    expected = _expected_nodes(script, step.launch)
    if spawns_workers(step.launch):
        return expected is None or expected > 1
    nodes = script.geometry(step).nodes
    if nodes is None or nodes > 1:
        return True
    return any(
        name in _RANK_OPTIONS or name == "world_size" for name, _ in script.options_of_program(step.launch)
    )


def _expected_nodes(script: Script, launch: Launch) -> int | None:
    """Return how many nodes a launcher is told of: torchrun's default is 1."""
    for name in ("nnodes", "num_machines", "num_nodes"):
        if name in launch.options:
            text = launch.options[name].text.rpartition(":")[2]
            return script.number(Value(text, launch.options[name].lines), script.job)
    return 1 if launch.launcher in ("torchrun", "launch") else None


def _holds(script: Script, assigned: Assigned) -> bool:
    """Return whether an assignment is the last word: no later one replaces it, no other branch differs."""
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


def _matters(script: Script, name: str, spanning: list[Step]) -> bool:
    """Return whether anything reads the variable: launchers with a rendezvous of their own do not."""
    used = any(use.name == name for use in script.walk.uses)
    return used or not spanning or any(not spawns_workers(step.launch) for step in spanning)


def _doubtful(remark: Remark) -> Remark:
    return remark._replace(severity=Severity.WARNING)


def _at_home(script: Script, value: Value, *, in_task: bool) -> Iterator[Remark]:
    remedy = 'use the first host of the job: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if _LOOPBACK.match(value.text):
        message = f"{script.shown(value.text)[:60]} is each node itself: the nodes never meet"
        yield Remark(value.line, f"{message}, and the job ends after the store's time-out", remedy)
        return
    for unknown in script.unknowns(value.text)[:1]:
        if in_task and unknown.in_task and _own_name(unknown):
            message = f"each task computes {unknown.source[:40]} on its own node, so the nodes never meet"
            yield Remark(unknown.line, message, remedy)
        elif _LOOPBACK.match(unknown.default or "") and not _set_elsewhere(script, unknown):
            message = f"where {unknown.name} is not set, each node takes {unknown.default} for the master"
            yield Remark(unknown.line, message, remedy, Severity.WARNING)


def _own_name(unknown: Unknown) -> bool:
    """Return whether an expansion is the name of the node that expands it."""
    if unknown.kind == "command":
        return bool(re.match(r"\s*(?:/bin/|/usr/bin/)?hostname\b[^|;&]*\Z", unknown.source[2:-1]))
    return unknown.name in ("HOSTNAME", "SLURMD_NODENAME")


def _set_elsewhere(script: Script, unknown: Unknown) -> bool:
    others = script.assigned_to.get(unknown.name, [])
    return unknown.name.startswith("SLURM") or any(other.line != unknown.line for other in others)


def _addresses(script: Script, launch: Launch) -> list[Value]:
    """Return the master addresses that a launcher or a program is given."""
    found = [value for name, value in launch.options.items() if name in _ADDRESS_OPTIONS]
    found += [value for name, value in script.options_of_program(launch) if name in _ADDRESS_OPTIONS]
    return [value for value in found if value.text]


def _prefixed(step: Step) -> list[Value]:
    return [value for name, value in step.prefix.items() if _ADDRESS_VARIABLE.match(name)]


def _has_address(script: Script, launch: Launch) -> bool:
    """Return whether torchrun is told where to meet, or may be by what is not known here."""
    options = launch.options
    if launch.opaque or any(MARK.fullmatch(word.text) for word in _before_program(launch)):
        return True
    if script.walk.opaque or any(name.startswith("PET_") for name in script.walk.exported):
        return True
    if "standalone" in options:
        return False
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else "static"
    if backend == "static":
        return bool({"master_addr", "rdzv_endpoint"} & set(options))
    return "rdzv_endpoint" in options or not (backend in _MEETING or MARK.search(backend))


def _before_program(launch: Launch) -> list[Value]:
    words = list(launch.words)
    behind = len(launch.arguments)
    return words[: len(words) - behind] if behind else words


def _no_address(launch: Launch) -> str:
    if "standalone" in launch.options:
        return "--standalone meets at localhost: on several nodes, each waits for the others on its own"
    if "rdzv_backend" in launch.options:
        return "c10d without --rdzv_endpoint meets at localhost: each node waits for the others on its own"
    return (
        f"{_name(launch)} is given no address and takes 127.0.0.1: each node waits for the others on its own"
    )


def _name(launch: Launch) -> str:
    return "torch.distributed.launch" if launch.launcher == "launch" else launch.launcher


def _launcher_line(step: Step) -> int:
    """Return the line of the launcher's own word."""
    for word in step.launch.words:
        name = word.text.rpartition("/")[2]
        if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
            return word.line
    return step.line


@rule(Severity.WARNING)
def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master is a fixed host, while Slurm decides where the job runs.

    On other nodes nobody listens there, and all processes wait until their time-out.

    Bad:
        export MASTER_ADDR=node001

    Good:
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    if script.job.value("nodelist"):
        return
    for value in _master_values(script):
        match = _HOST.match(value.text)
        if not match or _LOOPBACK.match(value.text) or match.group(1) in ("0.0.0.0", "255.255.255.255"):  # noqa: S104
            continue
        yield Remark(
            value.line,
            f"the master is always {match.group(1)}, wherever Slurm puts the job",
            'use its first host: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )


def _master_values(script: Script) -> Iterator[Value]:
    for assigned in script.walk.assigned:
        if assigned.value and _ADDRESS_VARIABLE.match(assigned.name):
            yield assigned.value
    for step in script.training:
        yield from _addresses(script, step.launch)
        yield from _prefixed(step)


@rule(Severity.INFO)
def hardcoded_port(script: Script) -> Iterator[Remark]:
    """The port of the rendezvous is fixed.

    Two jobs that share a node then want the same port: "Address already in use".

    Bad:
        export MASTER_PORT=29500

    Good:
        export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    """
    remedy = "derive it from the job: $((10000 + SLURM_JOB_ID % 20000)), below the ephemeral ports"
    message = "the port {} is fixed: two jobs that share a node want the same one"
    for assigned in script.walk.assigned:
        if assigned.value and _PORT_VARIABLE.match(assigned.name):
            port = _PORT.search(assigned.value.text)
            if port:
                yield Remark(
                    assigned.value.line,
                    message.format(port.group(1)),
                    remedy,
                    edit=_computed_port(script, assigned, port.group(1)),
                )
    for step in script.training:
        options = [*step.launch.options.items(), *script.options_of_program(step.launch)]
        options += [(name.lower(), value) for name, value in step.prefix.items()]
        for name, value in options:
            port = _PORT.search(value.text) if name in _PORT_OPTIONS or name == "port" else None
            if port and name in _ADDRESS_OPTIONS and value.text.isdecimal():
                continue
            if port and value.line <= len(script.lines) and port.group(1) in script.lines[value.line - 1]:
                yield Remark(value.line, message.format(port.group(1)), remedy)


def _computed_port(script: Script, assigned: Assigned, port: str) -> Edit | None:
    line = script.lines[assigned.line - 1] if assigned.line <= len(script.lines) else ""
    written = f"{assigned.name}={port}"
    if assigned.in_task or written not in line:
        return None
    return Edit(assigned.line, written, f"{assigned.name}=$((10000 + SLURM_JOB_ID % 20000))")


@rule(Severity.WARNING)
def port_octal_arithmetic(script: Script) -> Iterator[Remark]:
    """Arithmetic on digits that may start with 0, which bash reads as octal.

    The last digits of a job's id may be 0899: bash then stops with "value too great for base",
    and 0123 silently becomes 83.

    Bad:
        export MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))

    Good:
        export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
    """
    for unknown in script.walk.unknowns:
        if unknown.kind != "arith" or "10#" in unknown.source:
            continue
        for inner in script.unknowns(unknown.default or ""):
            if not _may_start_with_zero(inner):
                continue
            edit = (
                Edit(unknown.line, inner.source, f"10#{inner.source}")
                if inner.source in unknown.source
                else None
            )
            yield Remark(
                unknown.line,
                f"{inner.source[:60]} may start with 0, which bash reads as octal: 0899 stops the script",
                "write $((10000 + SLURM_JOB_ID % 10000)), or put 10# before the digits",
                edit=edit,
            )
            break


def _may_start_with_zero(unknown: Unknown) -> bool:
    if unknown.kind == "command":
        return bool(_PADDED_COMMAND.search(unknown.source[:1000]))
    return unknown.op == ":" and bool(_DIGITS_OF_ID.search(unknown.name))


@rule(Severity.ERROR)
def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The rank of a node or a task is expanded by the batch shell, where it is always 0.

    The batch script runs on the first node only. What stands unescaped on the srun line, or in
    double quotes, is expanded there, so that every task gets 0. (A rendezvous over c10d gives out
    the ranks itself: there it does no harm.)

    Bad:
        srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...

    Good:
        srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    remedy = "let the task expand it: srun bash -c '... $SLURM_NODEID ...', or write \\$ in double quotes"
    for step in script.sruns:
        if _meets_by_itself(step.launch) or step.launch.opaque:
            continue
        for name, value in _ranks_given(script, step):
            for unknown in script.walk.unknowns.within(value.text):
                severity = _harm(script.geometry(step), unknown)
                if severity is None:
                    continue
                message = f"the batch shell expands {unknown.source}, so every task is told {name} 0"
                yield Remark(unknown.line, message, remedy, severity)
                if value.line != unknown.line:
                    yield Remark(value.line, f"{message} (see line {unknown.line})", remedy, Severity.INFO)
    yield from _exported_early(script, remedy)


def _ranks_given(script: Script, step: Step) -> Iterator[tuple[str, Value]]:
    launch = step.launch
    yield from ((name, value) for name, value in launch.options.items() if name in _RANK_OPTIONS)
    for name, value in script.options_of_program(launch):
        if name in _RANK_OPTIONS:
            yield name, value
    yield from ((name, value) for name, value in step.prefix.items() if name in _RANK_NAMES)


def _meets_by_itself(launch: Launch) -> bool:
    """Return whether the launcher's rendezvous gives out the ranks, whatever it is told."""
    options = launch.options
    backend = options["rdzv_backend"].text if "rdzv_backend" in options else ""
    conf = options["rdzv_conf"].text if "rdzv_conf" in options else ""
    return backend in _MEETING or "c10d" in conf or bool(MARK.search(backend))


def _harm(geometry: Geometry, unknown: Unknown) -> Severity | None:
    """Return how sure it is that a rank expanded early is wrong; None where it is not."""
    if unknown.in_task or unknown.name not in _RANK_VARIABLES:
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


def _exported_early(script: Script, remedy: str) -> Iterator[Remark]:
    """Find ranks that the batch shell exports to all tasks."""
    direct = [step for step in script.sruns if not _meets_by_itself(step.launch) and not step.launch.opaque]
    if not direct:
        return
    for assigned in script.walk.assigned:
        if assigned.name not in _RANK_NAMES or not assigned.value:
            continue
        sees = assigned.exported or assigned.name in script.walk.exported
        for unknown in script.walk.unknowns.within(assigned.value.text):
            severity = next(filter(None, (_harm(script.geometry(step), unknown) for step in direct)), None)
            if severity is None or not sees:
                continue
            if not assigned.in_task and not assigned.name.endswith("VISIBLE_DEVICES"):
                severity = Severity.WARNING  # a program that asks Slurm itself is not misled
            message = f"the batch shell expands {unknown.source}, so every task sees {assigned.name}=0"
            yield Remark(unknown.line, message, remedy, severity)
