"""Rules about the text of a script: directives, line ends, syntax, backslashes, variables and traps."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from ..directives import DIRECTIVE, read_line
from ..launch import BUILTINS
from ..mistakes import Remark
from ..options import names
from ..script import MAX_SCRIPT_SIZE, Script, ends_script
from ..walk import Command

# bash(1), QUOTING: a backslash continues a line only directly before the newline, and not in single quotes.
_BROKEN_END = re.compile(r"[^#]*[ \t]\\[ \t]+(?:#.*)?")
_BROKEN = {'"': re.compile(r"(?:\A\"|[ \t\n])\\[ \t]+\n"), "'": re.compile(r"(?:\A'|[ \t\n])\\[ \t]*\n")}
# bash(1), Arrays: the index is a number, an expression with a variable, @ or *.
_INDEX = re.compile(r"\[(?:[@*]|\d+|\$?\{?[A-Za-z_]\w*\}?)\]")
#: Options without which Slurm does not set their variable (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
_NEEDED_OPTIONS = names("cpus-per-task ntasks-per-node gpus gpus-per-node gpus-per-task cpus-per-gpu")
#: Variables that scripts read, and others that Slurm sets whose names resemble them (sbatch(1), srun(1)).
_SLURM_NAMES = names(
    """ARRAY_JOB_ID ARRAY_TASK_ID CPUS_ON_NODE CPUS_PER_TASK GPUS GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_TASK
    JOBID JOB_CPUS_PER_NODE JOB_GID JOB_GPUS JOB_ID JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_UID JOB_USER
    LOCALID NNODES NODEID NODELIST NPROCS NTASKS NTASKS_PER_NODE PROCID STEPID STEP_ID SUBMIT_DIR
    TASKS_PER_NODE"""
)


def malformed_directive(script: Script) -> Iterator[Remark]:
    """The script is refused because of a directive or its first line, or sbatch ignores a directive.

    Bad: #SBATCH --ntasks_per_node=4 --time=24h
    Good: #SBATCH --ntasks-per-node=4 --time=24:00:00
    """
    if not script.lines[0].startswith("#!"):
        message = "sbatch refuses the script: its first line does not start with #!"
        yield Remark(1, message, "make `#!/bin/bash` the first line")
    yield from script.header.remarks
    if script.too_large:
        message = f"Slurm refuses scripts of more than {MAX_SCRIPT_SIZE // 1024**2} MiB (max_script_size)"
        yield Remark(1, message, "move the data to a separate file")


def sbatch_after_command(script: Script) -> Iterator[Remark]:
    """A directive is below the first command, where sbatch ignores it.

    Bad: #SBATCH --nodes=4  # in a line below `module load`
    Good: #SBATCH --nodes=4  # in a line above `module load`
    """
    first = script.header.end + 1
    last = script.commands[-1].line if script.commands else 0
    given = {(option.name, option.value) for option in script.header.options}
    for number in script.walk.comments:
        if script.line(number).startswith(DIRECTIVE) and first < number < last:
            options, _ = read_line(script.line(number), number)
            if not options or not given.issuperset((one.name, one.value) for one in options):
                message = f"sbatch ignores this directive: it stopped reading at the command in line {first}"
                yield Remark(number, message, f"move the line above line {first}")


def crlf_script(script: Script) -> Iterator[Remark]:
    r"""The lines of the script end with CR LF, as on Windows, so that sbatch refuses it.

    Bad: #!/bin/bash\r\n
    Good: #!/bin/bash\n
    """
    if script.dos_line:
        message = "sbatch refuses the script: its lines end with CR LF, as on Windows"
        yield Remark(script.dos_line, message, "convert the script: dos2unix SCRIPT")


def shell_syntax(script: Script) -> Iterator[Remark]:
    """``bash -n`` finds a syntax error in the script. What is above it runs.

    Bad: for node in $NODES; do echo $node
    Good: for node in $NODES; do echo $node; done
    """
    exits = [one.line for one in script.walk.commands if ends_script(one)]
    if script.error and script.error[0] <= min(exits, default=script.error[0]):  # bash reads the line
        line = min(script.error[0], len(script.lines))
        while line > 1 and script.line(line).strip()[:1] in ("", "#"):
            line -= 1  # the end of the file is below its last command
        message = f"bash cannot parse the script: {script.error[1]}"
        yield Remark(line, message, "check the script with `bash -n SCRIPT`")


def broken_continuation(script: Script) -> Iterator[Remark]:
    r"""The backslash at the end of a line does not continue it: it is not the last character, or is quoted.

    Bad: srun python train.py \  # the data
    Good: srun python train.py \
    """
    for command in script.commands:
        broken = _BROKEN_END.fullmatch(script.line(command.end))
        if broken and script.line(command.end + 1).strip():
            message = "the backslash is not the last character of the line, so the command ends here"
            yield Remark(command.end, message, "remove what follows the backslash")
    for name, line, text in script.walk.strings:
        stays = _BROKEN[text[0]].search(text)
        split = [one.program for one in script.walk.uses if one.name == name and one.program]
        if stays and not BUILTINS.issuperset(split):
            message = f"the backslash stays in ${name}, and the program gets it as an argument"
            remedy = "use double quotes" if text[0] == "'" else "remove the blank after the backslash"
            yield Remark(line + text[: stays.end() - 1].count("\n"), message, remedy)


def array_without_braces(script: Script) -> Iterator[Remark]:
    """An element of an array is written without braces: bash takes the first element, and appends ``[2]``.

    Bad: srun python train.py --batch $SIZES[$SLURM_ARRAY_TASK_ID]
    Good: srun python train.py --batch ${SIZES[$SLURM_ARRAY_TASK_ID]}
    """
    for use in script.walk.uses:
        if use.name in script.walk.arrays - script.walk.scalars and _INDEX.fullmatch(use.subscript):
            message = f"bash takes the first element of {use.name} and appends the text {use.subscript}"
            yield Remark(use.line, message, f"write ${{{use.name}{use.subscript}}}")


def undefined_variable(script: Script) -> Iterator[Remark]:
    """Slurm does not set this variable in this job, unless the caller of sbatch gives an option for it.

    Bad: srun --ntasks=8 python train.py --gpus $SLURM_NTASKS_PER_NODE
    Good: srun --ntasks-per-node=8 python train.py --gpus $SLURM_NTASKS_PER_NODE
    """
    unset = {use.name for use in script.walk.uses if use.may_be_unset}
    known = unset | script.walk.scalars | script.walk.arrays
    given = set(script.job.options) | {one.name for command in script.commands for one in command.launch.srun}
    uses = {use.name: use for use in reversed(script.walk.uses) if use.name[:6] == "SLURM_"}
    uses = {name: use for name, use in uses.items() if name not in known and script.header.options}
    for name, use in uses.items():
        short = name.removeprefix("SLURM_")
        option = short.lower().replace("_", "-")
        near = difflib.get_close_matches(short, sorted(_SLURM_NAMES), n=1, cutoff=0.9)
        if option in _NEEDED_OPTIONS - given:
            message = f"Slurm sets ${name} only in jobs with --{option}, which this script does not request"
            yield Remark(use.line, message, f"add --{option}, or write ${{{name}:-NUMBER}}")
        elif near and short not in _SLURM_NAMES:
            message = f"Slurm does not set ${name}, so it is empty; did you mean $SLURM_{near[0]}?"
            yield Remark(use.line, message, f"use $SLURM_{near[0]}")


def trap_delayed(script: Script) -> Iterator[Remark]:
    """With ``--signal=B:``, only the batch shell gets the signal, and its trap waits for the running command.

    Bad: trap 'scontrol requeue $SLURM_JOB_ID' USR1; srun python train.py
    Good: trap 'scontrol requeue $SLURM_JOB_ID' USR1; srun python train.py & wait
    """
    flags, colon, signal = script.job.value("signal").upper().partition(":")
    name = signal.partition("@")[0].removeprefix("SIG")
    traps = [one for one in script.commands if one.name == "trap" and _catches(one, name)]
    ran = [one.outer for one in script.commands if one.launch.via == "srun" or one.launch.kind == "python"]
    for outer in ran[-1:] if "B" in flags and colon and traps else ():
        if outer.line > traps[0].line and outer.place <= {"subshell"}:
            message = f"bash runs the trap of line {traps[0].line} only after this command has ended"
            yield Remark(outer.line, message, "start the command in the background: srun ... & wait")


def _catches(command: Command, signal: str) -> bool:
    """Return whether ``trap`` sets an action for a signal."""
    given = [word.shown.upper().removeprefix("SIG") for word in command.words[1:]]
    return signal in given[1:] and given[0] not in ("-", "", "-L", "-P")
