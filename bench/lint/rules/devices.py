"""Rules about GPUs, CPUs and the backend."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from ...findings import Edit, Remark, Severity
from ...units import count
from ..expansion import MARK, Value
from ..geometry import Geometry
from ..launch import HELPERS, Launch, basename
from ..options import names
from ..script import Script, starts_workers
from ..walk import Step
from . import rule

_GPU_PARTITION = re.compile(
    r"gpu|a100|v100|h100|h200|a40|l40|rtx|dgx|volta|ampere|hopper|mi2\d0|p100|k80", re.I
)
#: A test for nccl, such as ``[ "$BACKEND" = nccl ]``, and NCCL's log do not show that the program uses it.
_USES_GPUS = re.compile(
    r"(?<!= )(?<!/)nccl(?!_DEBUG)|--nv\b|nvidia-smi|\bcuda\b|cuda/|CUDA_VISIBLE"
    r"|nproc[-_]per[-_]node[= ]gpu|accelerator[= ]gpu|rocm",
    re.I,
)
_BACKEND = re.compile(r"(?:[a-z_.]*_)?backend\Z|(?:[a-z_.]+\.)backend\Z")
_DEVICE = re.compile(r"(?:[a-z_.]+[._])?(?:device|accelerator)\Z")
_LISTS_CPUS = re.compile(r"(?:map|mask)_(?:cpu|ldom):")
#: Options of programs whose value is the ordinal of a GPU.
_ORDINALS = frozenset({"device", "device_id", "gpu", "gpu_id", "cuda_device"})
_SEES_GPUS = frozenset({"--nv", "--nvccli", "--rocm"})
_APPTAINER = frozenset({"singularity", "apptainer"})
_CONTAINER_VARIABLES = frozenset(
    {f"{name}_{kind}" for name in ("SINGULARITY", "APPTAINER") for kind in ("NV", "NVCCLI", "ROCM")}
)
#: Signs of AMD GPUs, which a container can use without --nv.
_AMD = re.compile(r"rocm|(?:HIP|ROCR|MIOPEN|RCCL|HSA)_|mi[23]\d\d|\blumi|frontier|project_46\d", re.I)
#: Signs that a program in a container uses GPUs, and that it uses CPUs or gets the driver in another way.
_NEEDS_GPUS = re.compile(
    r"--[\w.-]*(?:device|accelerator)[= ](?:cuda|gpu)|backend[= ]nccl|(?<!\S)--?(?:n(?:um)?[-_]?)?gpus?\b"
)
_OTHER_WAY = re.compile(r"gloo|driver|libcuda|/dev/nvidia")
#: Options of apptainer that take a value.
_WITH_VALUE = names("-B --bind --mount --pwd --cwd -H --home -W --workdir -S --scratch -o --overlay --env")
_NV = re.compile(r"\s--nv\b")
_IMAGE = re.compile(r"(?!.*(?:opt|arg|flag)).*(?:image|img|sif|container)", re.IGNORECASE)
_NO_GPU = frozenset({"no_cuda", "use_cpu", "cpu", "no_gpu", "nocuda", "disable_cuda", "cpu_only"})


@rule(Severity.INFO)
def gpu_per_task_isolation(script: Script) -> Iterator[Remark]:
    """Each task sees only its own GPU as device 0, so that no other ordinal exists in the task.

    ``--gpus-per-task`` and ``--gpu-bind`` hide the other GPUs of the node from a task. A command that asks
    for another ordinal fails with "invalid device ordinal". The finding has severity ``info`` if the command
    does not show the ordinal, because a program that uses device 0, ``current_device()`` or ``rank %
    device_count()`` works. srun sets CUDA_VISIBLE_DEVICES for each task, so that an export in the script
    does not help. ``--gres-flags=allow-task-sharing`` (Slurm 24.05) lets the tasks of a node access each
    other's GPUs.

    Bad:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gpus-per-task=1
        srun bash -c 'python train.py --device cuda:$SLURM_LOCALID'

    Good:
        #SBATCH --ntasks-per-node=4
        #SBATCH --gpus-per-node=4
        srun bash -c 'python train.py --device cuda:$SLURM_LOCALID'
    """
    for step in script.sruns:
        launch, geometry = step.launch, script.geometry(step)
        hides = geometry.isolation
        if hides is None or geometry.heterogeneous or starts_workers(launch) or geometry.tasks_on_a_node < 2:
            continue
        if any(word.text == "ddp_scaling_bench.start" for word in launch.words):
            continue  # the built-in training counts the visible devices
        seen = geometry.gpus_per_task or 1
        asks = _line_that_asks_for_another_gpu(script, step, seen)
        only = f"only {count(seen, 'GPU')}"
        message = f"with `{hides.written}`, each task sees {only}, numbered from 0"
        if asks:
            message += (
                f', but line {asks} asks for another GPU: the program fails with "invalid device ordinal"'
            )
        else:
            message += ": a program that selects device LOCAL_RANK fails in all tasks but the first"
        remedy = (
            "use --gpus-per-node without --gpu-bind, add --gres-flags=allow-task-sharing, or use device 0"
        )
        certain = asks and "closest" not in (hides.value or "")  # several GPUs may be the closest
        severity = Severity.ERROR if certain else Severity.WARNING if asks else None
        yield Remark(hides.line, message, remedy, severity, _gpus_per_node(geometry, seen))
        if hides.line != step.line:
            message = f"each task started here sees {only}, because of line {hides.line}"
            yield Remark(step.line, message, f"change line {hides.line}", Severity.INFO)


def _line_that_asks_for_another_gpu(script: Script, step: Step, seen: int) -> int | None:
    """Return the line in which the program selects a GPU that is hidden from its task, or None."""
    for name, value in script.options_of_program(step.launch):
        number = script.number(value, script.geometry(step))
        if name in ("trainer.devices", "trainer.gpus") and number and number > seen:
            return value.line
        ordinal = value.text.rpartition(":")[2]
        if name not in _ORDINALS or ("gpu" not in name + value.text and "cuda" not in value.text):
            continue
        if ordinal.isdecimal() and int(ordinal[:9]) >= seen:
            return value.line
        if any(
            unknown.name == "SLURM_LOCALID" and unknown.in_task for unknown in script.unknowns.of(ordinal)
        ):
            return value.line
    return None


def _gpus_per_node(geometry: Geometry, seen: int) -> Edit | None:
    """Return the edit that replaces ``--gpus-per-task`` by the equivalent ``--gpus-per-node``."""
    option = geometry.options.get("gpus-per-task")
    if option is None or not geometry.tasks_per_node or not (option.value or "").isdecimal():
        return None
    return Edit(option.line, option.written, f"--gpus-per-node={seen * geometry.tasks_per_node}")


@rule(Severity.INFO)
def missing_gpu_request(script: Script) -> Iterator[Remark]:
    """A program uses GPUs, but the job requests none.

    At most sites a job gets only the GPUs that it requests. At some sites, every job on a GPU
    partition gets all GPUs of its nodes.

    Bad:
        #SBATCH --partition=gpu
        srun python train.py --backend nccl

    Good:
        #SBATCH --partition=gpu
        #SBATCH --gpus-per-node=4
        srun python train.py --backend nccl
    """
    steps = [step for step in script.training if step.launch.kind in ("python", "launcher")]
    if script.job.asks_for_gpus or script.job.heterogeneous or not steps:
        return
    if any(script.geometry(step).asks_for_gpus or step.launch.opaque for step in steps):
        return
    partition = f"{script.job.value('partition') or ''} {script.job.value('constraint') or ''}"
    on_gpus = _GPU_PARTITION.search(partition)
    if not on_gpus and not script.mentions(_USES_GPUS):
        return
    remedy = "request GPUs: --gpus-per-node=N or --gres=gpu:N"
    line = steps[0].launch.srun_line or steps[0].line
    if on_gpus:
        partition_line = script.job.line("partition", "constraint")
        yield Remark(partition_line, "the job requests a GPU partition, but no GPUs", remedy)
    yield Remark(line, "this program uses GPUs, but the job requests none", remedy)


@rule(Severity.ERROR)
def backend_device_mismatch(script: Script) -> Iterator[Remark]:
    """The communication backend does not support the device, or is slow on it.

    nccl only supports tensors on GPUs. On CPUs it fails with "Tensors must be CUDA and dense" or
    "ProcessGroupNCCL is only supported with GPUs". gloo copies tensors on GPUs through host memory,
    which is slow.

    Bad:
        srun python train.py --backend nccl --device cpu

    Good:
        srun python train.py --backend gloo --device cpu
    """
    for step in script.training:
        if step.launch.kind not in ("python", "launcher"):
            continue
        for value in _backends(script, step.launch):
            yield from _mismatch(script, step, value)


def _backends(script: Script, launch: Launch) -> list[Value]:
    found = [value for name, value in script.options_of_program(launch) if _BACKEND.match(name)]
    exported = [
        assigned.value
        for assigned in script.walk.assigned
        if assigned.name.upper().endswith("BACKEND") and assigned.value and not assigned.branches
    ]
    return [value for value in [*found, *exported] if value.text.lower() in ("nccl", "gloo", "rccl")]


def _mismatch(script: Script, step: Step, backend: Value) -> Iterator[Remark]:
    device = _device(script, step)
    has_gpus = script.job.asks_for_gpus or script.geometry(step).asks_for_gpus or script.job.heterogeneous
    if backend.text.lower() in ("nccl", "rccl"):
        if device == "cpu":
            message = "this program runs on CPUs, but nccl only supports tensors on GPUs"
            yield Remark(backend.line, message, "use gloo on CPUs and nccl on GPUs")
    elif device != "cpu" and (has_gpus or device):
        message = "gloo copies tensors on GPUs through host memory, which is much slower than nccl"
        remedy = "use nccl on GPUs, unless you want to measure gloo"
        yield Remark(backend.line, message, remedy, Severity.INFO)


def _device(script: Script, step: Step) -> str:
    """Return ``cpu`` or ``cuda`` if the script determines the device, else an empty string."""
    for name, value in script.options_of_program(step.launch):
        if name in _NO_GPU and value.text.lower() not in ("false", "0", "no"):
            return "cpu"
        if _DEVICE.match(name):
            text = value.text.lower()
            return "cpu" if text == "cpu" else "cuda" if text.startswith(("cuda", "gpu")) else ""
    if "cpu" in step.launch.options or "use_cpu" in step.launch.options:
        return "cpu"
    hidden = script.assigned_to.get("CUDA_VISIBLE_DEVICES", ())
    texts = {assigned.value.text for assigned in hidden if assigned.value}
    return "cpu" if texts and texts <= {"", "-1"} else ""


@rule(Severity.INFO)
def srun_cpus_not_inherited(script: Script) -> Iterator[Remark]:
    """The job's ``--cpus-per-task`` does not apply to the tasks that srun starts.

    Since Slurm 22.05, each task that srun starts gets one CPU unless the option is also passed to
    srun. The training process and all its data loaders then share that CPU.

    Bad:
        #SBATCH --cpus-per-task=10
        srun python train.py

    Good:
        #SBATCH --cpus-per-task=10
        srun --cpus-per-task=$SLURM_CPUS_PER_TASK python train.py
    """
    if (script.job.number("cpus-per-task") or 2) < 2 or "cpus-per-task" not in script.job.options:
        return
    if "SRUN_CPUS_PER_TASK" in script.walk.exported:
        return
    for step in script.sruns:
        own = {option.name for option in step.launch.srun}
        if own & {"cpus-per-task", "exact", "cpus-per-gpu"} or step.launch.opaque:
            continue
        if any(
            option.name == "cpu-bind" and _LISTS_CPUS.search(option.value or "")
            for option in step.launch.srun
        ):
            continue  # each task gets the CPUs of the list
        line = step.launch.srun_line or step.line
        new = "srun --cpus-per-task=$SLURM_CPUS_PER_TASK"
        edit = Edit(line, "srun", new) if "srun " in script.line(line) else None
        message = "srun does not inherit --cpus-per-task since Slurm 22.05: each task may get only one CPU"
        remedy = "pass --cpus-per-task=$SLURM_CPUS_PER_TASK to srun, or export SRUN_CPUS_PER_TASK"
        yield Remark(line, message, remedy, edit=edit)
        return


@rule(Severity.INFO)
def container_without_gpus(script: Script) -> Iterator[Remark]:
    """Apptainer or Singularity starts a program without ``--nv`` in a job with GPUs.

    The container then contains neither the driver's libraries nor, at many sites, the devices:
    ``torch.cuda.is_available()`` is False. AMD GPUs need ``--rocm``. Some sites set ``always use nv``. The
    finding is a warning if the script shows that the program uses GPUs: torchrun, ``--device cuda``,
    variables of NCCL or MASTER_ADDR.

    Bad:
        #SBATCH --gpus-per-node=4
        srun apptainer exec image.sif python train.py

    Good:
        #SBATCH --gpus-per-node=4
        srun apptainer exec --nv image.sif python train.py
    """
    amd = script.mentions(_AMD) or any(_AMD.search(option.value or "") for option in script.header.options)
    if amd or _CONTAINER_VARIABLES & script.walk.exported or script.mentions(_NV):
        return  # where another command has --nv, its absence is intended
    for step in script.training:
        has_gpus = script.geometry(step).asks_for_gpus or script.job.asks_for_gpus
        if has_gpus and not step.launch.opaque and not _CONTAINER_VARIABLES & step.prefix.keys():
            yield from _without_nv(script, step)


def _without_nv(script: Script, step: Step) -> Iterator[Remark]:
    """Find the container in which a command runs, unless its options possibly make the GPUs visible."""
    launch = step.launch
    outer = [*launch.words, *(step.place.shell.words if step.place.shell else ())]
    words = [word.text for word in outer]
    start = next((at for at, text in enumerate(words) if _runs_container(text, words[at + 1 :])), None)
    if start is None or _SEES_GPUS & set(words) or any("instance://" in word for word in words):
        return  # the options of a running instance were given when it was started
    outside = start >= len(launch.words)  # the container runs the shell that starts the program
    own = outer[start:] if outside else outer[start : len(launch.words)]
    variables = _variables_up_to_image(script, own)
    shell = words[: len(launch.words)] if outside else []
    inside = " ".join([*(word.text for word in own), *shell, *variables])
    inspects = launch.kind != "python" and any(basename(word) in HELPERS for word in words[start + 2 :])
    if inspects or "cpu" in inside.lower() or not all(map(_IMAGE.match, variables)):
        return  # a variable that is not the image may contain options
    runs = outer[start]
    written = f"{runs.text} exec"
    edit = Edit(runs.line, written, f"{written} --nv") if written in script.line(runs.line) else None
    distributed = any(name.startswith(("NCCL_", "MASTER_ADDR")) for name in script.walk.exported)
    needs = launch.kind == "launcher" or (launch.kind == "python" and distributed)
    certain = (needs or _NEEDS_GPUS.search(inside)) and not _OTHER_WAY.search(inside)
    message = f"{basename(runs.text)} without --nv hides the GPUs from the program"
    remedy = "add --nv (NVIDIA) or --rocm (AMD) after exec"
    yield Remark(runs.line, message, remedy, Severity.WARNING if certain else None, edit)


def _variables_up_to_image(script: Script, words: Sequence[Value]) -> list[str]:
    """Return the variables among a container's options, and the image if it is a variable."""
    variables = []
    for before, word in itertools.islice(itertools.pairwise(words), 1, None):
        if before.text in _WITH_VALUE or word.text.startswith("-"):
            continue
        if not MARK.fullmatch(word.text):
            break  # the image
        variables.append(script.unknowns.shown(word.text))
        if _IMAGE.match(variables[-1]):
            break
    return variables


def _runs_container(program: str, following: list[str]) -> bool:
    """Return whether a word is apptainer or singularity with a subcommand that runs a program."""
    command = next((word for word in following if not word.startswith("-")), "")
    return basename(program) in _APPTAINER and command in ("exec", "run")
