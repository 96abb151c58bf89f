"""Read a command: wrappers of the shell, srun with its options, a launcher with its options, the program.

Only bash's own words and launchers are known by name. Any other program is ``unknown``: it may start
anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .options import Option, names, srun_options
from .values import Value, plain

SHELLS = names("bash sh dash zsh ksh")
#: Launchers that may start processes on other nodes.
REACHES_NODES = names(
    """srun mpirun mpiexec mpiexec.hydra mpirun_rsh orterun prun prterun ibrun aprun jsrun lrun flux
    horovodrun ssh pdsh clush parallel-ssh pssh sbatch salloc deepspeed composer lightning fabric
    colossalai oshrun charmrun pbsdsh dsh parallel xargs ray dask dask-mpi dask-ssh spark-submit"""
)
#: Builtins of bash, which start nothing (bash(1), SHELL BUILTIN COMMANDS).
BUILTINS = names(
    """: [ alias bg bind break builtin caller cd compgen complete compopt continue declare dirs disown echo
    enable exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd
    printf pushd pwd read readarray readonly return set shift shopt suspend test times trap true type
    typeset ulimit umask unalias unset wait"""
)
#: Words before a command that change nothing about what it starts.
_PREFIXES = names("exec command nohup time builtin")
# Python modules that are launchers, for `python -m`.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate",
}
#: Names of the options that torch.distributed.run accepts (torch/distributed/run.py, get_args_parser).
TORCHRUN_OPTIONS = names(
    """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts
    monitor_interval start_method event_log_handler role m module no_python run_path log_dir r redirects t
    tee local_ranks_filter node_rank master_addr master_port local_addr logs_specs numa_binding
    signals_to_handle virtual_local_rank duplicate_stdout_filters duplicate_stderr_filters
    shutdown_timeout h help"""
)
_TORCHRUN_FLAGS = names("standalone m module no_python run_path virtual_local_rank h help use_env")
#: Flags of `accelerate launch` (accelerate/commands/launch.py, launch_command_parser).
_ACCELERATE_FLAGS = names(
    """cpu multi_gpu tpu use_mps_device use_deepspeed use_fsdp use_megatron_lm use_xpu ipex quiet m module
    no_python debug same_network dynamo_use_fullgraph dynamo_use_dynamic enable_cpu_affinity h help
    use_parallelism_config tpu_use_cluster tpu_use_sudo no_tpu_cluster"""
)
#: Launchers that start several workers on their node, with their flags.
LAUNCHERS = {"torchrun": _TORCHRUN_FLAGS, "launch": _TORCHRUN_FLAGS, "accelerate": _ACCELERATE_FLAGS}
#: Options of python that have a value in the next word (python --help).
_PYTHON_WITH_VALUE = names("-W -X --check-hash-based-pycs")


@dataclass(slots=True)
class Launch:
    """The parts of a command.

    ``kind`` is ``python``, ``launcher``, ``shell`` (a file for a shell), ``inner`` (text for a shell),
    ``builtin``, ``nothing`` or ``unknown``. ``via`` is ``srun`` or another launcher that reaches nodes.
    ``opaque`` is True if an unknown expansion may contain further words for srun or the launcher.
    ``options`` are those of the launcher, with underscores. ``environment`` is what env sets.
    """

    kind: str = "nothing"
    via: str = ""
    srun: tuple[Option, ...] = ()
    opaque: bool = False
    launcher: str = ""
    options: dict[str, Value] = field(default_factory=dict)
    program: Value | None = None
    arguments: tuple[Value, ...] = ()
    environment: dict[str, Value] = field(default_factory=dict)

    @property
    def node_count(self) -> Value | None:
        """The number of nodes in the options of a launcher, or None."""
        return self.options.get("nnodes") or self.options.get("num_machines")

    def srun_option(self, name: str) -> Option | None:
        """Return the last occurrence of an option of srun, or None."""
        return next((option for option in reversed(self.srun) if option.name == name), None)


def read_command(words: Sequence[Value]) -> Launch:
    """Return the parts of a command."""
    return _Reader(words).read()


def _is_several(word: Value) -> bool:
    """Return whether a word is an unknown expansion that possibly results in several words."""
    only = word.only
    return only is not None and (not word.quoted or only.name == "@" or "[@]" in only.source)


class _Reader:
    """Read the words of a command from left to right."""

    def __init__(self, words: Sequence[Value]) -> None:
        self.words = words
        self.at = 0
        self.launch = Launch()

    def read(self) -> Launch:
        while self.at < len(self.words) and self._wrapper():
            pass
        if self.at < len(self.words) and self.launch.kind == "nothing":
            self._program()
        return self.launch

    def _text(self) -> str:
        return self.words[self.at].shown if self.at < len(self.words) else ""

    def _name(self) -> str:
        """Return the name of the next program without its folder, or an empty string if it is unknown."""
        text = self.words[self.at].literal if self.at < len(self.words) else None
        if text is None:
            last = self.words[self.at].parts[-1]
            text = last if isinstance(last, str) and "/" in last else ""
        return text.rpartition("/")[2]

    def _wrapper(self) -> bool:
        """Read one word before the program; return whether there may be another one."""
        name = self._name()
        if name == "env":
            return self._env()
        if name == "srun" and not self.launch.via:
            self._srun()
            return True
        option = any(word.start.startswith("-") for word in self.words[self.at + 1 : self.at + 2])
        self.at += name in _PREFIXES and not option
        return name in _PREFIXES and not option

    def _env(self) -> bool:
        """Read ``env NAME=VALUE ...``."""
        self.at += 1
        while self.at < len(self.words):
            word = self.words[self.at]
            name, equals, _ = word.start.partition("=")
            if word.start.startswith("-"):
                self.launch.kind, self.at = "unknown", len(self.words)
            if not equals or not name.isidentifier():
                return True
            self.launch.environment[name] = word.after(f"{name}=")
            self.at += 1
        return True

    def _srun(self) -> None:
        launch = self.launch
        launch.via = "srun"
        options, rest = srun_options().read(self.words[self.at + 1 :])
        launch.srun, self.at = tuple(options), len(self.words) - len(rest)
        if rest and (_is_several(rest[0]) or rest[0].literal == ":"):  # : separates components
            launch.opaque, launch.kind, self.at = True, "unknown", len(self.words)

    def _program(self) -> None:
        name, launch, word = self._name(), self.launch, self.words[self.at]
        self.at += 1
        launch.kind, launch.program = "unknown", word
        if name in BUILTINS:
            launch.kind = "builtin"
        elif name in SHELLS:
            self._shell()
        elif name.startswith("python") and (name[6:] or "3").replace(".", "").isdecimal():  # python3.11
            self._python()
        elif name in REACHES_NODES or name.startswith(("mpirun.", "mpiexec.")):
            launch.via = launch.via or name
        elif name in LAUNCHERS and name != "launch":
            self._launcher(name)
        elif name.endswith(".py"):
            launch.kind = "python"
        launch.arguments = launch.arguments or tuple(self.words[self.at :])

    def _shell(self) -> None:
        """Read ``bash -c TEXT`` or ``bash FILE``."""
        inner = False
        while self._text().startswith("-"):
            inner = inner or (not self._text().startswith("--") and self._text().endswith("c"))
            self.at += 1
        if self.at >= len(self.words):
            return
        self.launch.kind, self.launch.program = "inner" if inner else "shell", self.words[self.at]
        self.at += 1

    def _python(self) -> None:
        launch = self.launch
        while self._text().startswith("-"):
            option = self._text()
            self.at += 1
            if option == "-m":
                self._module()
                return
            if not option.startswith("--") and option.endswith("c"):
                return  # text for Python
            self.at += option in _PYTHON_WITH_VALUE
        if self.at < len(self.words):
            launch.kind, launch.program = "python", self.words[self.at]
            self.at += 1

    def _module(self) -> None:
        name = self._text()
        self.at += 1
        if name == "ddp_scaling_bench.start" and self._text() in MODULES:
            name = self._text()
            self.at += 1
        if name in MODULES:
            self._launcher(MODULES[name])
        elif self.at <= len(self.words):
            self.launch.kind, self.launch.program = "python", self.words[self.at - 1]

    def _launcher(self, name: str) -> None:
        """Read the options of a launcher up to the program."""
        launch, flags = self.launch, LAUNCHERS[name]
        if name == "accelerate" and launch.program and launch.program.shown.endswith("accelerate"):
            if self._text() != "launch":
                return
            self.at += 1
        launch.kind, launch.launcher, launch.program = "launcher", name, None
        while self.at < len(self.words):
            word = self.words[self.at]
            self.at += 1
            if not word.start.startswith("-"):
                launch.program = word
                launch.opaque = launch.opaque or _is_several(word)
                return
            if word.literal != "--":
                self._launcher_option(word, flags)

    def _launcher_option(self, word: Value, flags: frozenset[str]) -> None:
        written, equals, _ = word.start.partition("=")
        name = written.lstrip("-").replace("-", "_")
        longer = [option for option in TORCHRUN_OPTIONS if option.startswith(name)]
        if len(longer) == 1 and len(name) > 1 and self.launch.launcher != "accelerate":
            name = longer[0]  # argparse accepts unique prefixes
        value = word.after(f"{written}=") if equals else plain("", word.line)
        if not equals and name not in flags and self.at < len(self.words):
            value, self.at = self.words[self.at], self.at + 1
        self.launch.options[name] = value
