"""Read ``#SBATCH`` lines as sbatch does.

sbatch stops at the first line that is neither blank nor a comment. It splits the text after
``#SBATCH`` at blanks (quotes group words, ``#`` starts a comment) and parses the words with
getopt_long: unique prefixes of long names are allowed, nothing is expanded, and a later option overrides an
earlier one. These rules were checked against sbatch 22.05 (src/sbatch/opt.c, src/common/slurm_opt.c).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..findings import Edit, Remark, Severity
from .options import (
    EXPANSION,
    Option,
    OptionTable,
    canonical,
    is_in_brackets,
    is_placeholder,
    names,
    sbatch_options,
    srun_only,
)

_TOKEN = re.compile(
    r"\{\{[^}]*\}\}|\{[ \t]*\w[\w. '-]*\}|<[A-Za-z][^<>]*>|\[[A-Za-z][^\[\]]*\]|##\w+##"
    r"|(?:[^ \t'\"#{<[\\]|\\.?)+|'[^']*'|\"[^\"]*\"|[ \t]+|.",
    re.DOTALL,
)
_ALMOST_DIRECTIVE = re.compile(
    r"(!?#*!?[ \t]*#?[ \t]*)([A-Za-z]{5,8})(:?[ \t]+|:?(?=-))(-{1,2}|[\u2010-\u2015\u2212])[ \t]*[A-Za-z]"
)
#: A comment that starts like a directive: ``# SBATCH``.
_DISABLED = re.compile(r"#[ \t]+SBATCH\b")
#: A line that a program replaces by directives, such as ``{{ directives }}`` or ``{slurm.directives}``.
_TEMPLATE = re.compile(r"\{\{|\{%|\{[\w. ]+\}\Z")
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_NO_VALUE = "has no value"
_HETEROGENEOUS = frozenset({"hetjob", "packjob"})
#: Options that a release of Slurm renamed.
_RENAMED = {"workdir": "chdir", "share": "oversubscribe"}
#: Short options whose values may be any text, for accounts if the site checks none: sbatch accepts them.
_ANY_TEXT = frozenset("JoeiDAq")
_COUNTS = names(
    """ntasks ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu cpus-per-task cpus-per-gpu
    mincpus cores-per-socket sockets-per-node threads-per-core"""
)
_NUMBERS = _COUNTS | names("nodes mem mem-per-cpu mem-per-gpu time time-min")
_NODES = re.compile(r"\d+[kKmM]?(?:-\d+[kKmM]?)?|\d[\d,:-]*\d")
_SIZE = re.compile(r"\d+[kKmMgGtT]?[bB]?")
_TIME = re.compile(r"-1|(?i:infinite|unlimited)|\d+(?::\d+){0,2}|\d+-\d*(?::\d+){0,2}")
_SIGNAL = re.compile(r"(?:[RB]{1,2}:)?(?:SIG)?[A-Za-z0-9+-]+(?:@\d+)?", re.IGNORECASE)
#: The start of a value that stands for a number, such as ``NODES``, ``@NODES`` or ``%s``.
_PLACEHOLDER = re.compile(r"[A-Za-z@%_]")
_YOURS = re.compile(r"(?i:\byour [a-z]+)|(?<==)(?:FILL|ENTER|INSERT|REPLACE|CHANGE)(?: [A-Z]+)+\b")
_HUMAN_TIME = re.compile(r"(\d{1,5})([dhmsDHMS])")
_UNITS = frozenset({"node", "task", "cpu", "gpu", "core", "socket"})
#: Of these options, sbatch accepts only one.
MEMORY = names("mem mem-per-cpu mem-per-gpu")
_MAIL = re.compile(
    r"(?i)(?:NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(?:_90|_80|_50)?|ARRAY_TASKS)"
)
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


class Line(NamedTuple):
    """A line of a script. ``kind`` is ``directive``, ``comment`` or ``command``.

    ``heterogeneous`` is True for ``#SBATCH hetjob``, which separates the components of a job.
    """

    kind: str
    options: tuple[Option, ...] = ()
    remarks: tuple[Remark, ...] = ()
    heterogeneous: bool = False


class Header(NamedTuple):
    """The directives of a script.

    ``end`` is the index of the first command, or the number of lines if there is none. ``components``
    contains the options of each component of a heterogeneous job.
    """

    options: tuple[Option, ...] = ()
    remarks: tuple[Remark, ...] = ()
    end: int = 0
    components: tuple[tuple[Option, ...], ...] = ((),)

    @property
    def heterogeneous(self) -> bool:
        """True if ``#SBATCH hetjob`` separates the components of a heterogeneous job."""
        return len(self.components) > 1


