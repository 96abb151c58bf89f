"""Read ``#SBATCH`` lines as sbatch does.

sbatch stops at the first line that is neither blank nor a comment. It splits the text after
``#SBATCH`` at blanks (quotes group words, ``#`` starts a comment) and parses the words with
getopt_long: unique prefixes of long names are allowed, nothing is expanded, and a later option overrides an
earlier one. These rules were checked against sbatch 22.05 (src/sbatch/opt.c, src/common/slurm_opt.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..findings import Edit, Remark
from .options import EXPANSION, Option, is_placeholder, names, sbatch_options
from .values import Value, plain

DIRECTIVE = "#SBATCH"
_MAX_LINES = 1000
# src/sbatch/opt.c, _get_next_opt: blanks separate words, quotes group them, a backslash escapes.
_TOKEN = re.compile(
    r"\{\{[^}]*\}\}|(?:[^ \t'\"#\\]|\\.?)+|'[^']*'|\"[^\"]*\"|[ \t]+|.",
    re.DOTALL,
)
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_COUNTS = """ntasks ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu cpus-per-task
    cpus-per-gpu mincpus cores-per-socket sockets-per-node threads-per-core"""
# src/common/proc_args.c, parse_int.
_COUNT = re.compile(r"0*[1-9]\d*")
#: Of these options, sbatch accepts only one.
_MEMORY = names("mem mem-per-cpu mem-per-gpu")
# src/common/proc_args.c, verify_node_count and str_to_mbytes; src/common/parse_time.c, time_str2secs.
_NODES = re.compile(r"\d+[kKmM]?(?:-\d+[kKmM]?)?|\d[\d,:-]*\d")
_SIZE = re.compile(r"\d+[kKmMgGtT]?[bB]?")
_TIME = re.compile(r"-1|(?i:infinite|unlimited)|\d+(?::\d+){0,2}|\d+-\d*(?::\d+){0,2}")
# src/common/proc_args.c, get_signal_opts.
_SIGNAL = re.compile(r"(?:[RB]{1,2}:)?(?:SIG)?[A-Za-z0-9+-]+(?:@\d+)?", re.IGNORECASE)
# src/common/proc_args.c, parse_mail_type: unknown types are skipped if another one is known.
_MAIL = re.compile(
    r"(?i)(?:.*,)?(?:NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT\w*|ARRAY_TASKS)(?:,.*)?"
)
# A duration that time_str2secs refuses, such as 24h.
_HUMAN_TIME = re.compile(r"(\d{1,5})([dhmsDHMS])")
_DURATION = "minutes, hours:minutes:seconds or days-hours:minutes:seconds"
_FORMS: dict[str, tuple[re.Pattern[str], str]] = {
    **dict.fromkeys(_COUNTS.split(), (_COUNT, "a number of at least 1")),
    "nodes": (_NODES, "a number of nodes, or MIN-MAX"),
    "mem": (_SIZE, "a whole number with K, M, G or T, such as 64G"),
    "mem-per-cpu": (_SIZE, "a whole number with K, M, G or T, such as 4G"),
    "mem-per-gpu": (_SIZE, "a whole number with K, M, G or T, such as 32G"),
    "time": (_TIME, _DURATION),
    "time-min": (_TIME, _DURATION),
    "mail-type": (_MAIL, "BEGIN, END, FAIL, ALL or NONE"),
    "open-mode": (re.compile("append|truncate|a|t"), "append or truncate"),
    "exclusive": (re.compile("user|mcs|topo"), "--exclusive alone, or =user, =mcs, =topo"),
    "signal": (_SIGNAL, "[R][B:]SIGNAL[@SECONDS], such as B:USR1@120"),
}


class Line(NamedTuple):
    """A directive: its options, its mistakes, and whether it is ``#SBATCH hetjob``."""

    options: tuple[Option, ...] = ()
    remarks: tuple[Remark, ...] = ()
    heterogeneous: bool = False


class Header(NamedTuple):
    """The directives of a script.

    ``end`` is the index of the first command. ``components`` counts those of a heterogeneous job.
    """

    options: tuple[Option, ...] = ()
    remarks: tuple[Remark, ...] = ()
    end: int = 0
    components: int = 1


