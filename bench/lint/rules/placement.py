"""Rules about the nodes, components and CPUs on which commands run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise

from ...findings import Edit, Remark, Severity
from ..geometry import Geometry, evaluate
from ..launch import basename
from ..options import names
from ..script import Script, is_chore, starts_workers
from ..walk import Step
from . import rule

#: Commands that write files to the path in their last argument or in an option.
_COPIES = names(
    """cp rsync tar unzip mkdir mv wget curl unsquashfs git scp dcp drsync rclone gsutil aws azcopy 7z install
    dd"""
)
_MAKES_ENVIRONMENT = names("virtualenv venv")
_CONDA = names("conda mamba micromamba")
_NODE_LOCAL = re.compile(
    r"\A(?:/tmp/|/dev/shm|/local|/scratch_local|/lscratch|\$\{?(?:SLURM_TMPDIR|TMPDIR|LOCAL_SCRATCH|LSCRATCH|"
    r"LOCAL_SSD|JOBFS|BB_JOB|TMP_LOCAL|LOCALDIR)\b)"
)
_HET_GROUP = re.compile("--(?:het|pack)-group")
#: The folder of the script as the default of a variable.
_DEFAULT = re.compile(r"\$\{\w+:?-.*(?:\$0|BASH_SOURCE)")
#: Options that give a task more than one CPU.
MORE_CPUS = names(
    """cpus-per-task cpus-per-gpu mincpus exclusive extra-node-info cores-per-socket sockets-per-node
    threads-per-core overcommit ntasks-per-core whole exact"""
)
#: Commands that a script uses to find the folder of a file.
_FIND_FOLDERS = names("dirname realpath readlink")
#: The script knows that it has possibly been copied, or starts itself with sbatch.
_KNOWS_ITS_COPY = re.compile(r"SLURM_SUBMIT_DIR|scontrol show job|\bsbatch\b|slurm_script|/spool/")
_WORKERS = re.compile(r"(?:.*[.])?(?:(?:n|num|data|dataset|loader|dataloader|train)_?)*workers\Z|(?:j|nw)\Z")


@rule(Severity.ERROR)
def unknown_het_group(script: Script) -> Iterator[Remark]:
    """Srun names a component that the heterogeneous job does not have, or uses only the first component.

    ``#SBATCH hetjob`` separates the components, which are numbered from 0. Without ``--het-group``,
    srun starts its tasks on component 0 only.

    Bad:
        #SBATCH --nodes=1
        #SBATCH hetjob
        #SBATCH --nodes=4
        srun --het-group=2 python train.py

    Good:
        #SBATCH --nodes=1
        #SBATCH hetjob
        #SBATCH --nodes=4
        srun --het-group=1 python train.py
    """
    count = len(script.header.components)
    if count == 1 and not script.mentions(_HET_GROUP):
        return  # `srun A : B` also works in other jobs
    sruns = [step for step in script.walk.steps if step.launch.via == "srun"]
    used = [option for step in sruns for option in step.launch.srun if option.name == "het-group"]
    for option in used:
        ends = [text for end in re.split("[,-]", option.value or "") for text in script.choices(end)]
        numbers = [evaluate(end, script.unknowns, script.job) for end in ends]
        wrong = [number for number in numbers if number is not None and number >= count]
        if wrong and (count > 1 or not script.walk.opaque):
            message = f"the job has no component {wrong[0]}: "
            message += (
                f"its components are 0 to {count - 1}" if count > 1 else "no line `#SBATCH hetjob` adds one"
            )
            # `sbatch OPTIONS : OPTIONS script` adds components too.
            severity = None if count > 1 else Severity.WARNING
            yield Remark(option.line, message, "correct the number, or add the component", severity)
    unclear = any(step.launch.opaque for step in sruns) or script.walk.opaque
    if count > 1 and script.sruns and not used and not unclear:
        step = script.sruns[0]
        message = (
            f"srun without --het-group uses component 0 only: {count - 1} of {count} components stay idle"
        )
        remedy = f"pass --het-group=0-{count - 1}, or start one srun per component"
        yield Remark(step.launch.srun_line or step.line, message, remedy, Severity.WARNING)


@rule(Severity.WARNING)
def first_node_only(script: Script) -> Iterator[Remark]:
    """The batch shell prepares node-local storage on the first node, but the tasks run on all nodes.

    $SLURM_TMPDIR, /tmp and similar folders are different on each node. If the batch shell puts a virtual
    environment or data in such a folder, they do not exist on the other nodes, where the program fails.

    Bad:
        #SBATCH --nodes=2
        virtualenv $SLURM_TMPDIR/env
        srun $SLURM_TMPDIR/env/bin/python train.py

    Good:
        #SBATCH --nodes=2
        srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 virtualenv $SLURM_TMPDIR/env
        srun $SLURM_TMPDIR/env/bin/python train.py
    """
    by_mpi = [step for step in script.training if "mpi" in " ".join(step.launch.wrappers)]
    starts = [*script.sruns, *(step for step in by_mpi if step.launch.kind == "python")]
    spread = [step for step in starts if (script.geometry(step).nodes or 1) > 1]
    if not spread:
        return
    prepared = _made_by_srun(script)
    for step in script.walk.steps:
        if step.launch.via or step.place.task is not None or step.line > spread[-1].line:
            continue
        words = [script.unknowns.shown(word.text) for word in step.launch.words]
        name = basename(words[0]) if words else ""
        makes = _MAKES_ENVIRONMENT & set(words[:3]) or (name in _CONDA and "create" in words[1:3])
        if name not in _COPIES and not makes:
            continue
        target = next((word for word in reversed(words[1:]) if not word.startswith("-")), "")
        if name in _CONDA:
            named = (to for option, to in pairwise(words) if option in ("-p", "--prefix"))
            target = next(named, target)
        target = target.partition("=")[2] or target
        local = _NODE_LOCAL.match(target) or any(target.startswith(path) for path in prepared)
        if local and name != "mkdir":
            what = "makes an environment" if makes else "writes files"
            message = f"the batch shell {what} in {target[:50]}, which exists on the first node only"
            commands = "the commands that make and fill it" if makes else "the command"
            remedy = f"run {commands} on each node: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 "
            yield Remark(step.line, message, remedy + ("bash -c '...'" if makes else "COMMAND"))


def _made_by_srun(script: Script) -> list[str]:
    """Return the folders that srun makes on each node: they are probably in node-local storage."""
    commands = (step.launch.words for step in script.walk.steps if step.launch.via == "srun")
    shown = ([script.unknowns.shown(word.text) for word in words] for words in commands)
    return [words[-1] for words in shown if "mkdir" in words and "/" in words[-1]]


@rule(Severity.WARNING)
def script_folder(script: Script) -> Iterator[Remark]:
    """The script looks for files beside itself, but Slurm executes a copy of the script.

    sbatch copies the script, and the first node executes the copy in Slurm's own folder, such as
    /var/spool/slurmd/job4711/slurm_script. ``$0`` and ``${BASH_SOURCE[0]}`` are the path of this copy.
    Files that lie beside the script are therefore not found.

    Bad:
        #SBATCH --ntasks=4
        cd "$(dirname "$0")"
        srun python train.py

    Good:
        #SBATCH --ntasks=4
        cd "$SLURM_SUBMIT_DIR"
        srun python train.py
    """
    if not script.header.options or script.is_draft or script.mentions(_KNOWS_ITS_COPY):
        return
    for use in script.walk.uses:
        place = use.place
        inside = place.origin or place.task or place.branches or place.condition
        if use.name in ("0", "BASH_SOURCE") and use.command in _FIND_FOLDERS and not inside:
            own = "$0" if use.name == "0" else "${BASH_SOURCE[0]}"
            message = f"{own} is Slurm's copy of the script in its spool folder, without the files beside it"
            remedy = "use $SLURM_SUBMIT_DIR, the folder in which sbatch was called, or write the path itself"
            # Python also finds modules in the folder of the program and in installed packages.
            default = _DEFAULT.search(script.line(use.line))  # the caller possibly sets the folder
            harmless = default or "PYTHONPATH=" in script.line(use.line) or _is_only_shown(script, use.line)
            severity = Severity.INFO if harmless else None
            yield Remark(use.line, message, remedy, severity)
            return


def _is_only_shown(script: Script, line: int) -> bool:
    """Return whether a line sets a variable that no command but echo uses."""
    found = {one.name for one in script.walk.assigned if one.line == line}
    uses = [use for use in script.walk.uses if use.name in found and use.command not in ("echo", "printf")]
    return bool(found) and not uses and not found & script.walk.exported


@rule(Severity.INFO)
def output_folder(script: Script) -> Iterator[Remark]:
    """The script makes the folder of its output file, but Slurm opens this file before the script starts.

    If the folder is missing, the job fails without any output. Slurm 22.05 behaves like this; Slurm 24.11
    and 26.05 make the folder.

    Bad:
        #SBATCH --output=logs/%j.out
        mkdir -p logs
        srun python train.py

    Good:
        # mkdir -p logs && sbatch train.sbatch
        #SBATCH --output=logs/%j.out
        srun python train.py
    """
    files = [script.job.options[name] for name in ("output", "error") if name in script.job.options]
    for step in script.walk.steps:
        words = [script.unknowns.shown(word.text) for word in step.launch.words]
        if not words or words[0] != "mkdir":
            continue
        made = {posixpath.normpath(word) for word in words[1:]}
        for file in files:
            folder = posixpath.normpath(posixpath.dirname(file.value or ""))
            if folder != "." and folder in made:
                message = f"Slurm opens {file.value} before this command makes {folder}: "
                message += "in some releases (22.05), the job fails if the folder is missing"
                remedy = f"make the folder before the job starts: mkdir -p {folder} && sbatch SCRIPT"
                yield Remark(step.line, message, remedy)
                return


@rule(Severity.INFO)
def one_core_per_task(script: Script) -> Iterator[Remark]:
    """A task with data loaders gets one core, because the script requests no ``--cpus-per-task``.

    Slurm's default is one CPU per task. A training process and its data loaders then share this CPU, and
    the GPU waits for data. Some sites give more CPUs for each GPU. The finding is a warning if the command
    asks for several data loaders.

    Bad:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gpus-per-node=4
        srun python train.py --num_workers 8

    Good:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gpus-per-node=4
        #SBATCH --cpus-per-task=10
        srun --cpus-per-task=10 python train.py --num_workers 8
    """
    for step in script.sruns:
        launch, geometry = step.launch, script.geometry(step)
        own = set(geometry.options) | {option.name for option in launch.srun}
        if own & MORE_CPUS or launch.opaque or launch.kind not in ("python", "launcher") or is_chore(launch):
            continue
        if (
            not geometry.asks_for_gpus
            or not geometry.tasks_per_node
            or "SRUN_CPUS_PER_TASK" in script.walk.exported
        ):
            continue
        loaders = _data_loaders(script, step, geometry)
        if loaders == 0:
            continue
        who = "all workers" if starts_workers(launch) else "each process"
        message = f"Slurm's default is one core per task: {who} and their data loaders share it"
        if loaders:
            message = f"{loaders} data loaders share one core, Slurm's default for a task"
        severity = Severity.WARNING if loaders and loaders > 1 else None
        line = geometry.line("ntasks-per-node", "ntasks") or step.line
        yield Remark(line, message, "request --cpus-per-task, and pass it to srun as well", severity)
        return


def _data_loaders(script: Script, step: Step, geometry: Geometry) -> int | None:
    for name, value in script.options_of_program(step.launch):
        if _WORKERS.match(name):
            return script.number(value, geometry)
    return None


@rule(Severity.WARNING)
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
        srun python train.py &
        wait
    """
    signal = script.job.value("signal") or ""
    flags, colon, _ = signal.partition(":")
    traps = [step for step in script.walk.steps if _sets_trap(step) and step.place.task is None]
    if "B" not in flags.upper() or not colon or not traps:
        return
    for step in script.training:
        line = step.launch.srun_line or step.line
        if step.place.background or (step.place.task is not None and step.launch.srun_line is None):
            continue
        if line < traps[0].line or step.place.substitution:
            continue
        if not step.launch.via and step.launch.kind not in ("python", "launcher"):
            continue  # the command possibly ends soon
        text = script.line(step.end).rstrip()
        whole = step.end == line and not step.place.piped and "#" not in text
        edit = Edit(step.end, "", f"{text} & wait") if whole else None
        message = f"bash runs the trap of line {traps[0].line} after this command ends, not when signalled"
        command = "srun ... | ..." if step.place.piped else "srun ..."
        remedy = f"start the command in the background and wait for it: {command} & wait"
        yield Remark(line, message, remedy, edit=edit)
        return


def _sets_trap(step: Step) -> bool:
    words = step.launch.words
    given = [word.text for word in words[1:] if word.text != "--"]
    if len(given) < 2 or words[0].text != "trap" or given[0] in ("-", "-l", "-p"):
        return False
    return any(text.upper() not in ("EXIT", "ERR", "DEBUG", "0") for text in given[1:])