def read_header(lines: Sequence[str]) -> Header:
    """Read the directives before the first command."""
    components: list[list[Option]] = [[]]
    remarks: list[Remark] = []
    end = len(lines)
    waiting = None  # an option whose value may be in the next directive: sbatch reads all words as one list
    for number, text in enumerate(lines, start=1):
        words = text.removeprefix("#SBATCH").lstrip()
        if waiting and text.startswith("#SBATCH") and words[:1] not in ("", "-", "#"):
            remarks.remove(waiting)
            text = f"#SBATCH {waiting.message.split('`')[1]} {words}"
        line = read_line(text, number)
        if line.kind == "directive" and words[:1] not in ("", "#"):
            waiting = next((remark for remark in line.remarks if _NO_VALUE in remark.message), None)
        if line.kind == "command":
            end = number - 1
            break
        if line.heterogeneous:
            components.append([])
        components[-1] += line.options
        remarks += line.remarks
    options = [option for component in components for option in component]
    kept = _without_disabled(remarks, options, lines)
    return Header(tuple(options), kept, end, tuple(tuple(component) for component in components))


def _without_disabled(
    remarks: Sequence[Remark], options: Sequence[Option], lines: Sequence[str]
) -> tuple[Remark, ...]:
    """Omit findings on a ``# SBATCH`` line if an active directive requests the same resource.

    Other lines that sbatch ignores are no longer corrected if an active directive requests the same resource:
    they are possibly disabled on purpose. A line that only requests the default does no harm.
    """
    active = {_kind(one.name): one for one in options if lines[one.line - 1].startswith("#SBATCH")}
    counts = _COUNTS | {"nodes"}
    single = all(one.value == "1" for one in options if one.name in counts and _kind(one.name) != "cpus")
    kept = []
    for remark in remarks:
        text = lines[remark.line - 1] if remark.line else "#SBATCH"
        if remark.edit and not text.startswith("#SBATCH"):
            intended = _directive(remark.edit.new, 0).options
            other = next((active[_kind(one.name)] for one in intended if _kind(one.name) in active), None)
            if _DISABLED.match(text):
                if other:
                    continue
                remark = remark._replace(severity=Severity.INFO) if active else remark
            elif single and all(one.name in counts and one.value == "1" for one in intended):
                remark = remark._replace(severity=Severity.INFO)
            elif other and text.lstrip().startswith("#"):
                remark = _alternative(remark, other, same=other.name in {one.name for one in intended})
        kept.append(remark)
    return tuple(kept)


def _alternative(remark: Remark, other: Option, *, same: bool) -> Remark:
    """Return the finding for an ignored line that is possibly an alternative to an active directive."""
    remedy = f"remove this line or line {other.line}: "
    if same:
        return remark._replace(severity=Severity.INFO, remedy=f"{remedy}the last one counts", edit=None)
    if other.name in MEMORY:
        return remark._replace(remedy=f"{remedy}sbatch accepts only one of these options", edit=None)
    return remark


def _kind(name: str) -> str:
    """Return the resource that an option requests: options for the same resource are alternatives."""
    for prefix in ("mem", "gpus", "ntasks", "cpus", "mail"):
        if name.startswith(prefix):
            return prefix
    return {"gres": "gpus", "nodelist": "nodes", "exclude": "nodes", "tasks-per-node": "ntasks"}.get(
        name, name
    )


def read_line(text: str, number: int) -> Line:
    """Read one line of a script as sbatch does."""
    if text.startswith("#SBATCH"):
        return _directive(text, number)
    stripped = text.strip(" \t\r\f\v")
    if not stripped:
        return Line("comment")
    remark = _almost_a_directive(text[:400], number)
    if remark and remark.edit:
        # An unindented comment, such as "# SBATCH", may be a directive that is disabled on purpose.
        disabled = stripped.startswith("#") and remark.severity is Severity.WARNING and stripped == text
        intended = () if disabled else _directive(remark.edit.new, number).options
        return Line("comment", intended, (remark,))
    return Line("comment" if stripped.startswith("#") or _TEMPLATE.match(stripped) else "command")


