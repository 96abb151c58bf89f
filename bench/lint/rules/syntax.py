"""Rules about the text of a script: directives, line ends, syntax and stray commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.findings import Edit, Remark, Severity
from bench.lint.expansion import MARK, Value
from bench.lint.launch import HELPERS, SHELLS, basename
from bench.lint.options import Option
from bench.lint.rules import rule
from bench.lint.script import ANALYSED_SIZE, MAX_SCRIPT_SIZE, Script, first_line, ignored_directives
from bench.lint.syntax import UNCLOSED_HEREDOC, ShellError, Simple, Word
from bench.lint.walk import DECLARATIONS, Step

_OPENS_STRING = re.compile(r"\\\Z|(?:=|-\w*c\s+|echo\s+|<<<\s*|\()[\"']\Z|\S[ \t]+[\"']\Z")
#: A part of a command that is to be filled in, such as ``<path>``.
_BLANK = re.compile(r"<[A-Za-z.?][^<>|;()$`\"']*(?<!\s)>|\w+\((?:int|float|str|bool)\)")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_MAX_ODD_LINES = 200
_PROSE = re.compile(r"[A-Z][a-z]+[,:]?\Z")
_WORD = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*[,.:]?\Z")
_STOP_WORDS = frozenset({"the", "a", "an", "of", "and", "with", "this", "is", "are", "to", "from", "on"})
_STOPS_AT_ERRORS = re.compile(r"\s*set\s+(?:-\w+\s+)*(?:-[a-z]*e|-[a-z]*o\s+errexit)|#!.*sh\s+-[a-z]*e")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_PYTHON_KEYWORDS = frozenset({"import", "from", "print", "def", "elif", "class"})
#: Leftovers of editing: ends of here-documents, prompts, separator lines, bare numbers.
_LEFTOVER = re.compile(r"EO[FTL]|END|\$|[-=*~]{3,}|\d+")
_CSH_COMMANDS = frozenset({"setenv", "unsetenv"})


@rule(Severity.ERROR)
def sbatch_after_command(script: Script) -> Iterator[Remark]:
    """A directive is below the first command, so sbatch ignores it.

    sbatch stops reading directives at the first line that is neither blank nor a comment. It
    ignores all directives after that line without a message.

    Bad:
        #!/bin/bash
        module load cuda
        #SBATCH --nodes=4

    Good:
        #!/bin/bash
        #SBATCH --nodes=4
        module load cuda
    """
    first = script.header.end + 1
    if first <= (first_line(script.lines) or 0):
        return  # sbatch refuses the script, see malformed-directive
    ignored = list(ignored_directives(script))
    options = [option for _, some in ignored for option in some]
    severity = Severity.INFO if _is_collection(script, options) else None
    last = script.walk.steps[-1].line if script.walk.steps else len(script.lines)
    if severity is None and ignored and ignored[0][0] > last:
        severity = Severity.WARNING  # possibly kept below the script on purpose
    for number, _ in ignored:
        message = f"sbatch ignores this directive: it stopped reading at the first command, in line {first}"
        yield Remark(number, message, f"move the line above line {first}", severity)


def _is_collection(script: Script, ignored: Sequence[Option]) -> bool:
    """Return whether the file contains or writes several scripts."""
    given = {option.name for option in script.header.options}
    repeated = sum(option.name in given for option in ignored)
    texts = ("\n".join(script.lines[first - 1 : last]) for first, last in script.swallowed)
    return repeated > 1 or any("#SBATCH" in text for text in texts)


@rule(Severity.ERROR)
def malformed_directive(script: Script) -> Iterator[Remark]:
    """A directive or the first line is malformed: sbatch refuses the script or ignores the line.

    sbatch refuses a script with an unknown option, an invalid value or a stray word, and a script whose
    first line does not start with ``#!``. It ignores lines that do not start with exactly ``#SBATCH``, and it
    does not expand variables.

    Bad:
        # SBATCH --nodes=4
        #SBATCH --ntasks_per_node=4
        #SBATCH --time=24h

    Good:
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=4
        #SBATCH --time=24:00:00
    """
    start = first_line(script.lines)
    if start and not script.lines[0].startswith("#!"):
        message = "sbatch refuses the script: its first line does not start with #!"
        yield Remark(start, message, "make `#!/bin/bash` the first line")
    for remark in script.header.remarks:
        name = _VARIABLE.search(script.line(remark.line or 0))
        if remark.severity is Severity.ERROR and name and name[1] not in script.assigned_to:
            remark = remark._replace(severity=Severity.WARNING)  # a program possibly fills in the value
        yield remark
    if script.size > MAX_SCRIPT_SIZE:
        limit = f"{MAX_SCRIPT_SIZE // 1024**2} MiB"
        message = f"Slurm refuses scripts of more than {limit}, unless the site raised max_script_size"
        yield Remark(1, message, "move the data to a separate file", Severity.WARNING)


@rule(Severity.ERROR)
def crlf_script(script: Script) -> Iterator[Remark]:
    r"""The lines of the script end with CR LF, as on Windows.

    sbatch refuses such a script: "Batch script contains DOS line breaks".

    Bad:
        #!/bin/bash\r\n

    Good:
        #!/bin/bash\n
    """
    if script.dos_line:
        message = "sbatch refuses the script: its lines end with CR LF, as on Windows"
        yield Remark(
            script.dos_line, message, "convert the script: dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT"
        )


@rule(Severity.ERROR)
def shell_syntax(script: Script) -> Iterator[Remark]:
    """The shell cannot parse the script.

    bash reads and executes a script command by command. It executes everything before the error,
    and then the job ends.

    Bad:
        for node in $NODES; do
            echo $node

    Good:
        for node in $NODES; do
            echo $node
        done
    """
    for text, problem in script.walk.broken[:20]:
        yield _error_in_text(text, problem)
    if script.size > ANALYSED_SIZE:
        message = f"only the first {ANALYSED_SIZE // 1024} KiB of this script were checked"
        yield Remark(1, message, "move the data to a separate file", Severity.INFO)
    if script.error and not script.is_draft:
        yield from _syntax_error(script, script.error)


def _syntax_error(script: Script, error: ShellError) -> Iterator[Remark]:
    blank = _BLANK.search(script.line(error.line))
    if blank:
        message = f"bash cannot parse the script until `{blank.group()[:40]}` is filled in"
        yield Remark(error.line, message, "write the value in its place", Severity.INFO)
        return
    quote = error.quote if error.quote in ("'", '"') else ""
    unpaired = _unpaired_quote(script.lines, quote, upto=error.line)
    if unpaired:
        line, quote = unpaired
        message = f"a {quote} is opened in this line and never closed, so bash cannot parse the script"
        message += f" (it stops at line {error.line}: {error.message})"
        yield Remark(line, message, f"close the {quote}")
        return
    line = min(error.line, len(script.lines))
    while line > 1 and script.lines[line - 1].strip()[:1] in ("", "#"):
        line -= 1
    remedy = "check the script with `bash -n SCRIPT`"
    if error.opened and error.opened != line:
        yield Remark(error.opened, f"bash cannot parse the command that starts here: {error.message}", remedy)
        yield Remark(line, f"bash stops here: {error.message}", remedy, Severity.INFO)
    elif error.message.startswith(UNCLOSED_HEREDOC):
        message = f"bash takes all lines below as text, because {error.message}"
        remedy = "write the closing word alone in its line, without blanks"
        yield Remark(line, message, remedy, Severity.WARNING)
    else:
        yield Remark(line, f"bash cannot parse the script: {error.message}", remedy)


def _error_in_text(text: Value, error: ShellError) -> Remark:
    """Return the finding for a syntax error in text for a shell, such as the argument of ``bash -c``."""
    quote = error.quote if error.quote in ("'", '"') else ""
    unpaired = _unpaired_quote(text.text.split("\n"), quote, upto=10_000)
    line = text.lines[min(unpaired[0], len(text.lines)) - 1] if unpaired else error.opened or error.line
    message = f"the shell that executes this text cannot parse it: {error.message}"
    severity = Severity.WARNING if MARK.search(text.text) else None
    return Remark(line, message, "correct the text between the quotes", severity)


def _unpaired_quote(lines: Sequence[str], quote: str, *, upto: int) -> tuple[int, str] | None:
    """Return (number of the line with an unclosed quote, quote character), or None.

    A string that spans several lines has an odd number of quotes in its first and its last line, so
    lines with an odd number of quotes come in pairs. The result is the first line of the first pair that does
    not look like a string. If ``quote`` is empty (unknown), only lines up to ``upto`` are examined.
    """
    for kind in (quote,) if quote else ('"', "'"):
        counts = [_count_quotes(line, kind) for line in lines[: None if quote else upto]]
        odd = [index for index, count in enumerate(counts) if count % 2]
        if not odd or len(odd) > _MAX_ODD_LINES or (not quote and len(odd) % 2 == 0):
            continue
        pairs = zip(odd[::2], odd[1::2], strict=False)
        wrong = (first for first, last in pairs if not _is_string(lines, counts, first, last))
        return next(wrong, odd[-1] if len(odd) % 2 else odd[0]) + 1, kind
    return None


def _is_string(lines: Sequence[str], counts: Sequence[int], first: int, last: int) -> bool:
    """Return whether two lines with an odd number of quotes look like a string of several lines."""
    return bool(_OPENS_STRING.search(lines[first].rstrip())) and not any(counts[first + 1 : last])


def _count_quotes(line: str, kind: str) -> int:
    """Count the quotes of one kind, except escaped quotes and quotes in comments or in other quotes."""
    count, other, index = 0, "", 0
    text = line[:20_000]
    while index < len(text):
        char = text[index]
        if char == "\\" and other != "'":
            index += 1
        elif char == other:
            other = ""
        elif not other and char == kind:
            count += 1
        elif not other and char in "'\"" and count % 2 == 0:
            other = char if text.find(char, index + 1) > 0 else ""
        elif char == "#" and not other and count % 2 == 0 and (index == 0 or text[index - 1] in " \t"):
            break
        index += 1
    return count


@rule(Severity.ERROR)
def stray_command(script: Script) -> Iterator[Remark]:
    r"""Bash runs a line that is not meant as a command, such as an option or a leftover of editing.

    A backslash continues a line only if it is the very last character. A blank after the backslash, or
    a comment between the lines, ends the command. Bash then tries to run the next line as a command of
    its own.

    Bad:
        srun python train.py \  # the data
            --data /scratch
        MASTER_PORT = 29500

    Good:
        srun python train.py \
            --data /scratch
        MASTER_PORT=29500
    """
    end = next((step.line for step in script.walk.steps if _ends_script(step)), len(script.lines))
    for step in script.walk.steps:
        remark = None if step.place.condition or step.line > end else _stray(script, step)
        if remark:
            yield remark
    yield from _never_reached(script)


def _stray(script: Script, step: Step) -> Remark | None:
    words, line = step.node.words, step.line
    first = words[0].literal or ""
    bare = words[0].bare or ""
    start = words[0].parts[0]
    is_option = start.kind == "text" and not start.quoted and bool(re.match(r"--?[A-Za-z]", start.text))
    if is_option and not step.place.substitution:
        if step.node.assigns:
            message = f"bash runs `{start.text[:40]}` as a command, because the value before it is not quoted"
            return Remark(line, message, "write NAME='WORD WORD'")
        return _broken_off_option(script, step, start.text)
    if bare in DECLARATIONS:
        return Remark(line, f"{bare} does not allow blanks around =", f"write {bare} NAME=VALUE")
    spaced = len(words) > 1 and (words[1].bare or "").startswith("=") and bool(_NAME.match(bare))
    if spaced and not step.place.piped and bare not in HELPERS and not step.place.task:
        return _spaced_assignment(script, step.node)
    if _assigns_to_expansion(words[0]):
        message = "bash runs this line as a command, because there is a $ before the variable's name"
        return Remark(line, message, "remove the $")
    if script.line(line).lstrip().startswith(("'''", '"""')):
        message = "bash has no block comments: it runs the text between the quotes as a command"
        return Remark(line, message, "put # at the start of each line", _severity_of_leftover(script))
    if re.match(r"!?#?!?SBATCH\b", first):
        message = f"bash runs `{first}` as a command, but there is no such command"
        return Remark(line, message, "put # at the start of the line")
    is_python = first in _PYTHON_KEYWORDS and len(words) > 1 and "import" in [word.literal for word in words]
    if first in _CSH_COMMANDS or is_python:
        message = f"`{first}` is not a bash command"
        return Remark(line, message, "write the line in bash, or move it to a script in its own language")
    if first.isdecimal() and step.place.substitution:
        message = f"bash runs `{first}` as a command here, so the expansion is empty"
        return Remark(line, message, "put `echo` before it", Severity.INFO if step.place.branches else None)
    if _LEFTOVER.fullmatch(first) or (words[0].bare is None and _is_sentence(script, step)):
        message = f"bash runs `{first[:40]}` as a command, but there is no such command"
        return Remark(line, message, "remove the line", _severity_of_leftover(script))
    comment = _comment_before(script, step)
    if comment:
        message = (
            f"the comment in line {comment} ends the command above: bash runs this line as a new command"
        )
        return Remark(line, message, "move the comment above the command")
    hashed = next((word for word in step.launch.words[1:] if word.text == "#"), None)
    if hashed and step.launch.is_training and not re.search(r"(['\"])#\1", script.line(step.line)):
        message = (
            "`#` starts no comment within quotes: the program gets it and the words after it as arguments"
        )
        return Remark(hashed.line, message, "remove the comment from the text between the quotes")
    return _stray_warning(script, step, bare)


