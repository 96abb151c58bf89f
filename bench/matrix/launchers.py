"""Launchers in a command: how they are recognised, and their replacement by the launchers of a matrix.

The harness starts one process per rank. If the command of a rank is a launcher, too, each rank starts a
training of its own: `bench plan` warns about it, and `bench init --command` replaces the launcher or refuses
the command. Words within a shell script, or after ``bash -c``, are not visible.
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
        replacement: the launcher of the matrix that replaces it; empty for a wrapper, which stays.
        refusal: the reason for which `bench init` refuses it.
        flags: its options without a value, with underscores. After an option in neither list, the program is
            unknown. Names of one letter follow a single dash.
        values: its options with a value.
        starts_python: if true, it starts a script, or with ``-m`` a module, with python.
    """

    name: str
    pattern: str
    replacement: str = ""
    refusal: str = ""
    flags: str = ""
    values: str = ""
    starts_python: bool = False


_MODULE = r"\S*python[0-9.]* (?:-[a-zA-Z]+ )*-[a-zA-Z]*m "
_LOCAL_RANK = "it passes --local_rank to the script, and torchrun sets LOCAL_RANK only"
_MODULE_FLAGS = "m module no_python"

LAUNCHERS = (
    Launcher(  # torch/distributed/run.py of torch 2.13
        "torchrun",
        rf"torchrun|{_MODULE}torch\.distributed\.run",
        replacement="torchrun",
        starts_python=True,
        flags=f"standalone run_path virtual_local_rank h help {_MODULE_FLAGS}",
        values="""nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts
        monitor_interval start_method event_log_handler role log_dir r redirects t tee local_ranks_filter
        duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr master_port local_addr
        logs_specs numa_binding signals_to_handle shutdown_timeout""",
    ),
    Launcher(
        "torch.distributed.launch",
        rf"{_MODULE}torch\.distributed\.launch",
        "torchrun",
        _LOCAL_RANK,
        starts_python=True,
    ),
    Launcher(  # only options without an effect on the program, or that the matrix replaces
        "accelerate launch",
        r"accelerate launch|accelerate-launch"
        rf"|{_MODULE}accelerate\.commands\.(?:launch|accelerate_cli launch)",
        replacement="torchrun",
        starts_python=True,
        flags=f"multi_gpu {_MODULE_FLAGS}",
        values="num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend",
    ),
    Launcher(
        "deepspeed",
        rf"deepspeed|{_MODULE}deepspeed\.launcher\.runner",
        "torchrun",
        _LOCAL_RANK,
        starts_python=True,
    ),
    Launcher(
        "mpirun",
        r"(?:mpirun|mpiexec)(?:\.\w+)?|orterun|prterun",
        "srun",
        "it gives each process MPI's variables instead of RANK and WORLD_SIZE",
    ),
    Launcher(  # srun(1); options that rarely start a training are not listed
        "srun",
        "srun",
        replacement="srun",
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
    """The words of the launcher and its options."""
    program: list[str]
    """The words of the program, beginning with ``python`` for a script or module; empty if uncertain."""
    unknown: str = ""
    """The option after which the program is uncertain."""


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
            before = (["env"] if "=" in words[0] else []) + ([] if launcher.replacement else own)
            return inner._replace(wrapper=[*before, *inner.wrapper])
        return LaunchLine(launcher, [], own, program, unknown) if launcher.replacement else None
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
