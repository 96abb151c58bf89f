"""``#SBATCH`` lines, read as sbatch reads them.

sbatch stops at the first line that is neither blank nor a comment, splits what follows
``#SBATCH`` at blanks (quotes group, ``#`` ends it) and hands the words to getopt_long: unique
prefixes of long names are allowed, nothing is expanded, and a later option overrides an earlier
one. Checked against sbatch 22.05 (src/sbatch/opt.c, src/common/slurm_opt.c).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.findings import Severity
from bench.lint.options import OptionTable, canonical, sbatch_options, srun_only
from bench.lint.values import Objection, is_in_brackets, objection_to

_TOKEN = re.compile(r"\{\{[^}]*\}\}|<[A-Za-z][^<>]*>|[^ \t'\"#{<]+|'[^']*'|\"[^\"]*\"|[ \t]+|.", re.DOTALL)
_NEARLY = re.compile(
    r"(!?#*!?[ \t]*#?[ \t]*)([A-Za-z]{5,8})(:?[ \t]+|:?(?=-))(-{1,2}|[\u2010-\u2015\u2212])[ \t]*[A-Za-z]"
)
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_HETEROGENEOUS = frozenset({"hetjob", "packjob"})


class Option(NamedTuple):
    """An option and its value (None where it takes none), under its full name."""

    name: str
    value: str | None
    written: str
    line: int = 0


class Complaint(NamedTuple):
    """What is wrong with a directive; ``fixed`` is the line as it should be, where known."""

    message: str
    remedy: str
    severity: Severity = Severity.ERROR
    fixed: str | None = None


class Line(NamedTuple):
    """What one line of the head of a script says."""

    kind: str  # "directive", "comment" or "command"
    options: tuple[Option, ...] = ()
    complaints: tuple[Complaint, ...] = ()
    heterogeneous: bool = False


_COMMENT = Line("comment")
_COMMAND = Line("command")


def read_line(text: str) -> Line:
    """Return what sbatch makes of one line of a script."""
    if text.startswith("#SBATCH"):
        return _directive(text, text[len("#SBATCH") :])
    stripped = text.strip(" \t\r\f\v")
    if not stripped:
        return _COMMENT
    complaint = _nearly_a_directive(text[:400])
    if complaint and complaint.fixed:
        switched_off = (
            stripped.startswith("#") and complaint.severity is Severity.WARNING and stripped == text
        )
        meant = () if switched_off else _directive(complaint.fixed, complaint.fixed[len("#SBATCH") :]).options
        return Line("comment", meant, (complaint,))
    # A line of a template, such as {{ directives }}, stands for lines that are not there yet.
    return _COMMENT if stripped.startswith(("#", "{{", "{%")) else _COMMAND


def _nearly_a_directive(text: str) -> Complaint | None:
    """Return what to say of a line that was meant as a directive and is none to sbatch."""
    stripped = text.strip(" \t")
    match = _NEARLY.match(stripped)
    if not match:
        return None
    mark, word = match.group(1, 2)
    if mark.count("#") > 1 or (word.upper() != "SBATCH" and not _misspelt(word)):
        return None
    bare = not mark.startswith("#")
    if bare and not word.isupper():
        return None
    rest = stripped[match.end(2) :].lstrip(": \t")
    fixed = f"#SBATCH {rest}"
    remedy = f"write `{fixed.strip()[:80]}`, with nothing before #SBATCH"
    if mark == "#" and word == "SBATCH" and stripped != text:
        what = "sbatch reads #SBATCH only at the very start of a line: this line is a comment to it"
        return Complaint(what, remedy, Severity.WARNING, fixed)
    if mark == "#" and word == "SBATCH":
        return None
    if bare:
        what = "this is no directive but a command that bash runs, and sbatch stops reading directives here"
        return Complaint(what, remedy, Severity.ERROR, fixed)
    if word.upper() == "SBATCH":
        what = f"`{mark}{word}` is an ordinary comment: sbatch ignores the line, whatever it asks for"
        kept = f"{remedy}; if it is switched off on purpose, write ##SBATCH"
        return Complaint(what, kept, Severity.WARNING, fixed)
    what = f"`{mark}{word}` is not #SBATCH: sbatch takes the line for a comment and ignores it"
    return Complaint(what, remedy, Severity.ERROR, fixed)


def _misspelt(word: str) -> bool:
    upper = word.upper()
    return upper[0] == "S" and difflib.SequenceMatcher(None, upper, "SBATCH").ratio() >= 0.8


def _directive(text: str, rest: str) -> Line:
    words, problem = _words(rest)
    if problem:
        return Line("directive", complaints=(problem,))
    if words and words[0] in _HETEROGENEOUS:
        return Line("directive", heterogeneous=True)
    options: list[Option] = []
    complaints: list[Complaint] = []
    for item in read_options(words, sbatch_options()):
        if isinstance(item, Option):
            options.append(item)
            objection = objection_to(item.name, item.value)
            if objection:
                complaints.append(_of_value(item, objection, text))
        else:
            complaints.append(_with_fix(item, text))
    return Line("directive", tuple(options), tuple(complaints[:1]))


def _of_value(option: Option, objection: Objection, text: str) -> Complaint:
    message, remedy, severity, instead = objection
    fixed = None
    if instead and option.value:
        fixed = text.replace(option.written, option.written.replace(option.value, instead), 1)
    return Complaint(f"`{option.written}`: {message}", remedy, severity, fixed)


def _with_fix(item: _Trouble, text: str) -> Complaint:
    fixed = text.replace(item.old, item.new, 1) if item.new else None
    return Complaint(item.message, item.remedy, item.severity, fixed)


def _words(rest: str) -> tuple[list[str], Complaint | None]:
    """Split as sbatch does: quotes group, an unquoted # starts a comment."""
    words: list[str] = []
    current: list[str] | None = None
    for match in _TOKEN.finditer(rest):
        piece = match.group()
        if piece[0] in " \t":
            if current is not None:
                words.append("".join(current))
            current = None
            continue
        if piece == "#":
            break
        if piece in ("'", '"'):
            what = f"sbatch refuses the script: the quote {piece} is never closed"
            return [], Complaint(what, "close the quote on the same line")
        quoted = len(piece) > 1 and piece[0] in "'\"" and piece[-1] == piece[0]
        current = [*(current or ()), piece[1:-1] if quoted else piece]
    if current is not None:
        words.append("".join(current))
    return [word for word in words if word != "\\"], None