def _severity_of_leftover(script: Script) -> Severity:
    """Return the severity of a command that does not exist: an error only if ``set -e`` ends the script."""
    return Severity.ERROR if any(map(_STOPS_AT_ERRORS.match, script.lines)) else Severity.WARNING


def _comment_before(script: Script, step: Step) -> int | None:
    """Return the line of the comment that ends a continued command just before this step, or None."""
    above = step.line - 1
    while above > 0 and script.line(above).lstrip().startswith("#"):
        above -= 1
    continued = script.line(above).rstrip().endswith("\\") and above < step.line - 1
    start = above
    while start > 1 and script.line(start - 1).rstrip().endswith("\\"):
        start -= 1
    deeper = _indentation(script.line(step.line)) > _indentation(script.line(start))
    return above + 1 if continued and deeper and step.place.task is None else None


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _stray_warning(script: Script, step: Step, bare: str) -> Remark | None:
    """Return a finding for a line that is probably not meant as a command."""
    words, line = step.node.words, step.line
    start = words[0].parts[0]
    if len(words) == 1 and start.kind == "param" and start.text.startswith("SLURM"):
        message = f"bash runs the value of ${start.text} as a command"
        remedy = "if the line is meant as output, put `echo` before it; otherwise remove the line"
        return Remark(line, message, remedy, _severity_of_leftover(script))
    texts = [word.bare or "" for word in words]
    is_prose = (len(texts) > 3 and bool(_STOP_WORDS & set(texts))) or (len(texts) > 2 and _PROSE.match(bare))
    is_prose = is_prose and all(_WORD.match(text) for text in texts)
    is_prose = is_prose and bare not in HELPERS and not script.walk.opaque and not step.launch.via
    if is_prose and not _is_function(script, bare):
        message = f"bash runs `{bare}` as a command"
        return Remark(line, message, "if the line is meant as a comment, start it with #", Severity.WARNING)
    is_shell = basename(words[-1].literal or "") in SHELLS
    if is_shell and step.launch.via == "srun" and any(option.name == "pty" for option in step.launch.srun):
        message = "srun --pty in a batch script has no terminal, so the interactive shell ends at once"
        return Remark(line, message, "remove the line", Severity.WARNING)
    return None


