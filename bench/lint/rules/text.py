"""Rules about the text of a script: directives, line ends, syntax and words that bash runs by mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ..directives import DIRECTIVE, read_line
from ..launch import BUILTINS
from ..script import MAX_SCRIPT_SIZE, Script
from ..syntax import check_syntax
from ..values import Unknown
from ..walk import DECLARES, Command
from . import rule

# bash(1), QUOTING: a backslash continues a line only directly before the newline.
_NOT_LAST = re.compile(r"(?<=[ \t])\\[ \t]+(#.*)?\Z")
# An option as the first word of a command: bash(1), SIMPLE COMMANDS.
_OPTION = re.compile(r"--?[A-Za-z]")


@rule(Severity.ERROR)
def malformed_directive(script: Script) -> Iterator[Remark]:
    """A directive or the first line is malformed: sbatch refuses the script or ignores the line.

    sbatch refuses a script with an unknown option, an invalid value or a stray word, and a script whose
    first line does not start with ``#!``. It ignores lines that do not start with exactly ``#SBATCH``, and it
    does not expand variables.

    Bad:
        #SBATCH --ntasks_per_node=4
        #SBATCH --time=24h
    Good:
        #SBATCH --ntasks-per-node=4
        #SBATCH --time=24:00:00
    """
    if not script.lines[0].startswith("#!"):
        message = "sbatch refuses the script: its first line does not start with #!"
        yield Remark(1, message, "make `#!/bin/bash` the first line")
    yield from script.header.remarks
    if script.too_large:
        message = f"Slurm refuses scripts of more than {MAX_SCRIPT_SIZE // 1024**2} MiB (max_script_size)"
        yield Remark(1, message, "move the data to a separate file")


@rule(Severity.ERROR)
def sbatch_after_command(script: Script) -> Iterator[Remark]:
    """A directive is below the first command, so sbatch ignores it.

    sbatch stops reading directives at the first line that is neither blank nor a comment.

    Bad:
        module load cuda
        #SBATCH --nodes=4
    Good:
        #SBATCH --nodes=4
        module load cuda
    """
    first = script.header.end + 1
    last = script.commands[-1].line if script.commands else 0
    given = {(option.name, option.value) for option in script.header.options}
    for number in script.walk.comments:
        if not script.line(number).startswith(DIRECTIVE) or not first < number < last:
            continue
        line = read_line(script.line(number), number)
        if line.options and {(one.name, one.value) for one in line.options} <= given:
            continue  # kept below the script, or repeated
        message = f"sbatch ignores this directive: it stopped reading at the first command, in line {first}"
        remedy = f"move the line above line {first}"
        if line.remarks:
            remedy += f", and correct it: {line.remarks[0].remedy}"
        yield Remark(number, message, remedy)


@rule(Severity.ERROR)
def crlf_script(script: Script) -> Iterator[Remark]:
    r"""The lines of the script end with CR LF, as on Windows.

    sbatch refuses such a script: "Batch script contains DOS line breaks".

    Bad: #!/bin/bash\r\n
    Good: #!/bin/bash\n
    """
    if script.dos_line:
        message = "sbatch refuses the script: its lines end with CR LF, as on Windows"
        remedy = "convert the script: dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT"
        yield Remark(script.dos_line, message, remedy)


@rule(Severity.ERROR)
def shell_syntax(script: Script) -> Iterator[Remark]:
    """``bash -n`` finds a syntax error in the script, or in a text for ``bash -c``.

    bash executes everything before the error, and then the job ends. ``bash -n`` executes nothing.

    Bad:
        for node in $NODES; do
            echo $node
    Good:
        for node in $NODES; do
            echo $node
        done
    """
    for line, text in script.walk.inner:
        error = check_syntax(text)
        if error:
            message = f"the shell that executes this text cannot parse it: {error.message}"
            last = min(error.line, text.count("\n") + 1)
            yield Remark(line + last - 1, message, "correct the text between the quotes")
    error = script.error
    ends = (one.line for one in script.walk.commands if one.ends_script)
    if error and error.line <= next(ends, error.line):  # bash reads the line
        line = min(error.line, len(script.lines))
        while line > 1 and script.line(line).strip()[:1] in ("", "#"):
            line -= 1  # the end of the file is below its last command
        message = f"bash cannot parse the script: {error.message}"
        yield Remark(line, message, "check the script with `bash -n SCRIPT`")


@rule(Severity.ERROR)
def stray_command(script: Script) -> Iterator[Remark]:
    r"""Bash runs a word as a command that is not meant as one, such as an option or a variable's name.

    A blank after a backslash, or a comment between the lines of a command, ends the command. Bash then runs
    the next line as a command. An assignment has no blanks around ``=`` and no ``$`` before the name.

    Bad:
        srun python train.py \  # the data
            --data /scratch
        MASTER_PORT = 29500
    Good:
        srun python train.py \
            --data /scratch
        MASTER_PORT=29500
    """
    for command in script.commands:
        remark = _stray(script, command)
        if remark:
            yield remark


def _stray(script: Script, command: Command) -> Remark | None:
    words, line = command.words, command.line
    first, second = words[0], words[1].start if len(words) > 1 else ""
    name, only = first.literal or "", first.parts[0]
    if _OPTION.match(first.start) and not first.quoted:
        return _broken_off_option(script, command)
    if name == "SBATCH":
        return Remark(line, "bash runs `SBATCH` as a command", "put # at the start of the line")
    if name in DECLARES:
        spaced = any(word.literal == "=" or word.start[:1] == "=" for word in words[2:])
        message = f"{name} does not allow blanks around ="
        return Remark(line, message, f"write {name} NAME=VALUE") if spaced else None
    if name.isidentifier() and name not in BUILTINS and second[:1] == "=" and second[1:2] != "=":
        message = f"bash runs `{name}` as a command: an assignment has no blanks around ="
        return Remark(line, message, f"write {name}=VALUE")
    after = first.parts[1] if len(first.parts) > 1 and not first.quoted else ""
    if isinstance(only, Unknown) and only.source == f"${only.name}" and str(after).startswith("="):
        message = "bash runs this line as a command, because there is a $ before the variable's name"
        return Remark(line, message, "remove the $")
    following = script.line(command.end + 1).lstrip()
    if _NOT_LAST.search(script.line(command.end)) and following and following[0] not in "-#":
        message = "the backslash is not the last character of the line, so the command ends here"
        return Remark(command.end, message, "move the comment above the command, or remove the blanks")
    return _after_comment(script, command)


def _broken_off_option(script: Script, command: Command) -> Remark:
    """Return the finding for an option that a blank or a comment separates from its command."""
    line, option = command.line, command.words[0].start.split("\n")[0][:40]
    message = f"bash runs `{option}` as a command, although it is an option"
    broken = _NOT_LAST.search(script.line(line - 1))
    if broken and not broken[1]:
        remedy = f"remove the blanks after the backslash in line {line - 1}"
        return Remark(line, message, remedy, Edit(line - 1, broken.group(), "\\"))
    remedy = "end every line of the command above with a backslash, or write #SBATCH before a directive"
    return Remark(line, message, remedy)


def _after_comment(script: Script, command: Command) -> Remark | None:
    """Find a command below a comment that ends a continued command."""
    above = command.line - 1
    comment = script.line(above).lstrip().startswith("#")
    while script.line(above).lstrip().startswith("#") and above > 1:
        above -= 1
    if not comment or not script.line(above).endswith("\\") or command.place.task is not None:
        return None
    message = f"the comment in line {above + 1} ends the command above: bash runs this line as a new command"
    return Remark(command.line, message, "move the comment above the command")


@rule(Severity.WARNING)
def arguments_split(script: Script) -> Iterator[Remark]:
    """``"$@"`` within a text for ``bash -c`` passes only the first argument.

    bash splits ``bash -c "train.sh $@"`` into several words. The text up to the first argument is the
    command. The other arguments become $0, $1 and so on of this command, which does not use them.

    Bad: srun bash -c "python train.py $@"
    Good: srun bash -c 'python train.py "$@"' bash "$@"
    """
    for command in script.commands:
        text = command.launch.program if command.launch.kind == "inner" else None
        for part in text.parts if text and text.quoted and len(text.parts) > 1 else ():
            if not isinstance(part, str) and (part.name == "@" or part.source.endswith("[@]}")):
                message = "bash -c gets only the first argument: "
                message += f"{part.source} within a text becomes several words"
                remedy = 'write bash -c \'... "$@"\' bash "$@", and export the variables that the text uses'
                yield Remark(part.line, message, remedy)


@rule(Severity.ERROR)
def script_folder(script: Script) -> Iterator[Remark]:
    """The script looks for files beside itself, but Slurm executes a copy of the script.

    ``$0`` and ``${BASH_SOURCE[0]}`` are the path of the copy, such as
    /var/spool/slurmd/job4711/slurm_script. Files that lie beside the script are therefore not found.

    Bad: cd "$(dirname "$0")"
    Good: cd "$SLURM_SUBMIT_DIR"
    """
    used = {use.name for use in script.walk.uses}
    submits = any(
        one.name == "sbatch" or [word.literal for word in one.words[:3]] == ["scontrol", "show", "job"]
        for one in script.commands
    )
    if not script.header.options or submits or "SLURM_SUBMIT_DIR" in used:
        return  # the script knows where it is, or starts itself with sbatch
    for command in script.commands:
        place = command.place
        if command.name not in ("dirname", "realpath", "readlink") or place.task or place.function:
            continue
        named = [part for word in command.words for part in word.parts if not isinstance(part, str)]
        own = next((part for part in named if part.name in ("0", "BASH_SOURCE")), None)
        if own and not place.conditional:
            message = f"{own.source} is Slurm's copy of the script in its spool folder, "
            remedy = "use $SLURM_SUBMIT_DIR, the folder in which sbatch was called, or write the path itself"
            yield Remark(command.line, f"{message}without the files beside it", remedy)
            return


@rule(Severity.ERROR)
def trap_delayed(script: Script) -> Iterator[Remark]:
    """Slurm sends a signal to the batch shell, which runs its trap only after the foreground command ends.

    With ``--signal=B:``, only the batch shell gets the signal, and bash waits for the running command
    before it executes a trap. The job therefore ends at its time limit without a checkpoint.

    Bad:
        #SBATCH --signal=B:USR1@120
        trap 'scontrol requeue $SLURM_JOB_ID' USR1
        srun python train.py
    Good:
        #SBATCH --signal=B:USR1@120
        trap 'scontrol requeue $SLURM_JOB_ID' USR1
        srun python train.py & wait
    """
    flags, colon, signal = (script.job.value("signal") or "").partition(":")
    name = signal.partition("@")[0].upper().removeprefix("SIG")
    traps = [one for one in script.commands if one.name == "trap" and _catches(one, name)]
    if "B" not in flags.upper() or not colon or not traps:
        return
    started = [one for one in script.commands if one.launch.via == "srun" or one.launch.kind == "python"]
    for command in [one for one in started if one.launch.program and one.launch.kind != "builtin"][-1:]:
        outer = command.outer
        if outer.line > traps[0].line and command.certain and not outer.place.background:
            message = (
                f"bash runs the trap of line {traps[0].line} after this command ends, not when signalled"
            )
            remedy = "start the command in the background and wait for it: srun ... & wait"
            yield Remark(outer.line, message, remedy)
            return


def _catches(command: Command, signal: str) -> bool:
    """Return whether ``trap`` sets an action for a signal."""
    given = [word.shown for word in command.words[1:] if word.literal != "--"]
    caught = {text.upper().removeprefix("SIG") for text in given[1:]}
    return len(given) > 1 and given[0] not in ("-", "", "-l", "-p") and signal in caught
