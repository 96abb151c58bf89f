"""Numbers that a script computes from what Slurm tells it, such as ``$((SLURM_NNODES * 4))``."""

from __future__ import annotations

import re

from bench.lint.environment import MARK, Unknown, Unknowns
from bench.lint.geometry import Geometry

_TOKEN = re.compile(r"\d+|[-+*/%()]")
_EXPRESSION = re.compile(r"[\d\s()+*/%-]{1,400}")
_DEEPEST = 12
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}


def number(text: str, unknowns: Unknowns, geometry: Geometry, *, depth: int = 0) -> int | None:
    """Return the whole number that ``text`` (with marks) becomes in a job, or None."""
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if depth > _DEEPEST or len(text) > 400:
        return None
    found = iter(unknowns.of(text))
    values = [_value(unknown, unknowns, geometry, depth) for unknown in found]
    if not values or None in values:
        return None
    resolved = iter(values)
    plain = MARK.sub(lambda _: str(next(resolved)), text)
    return _evaluate(plain) if _EXPRESSION.fullmatch(plain) else None


def _value(unknown: Unknown, unknowns: Unknowns, geometry: Geometry, depth: int) -> int | None:
    if unknown.kind == "arith":
        return number_of_expression(unknown.default or "", unknowns, geometry, depth=depth + 1)
    if unknown.kind == "command":
        return _counted(unknown.source, geometry)
    if unknown.op and unknown.default is None:
        return None
    known = of_slurm(unknown.name, geometry)
    if known is not None:
        return known
    return number(unknown.default, unknowns, geometry, depth=depth + 1) if unknown.default else None


def number_of_expression(text: str, unknowns: Unknowns, geometry: Geometry, *, depth: int = 0) -> int | None:
    """Return the value of arithmetic whose expansions are resolved or marks, or None."""
    plain = text.strip()
    if _EXPRESSION.fullmatch(plain):
        return _evaluate(plain)
    return number(plain, unknowns, geometry, depth=depth)


def _counted(source: str, geometry: Geometry) -> int | None:
    """Return what the usual ways of counting nodes and GPUs come to."""
    if "wc -l" in source or "grep -c" in source:
        if "nvidia-smi" in source or "rocm-smi" in source:
            return geometry.gpus_per_node or None
        if "scontrol show hostname" in source:
            return geometry.nodes
    return None


def of_slurm(name: str, geometry: Geometry) -> int | None:
    """Return the number that Slurm stores in an environment variable of a job or step."""
    if name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        return geometry.nodes
    if name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        return geometry.ntasks
    if name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        return geometry.tasks_per_node
    if name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        return geometry.gpus_per_node or None
    if name == "SLURM_GPUS_PER_TASK":
        return geometry.gpus_per_task
    if name in ("SLURM_GPUS", "SLURM_NGPUS"):
        total = geometry.value("gpus")
        return int(total) if total and total.isdecimal() else None
    return geometry.number("cpus-per-task") if name == "SLURM_CPUS_PER_TASK" else None


def _evaluate(expression: str) -> int | None:
    """Evaluate integer arithmetic as the shell does (division truncates); None where it is none."""
    tokens = _TOKEN.findall(expression)
    try:
        value, rest = _sum(tokens, 0, 0, depth=0)
    except (IndexError, ZeroDivisionError, ValueError):
        return None
    return value if rest == len(tokens) else None


def _sum(tokens: list[str], at: int, binding: int, *, depth: int) -> tuple[int, int]:
    """Precedence climbing: return the value of the tokens from ``at`` and where it ended."""
    if depth > 40:
        raise ValueError("nested too deeply")
    piece = tokens[at]
    if piece == "(":
        left, at = _sum(tokens, at + 1, 0, depth=depth + 1)
        if tokens[at] != ")":
            raise ValueError("unbalanced")
        at += 1
    elif piece == "-":
        left, at = _sum(tokens, at + 1, 3, depth=depth + 1)
        left = -left
    else:
        if piece.startswith("0") and len(piece) > 1:
            raise ValueError("octal")
        left, at = int(piece[:12]), at + 1
    while at < len(tokens) and _BINDING.get(tokens[at], 0) > binding:
        operator = tokens[at]
        right, at = _sum(tokens, at + 1, _BINDING[operator], depth=depth + 1)
        left = _apply(operator, left, right)
    return left, at


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return quotient if operator == "/" else left - quotient * right
