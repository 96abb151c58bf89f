"""Rules about how processes find each other: address, port and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from ...findings import Edit, Remark, Severity
from ..geometry import number
from ..script import Script
from ..values import Unknown, Value
from ..walk import Command
from . import rule
from .launching import TORCH, is_static

# RFC 6761 and RFC 1122: names and addresses of the own host, with an optional scheme and port.
_LOOPBACK = re.compile(
    r"(?:localhost(?:\.localdomain)?|127\.\d+\.\d+\.\d+|\[?::1\]?|ip6-localhost)(?::|/|\Z)", re.I
)
# A port alone or at the end of an address, as above.
_PORT = re.compile(r"(?:\A|:)(\d{4,5})\Z")
# hostname(1) without a further command: the name of the node that expands it.
_OWN_NAME = re.compile(r"(?:\$\(|`)\s*hostname\b[^|;&$`]*(?:\)|`)\Z")
# bash(1), ARITHMETIC EVALUATION: a leading 0 means octal. bash(1), Substring Expansion: the last digits.
_LAST_DIGITS = re.compile(r"(?<!10#)\$\{(SLURM_JOB_?ID|SLURM_ARRAY_JOB_ID|SLURM_JOBID): *-\d+\}")
# tail(1) and cut(1): the last characters of a number.
_CUT_DIGITS = re.compile(
    r"(?<!10#)\$\([^()]*SLURM_(?:JOB_?ID|ARRAY_JOB_ID)[^()]*\|\s*(?:tail -c|cut -c)[^()]*\)"
)
_OCTAL = re.compile(r"(?<![\w.#])0\d*[89]\d*(?![\w.])")
# scontrol(1), show hostnames: one host per line.
_HOST_LIST = re.compile(r"\bscontrol show hostnames?\b[^|]*\Z")
_ADDRESS_OPTIONS = ("master_addr", "rdzv_endpoint", "main_process_ip")
_PORT_OPTIONS = ("master_port", "rdzv_endpoint", "main_process_port")
_RANK_OPTIONS = ("node_rank", "machine_rank", "local_rank", "rank")
_SLURM_RANKS = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"})
_FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def _spanning(script: Script) -> Iterator[Command]:
    """Yield the commands whose processes on several nodes form one group."""
    for command in script.sruns:
        launch, geometry = command.launch, script.geometry(command)
        several = (geometry.nodes or 1) > 1 or (command.outer.place.loop and script.job.several_nodes)
        if launch.launcher:
            expected = number(launch.node_count, geometry)
            several = several and expected is not None and expected > 1
        if several and (launch.launcher or launch.kind == "python"):
            yield command


def _addresses(command: Command) -> list[Value]:
    """Return the master addresses in the options of a launcher, or in the environment of a program."""
    launch = command.launch
    if launch.launcher:
        return [launch.options[name] for name in _ADDRESS_OPTIONS if name in launch.options]
    value = command.exported("MASTER_ADDR")
    return [value] if value else []


@rule(Severity.ERROR)
def loopback_master_addr(script: Script) -> Iterator[Remark]:
    """The master address of a job with several nodes is the local host.

    Every node then connects to itself, and the processes of the other nodes never reach the first
    node. torchrun does not read MASTER_ADDR: without an address in its options, it uses 127.0.0.1.
    Without --rdzv_endpoint, the c10d backend uses localhost.

    Bad: export MASTER_ADDR=localhost
    Good: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    remedy = f"use the first host of the job: {_FIRST_HOST}"
    for command in _spanning(script):
        for value in _addresses(command):
            if _LOOPBACK.match(value.start):
                message = f"{value.shown[:60]} refers to a different host on every node: "
                message += "the nodes never connect, and the job fails when the rendezvous times out"
                yield Remark(value.line, message, remedy)
            for own in filter(_is_own_name, value.unknowns()):
                message = f"each task expands {own.source[:40]} on its own node, so the nodes never connect"
                yield Remark(own.line, message, remedy)
        if _lacks_address(script, command):
            message = "torchrun gets no address and uses the local host: the nodes never connect"
            options = "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
            yield Remark(command.line, message, f"pass {options} with the job's first host as HOST")


