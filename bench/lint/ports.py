"""Find the range of port numbers that an expression in a script can give."""

from __future__ import annotations

import ast
import re

from bench.lint.expansion import MARK, Unknown, Unknowns

#: Ports that only root may use.
PRIVILEGED = range(1024)
#: $RANDOM is at most 32767; IDs of jobs and processes have no useful limit.
_RANDOM = (0, 32767)
_ANY = (0, 2**31)
_SHUFFLED = re.compile(r"shuf\s+(?:-n\s*1\s+)?(?:-i\s*|--input-range=)(\d+)-(\d+)")
_LAST_DIGITS = re.compile(r"tail\s+-c\s*(\d)|cut\s+-c\s*\d+-(\d)")
_IDS = re.compile(r"JOB_?ID|TASK_ID|\bUID\b|\bPPID\b|SECONDS|\A\$\Z")

Range = tuple[int, int]


def possible_ports(text: str, unknowns: Unknowns) -> Range | None:
    """Return the lowest and highest number of an expression, or None if it is unknown."""
    if text.isascii() and text.isdecimal() and len(text) < 6:
        return int(text), int(text)
    found = unknowns.of(text)
    return _of_unknown(found[0], unknowns) if len(found) == 1 and MARK.fullmatch(text) else None


def _of_unknown(unknown: Unknown, unknowns: Unknowns) -> Range | None:
    if unknown.kind == "arith":
        return _of_expression(unknown.default or "", unknowns)
    if unknown.kind == "command":
        shuffled = _SHUFFLED.search(unknown.source)
        return (int(shuffled[1]), int(shuffled[2])) if shuffled else _of_digits(unknown.source)
    if unknown.op == ":":
        digits = re.search(r"-(\d)\)?\}\Z", unknown.source)
        return (0, 10 ** int(digits[1]) - 1) if digits else None
    if unknown.name in ("RANDOM", "SRANDOM"):
        return _RANDOM if unknown.name == "RANDOM" else _ANY
    return _ANY if _IDS.search(unknown.name) and not unknown.op else None


def _of_digits(source: str) -> Range | None:
    """Return the range of the last digits of a job ID, such as ``$(echo $SLURM_JOB_ID | tail -c 4)``."""
    match = _LAST_DIGITS.search(source)
    if not match or "expr " in source or not _IDS.search(source):
        return None
    # tail counts the end of the line as a character
    return 0, 10 ** (int(match[1]) - 1 if match[1] else int(match[2])) - 1


def _of_expression(text: str, unknowns: Unknowns) -> Range | None:
    """Return the range of an arithmetic expression."""
    ranges = {f"_{number}_": _of_unknown(one, unknowns) for number, one in enumerate(unknowns.of(text))}
    numbered = iter(ranges)
    plain = MARK.sub(lambda _: next(numbered), text.replace("10#", ""))
    try:
        return _of_node(ast.parse(" ".join(plain.split()), mode="eval").body, ranges)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _of_node(node: ast.expr, ranges: dict[str, Range | None]) -> Range | None:
    match node:
        case ast.Constant(value=int(value)):
            return value, value
        case ast.Name(id=name):
            return ranges.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _of_node(left, ranges), _of_node(right, ranges)
            return _combined(op, first, second) if first and second else None
    return None


def _combined(op: ast.operator, first: Range, second: Range) -> Range | None:
    match op:
        case ast.Add():
            return first[0] + second[0], first[1] + second[1]
        case ast.Sub():
            return first[0] - second[1], first[1] - second[0]
        case ast.Mult():
            return first[0] * second[0], first[1] * second[1]
        case ast.Mod() if second[0] == second[1] > 0:
            return (0, min(second[0] - 1, first[1])) if first[1] >= second[0] else first
    return None