def _is_function(script: Script, name: str) -> bool:
    """Return whether the script defines a function of this name, before or after its use."""
    return script.mentions(re.compile(rf"^\s*(?:function\s+{re.escape(name)}\b|{re.escape(name)}\s*\(\))"))


def _is_sentence(script: Script, step: Step) -> bool:
    """Return whether a line starts with a quoted sentence instead of the path of a program."""
    word = step.node.words[0].literal or ""
    sentence = word != "" and (not word.strip() or (" " in word.strip() and "/" not in word))
    return sentence and script.line(step.line).lstrip()[:1] in ("'", '"')


def _broken_off_option(script: Script, step: Step, option: str) -> Remark:
    line = step.line
    message = f"bash runs `{option[:40]}` as a command, although it is an option of the command above"
    if any(word.text.endswith("..") for word in step.launch.words):
        return Remark(line, message, "fill in the options before you submit the script", Severity.INFO)
    joined = any(part.text == "\\\n" for word in step.outer.words for part in word.parts)
    if joined and script.line(line - 1).lstrip().startswith("#"):
        message = f"`{option[:40]}` belongs to the comment above: within double quotes, \\ joins the lines"
        return Remark(line, message, f"remove the comment in line {line - 1}")
    broken = re.search(r"\\[ \t]+\Z", script.line(line - 1))
    if broken:
        remedy = f"remove the blanks after the backslash in line {line - 1}"
        return Remark(line, message, remedy, edit=Edit(line - 1, broken.group(), "\\"))
    remedy = "end every line of the command above with a backslash, without comments between them"
    return Remark(line, message, remedy)


