"""Read ``#SBATCH`` lines as sbatch does.

sbatch stops at the first line that is neither blank nor a comment. It splits the text after ``#SBATCH`` at
blanks (quotes group words, ``#`` starts a comment) and parses the words with getopt_long; it expands nothing
(src/sbatch/opt.c and src/common/slurm_opt.c of 22.05).
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ..findings import Edit, Remark
from .options import EXPANSION, SBATCH, SRUN, Option, is_placeholder, names
from .words import Word

DIRECTIVE = "#SBATCH"
_MAX_LINES = 1000
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_COUNTS = names(
    """ntasks ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu cpus-per-task
    cpus-per-gpu mincpus cores-per-socket sockets-per-node threads-per-core"""
)
#: Of these options, sbatch accepts only one.
_MEMORY = names("mem mem-per-cpu mem-per-gpu")
# src/common/proc_args.c, parse_int, verify_node_count and str_to_mbytes; parse_time.c, time_str2secs.
_COUNT = (re.compile(r"0*[1-9]\d*"), "a number of at least 1")
_SIZE = (re.compile(r"\d+[kKmMgGtT]?[bB]?"), "a whole number with K, M, G or T, such as 64G")
_TIME = (
    re.compile(r"-1|(?i:infinite|unlimited)|\d+(?::\d+){0,2}|\d+-\d*(?::\d+){0,2}"),
    "minutes, hours:minutes:seconds or days-hours:minutes:seconds",
)
_FORMS = {
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(_MEMORY, _SIZE),
    **dict.fromkeys(("time", "time-min"), _TIME),
    "nodes": (re.compile(r"\d+[kKmM]?(?:-\d+[kKmM]?)?|\d[\d,:-]*\d"), "a number of nodes, or MIN-MAX"),
    "exclusive": (re.compile("user|mcs|topo"), "--exclusive alone, or =user, =mcs, =topo"),
}
# A duration that time_str2secs refuses, such as 24h.
_HUMAN_TIME = re.compile(r"(\d{1,5})([dhmDHM])")
_SLURM_TIME = {"d": "{}-00:00:00", "h": "{:0>2}:00:00", "m": "{}"}
#: Options that a release of Slurm renamed.
_RENAMED = {"workdir": "chdir", "share": "oversubscribe"}
#: Short options whose values may be any text, such as ``-J=name``.
_ANY_TEXT = frozenset("JoeiDAq")


class Line(NamedTuple):
    """A directive: its options and its first mistake."""

    options: tuple[Option, ...]
    remark: Remark | None = None


class Header(NamedTuple):
    """The directives of a script; ``end`` is the number of lines before the first command."""

    options: tuple[Option, ...]
    remarks: tuple[Remark, ...]
    end: int


def read_header(lines: Sequence[str]) -> Header:
    """Read the directives before the first command."""
    commands = (at for at, text in enumerate(lines) if text.strip() and not text.lstrip().startswith("#"))
    end = next(commands, len(lines))
    read: list[Line] = []
    for number, text in enumerate(lines[: min(end, _MAX_LINES)], start=1):
        new = text[:400].strip()
        if text.startswith(DIRECTIVE):
            read.append(read_line(text, number))
        elif new.startswith(DIRECTIVE) and not read_line(new, number).remark:
            message = "sbatch treats this line as a comment: a directive starts with exactly #SBATCH"
            read.append(Line((), Remark(number, message, f"write `{new[:80]}`", Edit(number, "", new))))
    options = tuple(option for line in read for option in line.options)
    remarks = [line.remark for line in read if line.remark]
    memory = {one.name: one.line for one in options if one.name in _MEMORY}
    if len(memory) > 1 and not is_heterogeneous(lines):
        both = " and ".join(f"--{name}" for name in sorted(memory))
        message = f"sbatch refuses the script: {both} exclude each other"
        remarks.append(Remark(max(memory.values()), message, "keep one of these options"))
    return Header(options, tuple(remarks), end)


def is_heterogeneous(lines: Sequence[str]) -> bool:
    """Return whether a job has several components, which have options of their own."""
    return any(line.startswith((f"{DIRECTIVE} hetjob", f"{DIRECTIVE} packjob")) for line in lines)


def read_line(text: str, number: int) -> Line:
    """Read one directive."""
    try:
        words = shlex.split(text.removeprefix(DIRECTIVE).rstrip("\\ \t"), comments=True)
    except ValueError:
        return Line((), Remark(number, "sbatch refuses the directive: a quote is not closed", "close it"))
    if words[:1] in (["hetjob"], ["packjob"]):
        return Line(())
    options: list[Option] = []
    remarks: list[Remark | None] = []
    rest: Sequence[Word] = [Word((word,), number) for word in words]
    while rest:
        found, rest = SBATCH.read(rest)
        options += found
        remarks += [_refused_name(option) or _refused_value(option) for option in found]
        if rest:
            remarks.append(_stray(rest[0].shown, options[-1].written if options else "", number))
            rest = rest[1:]
    filled_in = not any("<" in word or "{{" in word or word == "{" for word in words)
    first = next((remark for remark in remarks if remark and filled_in), None)
    return Line(tuple(option for option in options if option.name in SBATCH.long), first)


def _stray(word: str, before: str, line: int) -> Remark:
    """Return a finding for a word that is neither an option nor a value."""
    why, new, old = "it is neither an option nor a value", "", word
    if word[:1] in _DASHES:
        why, new = "its dash is not a plain hyphen (-)", "--" + word.lstrip(_DASHES + "-")
    elif word.partition("=")[0] in SBATCH.long:
        why, new = "an option starts with --", f"--{word}"
    elif before.endswith("="):
        why, old, new = "a blank after = is not allowed", f"{before} {word}", f"{before}{word}"
    remedy = f"write `{new}`" if new else "remove it, or quote it together with the value before it"
    return Remark(line, f"sbatch refuses `{word}`: {why}", remedy, Edit(line, old, new) if new else None)


def _refused_name(option: Option) -> Remark | None:
    """Return a finding if sbatch refuses an option's name; a plugin of the site may add an unlike name."""
    table, word = SBATCH, re.split("[= ]", option.written)[0]
    letter, value = word[1:2], option.written[2:]
    written = word.removeprefix("--") if word.startswith("--") else word[1:]
    if word.startswith("--"):
        found = table.matches(written)
        plain = written.replace("_", "-").lower()
        near = difflib.get_close_matches(plain, table.long, n=1, cutoff=0.84) if not found else []
        meant = _RENAMED.get(written) or next((one for one in near if one == plain), "")
        if len(found) > 1:
            why = f"it is ambiguous ({', '.join(f'--{name}' for name in found[:6])})"
            return _refusal(option, word, why, "write the option's name in full")
        if meant or near:
            remedy = f"write --{meant}" if meant else f"did you mean --{near[0]}? See `sbatch --help`"
            new = f"--{meant}" if meant else ""
            return _refusal(option, word, f"sbatch has no option {word}", remedy, new)
        if not found and written in SRUN.long:
            return _refusal(option, word, "it is an option of srun only", "pass it to srun, or remove it")
    elif len(written) > 2 and written in SBATCH.long and letter not in _ANY_TEXT:
        why = f"with one dash, it is the short option -{letter}"
        return _refusal(option, word, why, f"write -{word}", f"-{word}")
    elif value.startswith("=") and letter in table.short and letter not in _ANY_TEXT:
        new = f"-{letter} {value[1:]}"
        why = f"short options have no =, so that the value is `{value}`"
        return _refusal(option, option.written, why, f"write `{new}`", new)
    elif len(option.name) == 1:
        return _refusal(option, word, f"sbatch has no option -{option.name}", "see `sbatch --help`")
    return None


def _refused_value(option: Option) -> Remark | None:
    """Return a finding if sbatch refuses the option's value."""
    name, value = option.name, option.value
    form, allowed = _FORMS.get(name, (None, ""))
    if not value or is_placeholder(value) or form is None or form.fullmatch(value):
        return None
    if EXPANSION.search(value):
        remedy = f"write the value itself, or pass it when submitting: sbatch --{name}=... script"
        return _refusal(option, value, "it does not expand variables in directives", remedy)
    human = _HUMAN_TIME.fullmatch(value) if name == "time" else None
    new = _SLURM_TIME[human[2].lower()].format(human[1]) if human else ""
    return _refusal(option, value, f"allowed is {allowed}", f"write --{name} as {allowed}", new)


def _refusal(option: Option, word: str, why: str, remedy: str, new: str = "") -> Remark:
    """Return a finding for a word that sbatch refuses; its correction is ``new``."""
    edit = Edit(option.line, word, new) if new else None
    return Remark(option.line, f"sbatch refuses `{option.written}`: {why}", remedy, edit)