def read_header(lines: Sequence[str]) -> Header:
    """Read the directives before the first command."""
    options: list[Option] = []
    remarks: list[Remark] = []
    components, end = 1, len(lines)
    for number, text in enumerate(lines[:_MAX_LINES], start=1):
        stripped = text.strip(" \t\r\f\v")
        if not text.startswith(DIRECTIVE):
            if stripped and not stripped.startswith("#"):
                end = number - 1
                break
            remarks += _indented(text[:400], number)
            continue
        line = read_line(text, number)
        components += line.heterogeneous
        options += line.options
        remarks += line.remarks
    memory = {one.name: one for one in options if one.name in _MEMORY}
    if len(memory) > 1 and components == 1:
        message = "sbatch refuses the script: "
        message += " and ".join(f"--{name}" for name in sorted(memory)) + " exclude each other"
        line_of_last = max(one.line for one in memory.values())
        remarks.append(Remark(line_of_last, message, "keep one of these options"))
    return Header(tuple(options), tuple(remarks), end, components)


def _indented(text: str, number: int) -> Iterator[Remark]:
    """Find an indented ``#SBATCH``."""
    new = text.lstrip(" \t")
    if new.startswith(DIRECTIVE) and not read_line(new, number).remarks:
        message = "sbatch treats this line as a comment: a directive starts with exactly #SBATCH"
        yield Remark(number, message, f"write `{new.strip()[:80]}`", Edit(number, "", new))


def read_line(text: str, number: int) -> Line:
    """Read one directive."""
    table = sbatch_options()
    words = _split(text.removeprefix(DIRECTIVE).rstrip("\r"))
    if words is None:
        return Line(
            remarks=(Remark(number, "sbatch refuses the directive: a quote is not closed", "close it"),)
        )
    if words[:1] in (["hetjob"], ["packjob"]):
        return Line(heterogeneous=True)
    options: list[Option] = []
    remarks: list[Remark | None] = []
    rest: Sequence[Value] = [plain(word, number) for word in words]
    while True:
        found, rest = table.read(rest)
        options += found
        remarks += [table.refused(option) or _refused_value(option) for option in found]
        if not rest:
            break
        remarks.append(_stray(rest[0].shown, options[-1].written if options else "", number))
        rest = rest[1:]
    filled_in = not any("<" in word or "{{" in word or word == "{" for word in words)
    kept = [remark for remark in remarks if remark and filled_in]
    return Line(tuple(option for option in options if option.name in table.long), tuple(kept[:1]))


def _split(rest: str) -> list[str] | None:
    """Split a directive into words: quotes group words, and # starts a comment; None for an open quote."""
    words: list[str] = []
    current: list[str] | None = None
    for match in _TOKEN.finditer(f"{rest} "):
        piece = match.group()
        if piece == "#":
            break
        if piece in ("'", '"'):
            return None
        if piece[0] in " \t":
            words += ["".join(current)] if current is not None else []
            current = None
        else:
            quoted = len(piece) > 1 and piece[0] in "'\"" and piece[-1] == piece[0]
            current = [*(current or ()), piece[1:-1] if quoted else piece]
    return [word for word in words if word != "\\"]


def _stray(word: str, before: str, line: int) -> Remark:
    """Return a finding for a word that is neither an option nor a value."""
    why, new, old = "it is neither an option nor a value", "", word
    if word[0] in _DASHES:
        why, new = "its dash is not a plain hyphen (-)", "--" + word.lstrip(_DASHES + "-")
    elif word.partition("=")[0] in sbatch_options().long:
        why, new = "an option starts with --", f"--{word}"
    elif before.endswith("="):
        why, old, new = "a blank after = is not allowed", f"{before} {word}", f"{before}{word}"
    remedy = f"write `{new}`" if new else "remove it, or quote it together with the value before it"
    edit = Edit(line, old, new) if new else None
    return Remark(line, f"sbatch refuses `{word}`: {why}", remedy, edit)


def _refused_value(option: Option) -> Remark | None:
    """Return a finding if sbatch refuses the option's value."""
    name, value = option.name, option.value
    form, allowed = _FORMS.get(name, (None, ""))
    if not value or is_placeholder(value) or form is None or form.fullmatch(value):
        return None
    refusal = sbatch_options().refusal
    if EXPANSION.search(value):
        remedy = f"write the value itself, or pass it when submitting: sbatch --{name}=... script"
        return refusal(option, value, "it does not expand variables in directives", remedy)
    new = _duration(value) if name == "time" else None
    return refusal(option, value, f"allowed is {allowed}", f"write --{name} as {allowed}", new or "")


def _duration(value: str) -> str | None:
    """Convert a duration such as ``24h``, ``90m`` or ``2d`` to Slurm's format; return None for other text."""
    match = _HUMAN_TIME.fullmatch(value)
    if not match:
        return None
    number, unit = int(match.group(1)), match.group(2).lower()
    formats = {"d": f"{number}-00:00:00", "h": f"{number:02d}:00:00", "m": f"{number}", "s": f"00:{number}"}
    return formats[unit]
