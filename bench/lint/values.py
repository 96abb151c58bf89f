"""The values of sbatch's options: which ones sbatch refuses, and what they mean."""

from __future__ import annotations

import re
from typing import NamedTuple

from bench.findings import Severity

_COUNTS = frozenset(
    {
        "ntasks",
        "ntasks-per-node",
        "ntasks-per-core",
        "ntasks-per-socket",
        "ntasks-per-gpu",
        "cpus-per-task",
        "cpus-per-gpu",
        "mincpus",
        "cores-per-socket",
        "sockets-per-node",
        "threads-per-core",
    }
)
_NODES = re.compile(r"\d+[kKmM]?(?:-\d+[kKmM]?)?|\d[\d,:-]*\d")
_SIZE = re.compile(r"\d+[kKmMgGtT]?[bB]?")
_TIME = re.compile(r"-1|(?i:infinite|unlimited)|\d+(?::\d+){0,2}|\d+-\d*(?::\d+){0,2}")
_SIGNAL = re.compile(r"(?:[RB]{1,2}:)?(?:SIG)?[A-Za-z0-9+-]+(?:@\d+)?", re.IGNORECASE)
_HUMAN_TIME = re.compile(r"(\d{1,5})([dhmsDHMS])")
_MAIL = re.compile(
    r"(?i)(?:NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(?:_90|_80|_50)?|ARRAY_TASKS)"
)
_PLACEHOLDER = re.compile(
    r"[<>{}\[\]]|\.\.\.|\A[A-Z][A-Z_:-]*\Z|\A(?i:x+|n+)\Z|(?i:your[-_ ]|change[-_ ]?me|todo)"
)
_BRACKETS = re.compile(r"[<>{}]|\.\.\.")
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]|\$\(|`")
_FORMS: dict[str, tuple[re.Pattern[str], str]] = {
    "nodes": (_NODES, "a number of nodes, or MIN-MAX"),
    "mem": (_SIZE, "a whole number with K, M, G or T, such as 64G"),
    "mem-per-cpu": (_SIZE, "a whole number with K, M, G or T, such as 4G"),
    "mem-per-gpu": (_SIZE, "a whole number with K, M, G or T, such as 32G"),
    "time": (
        _TIME,
        "minutes, hours:minutes:seconds or days-hours:minutes:seconds",
    ),
    "time-min": (_TIME, "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "open-mode": (re.compile("append|truncate|a|t"), "append or truncate"),
    "exclusive": (re.compile("user|mcs|topo"), "--exclusive alone, or =user, =mcs, =topo"),
    "signal": (_SIGNAL, "[R][B:]SIGNAL[@SECONDS], such as B:USR1@120"),
}


def is_in_brackets(text: str) -> bool:
    """Return whether ``text`` is visibly to be filled in, such as ``<account>`` or ``{{ nodes }}``."""
    return bool(_BRACKETS.search(text))


def is_placeholder(value: str) -> bool:
    """Return whether a value is to be filled in, such as ``<account>``, ``{{ nodes }}`` or ``N``."""
    return bool(_PLACEHOLDER.search(value))


class Objection(NamedTuple):
    """What is wrong with a value; ``instead`` is what was probably meant."""

    message: str
    remedy: str
    severity: Severity = Severity.ERROR
    instead: str | None = None


def objection_to(name: str, value: str | None) -> Objection | None:
    """Return what is wrong with an option's value, or None where sbatch takes it."""
    if value is None:
        return None
    if _EXPANSION.search(value):
        return _unexpanded(name)
    if is_placeholder(value):
        return None
    if name in _COUNTS:
        if value.isascii() and value.isdecimal() and int(value[:18]) > 0:
            return None
        return _refused(name, value, "a number of at least 1")
    if name == "mail-type":
        wrong = [kind for kind in value.split(",") if not _MAIL.fullmatch(kind)]
        return _refused(name, wrong[0], "BEGIN, END, FAIL, ALL or NONE") if wrong else None
    pattern, allowed = _FORMS.get(name, (None, ""))
    if pattern is None or pattern.fullmatch(value):
        return None
    return _refused(name, value, allowed)._replace(instead=_duration(value) if name == "time" else None)


def _refused(name: str, value: str, allowed: str) -> Objection:
    return Objection(f"sbatch refuses the script: {value!r} is not {allowed}", f"write --{name} as {allowed}")


def _duration(value: str) -> str | None:
    """Return ``24h``, ``90m`` or ``2d`` as Slurm writes it."""
    match = _HUMAN_TIME.fullmatch(value)
    if not match:
        return None
    number, unit = int(match.group(1)), match.group(2).lower()
    return {"d": f"{number}-00:00:00", "h": f"{number:02d}:00:00", "m": f"{number}", "s": f"00:{number}"}[
        unit
    ]


def _unexpanded(name: str) -> Objection:
    remedy = f"write the value itself, or give it when submitting: sbatch --{name}=... script"
    if name in _COUNTS or name in _FORMS:
        return Objection("sbatch expands no variables in directives: this is no number to it", remedy)
    message = "sbatch expands no variables in directives: the text is taken as it stands"
    return Objection(message, remedy, Severity.WARNING)


_GPU_NAMES = frozenset({"gpu", "gpus", "dcu", "npu", "hpu", "mlu", "gcd", "xpu"})
_TRAILING = re.compile(r"\(S:[^)]*\)\Z")


def gpus_of_gres(value: str) -> int | None:
    """Return how many GPUs a ``--gres`` list asks for: 0 for none, None where it cannot be told."""
    total = 0
    for item in value.split(","):
        item = _TRAILING.sub("", item.strip().replace("gres/", "", 1))
        pieces = [piece for piece in re.split("[:=]", item) if piece and piece != "gres"]
        if not pieces or pieces[0].lower() not in _GPU_NAMES:
            if is_placeholder(item):
                return None
            continue
        count = _count(pieces[-1]) if len(pieces) > 1 else 1
        if count is None:
            return None
        total += count
    return total


def gpus_of_list(value: str) -> int | None:
    """Return how many GPUs ``[type:]number[,...]`` means (``--gpus`` and its kin); None if unclear."""
    total = 0
    for item in value.split(","):
        count = _count(item.replace("=", ":").rpartition(":")[2])
        if count is None:
            return None
        total += count
    return total


def _count(text: str) -> int | None:
    """Read a count; a bare type such as ``a100`` means one GPU of it."""
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if is_placeholder(text) or _EXPANSION.search(text):
        return None
    return 1


def whole(value: str | None) -> int | None:
    """Return the number that ``value`` is, or None."""
    if value is not None and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    return None
