"""Launchers in a command: how they are recognised, what starts them, and the words that they need.

Launchers srun and torchrun of a matrix start one process per rank: a launcher in the command of a rank would
start a training in each of them. With launcher own, the command is started once per node or once per job, and
its launcher starts the ranks. `bench plan` refuses the other combinations, and `bench init --command` writes
the right one. `bench plan` does not see words within a shell script, or after ``bash -c``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a training, or a wrapper that starts another program.

    Attributes:
        name: the name in messages.
        pattern: a regular expression for its words, separated by spaces, without the folder of the program.
        starts: with launcher own, the values of command_per with which it works, the best first; empty for a
            wrapper, which stays in the command.
        replacement: the launcher of the matrix that does the same.
        words: the options, with placeholders, without which it does not start all ranks on several nodes.
            ``--option|-o VALUE`` has two names, of which the first is written.
        sizes: other options for sizes and hosts, with the placeholders that replace their values.
        omitted: options that are wrong at some sizes.
        refusal: the reason for which no run can use it.
        if_given: a launcher only if one of its ``words`` is given.
        flags: its options without a value, with underscores. After an option in neither list, the program is
            unknown. Names of one letter follow a single dash.
        values: its options with a value.
        starts_python: if true, it starts a script, or with ``-m`` a module, with python.
    """

    name: str
    pattern: str
    starts: tuple[str, ...] = ()
    replacement: str = ""
    words: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    refusal: str = ""
    if_given: bool = False
    flags: str = ""
    values: str = ""
    starts_python: bool = False


_MODULE = r"\S*python[0-9.]* (?:-[a-zA-Z]+ )*-[a-zA-Z]*m "
_MASTER = ("--master_addr {master_addr}", "--master_port {master_port}")
_ELASTIC = (
    *("--nnodes {nodes}", "--nproc_per_node {tasks_per_node}"),
    *("--rdzv_backend|--node_rank c10d", "--rdzv_endpoint|--master_addr {master_addr}:{master_port}"),
)

