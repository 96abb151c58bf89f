"""Recognise the program that a command starts, behind srun, launchers, containers and wrappers.

The names and options of programs are taken from their help texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .expansion import MARK, Unknowns, Value
from .options import Option, canonical, names, srun_options

PYTHON = re.compile(r"(?:i?python|pypy)[0-9.]*w?\Z")
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})

#: Programs that run another command on the same node, each followed by its options that take a value.
_WRAPPERS = """
exec -a
time -f -o --format --output
stdbuf -i -o -e --input --output --error
nice -n --adjustment
ionice -c -n --class --classdata
sudo -u -g
numactl -N -m -C -i -p --cpunodebind --membind --physcpubind --interleave --preferred
strace -o -e -s -p
perf -o -e -F
nsys -o -t -s -c -w -f -d -y --output --trace --sample --capture-range --force-overwrite --stats \
--capture-range-end --delay --duration --gpu-metrics-device --cuda-memory-usage --cudabacktrace
ncu -o -k -c -s --export --kernel-name --launch-count --launch-skip --set --section --metrics
rocprof -o -i
py-spy -o --output -r --rate -f --format
conda -n --name -p --prefix --cwd
mamba -n --name -p --prefix --cwd
micromamba -n --name -p --prefix --cwd
uv --with --python -p --extra --group --project --directory --env-file --package --index-url
poetry -C -P --directory --project
pixi -e --environment --manifest-path
pdm -p --project
"""
WRAPPERS: dict[str, frozenset[str]] = dict.fromkeys(
    names(
        """command builtin nohup setsid unbuffer catchsegv valgrind dlprof scalene pipenv rye mlrun
        proxychains proxychains4 ts dumb-init"""
    ),
    frozenset(),
)
WRAPPERS.update((line.split()[0], names(line.partition(" ")[2])) for line in _WRAPPERS.strip().split("\n"))
#: Container runtimes, which run the command after their options and the image.
CONTAINERS = names(
    """singularity apptainer podman podman-hpc docker nvidia-docker shifter enroot sarus ch-run udocker
    pyxis charliecloud ngc cea-singularity"""
)
#: Subcommands of container runtimes that do not run a program.
CONTAINER_CHORES = names(
    """pull build import create load save rm rmi stop kill images image ps push login inspect tag migrate
    list remove start-service version cache volume"""
)

#: Launchers that start processes on all nodes of the job.
REACHES_NODES = names(
    """mpirun mpiexec mpiexec.hydra mpiexec.slurm mpirun_rsh mpirun.openmpi mpiexec.openmpi orterun prterun
    prun oshrun horovodrun ibrun jsrun aprun flux pdsh clush dsh pssh parallel-ssh pbsdsh ssh xargs
    parallel launcher hyperqueue hq ray dask dask-mpi dask-scheduler dask-worker dask-ssh spark-submit
    charmrun"""
)

#: Launchers that start several workers on their own node, each with its options that take no value.
WORKER_LAUNCHERS: dict[str, frozenset[str]] = {
    name: names(flags)
    for name, flags in {
        "torchrun": "standalone no_python m module run_path help h",
        "accelerate": "multi_gpu cpu tpu use_fsdp use_deepspeed use_megatron_lm same_network quiet q debug m "
        "module no_python use_xpu use_mps_device mps fp16 tpu_use_cluster use_parallelism_config "
        "enable_cpu_affinity "
        "dynamo_use_fullgraph dynamo_use_dynamic h help gpu tpu_use_sudo no_tpu_cluster use_cpu",
        "deepspeed": "no_ssh no_ssh_check force_multi save_pid no_local_rank no_python m module h help "
        "bind_cores_to_rank elastic_training ssh_check",
        "lightning": "help",
        "fabric": "help",
        "composer": "v verbose m module_mode c command_mode h help",
        "colossalai": "",
    }.items()
}
#: Options of torchrun up to torch 2.13 (torch/distributed/run.py), without those of torch.distributed.launch.
TORCHRUN_OPTIONS = names(
    """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts
    monitor_interval start_method event_log_handler role m module no_python run_path log_dir r redirects t
    tee local_ranks_filter node_rank master_addr master_port local_addr logs_specs numa_binding
    signals_to_handle virtual_local_rank duplicate_stdout_filters duplicate_stderr_filters
    shutdown_timeout h help"""
)
#: Options of ``accelerate launch`` that torchrun does not have.
ACCELERATE_OPTIONS = (
    names(
        """mixed_precision num_machines num_processes machine_rank main_process_ip main_process_port gpu_ids
        config_file dynamo_backend num_cpu_threads_per_process deepspeed_config_file zero_stage
        gradient_accumulation_steps gradient_clipping fsdp_sharding_strategy deepspeed_hostfile"""
    )
    | WORKER_LAUNCHERS["accelerate"]
) - TORCHRUN_OPTIONS
#: Other names of the launchers in WORKER_LAUNCHERS.
SYNONYMS = {
    "torchrun-hpc": "torchrun",
    "torchrun_slurm": "",
    "torchelastic": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed.pt": "deepspeed",
}
#: Python modules that are launchers, for ``python -m``.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "torch.distributed.elastic.run": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "composer.cli.launcher": "composer",
    "lightning.fabric.cli": "lightning",
}
#: Python modules that do not train, for ``python -m``.
HELPER_MODULES = names(
    """pip venv virtualenv ensurepip json.tool http.server site sysconfig timeit compileall zipfile tarfile
    pytest unittest torch.utils.collect_env bitsandbytes wandb nltk.downloader spacy ipykernel jupyter
    notebook tensorboard.main playwright build"""
)

#: Programs that inspect the nodes, copy data or wait: they are not the training program.
HELPERS = names(
    """hostname echo printf mkdir rm rmdir cp mv ls cat tar rsync scp sleep true false date env printenv
    ulimit nvcc module ml pip pip3 ip ifconfig ibstat ibstatus ibv_devinfo lscpu lstopo lspci free df du touch
    chmod chown ln find sed awk gawk grep egrep head tail sort uniq wc tr cut tee xz gzip gunzip zip unzip
    7z zstd pigz wget curl aria2c git scontrol squeue sinfo sacct sacctmgr scancel sbatch salloc sbcast
    sattach sstat sprio sview strigger nvidia-smi nvidia-cuda-mps-control rocm-smi amd-smi rocminfo nvtop
    dcgmi gpustat hwloc-ls which whereis whoami id uptime ps pkill kill killall nproc lsof sync test [ [[ :
    cd pushd popd pwd export set unset source . eval trap wait exit return shift read local declare typeset
    readonly let alias unalias type hash umask shopt getent host dig nslookup ping nc ncat ss netstat
    python-config deactivate stat dd lfs beegfs-ctl md5sum sha256sum sha1sum diff cmp basename dirname
    realpath readlink mktemp seq shuf expr bc jq yq tmux screen watch make cmake ninja gcc g++ mount umount
    fusermount squashfuse dask-ssh wandb huggingface-cli hf lsb_release aws gsutil gcloud azcopy rclone
    globus uname lsmem dmesg numastat numad limit mail mailx sendmail tensorboard nvidia-modprobe modprobe
    sysctl sshfs logger yes jupyter jupyter-lab jupyter-notebook ssh-keygen ssh-agent ssh-add keychain mawk
    nl vmstat iostat iotop top htop mpstat sar busybox chronyc ntpdate tree column paste fold split rev
    nvidia-persistenced dcgmproftester12 all_reduce_perf all_gather_perf reduce_scatter_perf ib_write_bw
    iperf3 rapidsmi continue break fg bg jobs disown getopts mapfile readarray"""
)

#: Names of Python programs that prepare data or inspect the system instead of training.
CHORES = re.compile(
    r"(?:^|[_/.-])(?:download|prepare|pre_?process|preproc|convert|tokeni[sz]e|build|compile|install|setup|check"
    r"|test_(?:gpu|nccl|cuda|env)|print|show|list|get|make|gen(?:erate)?|create|split|merge|plot|visuali[sz]e"
    r"|summari[sz]e|parse|collect|extract|copy|clean|cleanup|edit|write|config(?:ure)?|hostfile|nodelist|upload"
    r"|sync|submit|monitor|stats|count|cache|index|find|notify|send|slack|log|free_port|port|verify|validate_config)",
    re.IGNORECASE,
)
#: Names of Python programs that train.
TRAINS = re.compile(
    r"train|finetun|fine_tun|fit\b|ddp|distribut|main|run|learn|experiment|sft|dpo|launch", re.IGNORECASE
)

_PYTHON_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LAUNCHER_WORDS = frozenset({"launch", "run", "model"})
_RUNNERS = frozenset(
    {"conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "pdm", "hatch", "rye"}
)
_SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".csh", ".zsh")


@dataclass(slots=True)
class Launch:
    """A program that a command starts, with the launchers and wrappers before it.

    ``via`` says what starts the program on the nodes: ``srun``, ``remote`` (another launcher, such as
    mpirun), ``unknown`` (a variable that may contain a launcher), or an empty string (nothing).

    ``kind`` says what the program is: ``python`` (a Python program), ``launcher`` (torchrun or similar),
    ``script`` (a file with unknown content), ``inner`` (``bash -c``), ``helper`` (a program that does
    not train) or ``unknown``.

    ``environment`` contains the variables that ``env`` sets.

    ``launcher`` is the name of the launcher, ``start`` its index in ``words``, and ``inner`` contains the
    commands for ``bash -c``. ``opaque`` is True if srun gets options from a variable with an unknown
    value. ``srun_certain`` is the number of options before that variable. Later options may belong to the
    program.
    """

    line: int
    via: str = ""
    srun_line: int | None = None
    srun: tuple[Option, ...] = ()
    srun_certain: int = 0
    opaque: bool = False
    environment: dict[str, Value] = field(default_factory=dict)
    wrappers: list[str] = field(default_factory=list)
    kind: str = "helper"
    launcher: str = ""
    start: int = 0
    options: dict[str, Value] = field(default_factory=dict)
    program: Value | None = None
    arguments: tuple[Value, ...] = ()
    inner: Value | None = None
    words: tuple[Value, ...] = ()

    @property
    def is_training(self) -> bool:
        """True if this may be the training program."""
        return self.kind in ("python", "launcher", "script", "unknown")

    @property
    def node_count(self) -> Value | None:
        """The number of nodes in the options of a launcher, or None."""
        counts = (self.options.get(name) for name in ("nnodes", "num_machines", "num_nodes"))
        return next(filter(None, counts), None)


def basename(text: str) -> str:
    """Return the last component of a path."""
    return text.rpartition("/")[2]


def read_command(arguments: Sequence[Value], unknowns: Unknowns) -> Launch:
    """Find the program that a command starts behind wrappers and launchers."""
    return _CommandReader(arguments, unknowns).read()


class _CommandReader:
    """Read the arguments of a command from left to right: wrappers, srun, launcher, program."""

    def __init__(self, arguments: Sequence[Value], unknowns: Unknowns) -> None:
        self.words = [argument for argument in arguments if argument.text]
        self.unknowns = unknowns
        self.at = 0
        self.launch = Launch(line=self.words[0].line if self.words else 0, words=tuple(self.words))

    def read(self) -> Launch:
        """Read all arguments and return the program that the command starts."""
        for _ in range(30):  # one wrapper per round
            if self.at >= len(self.words) or not self._strip():
                break
        return self.launch

    def _text(self, ahead: int = 0) -> str:
        position = self.at + ahead
        return self.words[position].text.replace("\\\n", "") if position < len(self.words) else ""

    def _strip(self) -> bool:
        """Read one program and its options; return whether the program may start another one."""
        text = self._text()
        name = basename(text)
        if name == "env" or self._is_assignment(text):
            return self._strip_env()
        if name == "srun":
            return self._strip_srun()
        if name in ("timeout", "taskset", "chrt"):
            return self._strip_positional(name)
        if name in WRAPPERS:
            return self._strip_wrapper(name)
        if name in CONTAINERS:
            return self._strip_container(name)
        if name in REACHES_NODES or name.startswith(("mpirun", "mpiexec")):
            self.launch.via = self.launch.via or "remote"
            self.launch.wrappers.append(name)
            self.launch.kind = "unknown"
            before = self.at
            found = self._jump_to_program()
            self._environment_options(before)
            return found
        if name in SHELLS:
            self._shell()
        elif PYTHON.match(name) or self._is_unknown_python(text):
            self._python()
        elif SYNONYMS.get(name, name) in WORKER_LAUNCHERS:
            self._launcher(SYNONYMS.get(name, name), skip=1)
        else:
            return self._other(text, name)
        return False

    @staticmethod
    def _is_assignment(text: str) -> bool:
        head, equals, _ = text.partition("=")
        return bool(equals) and head.isidentifier()

    def _is_unknown_python(self, text: str) -> bool:
        """Return whether ``text`` is a variable such as $PYTHON with an unknown value."""
        match = MARK.fullmatch(text)
        found = [unknown.name.lower() for unknown in self.unknowns.of(text)] if match else []
        return any("python" in name or name == "py" for name in found)

    def _strip_env(self) -> bool:
        if basename(self._text()) == "env":
            self.at += 1
        while (text := self._text()).startswith("-") or self._is_assignment(text):
            if self._is_assignment(text):
                name, _, value = text.partition("=")
                self.launch.environment[name] = Value(value, self.words[self.at].lines)
            self.at += 2 if text in ("-u", "--unset", "-C", "--chdir", "-S") and text != "-S" else 1
        return True

    def _strip_positional(self, name: str) -> bool:
        """Skip ``timeout [options] DURATION`` or ``taskset [-c] MASK``."""
        self.at += 1
        while (text := self._text()).startswith("-"):
            self.at += 2 if text in ("-k", "-s", "--kill-after", "--signal") else 1
        self.at += 1
        self.launch.wrappers.append(name)
        return True

    def _strip_wrapper(self, name: str) -> bool:
        with_value = WRAPPERS[name]
        self.at += 1
        if name in _RUNNERS and not self._subcommand("run", "exec"):
            return False
        if name in ("nsys", "ncu", "perf", "memray", "scalene", "py-spy"):
            self._subcommand("profile", "launch", "start", "run", "record", "stat")
        if name == "numactl" and self._text() in ("--show", "-s", "--hardware", "-H"):
            return False
        while (text := self._text()).startswith("-"):
            self.at += 1
            if text == "--":
                break
            if text in with_value and "=" not in text:
                self.at += 1
        self.launch.wrappers.append(name)
        return True

    def _subcommand(self, *subcommands: str) -> bool:
        """Skip options and one of the ``subcommands``; return False for other subcommands."""
        position = self.at
        while position < len(self.words) and self.words[position].text.startswith("-"):
            position += 1
        if position < len(self.words) and self.words[position].text in subcommands:
            self.at = position + 1
            return True
        return False

    def _strip_container(self, name: str) -> bool:
        self.at += 1
        if self._text() in CONTAINER_CHORES or not self._text():
            return False
        self.launch.wrappers.append(name)
        self.launch.kind = "unknown"
        before = self.at
        found = self._jump_to_program()
        self._environment_options(before)
        if any(basename(word.text) in REACHES_NODES for word in self.words[before : self.at]):
            self.launch.via = self.launch.via or "remote"
        return found

    def _environment_options(self, start: int) -> None:
        """Read variables in the options of a container or of mpirun, such as ``-x NAME=value``."""
        for word, following in pairwise(self.words[start : self.at + 1]):
            option, _, attached = word.text.partition("=")
            if option not in ("--env", "-e", "-x"):
                continue
            for item in (attached or following.text).split(","):
                name, equals, value = item.partition("=")
                if equals:
                    self.launch.environment[name] = Value(value, word.lines)

    def _jump_to_program(self, *, scripts: bool = True) -> bool:
        """Skip to the first word that names Python, a launcher or a shell; return False if there is none.

        With ``scripts``, a file name that ends in .py counts too.
        """
        for position in range(self.at, len(self.words)):
            text = self.words[position].text
            name = basename(text)
            is_shell = name in SHELLS and position + 1 < len(self.words)
            is_file = scripts and name.endswith(".py") and not text.startswith("-")
            is_launcher = SYNONYMS.get(name, name) in WORKER_LAUNCHERS
            if PYTHON.match(name) or self._is_unknown_python(text) or is_launcher or is_shell or is_file:
                self.at = position
                return True
        return False

    def _strip_srun(self) -> bool:
        self.launch.via = "srun"
        self.launch.srun_line = self.words[self.at].line
        self.at += 1
        options: list[Option] = []
        table = srun_options()
        while self.at < len(self.words):
            text, line = self._text(), self.words[self.at].line
            if MARK.fullmatch(text) and self.at + 1 < len(self.words):
                self.launch.opaque = True
                self.at += 1
                continue
            if not text.startswith("-") or text == "-":
                break
            self.at += 1
            if text == "--":
                break
            options.extend(self._srun_option(text, line, table.short))
            if not self.launch.opaque:
                self.launch.srun_certain = len(self.launch.srun) + len(options)
        self.launch.srun += tuple(options)
        self.launch.kind = "helper" if self.at >= len(self.words) else "unknown"
        return True

    def _srun_option(self, text: str, line: int, short: dict[str, str]) -> list[Option]:
        """Read the srun options in one word, and the next word if it is the value of an option."""
        table = srun_options()
        if text.startswith("--"):
            written, equals, value = text[2:].partition("=")
            matches = table.matches(written)
            name = matches[0] if len({canonical(match) for match in matches}) == 1 else written
            if not equals and table.takes(name) == "=":
                value = self._text()
                self.at += 1
            return [Option(canonical(name), value, text, line)]
        options = []
        for position, letter in enumerate(text[1:], start=1):
            name = short.get(letter, letter)
            if table.takes(name) != "=":
                options.append(Option(canonical(name), None, text, line))
                continue
            value = text[position + 1 :]
            if not value:
                value = self._text()
                self.at += 1
            options.append(Option(canonical(name), value, text, line))
            break
        return options

    def _shell(self) -> None:
        """Read ``bash -c TEXT`` or ``bash SCRIPT``."""
        self.at += 1
        while (text := self._text()).startswith(("-", "+")):
            self.at += 1
            if not text.startswith("--") and "c" in text[1:]:
                if self.at < len(self.words):
                    while self._text().startswith("-") and self.at + 1 < len(self.words):
                        self.at += 1
                    self.launch.kind = "inner"
                    self.launch.inner = self.words[self.at]
                    self.launch.arguments = tuple(self.words[self.at + 1 :])
                return
            if text in ("-o", "+o", "--rcfile", "--init-file"):
                self.at += 1
        self._script()

    def _script(self) -> None:
        self.launch.kind = "script" if self.at < len(self.words) else "helper"
        if self.at < len(self.words):
            self.launch.program = self.words[self.at]
            self.launch.arguments = tuple(self.words[self.at + 1 :])

    def _python(self) -> None:
        self.at += 1
        launch = self.launch
        launch.kind = "python"
        while (text := self._text()).startswith("-"):
            self.at += 1
            if text in ("-c", "-", "-V", "--version", "-h", "--help", "-i") or text.startswith("-c"):
                launch.kind = "helper"
                return
            if text == "-m" or (text.startswith("-m") and not text.startswith("--")):
                self._module(text[2:])
                return
            if text in _PYTHON_WITH_VALUE:
                self.at += 1
        if self.at >= len(self.words):
            launch.kind = "helper"
            return
        launch.program = self.words[self.at]
        launch.arguments = tuple(self.words[self.at + 1 :])

    def _module(self, attached: str) -> None:
        name = attached or self._text()
        if not name:
            self.launch.kind = "helper"
            return
        if not attached:
            self.at += 1
        if name == "ddp_scaling_bench.start" and self._text() in MODULES:
            name, self.at = str(self._text()), self.at + 1
        if name in MODULES:
            self._launcher(MODULES[name], skip=0)
            return
        root = name.partition(".")[0]
        if name == "ddp_scaling_bench.start" and self._text() == "preflight":
            self.launch.kind = "helper"  # one task per node uses all of its GPUs
            return
        if name in HELPER_MODULES or root in HELPER_MODULES or root in ("ray", "dask"):
            self.launch.kind = "helper"
            if root in ("ray", "dask"):
                self.launch.via = self.launch.via or "remote"
            return
        self.launch.program = self.words[self.at - 1] if self.at else None
        self.launch.arguments = tuple(self.words[self.at :])

    def _launcher(self, name: str, *, skip: int) -> None:
        """Read the options of a launcher such as torchrun, up to the program."""
        launch = self.launch
        launch.kind, launch.launcher, launch.start = "launcher", name, self.at
        self.at += skip
        if name in ("accelerate", "lightning", "fabric", "colossalai") and skip:
            if name == "accelerate" and self._text() not in ("launch",) and not MARK.search(self._text()):
                launch.kind = "helper"
                return
            while self._text() in _LAUNCHER_WORDS:
                self.at += 1
        flags = WORKER_LAUNCHERS.get(name, WORKER_LAUNCHERS["torchrun"]) | {"use_env"}
        while (text := self._text()).startswith("-") and text != "-":
            self.at += 1
            if text == "--":
                break
            self._launcher_option(text, flags)
        if self.at < len(self.words):
            launch.program = self.words[self.at]
            launch.arguments = tuple(self.words[self.at + 1 :])
        if {"help", "h", "version"} & set(launch.options):
            launch.kind = "helper"

    def _launcher_option(self, text: str, flags: frozenset[str]) -> None:
        written, equals, value = text.partition("=")
        name = written.lstrip("-").replace("-", "_")
        line = self.words[self.at - 1].line
        longer = [option for option in TORCHRUN_OPTIONS if option.startswith(name)]
        if len(longer) == 1 and len(name) > 1 and self.launch.launcher in ("torchrun", "launch"):
            name = longer[0]  # argparse accepts abbreviations
        if equals:
            self.launch.options[name] = Value(value, (line,))
        elif name in flags or self._text().startswith("-") or self._text().endswith(".py"):
            self.launch.options[name] = Value("", (line,))
        elif self.at < len(self.words):
            self.launch.options[name] = Value(self._text(), (line,))
            self.at += 1

    def _other(self, text: str, name: str) -> bool:
        """Read a program that no other method reads; return whether it starts another known program."""
        launch = self.launch
        launch.program = self.words[self.at]
        launch.arguments = tuple(self.words[self.at + 1 :])
        if name.endswith(".py"):
            launch.kind = "python"
            return False
        if name in HELPERS and not MARK.search(text):
            launch.kind = "helper"
            return False
        before = self.at
        self.at += 1
        if self._jump_to_program(scripts=False) and basename(self._text()) not in SHELLS:
            launch.wrappers.append(name)
            if MARK.fullmatch(text) and not launch.via:
                launch.via = "unknown"
            launch.program, launch.arguments = None, ()
            return True
        self.at = before
        is_script = name.endswith(_SCRIPT_ENDINGS) or "/" in text
        launch.kind = "script" if is_script else "unknown"
        return False
