"""Rules about the port that the processes meet at."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.engine import Edit, Remark, rule
from bench.lint.environment import Assigned, Unknown
from bench.lint.rendezvous import (
    ADDRESS_OPTIONS,
)
from bench.lint.script import Script

_PORT_OPTIONS = frozenset({"master_port", "main_process_port", "main_port", "dist_port"}) | ADDRESS_OPTIONS
_PORT_VARIABLE = re.compile(r"(?i:[a-z_]*port[a-z_]*|rdzv_endpoint|dist_url|init_method|[a-z_]*endpoint)\Z")
_PORT = re.compile(r"(?:\A|:)(\d{4,5})\Z")
_PADDED_COMMAND = re.compile(
    r"tail\s+(?:-c|--bytes)|cut\s+-c|head\s+-c|\bdate\b[^|]*%0?[SMHdmjNyV]|rev\b.*cut|printf[^|]*%0"
)
_DIGITS_OF_ID = re.compile(r"JOB_?ID|TASK_ID|PROCID|STEP", re.I)


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
            if port and name in ADDRESS_OPTIONS and value.text.isdecimal():
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
