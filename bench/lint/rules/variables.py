"""Rules about expansions: undefined variables, digits read as octal, and quotes that form other words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from ...findings import Edit, Remark, Severity
from ..expansion import Unknown
from ..script import Script
from ..walk import Use
from . import rule

#: Variables that Slurm sets only if a certain option is given (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
_NEEDED_OPTIONS: dict[str, tuple[str, ...]] = {
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_GPUS": ("gpus",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_CPUS_PER_GPU": ("cpus-per-gpu",),
    "SLURM_ARRAY_TASK_ID": ("array",),
    "SLURM_ARRAY_JOB_ID": ("array",),
    "SLURM_ARRAY_TASK_COUNT": ("array",),
}
#: Variables that Slurm sets, without ``SLURM_``.
_SLURM_NAMES = """
ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN ARRAY_TASK_STEP CLUSTER_NAME CONF
CPUS_ON_NODE CPUS_PER_GPU CPUS_PER_TASK CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE CPU_BIND_VERBOSE CPU_FREQ_REQ
DEBUG DIST_PLANESIZE DISTRIBUTION EXPORT_ENV GPUS GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK
GPU_BIND GPU_FREQ GTIDS HET_SIZE HINT JOBID JOB_ACCOUNT JOB_CPUS_PER_NODE JOB_DEPENDENCY JOB_END_TIME
JOB_GID JOB_GPUS JOB_GROUP JOB_ID JOB_LICENSES JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_PARTITION JOB_QOS
JOB_RESERVATION JOB_START_TIME JOB_UID JOB_USER LAUNCH_NODE_IPADDR LOCALID MEM_BIND MEM_PER_CPU MEM_PER_GPU
MEM_PER_NODE MPI_TYPE NNODES NODEID NODELIST NODE_ALIASES NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU
NTASKS_PER_NODE NTASKS_PER_SOCKET OOMKILLSTEP OVERCOMMIT PRIO_PROCESS PROCID PROFILE RESTART_COUNT
SCRIPT_CONTEXT SHARDS_ON_NODE SRUN_COMM_HOST SRUN_COMM_PORT STEPID STEP_GPUS STEP_ID STEP_LAUNCHER_PORT
STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE
TASK_PID THREADS_PER_CORE TOPOLOGY_ADDR TOPOLOGY_ADDR_PATTERN TRES_PER_TASK UMASK WCKEY WORKING_CLUSTER
WHOLE TMPDIR JOB_TMP SCRATCH JOB_COMMENT NODEFILE HOSTFILE TIMELIMIT KILL_BAD_EXIT WAIT UNBUFFEREDIO NETWORK
EXACT OVERLAP SPANK_TASK_ENV JOBTMP HET_GROUP JOB_SCRATCHDIR RLIMIT_STACK QOS PARTITION ACCOUNT CONTAINER
JOB_CONSTRAINTS TASKS USER
"""
_SLURM_VARIABLES = frozenset(
    {"SLURMD_NODENAME", "SLURMD_TRES_FREQ", *(f"SLURM_{name}" for name in _SLURM_NAMES.split())}
)
#: Variables of the login shell, of common software and of sites, which a job usually inherits.
_COMMON_VARIABLE = re.compile(
    r"""(?:
    HOME|USER|LOGNAME|PATH|PWD|OLDPWD|SHELL|SHLVL|HOSTNAME|HOST|HOSTTYPE|OSTYPE|MACHTYPE|LANG|LANGUAGE|TERM|EDITOR
    |TMPDIR|TMP|TEMP|UID|EUID|PPID|RANDOM|SRANDOM|SECONDS|LINENO|EPOCHSECONDS|EPOCHREALTIME|FUNCNAME|PIPESTATUS|IFS
    |REPLY|OPTARG|OPTIND|DIRSTACK|GROUPS|COLUMNS|LINES|DISPLAY|MAIL|MANPATH|INFOPATH|LD_LIBRARY_PATH|LD_PRELOAD
    |LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|PKG_CONFIG_PATH|CMAKE_PREFIX_PATH|PYTHON\w+|VIRTUAL_ENV
    |PS\d|PROMPT_COMMAND|HISTFILE|DEBUG|VERBOSE|CI|CC|CXX|FC|CFLAGS|SSH_\w+|KRB5\w*|EMAIL|HPC\w*|SYSTEMNAME|CLUSTER
    |SITE|LMOD\w*|NETWORK_ROOT|OAK|CFS|PSCRATCH|DSDIR|STORE|WORK|GROUP|PI_HOME|SLURM\w*|JOB_?ID|ARCH|DATAPATH
    |(?:SINGULARITY|APPTAINER|BASH|XDG|LC|CONDA|MAMBA|CUDA|NV|NVIDIA|NCCL|RCCL|ROCM|ROCR|HIP|HSA|OMPI|PMI|PMIX|PALS|I
      |MPI|EB|LMOD|MODULE|MODULES|SPACK|UENV|PBS|SGE|LSB|HF|HUGGINGFACE|TRANSFORMERS|WANDB|AWS|GOOGLE|AZURE|OMP|KMP
      |MKL|OPENBLAS|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|GLOO|UCX|FI|CRAY|MPICH|XLA|TF|JAX|GIT|PIP|NVTE|VLLM|RAY|FSX
      |EBROOT|EBVERSION|ALL_CCF\w*)_?\w*
    |\w*(?:SCRATCH|WORK|HOME|PROJECT|PROJ|PROJECTS|TMPDIR|STORAGE|ACCOUNT|TOKEN|API_KEY|KEY|USERNAME|BASE|ROOT)\w*
    |[0-9]+|[@*#?$!_-]
    )\Z""",
    re.VERBOSE,
)
#: Commands for which an empty argument does no harm.
_HARMLESS = frozenset(
    {"echo", "printf", "[", "test", "[[", "let", "cat", "unset", "logger", ":", "mkdir", "ls", "cd"}
)
#: Variables that launchers set for their workers, with equivalent expressions of Slurm's variables.
_OF_LAUNCHER = {
    "MASTER_ADDR": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "MASTER_PORT": "$((10000 + SLURM_JOB_ID % 20000))",
    "WORLD_SIZE": "$SLURM_NTASKS",
    "LOCAL_WORLD_SIZE": "$SLURM_NTASKS_PER_NODE",
    "RANK": "$SLURM_PROCID",
    "LOCAL_RANK": "$SLURM_LOCALID",
    "GROUP_RANK": "$SLURM_NODEID",
    "NODE_RANK": "$SLURM_NODEID",
}
_FOR_TASKS = re.compile(r"(?:MASTER_ADDR|MASTER_PORT|WORLD_SIZE|(?:NCCL|GLOO|TORCH|OMP|UCX|FI)_[A-Z0-9_]+)\Z")
#: Variables of another scheduler or platform, which also sets the variables of a launcher.
_OTHER_PLATFORM = re.compile(
    r"\$\{?(?:KUBERNETES|OMPI|PMI|PMIX|LSB|PBS|SGE|COBALT|FLUX|OAR|VC|AZUREML|SM|MLP|ARNOLD|PET)_[A-Z]"
)
#: A loop over the nodes but the first, which does nothing in a job of one node.
_OTHER_NODES = re.compile(r"(?:NNODES|NUM_NODES)\}?\s*-\s*1")
_NUMBER_OF_NODES = re.compile("SLURM_NNODES|SLURM_JOB_NUM_NODES")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_PADDED_COMMAND = re.compile(
    r"tail\s+(?:-c|--bytes)|cut\s+-c|head\s+-c|\bdate\b[^|+]*\+[\"']?%0?[SMHdmjNyV]|rev\b.*cut|printf[^|]*%0"
    r"|grep\s+-\w*o\w*\s+['\"]?(?:\.\.|\[0-9\]|\\d)|sed\b.*\\?\(\.\."
)
_OCTAL = re.compile(r"(?<![\w.#])0\d*[89]\d*(?![\w.])")
_DECIMAL = re.compile(r"\|\s*bc\b")
_SOURCE_OF_DIGITS = re.compile(r"JOB_?ID|TASK_ID|PROCID|STEP|\bdate\b|printf|PORT|hostname", re.I)
_DIGITS_OF_ID = re.compile(r"JOB_?ID|TASK_ID|PROCID|STEP", re.I)
_HOST_LIST = re.compile(r"scontrol show host|\$\(srun\b[^|]* hostname\b")
_QUOTED_ELEMENT = re.compile(r"\(\"(\$\w+|\$\{\w+\})\"\)")


@rule(Severity.WARNING)
def undefined_variable(script: Script) -> Iterator[Remark]:
    """A variable is used that is not set, or that is set but not exported to the tasks.

    Such a variable expands to an empty string, so that an option has no value, or an address has no host.
    Only variables of Slurm or of a launcher are certainly empty. Other variables may come from the shell that
    submits the job, because sbatch passes its environment on. Their findings have severity ``info``, and are
    omitted if a comment, a test or a default in the script shows that the caller sets the variable.
    A launcher's variables have severity ``info`` in scripts that also use variables of another scheduler.
    The rule does not apply to scripts that source a file, because that file may set the variable.

    Bad:
        #SBATCH --ntasks=8
        srun python train.py --gpus $SLURM_NTASKS_PER_NODE

    Good:
        #SBATCH --ntasks-per-node=8
        srun python train.py --gpus $SLURM_NTASKS_PER_NODE
    """
    if script.walk.opaque or script.is_draft:
        return
    given = script.job.value("export") or ""
    reported: set[str] = set()
    for use in script.walk.uses:
        if use.name in reported or use.command in _HARMLESS or use.guarded:
            continue
        remark = _undefined(script, use)
        if remark and f"{use.name}=" not in given:
            reported.add(use.name)
            yield remark
    yield from _missing_in_tasks(script)


def _undefined(script: Script, use: Use) -> Remark | None:
    """Return a finding if a used variable is undefined, or None."""
    name, line = use.name, use.line
    if script.line(line).lstrip().startswith(f"${name}="):
        return None  # an assignment with a $ before the name, which stray-command reports
    if name.startswith("SLURM"):
        return _undefined_by_slurm(script, use)
    if use.known or not _NAME.match(name) or _COMMON_VARIABLE.match(name) or name in script.walk.expected:
        return None
    assigned = script.assigned_to.get(name, ())
    if use.place.task is not None and any(not one.in_task and one.line < line for one in assigned):
        message = f"${name} is set in the batch shell but not exported: it is empty in the task"
        return Remark(line, message, f"write export {name}=...")
    itself = line if name in _OF_LAUNCHER else 0
    if any((use.place.loops or one.line < line) and one.line != itself for one in assigned):
        return None
    if name in _OF_LAUNCHER and use.place.task is None:
        message = f"${name} is empty here: a launcher sets it only for the processes that it starts"
        remedy = f"set {name} before this line: {name}={_OF_LAUNCHER[name]}"
        if name.endswith("RANK"):
            remedy = f"use {_OF_LAUNCHER[name]} in a command that srun starts"
        elsewhere = _relies_on_caller(script) or script.mentions(_OTHER_PLATFORM)
        return Remark(line, message, remedy, Severity.INFO if elsewhere else None)
    if _caller_sets(script, name):
        return None
    unless = "unless the submitting shell exports it"
    if assigned:
        message = f"${name} is only set in line {assigned[0].line}, so it is empty here {unless}"
        return Remark(line, message, f"set {name} to a value before this line", Severity.INFO)
    close = difflib.get_close_matches(name, script.assigned_to, n=1, cutoff=0.8)
    meant = f"; did you mean ${close[0]}?" if close else ""
    remedy = (
        f"use ${close[0]}" if close else f"set {name} in the script, or submit with --export=ALL,{name}=VALUE"
    )
    return Remark(line, f"nothing sets ${name}, so it is empty {unless}{meant}", remedy, Severity.INFO)


def _caller_sets(script: Script, name: str) -> bool:
    """Return whether a comment or a text for the user names the variable."""
    mentioned = re.compile(rf"#.*\b{name}\b|--export=.*\b{name}\b|\b(?:echo|printf|usage)\b.*\b{name}\b")
    return any(mentioned.search(line[:2000]) for line in script.lines)


def _relies_on_caller(script: Script) -> bool:
    """Return whether the script uses at least two lower-case variables that it does not set."""
    unset = {use.name for use in script.walk.uses if not use.known and not use.guarded and use.name.islower()}
    return len(unset - set(script.assigned_to)) > 1


def _undefined_by_slurm(script: Script, use: Use) -> Remark | None:
    """Return a finding if Slurm does not set the variable in this job, or None."""
    name = use.name
    if name in script.assigned_to or _is_tested_above(script, use):
        return None
    if name not in _SLURM_VARIABLES and "_HET_GROUP_" not in name:
        gpus = re.search("NUM_?GPU|NGPU|GPUS?_COUNT", name)
        close = difflib.get_close_matches(name, sorted(_SLURM_VARIABLES), n=1, cutoff=0.8)
        close = ["SLURM_GPUS_ON_NODE"] if gpus else close
        if close and name.startswith(f"{close[0]}_"):
            close = [f"{{{close[0]}}}{name.removeprefix(close[0])}"]
        if close:
            message = f"Slurm does not set ${name}, so it is empty; did you mean ${close[0]}?"
            return Remark(use.line, message, f"use ${close[0]}")
    options = _NEEDED_OPTIONS.get(name, ())
    given = set(script.job.options) | {option.name for step in script.sruns for option in step.launch.srun}
    if options and not given & set(options) and not _given_in_usage(script, options[0]):
        message = f"Slurm sets ${name} only in jobs with --{options[0]}, which this script does not request"
        remedy = f"add --{options[0]}, or write ${{{name}:-NUMBER}}"
        # Job arrays, and the sizes of jobs without a number of nodes, are given on the command line.
        sizes = {"nodes", "ntasks", "ntasks-per-node"} & set(script.job.options)
        elsewhere = not sizes or ("nodes" not in sizes and script.mentions(_NUMBER_OF_NODES))
        for_other_nodes = use.place.loops and script.job.nodes == 1 and script.mentions(_OTHER_NODES)
        uncertain = options == ("array",) or elsewhere or for_other_nodes or use.place.branches
        severity = Severity.INFO if uncertain else None
        return Remark(use.line, message, remedy, severity)
    return None


def _given_in_usage(script: Script, option: str) -> bool:
    """Return whether a comment shows that the caller passes an option to sbatch."""
    usage = re.compile(rf"\s*#.*\bsbatch\b.*--{option}\b")
    return any(usage.match(line[:500]) for line in script.lines)


def _is_tested_above(script: Script, use: Use) -> bool:
    """Return whether one of the lines above a use tests whether the variable has a value."""
    test = re.compile(
        rf"(?:\[|\btest|!|&&|\|\|)\s*-[nv]\s+\"?\$?\{{?{use.name}\b|\${{?{use.name}\}}?\"?\s*!=\s*(?:\"\"|'')"
    )
    return any(test.search(line[:500]) for line in script.lines[max(0, use.line - 6) : use.line])


def _missing_in_tasks(script: Script) -> Iterator[Remark]:
    """Find variables such as MASTER_ADDR that are meant for the tasks, but neither exported nor used.

    torchrun and similar launchers set the variables of the rendezvous themselves.
    """
    sruns = [step for step in script.sruns if step.launch.kind == "python"]
    alone = all((script.geometry(step).ntasks or 2) == 1 for step in sruns)
    used = {use.name for use in script.walk.uses}
    for name, assigned in script.assigned_to.items():
        first = assigned[0]
        if not _FOR_TASKS.match(name) or name in used or name in script.walk.exported or first.in_task:
            continue
        if script.sruns:
            written = f"{name}="
            is_plain = script.line(first.line).startswith(written)
            edit = Edit(first.line, written, f"export {written}") if is_plain else None
            message = f"{name} is set, but neither exported nor used: the tasks do not get it"
            unread = name in _OF_LAUNCHER and alone
            remedy = f"write export {name}=..."
            yield Remark(first.line, message, remedy, Severity.INFO if unread else None, edit)


@rule(Severity.WARNING)
def port_octal_arithmetic(script: Script) -> Iterator[Remark]:
    """A number in an arithmetic expression possibly starts with 0; bash then reads it as octal.

    If the last digits of the job ID are 0899, bash stops with "value too great for base". If they
    are 0123, bash reads them as 83.

    Bad:
        export MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))

    Good:
        export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
    """
    remedy = "write $((10000 + SLURM_JOB_ID % 10000)), or put 10# before the digits"
    for unknown in script.unknowns:
        # expr and bc read all numbers as decimal.
        decimal = unknown.source.startswith("$(") and not unknown.source.startswith("$((")
        if unknown.kind != "arith" or "10#" in unknown.source or decimal or script.mentions(_DECIMAL):
            continue
        literal = _OCTAL.search(unknown.source)
        if literal:
            message = f"bash reads {literal.group()} as octal, where the digits 8 and 9 are an error"
            shorter = Edit(unknown.line, literal.group(), literal.group().lstrip("0"))
            yield Remark(unknown.line, message, "write the number without the leading 0", edit=shorter)
            continue
        inner = next(filter(_may_start_with_zero, script.unknowns.of(unknown.default or "")), None)
        if inner:
            message = (
                f"{inner.source[:60]} can start with 0: bash then reads it as octal, and 0899 is an error"
            )
            in_line = inner.source in unknown.source
            edit = Edit(unknown.line, inner.source, f"10#{inner.source}") if in_line else None
            yield Remark(unknown.line, message, remedy, edit=edit)


def _may_start_with_zero(unknown: Unknown) -> bool:
    if unknown.kind == "command":
        source = unknown.source[:1000]
        return bool(_PADDED_COMMAND.search(source)) and bool(_SOURCE_OF_DIGITS.search(source))
    return unknown.op == ":" and bool(_DIGITS_OF_ID.search(unknown.name))


@rule(Severity.ERROR)
def node_list_in_one_element(script: Script) -> Iterator[Remark]:
    """An array of the job's hosts has a single element, because the list is quoted.

    bash splits only unquoted expansions into words, so ``("$nodes")`` is an array with one element.
    ``${nodes_array[0]}`` is then the whole list, and ``${nodes_array[1]}`` is empty.

    Bad:
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        nodes_array=("$nodes")

    Good:
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        nodes_array=($nodes)
    """
    for assigned in script.walk.assigned:
        if not assigned.quoted or assigned.items is None:
            continue
        item = assigned.items[0]
        if not _HOST_LIST.search(script.unknowns.shown(item.text)):
            continue
        indexed = script.mentions(re.compile(rf"\$\{{{assigned.name}\[[^@*]|\"\$\{{{assigned.name}\[@"))
        single = not indexed or (not script.job.several_nodes and "nodes" in script.job.options)
        message = f"the quotes make one element of all hosts: ${{{assigned.name}[0]}} is the whole list"
        match = _QUOTED_ELEMENT.search(script.line(assigned.line))
        edit = Edit(assigned.line, match.group(), f"({match.group(1)})") if match else None
        yield Remark(assigned.line, message, "remove the quotes", Severity.INFO if single else None, edit)


@rule(Severity.WARNING)
def arguments_split(script: Script) -> Iterator[Remark]:
    """``"$@"`` within a text for ``bash -c`` passes only the first argument.

    bash splits ``bash -c "train.sh $@"`` into several words. The text up to the first argument is the
    command. The other arguments become $0, $1 and so on of this command, which does not use them.

    Bad:
        srun bash -c "python train.py $@"

    Good:
        srun bash -c 'python train.py "$@"' bash "$@"
    """
    for part in script.walk.split:
        name = "$@" if part.text == "@" else f"${{{part.text}}}"
        message = f"bash -c gets only the first argument: {name} within a text becomes several words"
        remedy = 'write bash -c \'... "$@"\' bash "$@", and export the variables that the text uses'
        yield Remark(part.line, message, remedy)


@rule(Severity.ERROR)
def brace_in_default(script: Script) -> Iterator[Remark]:
    """A default in braces, such as ``{}`` in ``${name:-{}}``, ends at its first closing brace.

    bash takes ``{`` as the default, and the last brace as text after the expansion. If the variable
    is set, its value is followed by a stray brace.

    Bad:
        CONFIG="${2:-{}}"

    Good:
        EMPTY='{}'
        CONFIG="${2:-$EMPTY}"
    """
    for unknown in script.unknowns:
        default = unknown.default or ""
        cut = default.startswith("{") and default.count("{") > default.count("}")
        if unknown.kind == "param" and unknown.op in (":-", "-", ":=", "=") and cut:
            message = f"if ${unknown.name} is set, a stray }} follows its value"
            remedy = "put the braces in a variable: EMPTY='{}', and then ${...:-$EMPTY}"
            yield Remark(unknown.line, f"{message}: the default ends at the first }}", remedy)