def _spaced_assignment(script: Script, node: Simple) -> Remark:
    name = node.words[0].bare
    match = re.search(rf"\b{name}[ \t]*=[ \t]*", script.line(node.line))
    edit = Edit(node.line, match.group(), f"{name}=") if match else None
    message = f"bash runs `{name}` as a command: an assignment has no blanks around ="
    return Remark(node.line, message, f"write {name}=VALUE", edit=edit)


def _assigns_to_expansion(word: Word) -> bool:
    """Return whether a word looks like ``$NAME=value``."""
    if len(word.parts) < 2:
        return False
    first, second = word.parts[:2]
    is_plain = first.kind == "param" and not first.op and not first.quoted and bool(_NAME.match(first.text))
    return is_plain and second.kind == "text" and not second.quoted and second.text.startswith("=")


def _never_reached(script: Script) -> Iterator[Remark]:
    """Find an unconditional ``exit`` before the start of the training program."""
    last = max((step.line for step in script.training if step.place.task is None), default=0)
    step = next((step for step in script.walk.steps if _ends_script(step) and step.line < last), None)
    if step and all(other.line > step.line for other in script.training):
        message = "the script ends here, and the lines below never run"
        yield Remark(step.line, message, "if that is a mistake, remove the line", Severity.WARNING)


def _ends_script(step: Step) -> bool:
    """Return whether a step is an ``exit`` that always runs."""
    place = step.place
    nested = place.branches or place.loops or place.function or place.substitution or place.piped
    return step.node.words[0].literal == "exit" and not nested and not place.task
