"""Read ``#SBATCH`` lines as sbatch does (src/sbatch/opt.c and src/common/slurm_opt.c of 22.05).

sbatch stops at the first line that is neither blank nor a comment. It splits the text after ``#SBATCH`` at
blanks (quotes group words, ``#`` starts a comment), parses the words with getopt_long, and expands nothing.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from .mistakes import Remark
from .options import LONG, Option, matches, names, read_options
from .words import Word

DIRECTIVE = "#SBATCH"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
# src/common/proc_args.c, parse_int and verify_node_count; parse_time.c, time_str2secs.
_TIME = re.compile(r"-1|(?i:infinite|unlimited)|\d+(?::\d+){0,2}|\d+-\d*(?::\d+){0,2}")
_FORMS = {
    "nodes": (re.compile(r"\d+[kKmM]?(?:-\d+[kKmM]?)?|\d[\d,:-]*\d"), "a number of nodes, or MIN-MAX"),
    "time": (_TIME, "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    **dict.fromkeys(
        names("ntasks ntasks-per-node cpus-per-task"), (re.compile(r"0*[1-9]\d*"), "a number of at least 1")
    ),
}
#: Short options whose values may be any text, such as ``-J=name``.
_ANY_TEXT = frozenset("JoeiDAq")
#: Characters of values that are still to be filled in, such as ``<account>`` or ``{{ nodes }}``.
_PLACEHOLDER = frozenset("<>{}")


class Header(NamedTuple):
    """The directives of a script; ``end`` is the number of lines before the first command."""

    options: list[Option]
    remarks: list[Remark]
    end: int


def read_header(lines: Sequence[str]) -> Header:
    """Read the directives before the first command."""
    commands = (at for at, text in enumerate(lines) if text.strip() and not text.lstrip().startswith("#"))
    header = Header([], [], next(commands, len(lines)))
    for number, text in enumerate(lines[: min(header.end, 1000)], start=1):
        options, remark = read_line(text.strip()[:400], number)
        if text.startswith(DIRECTIVE):
            header.options.extend(options)
        elif options and not remark:
            message = "sbatch treats this line as a comment: a directive starts with exactly #SBATCH"
            remark = Remark(number, message, f"write `{text.strip()[:80]}`")
        else:
            continue
        header.remarks.extend([remark] if remark else [])
    return header


def is_heterogeneous(lines: Sequence[str]) -> bool:
    """Return whether a job has several components, which have options of their own."""
    return any(line.startswith((f"{DIRECTIVE} hetjob", f"{DIRECTIVE} packjob")) for line in lines)


def read_line(text: str, number: int) -> tuple[list[Option], Remark | None]:
    """Return the options of a directive, and its first mistake."""
    if not text.startswith(DIRECTIVE) or is_heterogeneous([text]):
        return [], None
    try:
        words = shlex.split(text.removeprefix(DIRECTIVE).rstrip("\\ \t"), comments=True)
    except ValueError:
        return [], Remark(number, "sbatch refuses the directive: a quote is not closed", "close it")
    options: list[Option] = []
    remarks: list[Remark | None] = []
    rest: Sequence[Word] = [Word((word,), number) for word in words]
    while rest:
        found, rest = read_options(rest)
        options += found
        remarks += [_refused(option) for option in found]
        remarks += [_stray(word.shown, number) for word in rest[:1]]
        rest = rest[1:]
    filled_in = not any("<" in word or "{{" in word or word == "{" for word in words)
    return options, next((remark for remark in remarks if remark and filled_in), None)


def _stray(word: str, line: int) -> Remark:
    """Return a finding for a word that is neither an option nor a value."""
    why, remedy = "it is neither an option nor a value", "remove it, or quote it with the value before it"
    if word[:1] in _DASHES:
        why, remedy = "its dash is not a plain hyphen (-)", f"write `--{word.lstrip(_DASHES + '-')}`"
    elif word.partition("=")[0] in LONG:
        why, remedy = "an option starts with --", f"write `--{word}`"
    return Remark(line, f"sbatch refuses `{word}`: {why}", remedy)


def _refused(option: Option) -> Remark | None:
    """Return a finding if sbatch refuses an option; a plugin of the site may add an unlike name."""
    word, value = re.split("[= ]", option.written)[0], option.value or ""
    written = word[2:] if word.startswith("--") else word[1:]
    near: list[str] = []
    if word.startswith("--") and len(matches(written)) != 1:
        near = difflib.get_close_matches(written.replace("_", "-").lower(), LONG, n=1, cutoff=0.84)
    form, allowed = _FORMS.get(option.name, (None, ""))
    why = remedy = ""
    if near:
        why, remedy = f"sbatch has no option {word}", f"write --{near[0]}"
    elif not word.startswith("--") and len(written) > 1 and written in LONG and word[1] not in _ANY_TEXT:
        why, remedy = f"with one dash, it is the short option {word[:2]}", f"write -{word}"
    elif form and value and not form.fullmatch(value) and _PLACEHOLDER.isdisjoint(value):
        why, remedy = f"allowed is {allowed}", f"write --{option.name} as {allowed}"
        if "$" in value:
            why, remedy = "it does not expand variables in directives", "write the value itself"
    return Remark(option.line, f"sbatch refuses `{option.written}`: {why}", remedy) if why else None