LAUNCHERS = (
    Launcher(  # torch/distributed/run.py of torch 2.13
        "torchrun",
        rf"torchrun|{_MODULE}torch\.distributed\.run",
        ("node",),
        "torchrun",
        _ELASTIC,
        omitted=("--standalone",),
        starts_python=True,
        flags="standalone run_path virtual_local_rank h help m module no_python",
        values="""nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts
        monitor_interval start_method event_log_handler role log_dir r redirects t tee local_ranks_filter
        duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr master_port local_addr
        logs_specs numa_binding signals_to_handle shutdown_timeout""",
    ),
    Launcher(
        "torch.distributed.launch",
        rf"{_MODULE}torch\.distributed\.launch",
        ("node",),
        words=(*_ELASTIC[:2], "--node_rank {node_rank}", *_MASTER),
    ),
    Launcher(  # accelerate/commands/launch.py: one process is an error with --multi_gpu
        "accelerate launch",
        r"accelerate launch|accelerate-launch"
        rf"|{_MODULE}accelerate\.commands\.(?:launch|accelerate_cli launch)",
        ("node", "job"),
        words=(
            *("--num_processes {world_size}", "--num_machines {nodes}", "--machine_rank {node_rank}"),
            *("--main_process_ip {master_addr}", "--main_process_port {master_port}"),
        ),
        omitted=("--multi_gpu", "--multi-gpu"),
    ),
    Launcher(  # deepspeed/launcher/runner.py; without --no_ssh, it starts the other nodes over ssh
        "deepspeed",
        rf"deepspeed|{_MODULE}deepspeed\.launcher\.runner",
        ("node", "job"),
        words=("--hostfile|-H {hostfile}", "--no_ssh", "--node_rank {node_rank}", *_MASTER),
        sizes=("--num_gpus {tasks_per_node}", "--num_nodes {nodes}"),
    ),
    Launcher(  # lightning/fabric/cli.py
        "fabric run",
        r"(?:fabric|lightning) run(?: model)?",
        ("node",),
        words=(
            *("--devices {tasks_per_node}", "--num-nodes {nodes}", "--node-rank {node_rank}"),
            *("--main-address {master_addr}", "--main-port {master_port}"),
        ),
    ),
    Launcher(  # composer/cli/launcher.py
        "composer",
        "composer",
        ("node",),
        words=(
            *(
                "--nproc|-n {tasks_per_node}",
                "--world_size {world_size}",
                "--node_rank {node_rank}",
                *_MASTER,
            ),
        ),
    ),
    Launcher(  # torchtune/_cli/run.py: without options of torchrun, it starts no processes
        "tune run", "tune run", ("node",), words=_ELASTIC, if_given=True
    ),
    Launcher(
        "colossalai run",
        "colossalai run",
        ("job",),
        words=("--nproc_per_node {tasks_per_node}", "--host|--hostfile|-H {hosts}", *_MASTER),
    ),
    Launcher(
        "horovodrun",
        "horovodrun",
        ("job",),
        words=("-np|--num-proc|-n {world_size}", "--hostfile|-hostfile|-H|--hosts {hostfile}"),
    ),
    Launcher(  # Open MPI
        "mpirun",
        r"(?:mpirun|mpiexec)(?:\.\w+)?|orterun|prterun",
        ("job",),
        words=(
            "-np|--np|-n {world_size}",
            "--hostfile|-hostfile|--machinefile|-machinefile|-f|-H|--host|-host {hostfile}",
        ),
        sizes=("-N|-npernode|--npernode|-ppn {tasks_per_node}",),
    ),
    Launcher(
        "ray job submit",
        "ray job submit",
        ("job",),
        refusal="it submits a job to another cluster, which has resources and time of its own",
    ),
    Launcher("sbatch", "sbatch|salloc", ("job",), refusal="it requests a job of its own beside the run's"),
    Launcher(  # srun(1); options that rarely start a training are not listed
        "srun",
        "srun",
        ("job",),
        "srun",
        flags="l label u unbuffered exclusive K kill_on_bad_exit",
        values="""N nodes n ntasks ntasks_per_node c cpus_per_task G gpus gpus_per_node gpus_per_task gres
        p partition A account t time w nodelist mem J job_name o output export mpi cpu_bind""",
    ),
    Launcher(
        "env",
        r"(?:env|[A-Za-z_]\w*=\S*)(?: [A-Za-z_]\w*=\S*)*",
        flags="i ignore_environment",
        values="u unset C chdir",
    ),
    Launcher(
        "run",
        "(?:uv|poetry|pipenv|pdm|rye|conda|mamba|micromamba) run",
        flags="frozen locked isolated active offline no_sync no_project no_capture_output live_stream",
        values="n name p prefix python cwd with extra group project directory env_file",
    ),
)


class LaunchLine(NamedTuple):
    """A launcher within a command, with its words."""

    launcher: Launcher
    wrapper: list[str]
    """The words before the launcher, such as ``env X=1`` or ``uv run``. The program needs them, too."""
    words: list[str]
    """The words of the launcher and its options, as far as they are certain."""
    program: list[str]
    """The words of the program, beginning with ``python`` for a script or module; empty if uncertain."""
    unknown: str = ""
    """The option after which the program is uncertain."""
    head: int = 1
    """The number of words that name the launcher."""
    rest: tuple[str, ...] = ()
    """All words after these."""

    @property
    def missing(self) -> list[str]:
        """The words that the launcher lacks on several nodes."""
        given = {_key(word) for word in self.rest[: self._end]}
        return [_first(option) for option in self.launcher.words if given.isdisjoint(_names(option))]

    @property
    def fixed(self) -> list[str]:
        """The words for nodes and hosts that have the same value on every node, and for every size."""
        options, found = [*self.rest[: self._end]], []
        for option in self.launcher.words:
            at = [place for place, word in enumerate(options) if _key(word) in _names(option)]
            values = [word for place in at for word in options[place : place + 2]]
            if at and _OF_NODES.search(option) and not any("{" in value for value in values):
                found.append(_first(option))
        return found

    def for_sizes(self) -> list[str]:
        """Return the command for all sizes: the launcher's options for sizes and hosts have placeholders."""
        launcher, words, rest = self.launcher, [], list(self.rest[: self._end])
        options = {name: option for option in launcher.sizes + launcher.words for name in _names(option)}
        while rest:
            word = rest.pop(0)
            option = options.get(_key(word))
            words += [word] if option is None else _first(option).split()
            if option and " " in option and "=" not in word:
                del rest[:1]
        words = [word for word in words if word not in launcher.omitted]
        added = [word for option in self.missing for word in option.split()]
        return [*self.wrapper, *self.words[: self.head], *added, *words, *self.rest[self._end :]]

    @property
    def started(self) -> tuple[str, ...]:
        """The words that the launcher starts, as they are written."""
        return self.rest[self._end :]

    @property
    def _end(self) -> int:
        """The position of the program in ``rest``: a script, module, interpreter, or second plain word."""
        takes_value = False
        for at, word in enumerate(self.rest):
            if _PROGRAM.search(word) or not (takes_value or word.startswith("-")):
                return at
            takes_value = word.startswith("-") and "=" not in word
        return len(self.rest)