class _Trouble(NamedTuple):
    message: str
    remedy: str
    severity: Severity = Severity.ERROR
    old: str = ""
    new: str = ""


def read_options(words: Sequence[str], table: OptionTable) -> Iterator[Option | _Trouble]:
    """Yield what getopt makes of ``words``, all of which should be options and their values."""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if word == "--":
            return
        if word.startswith("--"):
            yield from _long(word, waiting, table)
        elif word.startswith("-") and len(word) > 1:
            yield from _short(word, waiting, table)
        elif not is_in_brackets(word):
            yield _stray(word)


def _stray(word: str) -> _Trouble:
    if word[0] in _DASHES:
        fixed = "--" + word.lstrip(_DASHES + "-")
        return _Trouble(
            f"sbatch refuses `{word}`: its dash is not the hyphen of the keyboard",
            f"write `{fixed}`",
            old=word,
            new=fixed,
        )
    if word == "=":
        return _Trouble("sbatch refuses blanks around =", "write --option=value without blanks")
    if word == ":":
        return _Trouble(
            "sbatch refuses `:` in a directive",
            "separate heterogeneous components by a line `#SBATCH hetjob`",
        )
    name = word.partition("=")[0]
    if name in sbatch_options().long:
        fixed = f"--{word}"
        return _Trouble(
            f"sbatch refuses `{word}`: an option starts with --", f"write `{fixed}`", old=word, new=fixed
        )
    return _Trouble(
        f"sbatch refuses the script: `{word}` is neither an option nor a value",
        "remove it, put it in quotes with the value before it, or start a comment with #",
    )


def _long(word: str, waiting: list[str], table: OptionTable) -> Iterator[Option | _Trouble]:
    written, equals, value = word[2:].partition("=")
    matches = table.matches(written)
    if len({canonical(name) for name in matches}) != 1:
        yield _unknown(word, written, matches, table)
        if not equals and waiting and not waiting[-1].startswith("-"):
            waiting.pop()
        return
    name = matches[0]
    takes = table.takes(name)
    if equals:
        yield Option(canonical(name), value if takes else None, word)
    elif takes == "=":
        if waiting:
            value = waiting.pop()
            yield Option(canonical(name), value, f"{word} {value}")
        else:
            yield _Trouble(f"sbatch refuses `{word}`: it needs a value", f"write {word}=VALUE")
    else:
        yield Option(canonical(name), None, word)


def _unknown(word: str, written: str, matches: list[str], table: OptionTable) -> _Trouble:
    if matches:
        names = ", ".join(f"--{name}" for name in matches[:6])
        return _Trouble(f"sbatch refuses `{word}`: it may mean {names}", "write the option's name in full")
    if table.command == "sbatch" and srun_only(written):
        return _Trouble(
            f"sbatch refuses `{word}`: --{written} is an option of srun only",
            f"give it to srun: srun --{written} ...",
        )
    close = table.closest(written)
    if close:
        return _Trouble(
            f"sbatch refuses `{word}`: it has no option --{written}",
            f"write --{close}",
            old=f"--{written}",
            new=f"--{close}",
        )
    return _Trouble(
        f"sbatch has no option --{written}: it refuses the script unless a plugin of the site adds it",
        "check the spelling with `sbatch --help`, or remove the option",
        Severity.WARNING,
    )


def _short(word: str, waiting: list[str], table: OptionTable) -> Iterator[Option | _Trouble]:
    name = word[1:].partition("=")[0]
    if len(name) > 2 and (name in table.long or name in table.plugins):
        yield _Trouble(
            f"`{word}` has one dash: sbatch reads it as the short option -{word[1]} and what follows",
            f"write `-{word}`",
            old=word,
            new=f"-{word}",
        )
        return
    position = 1
    while position < len(word):
        letter = word[position]
        long = table.short.get(letter)
        if long is None:
            yield _Trouble(f"sbatch refuses `{word}`: it has no option -{letter}", "see `sbatch --help`")
            return
        if table.takes(long) != "=":
            yield Option(canonical(long), None, word)
            position += 1
            continue
        yield _short_value(word, word[position + 1 :], canonical(long), letter, waiting)
        return


def _short_value(word: str, value: str, name: str, letter: str, waiting: list[str]) -> Option | _Trouble:
    if value.startswith("="):
        fixed = f"-{letter} {value[1:]}"
        message = f"sbatch reads `{word}` as -{letter} with the value `{value}`: short options take no ="
        return _Trouble(message, f"write `{fixed}` or `--{name}{value}`", old=word, new=fixed)
    if value:
        return Option(name, value, word)
    if waiting:
        value = waiting.pop()
        return Option(name, value, f"{word} {value}")
    return _Trouble(f"sbatch refuses `{word}`: it needs a value", f"write {word} VALUE")