def _almost_a_directive(text: str, number: int) -> Remark | None:
    """Return a finding for a line that looks like a directive but that sbatch treats as something else."""
    stripped = text.strip(" \t")
    match = _ALMOST_DIRECTIVE.match(stripped)
    if not match:
        return None
    mark, word = match.group(1, 2)
    if mark.count("#") > 1 or mark.endswith("! ") or (word.upper() != "SBATCH" and not _is_misspelt(word)):
        return None
    is_command = not mark.startswith("#")
    if is_command and not word.isupper():
        return None
    if word == "sbatch" and mark != "#":
        return None  # a comment that shows how to call sbatch
    rest = stripped[match.end(2) :].lstrip(": \t")
    edit = Edit(number, "", f"#SBATCH {rest}")
    refused = [remark.severity is Severity.ERROR for remark in _directive(edit.new, number).remarks]
    if any(refused) or (word == "sbatch" and refused):
        return None  # sbatch would refuse it as a directive, so it is a comment
    remedy = f"write `{edit.new.strip()[:80]}`, with nothing before #SBATCH"
    severity = Severity.ERROR
    if mark == "#" and word == "SBATCH":
        if stripped == text:
            return None
        message = "sbatch reads #SBATCH only at the very start of a line: it treats this line as a comment"
        severity = Severity.WARNING
    elif is_command:
        message = (
            "this is not a directive but a command: bash runs it, and sbatch stops reading directives here"
        )
    elif word in ("SBATCH", "sbatch") or (len(word) > 6 and word.endswith("SBATCH")):
        message = f"`{mark}{word}` is an ordinary comment: sbatch ignores the line"
        remedy += "; to disable the directive on purpose, write ##SBATCH"
        typed = word.upper() in ("SBATCH", "SSBATCH") and "!" not in mark
        severity = Severity.WARNING if typed else Severity.INFO
    else:
        message = f"`{mark}{word}` is not #SBATCH: sbatch treats the line as a comment and ignores it"
        remedy += "; to disable the directive on purpose, write ##SBATCH"
        severity = Severity.WARNING
    return Remark(number, message, remedy, severity, edit)


def _is_misspelt(word: str) -> bool:
    upper = word.upper()
    return upper[0] in "SB" and difflib.SequenceMatcher(None, upper, "SBATCH").ratio() >= 0.8


def _directive(text: str, number: int) -> Line:
    words, problem = _split(text.removeprefix("#SBATCH"))
    if problem:
        return Line("directive", remarks=(problem._replace(line=number),))
    if words and words[0] in _HETEROGENEOUS:
        return Line("directive", heterogeneous=True)
    options: list[Option] = []
    expands = any(map(EXPANSION.search, words))  # a value with a variable, not a placeholder
    blanks = [*([] if expands else filter(is_in_brackets, words)), *_YOURS.findall(text)]
    remarks = [_placeholder(blank, number) for blank in blanks]
    for item in read_options(words, sbatch_options(), line=number):
        remark = refused_value(item) if isinstance(item, Option) else item
        if isinstance(item, Option):
            options.append(item)
        if remark:
            remarks.append(remark)
    if not _YOURS.search(text):
        remarks.sort(key=lambda remark: remark.severity is not Severity.ERROR)
    return Line("directive", tuple(options), tuple(remarks[:1]))


def _placeholder(word: str, number: int) -> Remark:
    message = f"`{word}` is a placeholder, which sbatch does not understand"
    return Remark(number, message, "fill it in before you submit the script", Severity.INFO)


def _split(rest: str) -> tuple[list[str], Remark | None]:
    """Split a directive into words: quotes group words, and an unquoted # starts a comment."""
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
            message = f"sbatch refuses the script: the quote {piece} is never closed"
            return [], Remark(None, message, "close the quote on the same line", Severity.ERROR)
        quoted = len(piece) > 1 and piece[0] in "'\"" and piece[-1] == piece[0]
        current = [*(current or ()), piece[1:-1] if quoted else piece]
    if current is not None:
        words.append("".join(current))
    return [word for word in words if word != "\\"], None


def read_options(words: Sequence[str], table: OptionTable, *, line: int = 0) -> Iterator[Option | Remark]:
    """Parse options and their values like getopt; yield a finding for each word that getopt refuses."""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if word == "--":
            return
        if word.startswith("--"):
            yield from _long(word, waiting, table, line)
        elif word.startswith("-") and len(word) > 1:
            yield from _short(word, waiting, table, line)
        elif not is_in_brackets(word) or word.count("}") > word.count("{"):  # as in ${NAME:?a message}
            yield _stray(word, line)