_PROGRAM = re.compile(r"^(?:-m|--module|--)$|\.py$|(?:^|/)(?:python[0-9.]*|bash)$")


#: Names that only launchers have.
_ANY_LAUNCHER = re.compile(
    r"(?:\S*/)?(?:torchrun|accelerate|deepspeed|composer|horovodrun|mpirun|mpiexec|srun)"
)
_OF_NODES = re.compile(r"\{(?:nodes|node_rank|world_size|master_addr|hostfile)\}")


def _key(word: str) -> str:
    """Return the name of an option, for comparisons."""
    name = word.partition("=")[0]
    return name.replace("-", "_") if name.startswith("--") else name


def _names(option: str) -> set[str]:
    """Return the names of an option in ``words`` or ``sizes``."""
    return {_key(name) for name in option.partition(" ")[0].split("|")}


def _first(option: str) -> str:
    """Return an option in ``words`` or ``sizes`` with its first name only."""
    return re.sub(r"\|\S*", "", option)


def read_launch(words: Sequence[str]) -> LaunchLine | None:
    """Return the innermost launcher that a command starts, or None.

    The innermost launcher sets the ranks, as in ``srun torchrun train.py``.
    """
    text = " ".join(word.replace(" ", "\0") for word in words)
    for launcher in LAUNCHERS:
        match = re.match(rf"(?:[^ =]*/)?(?:{launcher.pattern})(?= |$)", text)
        if match is None:
            continue
        head = match[0].count(" ") + 1
        options, program, unknown = _split(launcher, list(words[head:]))
        own = [*words[:head], *options]
        if launcher.starts_python and program:
            python = words[0] if head > 1 and "python" in words[0] else "python"
            program = _python_program(python, options, program)
        inner = read_launch(program) if program else None
        if inner is not None:
            # Without a shell, X=1 is not an assignment: env(1) does the same.
            before = (["env"] if "=" in words[0] else []) + ([] if launcher.starts else own)
            return inner._replace(wrapper=[*before, *inner.wrapper])
        program = program if launcher.replacement else []
        line = LaunchLine(launcher, [], own, program, unknown, head, tuple(words[head:]))
        is_launcher = launcher.starts and not (launcher.if_given and len(line.missing) == len(launcher.words))
        return line if is_launcher else None
    # Behind a program that starts others, such as `numactl -N 0 torchrun`.
    for at, word in enumerate(words):
        if _PROGRAM.search(word) or word.endswith(".sh"):
            return None
        if at and _ANY_LAUNCHER.fullmatch(word):
            inner = read_launch(words[at:])
            return inner and inner._replace(wrapper=[*words[:at], *inner.wrapper])
    return None


def _split(launcher: Launcher, words: list[str]) -> tuple[list[str], list[str], str]:
    """Split the words after a launcher into its options and the program.

    After an unknown option, which is the last value, the program is empty.
    """
    flags, values = launcher.flags.split(), launcher.values.split()
    options: list[str] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        options.append(word)
        if word == "--":
            break
        name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
        if not word.startswith("--"):
            name, equals = name[:1], name[1:] + equals
        if name in values:
            options += [] if equals else words[:1]
            words = words if equals else words[1:]
        elif name not in flags:
            return [*options, *words], [], word
    return options, words, ""


def _python_program(python: str, options: Sequence[str], program: list[str]) -> list[str]:
    """Return the words of the process that a launcher written in Python starts."""
    names = {option.lstrip("-").replace("-", "_") for option in options}
    if names & {"m", "module"}:
        return [python, "-m", *program]
    return program if "no_python" in names and "run_path" not in names else [python, *program]
