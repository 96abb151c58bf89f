"""Read a command: srun and a launcher with their options, and the program, which may start anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .geometry import Geometry, number
from .options import Option, names, read_options
from .words import Word

#: Launchers that may start processes on other nodes.
REACHES_NODES = names(
    """srun mpirun mpiexec mpiexec.hydra mpirun_rsh orterun prun prterun ibrun aprun jsrun lrun flux
    horovodrun ssh pdsh clush parallel-ssh pssh sbatch salloc composer lightning fabric
    colossalai oshrun charmrun pbsdsh dsh parallel xargs ray tune dask dask-mpi dask-ssh spark-submit"""
)
#: Builtins of bash, which start nothing (bash(1), SHELL BUILTIN COMMANDS).
BUILTINS = names(
    """: [ alias bg bind break builtin caller cd compgen complete compopt continue declare dirs disown echo
    enable exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd
    printf pushd pwd read readarray readonly return set shift shopt suspend test times trap true type
    typeset ulimit umask unalias unset wait"""
)
#: Words before a command, and Python modules that are torchrun, for `python -m`.
_PREFIXES = names("exec command nohup time builtin")
_MODULES = names("torch.distributed.run torch.distributed.launch")
#: Options without a value of launchers that start several workers: torch/distributed/run.py,
#: accelerate/commands/launch.py, deepspeed/launcher/runner.py.
_FLAGS = names(
    """standalone m module no_python run_path virtual_local_rank use_env h help cpu multi_gpu tpu
    use_mps_device use_deepspeed use_fsdp use_megatron_lm use_xpu ipex quiet debug same_network
    dynamo_use_fullgraph dynamo_use_dynamic enable_cpu_affinity use_parallelism_config tpu_use_cluster
    tpu_use_sudo no_tpu_cluster force_multi no_local_rank no_ssh no_ssh_check elastic_training
    bind_cores_to_rank"""
)
#: Options of launchers that rules read. argparse accepts their prefixes.
_READ = names(
    """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_conf standalone node_rank master_addr local_addr
    num_machines num_processes machine_rank main_process_ip num_nodes num_gpus hostfile include"""
)


@dataclass(slots=True)
class Launch:
    """The parts of a command.

    ``kind`` is ``python``, ``launcher``, ``shell`` (of a file), ``inner`` (a shell of text), ``builtin``,
    ``nothing`` or ``unknown``. ``via`` is ``srun`` or a launcher of several nodes. ``opaque`` means that
    an unknown word may contain further options. ``options`` are those of the launcher, with underscores.
    """

    kind: str = "nothing"
    via: str = ""
    srun: Sequence[Option] = ()
    opaque: bool = False
    launcher: str = ""
    options: dict[str, Word] = field(default_factory=dict)
    program: Word | None = None
    arguments: tuple[Word, ...] = ()

    @property
    def node_count(self) -> Word | None:
        """The number of nodes in the options of a launcher, or None."""
        options = self.options
        return options.get("nnodes") or options.get("num_machines") or options.get("num_nodes")

    def workers(self, geometry: Geometry) -> int | None:
        """Return the number of workers that the launcher starts on each node, or None if it is unknown."""
        options = self.options
        if self.launcher == "accelerate":  # --num_processes counts the processes of all machines
            total = number(options.get("num_processes"), geometry)
            machines = number(self.node_count, geometry)
            return total // machines if total and machines else None
        value = options.get("num_gpus" if self.launcher == "deepspeed" else "nproc_per_node")
        all_gpus = value.literal in ("gpu", "auto") if value else self.launcher == "deepspeed"
        if all_gpus and options.keys().isdisjoint({"include", "hostfile"}):
            return geometry.gpus_per_node
        return number(value, geometry)


def program_name(word: Word) -> str:
    """Return the name of a program without its folder, or an empty string if it is unknown."""
    last = word.parts[-1]
    known = word.literal is not None or (isinstance(last, str) and "/" in last)
    return str(last).rpartition("/")[2] if known else ""


def read_command(words: Sequence[Word]) -> Launch:
    """Return the parts of a command."""
    launch = Launch()
    rest = list(words)
    while rest and launch.kind == "nothing":
        name, word = program_name(rest[0]), rest.pop(0)
        if name == "srun" and not launch.via:
            launch.via = name
            launch.srun, rest = read_options(rest)
            if rest and (rest[0].may_be_several or rest[0].literal == ":"):  # : separates components
                launch.opaque, launch.kind = True, "unknown"
        elif name not in _PREFIXES or (rest and rest[0].start.startswith("-")):
            launch.kind, launch.program, launch.arguments = "unknown", word, tuple(rest)
            _read_program(launch, name, rest)
    return launch


def _read_program(launch: Launch, name: str, rest: list[Word]) -> None:
    if name in BUILTINS:
        launch.kind = "builtin"
    elif name in ("bash", "sh", "dash", "zsh", "ksh"):
        options = list(takewhile(lambda word: word.start.startswith("-"), rest))
        text = any(one.shown.endswith("c") and not one.start.startswith("--") for one in options)
        if len(rest) > len(options):
            launch.kind, launch.program = "inner" if text else "shell", rest[len(options)]
    elif name.startswith("python") and (name[6:] or "3").replace(".", "").isdecimal():  # python3.11
        _read_python(launch, rest)
    elif name in REACHES_NODES or name.startswith(("mpirun.", "mpiexec.")):
        launch.via = launch.via or name
    elif name == "accelerate" and rest and rest[0].literal == "launch":
        _read_launcher(launch, name, rest[1:])
    elif name in ("torchrun", "deepspeed"):
        _read_launcher(launch, name, rest)
    elif name.endswith(".py"):
        launch.kind = "python"


def _read_python(launch: Launch, rest: list[Word]) -> None:
    while rest and rest[0].start.startswith("-") and rest[0].literal != "-m":
        option = rest.pop(0).shown
        if option[-1] == "c" and not option.startswith("--"):
            return  # text for Python
        rest = rest[1:] if option in ("-W", "-X") else rest
    if len(rest) > 1 and rest[0].literal == "-m" and rest[1].literal in _MODULES:
        _read_launcher(launch, "torchrun", rest[2:])
    elif rest:
        launch.kind, launch.arguments = "python", tuple(rest)


def _read_launcher(launch: Launch, name: str, rest: list[Word]) -> None:
    """Read the options of a launcher up to the program."""
    launch.kind, launch.launcher, launch.program = "launcher", name, None
    while rest:
        word = rest.pop(0)
        if not word.start.startswith("-"):
            launch.program, launch.arguments = word, tuple(rest)
            launch.opaque = launch.opaque or word.may_be_several
            return
        written, equals, _ = word.start.partition("=")
        option = written.lstrip("-").replace("-", "_")
        option = "hostfile" if option == "H" else "include" if option == "i" else option
        if option not in _READ | _FLAGS and any(one.startswith(option) for one in _READ):
            launch.opaque = True  # an abbreviation
        value = word.after(f"{written}=") if equals else Word(("",), word.line)
        if not equals and option not in _FLAGS and rest:
            value = rest.pop(0)
        launch.options[option] = value