def _refused(
    line: int, message: str, remedy: str, severity: Severity = Severity.ERROR, old: str = "", new: str = ""
) -> Remark:
    """Return a finding for a line that sbatch refuses. Its correction replaces ``old`` by ``new``."""
    return Remark(line, message, remedy, severity, Edit(line, old, new) if new else None)


def _stray(word: str, line: int) -> Remark:
    if word[0] in _DASHES:
        fixed = "--" + word.lstrip(_DASHES + "-")
        message = f"sbatch refuses `{word}`: its dash is not a plain hyphen (-)"
        return _refused(line, message, f"write `{fixed}`", old=word, new=fixed)
    if word == "=":
        return _refused(line, "sbatch refuses blanks around =", "write --option=value without blanks")
    if word == ":":
        remedy = "separate heterogeneous components by a line `#SBATCH hetjob`"
        return _refused(line, "sbatch refuses `:` in a directive", remedy)
    name = word.partition("=")[0]
    if name in sbatch_options().long:
        message = f"sbatch refuses `{word}`: an option starts with --"
        return _refused(line, message, f"write `--{word}`", old=word, new=f"--{word}")
    return _refused(
        line,
        f"sbatch refuses the script: `{word}` is neither an option nor a value",
        "remove it, quote it together with the value before it, or put # before it if it is a comment",
    )


def _long(word: str, waiting: list[str], table: OptionTable, line: int) -> Iterator[Option | Remark]:
    written, equals, value = word[2:].partition("=")
    matches = table.matches(written)
    if len({canonical(name) for name in matches}) != 1:
        yield _unknown(word, written, matches, table, line)
        if not equals and waiting and not waiting[-1].startswith("-"):
            waiting.pop()
        return
    name = matches[0]
    takes = table.takes(name)
    if equals and takes and not value and table.command == "sbatch" and waiting and waiting[-1][:1] != "-":
        value = waiting.pop()
        message = f"sbatch refuses the blank in `{word} {value}`"
        yield Option(canonical(name), value, f"{word} {value}", line)
        yield _refused(line, message, f"write `{word}{value}`", old=f"{word} {value}", new=f"{word}{value}")
    elif equals:
        yield Option(canonical(name), value if takes else None, word, line)
    elif takes == "=":
        if waiting:
            value = waiting.pop()
            yield Option(canonical(name), value, f"{word} {value}", line)
        else:
            yield _to_be_filled_in(line, word)
    else:
        yield Option(canonical(name), None, word, line)


def _unknown(word: str, written: str, matches: list[str], table: OptionTable, line: int) -> Remark:
    if matches:
        candidates = ", ".join(f"--{name}" for name in matches[:6])
        return _refused(
            line,
            f"sbatch refuses `{word}`, because it is ambiguous: {candidates}",
            "write the option's name in full",
        )
    if is_in_brackets(written):
        return _placeholder(word, line)
    if table.command == "sbatch" and written in _RENAMED:
        message = f"sbatch refuses `{word}`: the option is now called --{_RENAMED[written]}"
        new = f"--{_RENAMED[written]}"
        return _refused(line, message, f"write {new}", old=f"--{written}", new=new)
    if table.command == "sbatch" and srun_only(written) and written.replace("_", "-") not in table.long:
        message = f"sbatch refuses `{word}`: --{written} is an option of srun only"
        return _refused(line, message, f"pass it to srun: srun --{written} ...")
    longer = (name for name in table.long if len(name) > 2 and written.startswith(name))
    close = table.closest(written) or next(longer, None)  # --memory means --mem
    if close:
        message = f"sbatch refuses `{word}`: it has no option --{written}"
        other = _counts_differently(written, close)
        if other:
            return _refused(line, message, other)
        return _refused(line, message, f"write --{close}", old=f"--{written}", new=f"--{close}")
    return _refused(
        line,
        f"sbatch refuses the script, unless a plugin of the site adds the option --{written}",
        f"check the spelling with `{table.command} --help`, or remove the option",
        Severity.INFO,
    )


def _counts_differently(written: str, close: str) -> str:
    """Return the remedy if the option with a similar name needs another number, else an empty string."""
    resource, _, unit = written.replace("_", "-").partition("-per-")
    other, _, per = close.partition("-per-")
    if {resource[:3], other[:3]} == {"cpu", "gpu"}:
        return "use an option that sbatch has, see `sbatch --help`"
    if unit.rstrip("s") in _UNITS and unit.rstrip("s") != (per or "node"):
        return f"write --{close} with a number that is meant per {per or 'node'}, or use another option"
    return ""