def _is_own_name(part: Unknown) -> bool:
    """Return whether an expansion in a task results in the name of the task's node."""
    named = part.name == "SLURMD_NODENAME" or (part.kind == "command" and _OWN_NAME.match(part.source))
    return part.in_task and bool(named)


def _lacks_address(script: Script, command: Command) -> bool:
    """Return whether torchrun certainly gets no address."""
    options, known = command.launch.options, command.launch.launcher in TORCH and not command.launch.opaque
    if not known or any(name.startswith("PET_") for name in script.names):
        return False  # torchrun reads its options from PET_ variables, too
    backend = options.get("rdzv_backend")
    if is_static(command.launch):
        return not {"master_addr", "rdzv_endpoint", "local_addr"} & set(options)
    return "rdzv_endpoint" not in options and backend is not None and backend.literal == "c10d"


@rule(Severity.WARNING)
def hardcoded_host(script: Script) -> Iterator[Remark]:
    """The master address is a fixed host, although Slurm chooses the nodes of the job.

    If the job runs on other nodes, no process listens on that host, and all processes wait until the
    rendezvous times out. The rule does not apply to jobs with ``--nodelist``.

    Bad: export MASTER_ADDR=node001
    Good: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    """
    if script.job.value("nodelist"):
        return
    for command in _spanning(script):
        backend = command.launch.options.get("rdzv_backend")
        if command.launch.srun_option("nodelist") or (backend and (backend.literal or "").startswith("etcd")):
            continue  # the script chooses the node, or a server outside the job
        for value in _addresses(command):
            host, colon, _ = value.start.partition(":")
            known = bool(colon) or value.literal is not None
            if host and known and not _LOOPBACK.match(value.start):
                message = f"the master address is always {host}, but Slurm may run the job on other nodes"
                yield Remark(value.line, message, f"use the first host of the job: {_FIRST_HOST}")


@rule(Severity.WARNING)
def hardcoded_port(script: Script) -> Iterator[Remark]:
    """The script uses a fixed rendezvous port.

    If two such jobs run on one node, the second job fails with "Address already in use". The rule does not
    apply to jobs with ``--exclusive``, whose nodes run no other job.

    Bad: export MASTER_PORT=29500
    Good: export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    """
    if "exclusive" in script.job.options or not script.header.options:
        return
    for command in script.commands:
        launch = command.launch
        given = [launch.options[name] for name in _PORT_OPTIONS if name in launch.options]
        value = command.exported("MASTER_PORT") if launch.kind == "python" else None
        for one in [*given, *([value] if value else [])]:
            last = one.parts[-1]
            port = _PORT.search(last) if isinstance(last, str) else None
            if port:
                message = f"the port {port[1]} is fixed: two jobs on the same node conflict"
                remedy = "compute the port from the job ID: $((10000 + SLURM_JOB_ID % 20000))"
                yield Remark(one.line, message, remedy)


@rule(Severity.ERROR)
def rank_expanded_early(script: Script) -> Iterator[Remark]:
    r"""The batch shell expands the rank of a node or task, and the rank is always 0 in the batch shell.

    On the srun line, the batch shell expands variables that are unquoted or in double quotes, so every task
    gets rank 0. The rule does not apply to a c10d rendezvous, which assigns the ranks itself.

    Bad: srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...
    Good: srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HOST ...'
    """
    for command in script.sruns:
        launch = command.launch
        if launch.opaque or launch.kind not in ("python", "launcher"):
            continue
        if launch.launcher in TORCH and not is_static(launch):
            continue
        for name, value in _ranks(command):
            early = next((one for one in value.unknowns() if _is_early(script, command, one)), None)
            if early:
                message = f"the batch shell expands {early.source}, so every task gets the same {name}"
                remedy = f"expand the variable in the task: srun bash -c '... ${early.name} ...', "
                yield Remark(early.line, message, f"{remedy}or \\$ within double quotes")