def _short(word: str, waiting: list[str], table: OptionTable, line: int) -> Iterator[Option | Remark]:
    name = word[1:].partition("=")[0]
    if len(name) > 2 and (name in table.long or name in table.plugins):
        message = f"`{word}` has only one dash: sbatch reads it as the short option -{word[1]}"
        yield _refused(line, message, f"write `-{word}`", _of_text(word[1]), old=word, new=f"-{word}")
        return
    position = 1
    while position < len(word):
        letter = word[position]
        long = table.short.get(letter)
        if long is None:
            yield _refused(
                line, f"sbatch refuses `{word}`: it has no option -{letter}", "see `sbatch --help`"
            )
            return
        if table.takes(long) != "=":
            yield Option(canonical(long), None, word, line)
            position += 1
            continue
        yield _short_value(word, position, canonical(long), waiting, line)
        return


def _short_value(word: str, position: int, name: str, waiting: list[str], line: int) -> Option | Remark:
    """Read a short option with its value, which is the rest of ``word`` or the next waiting word."""
    letter, value = word[position], word[position + 1 :]
    if value.startswith("="):
        fixed = f"-{letter} {value[1:]}"
        message = f"sbatch reads `{word}` as -{letter} with the value `{value}`: short options have no ="
        remedy = f"write `{fixed}` or `--{name}{value}`"
        return _refused(line, message, remedy, _of_text(letter), old=word, new=fixed)
    if value:
        return Option(name, value, word, line)
    if waiting:
        value = waiting.pop()
        return Option(name, value, f"{word} {value}", line)
    return _to_be_filled_in(line, word)


def _of_text(letter: str) -> Severity:
    return Severity.WARNING if letter in _ANY_TEXT else Severity.ERROR


def refused_value(option: Option) -> Remark | None:
    """Return a finding if sbatch refuses the option's value, or if the value contains a variable."""
    name, value = option.name, option.value
    if value is None:
        return None
    if EXPANSION.search(value):
        return _unexpanded(option)
    if is_placeholder(value):
        return None
    allowed, fixed = "", None
    if name in _COUNTS:
        if not (value.isascii() and value.isdecimal() and int(value[:18]) > 0):
            allowed = "a number of at least 1"
    elif name == "mail-type":
        if not any(_MAIL.fullmatch(kind) for kind in value.split(",")):  # sbatch skips unknown ones
            allowed = "BEGIN, END, FAIL, ALL or NONE"
    elif name in _FORMS and not _FORMS[name][0].fullmatch(value):
        allowed = _FORMS[name][1]
        fixed = _duration(value) if name == "time" else None
    if not allowed:
        return None
    if not value or (_PLACEHOLDER.match(value) and name in _NUMBERS):
        return _to_be_filled_in(option.line, option.written, allowed)
    message = f"`{option.written}`: sbatch refuses the value {value!r}; allowed: {allowed}"
    new = option.written.replace(value, fixed) if fixed else ""
    return _refused(option.line, message, f"write --{name} as {allowed}", old=option.written, new=new)


def _to_be_filled_in(line: int, written: str, allowed: str = "") -> Remark:
    message = f"sbatch refuses `{written}` until you give it {allowed}"
    if not allowed:  # getopt reads all directives as one list of words
        message = f"`{written}` {_NO_VALUE}: sbatch takes the next option as its value, or refuses the script"
    return Remark(line, message, "fill it in, or remove it, before you submit the script", Severity.INFO)


def _duration(value: str) -> str | None:
    """Convert a duration such as ``24h``, ``90m`` or ``2d`` to Slurm's format; return None for other text."""
    match = _HUMAN_TIME.fullmatch(value)
    if not match:
        return None
    number, unit = int(match.group(1)), match.group(2).lower()
    formats = {"d": f"{number}-00:00:00", "h": f"{number:02d}:00:00", "m": f"{number}", "s": f"00:{number}"}
    return formats[unit]


def _unexpanded(option: Option) -> Remark:
    message = f"`{option.written}`: sbatch does not expand variables in directives: "
    remedy = f"write the value itself, or pass it when submitting: sbatch --{option.name}=... script"
    if option.name in _COUNTS or option.name in _FORMS:
        return _refused(option.line, message + "it refuses this value", remedy)
    return _refused(option.line, message + "it uses this text unchanged", remedy, Severity.WARNING)