def _ranks(command: Command) -> Iterator[tuple[str, Value]]:
    """Yield the ranks in the options and the environment of a command."""
    launch = command.launch
    for name in _RANK_OPTIONS:
        if name in launch.options:
            yield f"--{name}", launch.options[name]
    for word, following in zip_longest(launch.arguments, launch.arguments[1:]):
        option, equals, _ = word.start.partition("=")
        if option.startswith("--") and option.lstrip("-").replace("-", "_") in _RANK_OPTIONS:
            value = word.after(f"{option}=") if equals else following
            yield from [(option, value)] if value else []
    if launch.kind == "python" and (command.place.task or command.exported("WORLD_SIZE")):
        for name in ("RANK", "LOCAL_RANK"):
            value = command.exported(name)
            yield from [(name, value)] if value else []


def _is_early(script: Script, command: Command, unknown: Unknown) -> bool:
    """Return whether the batch shell expands a rank that differs between the tasks."""
    if unknown.in_task or unknown.name not in _SLURM_RANKS or unknown.operator not in ("", ":-", "-"):
        return False
    geometry = script.geometry(command)
    counts = {
        "SLURM_NODEID": geometry.nodes,
        "SLURM_LOCALID": geometry.tasks_per_node,
        "SLURM_PROCID": geometry.ntasks,
    }
    return (counts[unknown.name] or 1) > 1


@rule(Severity.WARNING)
def gloo_interface_excluded(script: Script) -> Iterator[Remark]:
    """GLOO_SOCKET_IFNAME contains an exclusion such as ^lo, which only NCCL_SOCKET_IFNAME supports.

    Processes that use gloo stop with "Unable to find address for: ^lo".

    Bad: export GLOO_SOCKET_IFNAME=^lo,docker
    Good: export GLOO_SOCKET_IFNAME=ib0
    """
    name = "GLOO_SOCKET_IFNAME"
    values = [one.value for one in script.walk.assigned if one.name == name]
    for command in script.commands:
        values += [command.prefix.get(name), command.launch.environment.get(name)]
    for value in values:
        if value and value.start[:1] in ("^", "="):
            message = f"gloo has no exclusion: it looks for an interface named {value.start[:40]}"
            remedy = "write the name of one interface, such as ib0, or remove the line"
            yield Remark(value.line, message, remedy)


@rule(Severity.ERROR)
def node_list_in_one_element(script: Script) -> Iterator[Remark]:
    """An array of the job's hosts has a single element, because the list is quoted.

    bash splits only unquoted expansions into words, so ``("$nodes")`` is an array with one element.
    ``${nodes[0]}`` is then the whole list, and ``${nodes[1]}`` is empty.

    Bad: nodes=("$(scontrol show hostnames "$SLURM_JOB_NODELIST")")
    Good: nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
    """
    used = {use.name for use in script.walk.uses}
    for assigned in script.walk.assigned:
        items = assigned.items or ()
        only = items[0].only if len(items) == 1 and items[0].quoted else None
        if only and _HOST_LIST.search(only.source) and assigned.name in used and script.job.several_nodes:
            message = f"the quotes make one element of all hosts: ${{{assigned.name}[0]}} is the whole list"
            yield Remark(assigned.line, message, "remove the quotes")


@rule(Severity.ERROR)
def port_octal_arithmetic(script: Script) -> Iterator[Remark]:
    """A number in an arithmetic expression can start with 0; bash then reads it as octal.

    If the last digits of the job ID are 0899, bash stops with "value too great for base". 0123 means 83.

    Bad: export MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))
    Good: export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
    """
    remedy = "write $((10000 + SLURM_JOB_ID % 10000)), or put 10# before the digits"
    for unknown in script.walk.arithmetic:
        inside = unknown.operand.shown if unknown.operand else ""
        found = _LAST_DIGITS.search(inside) or _CUT_DIGITS.search(inside)
        octal = _OCTAL.search(unknown.source)
        if octal:
            message = f"bash reads {octal[0]} as octal, where the digits 8 and 9 are an error"
            without = Edit(unknown.line, octal[0], octal[0].lstrip("0"))
            yield Remark(unknown.line, message, "write the number without the leading 0", without)
        elif found:
            message = f"{found[0][:60]} can start with 0: bash then reads it as octal, and 0899 is an error"
            here = found[0] in unknown.source
            edit = Edit(unknown.line, found[0], f"10#{found[0]}") if here else None
            yield Remark(unknown.line, message, remedy, edit)
