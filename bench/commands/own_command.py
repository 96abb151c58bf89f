"""A user's own command, for `bench init --command`: its launcher, its script, and its lines of a matrix."""

from __future__ import annotations

import ast
import os
import re
import shlex
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..errors import BenchError
from ..matrix.field_types import env_name, shell_words
from ..matrix.nested_launch import LaunchLine, read_launch
from ..matrix.workload import (
    CELL_VALUES,
    RUN_TIME_VALUES,
    Words,
    WorkloadOptions,
    filled_words,
    names_in,
    runs_python,
    tokens,
)
from ..terminal import one_line
from .trial import Reading

RECORDER_LINES = """\
from ddp_scaling_bench import Recorder

recorder = Recorder(model)                # the model that the loop calls, after DDP(model)
for batch in recorder.batches(loader):
    with recorder.step():
        ...                               # forward, backward and optimizer.step(), as before
recorder.close()
"""
LIGHTNING_LINES = """\
from ddp_scaling_bench import LightningCallback

Trainer(callbacks=[LightningCallback()])  # beside your own arguments
"""
TRANSFORMERS_LINES = """\
from ddp_scaling_bench import TransformersCallback

Trainer(callbacks=[TransformersCallback()])  # beside your own arguments
"""
#: Options of accelerate that have no effect on the program, or that the matrix replaces.
_ACCELERATE_REPLACED = """
    multi_gpu num_processes num_machines machine_rank main_process_ip main_process_port same_network
    rdzv_backend rdzv_conf num_cpu_threads_per_process m module no_python quiet q t tee log_dir role
    max_restarts monitor_interval mixed_precision"""
#: Options of torchrun that change the program's processes, with a remedy.
_TORCHRUN_LOST = {
    "numa_binding": "set cluster.cpu_bind instead",
    "virtual_local_rank": "each process sees its own LOCAL_RANK",
}
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PLAIN_WORD = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
#: Two or more words that YAML reads as text without quotes.
_PLAIN_TEXT = re.compile(
    r"[A-Za-z_/](?:[\w@%+=,./{}'-]|:(?! |$))*(?: (?:[\w@%+=,./{}'-]|:(?! |$))+)+", re.ASCII
)


@dataclass(frozen=True)
class Script:
    """The facts about a script that bench reads from its source; the script is not executed."""

    has_recorder: bool
    """It imports the recorder or a callback."""
    trainer: str
    """``lightning``, ``transformers``, or an empty string for a loop of its own."""

    @property
    def lines(self) -> str:
        """The lines to add to the script."""
        return {"lightning": LIGHTNING_LINES, "transformers": TRANSFORMERS_LINES}.get(
            self.trainer, RECORDER_LINES
        )


@dataclass
class OwnCommand:
    """A command for a matrix. ``notes`` are sentences for the user, about changes and doubts."""

    words: list[str]
    """The words with the syntax of a matrix: placeholders, and literal braces written twice."""
    launcher: str = ""
    """``torchrun`` or ``srun`` if the user's command starts its processes with it; else empty."""
    env: dict[str, str] = field(default_factory=dict)
    script: Script | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def sets_batch(self) -> bool:
        """True if the command passes the batch of the cell to the script."""
        return bool({"per_gpu_batch", "global_batch"} & set(names_in(self.words)))

    def example_words(self) -> list[str]:
        """Return the words for one process: every number of ranks is 1, and the batch is 32."""
        options = WorkloadOptions().model_dump()
        sizes = dict.fromkeys(("nodes", "tasks_per_node", "gpus_per_node", "world_size"), 1)
        texts = {"study": "try", "cell_id": "try", "backend": "gloo", "launcher": self.launcher or "torchrun"}
        return filled_words(
            self.words, {**options, **texts, **sizes, "global_batch": 32, "per_gpu_batch": 32}
        )

    @property
    def as_yaml(self) -> str:
        """The command as a YAML value."""
        text = " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in self.words)
        return text if _PLAIN_TEXT.fullmatch(text) else yaml_text(text)


@dataclass(frozen=True)
class OwnWorkload:
    """The lines of a matrix for a command, and for its output if it was tried."""

    command: OwnCommand
    reading: Reading | None = None

    @property
    def header(self) -> str:
        """Comments for the beginning of the matrix."""
        return "".join(map(comment, self.command.notes))

    @property
    def env_line(self) -> str:
        """The `env` of the section `cluster`, or an empty string."""
        variables = ", ".join(f"{name}: {yaml_text(value)}" for name, value in self.command.env.items())
        return f"  env: {{{variables}}}\n" if variables else ""

    def scaling(self, of_both_modes: str) -> str:
        """Return the entries of the section `scaling`; both need a command that sets the batch."""
        if self.command.sets_batch:
            return of_both_modes
        return (
            comment(
                "The command does not set the batch. The entry below is right if each process has the same "
                "batch at every size (weak scaling): replace 1 by this number of samples. If the script "
                "divides a fixed batch among the processes, use the entry with mode strong instead. If it "
                "has an option for its batch, let the command set it, for example --batch-size "
                "{per_gpu_batch}; then both entries are possible.",
                indent="  ",
            )
            + "  - {mode: weak, per_gpu_batch: [1]}\n"
            + "  # - {mode: strong, global_batch: [256]}\n"
        )

    def workload(self, device: str, *, steps: int, warmup: int) -> str:
        """Return the section `workload`."""
        other = "cpu if it uses none" if device == "cuda" else "cuda if it uses GPUs, with axes.gpus_per_node"
        if self.reading is not None and not self._has_recorder:
            measured = self._patterns(self.reading)
        else:
            measured = self._recorder(steps=steps, warmup=warmup)
        command = f"workload:\n  device: {device}                # of the script; {other}\n"
        command += (
            "  # {world_size}, {run_dir} and the other names in docs/matrix.md become values of the run:\n"
        )
        command += f"  command: {self.command.as_yaml}\n"
        return command + measured

    def _recorder(self, *, steps: int, warmup: int) -> str:
        # An epoch has both windows, three steps between them, and the sampled step: see docs/recorder.md.
        needed = warmup + 3 * (steps + WorkloadOptions().attribution_steps + 4)
        text = f"""\
  metrics: recorder           # {"imported by" if self._has_recorder else "add the lines below to"} the script
  warmup_steps: {warmup:<13} # steps before the first measurement
  steps_per_epoch: {steps}         # measured together; `epochs` times
  epochs: 3
"""
        text += comment(
            f"The measurement needs about {needed} optimizer steps. Let the script stop soon afterwards, and "
            "within time_limit, for example with an option for its number of steps.",
            indent="  ",
        )
        if self._has_recorder:
            return text
        text += comment("The lines for the script:", indent="  ")
        text += self._lines()
        text += comment(
            "If the script must not be changed, bench can read the rate or step time that it prints: replace "
            "`metrics` by the patterns of these numbers, as in this example.",
            indent="  ",
        )
        return text + (
            "  # metrics:\n"
            "  #   output: {step_time: 'time ([0-9.]+)ms'}   # or throughput\n"
            "  #   units: {step_time: ms}\n"
            "  #   skip: 5                                   # values at the beginning\n"
        )

    def _patterns(self, found: Reading) -> str:
        text = comment(f"Found with --try: {found.line.strip()}", indent="  ")
        text += f"  metrics:\n    output: {{{found.quantity}: {yaml_text(found.pattern)}}}\n"
        if found.is_average:
            text += "    kind: average           # one value for the whole run, with its start\n"
        else:
            text += f"    units: {{{found.quantity}: {found.unit}}}\n"
            text += "    skip: 1                 # values at the beginning (warm-up)\n"
            check = {
                "ms": "the time of one step, not of several",
                "us": "the time of one step, not of several",
                "it/s": "the number of optimizer steps per second",
                "samples/s": "the rate of all processes together; else add `scope: per_gpu`",
            }
            text += comment(f"Check that this is {check[found.unit]}.", indent="    ")
        text += comment(
            "The parts of a step are measured only by the recorder: `metrics: recorder`, and in the script:",
            indent="  ",
        )
        return text + self._lines()

    @property
    def _has_recorder(self) -> bool:
        return self.command.script is not None and self.command.script.has_recorder

    def _lines(self) -> str:
        """Return the lines to add to the script, as comments."""
        lines = self.command.script.lines if self.command.script else RECORDER_LINES
        return "".join(f"  #     {line}".rstrip() + "\n" for line in lines.splitlines())


def yaml_text(text: str) -> str:
    """Return ``text`` as a YAML scalar in double quotes; characters that YAML does not allow are escaped."""
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    quoted = "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped)
    return f'"{quoted}"'


def comment(text: str, *, indent: str = "") -> str:
    """Return ``text`` as lines of a YAML comment."""
    lines = textwrap.wrap(one_line(text), 98 - len(indent), break_long_words=False, break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


def read_command(text: str) -> OwnCommand:
    """Read the command that a user would type: its launcher, its variables and its script.

    Raises:
        BenchError: it is no command, its launcher cannot be replaced, or its script does not exist.
    """
    try:
        text.encode()
        words = shell_words(text.replace("\\\n", ""))
    except UnicodeEncodeError:
        raise BenchError("--command is not valid UTF-8", remedy="use a UTF-8 locale") from None
    except ValueError as wrong:
        raise BenchError(f"--command {wrong}", remedy="close the quotes as in a shell") from None
    notes: list[str] = []
    env, words = _environment(words, notes)
    launcher = ""
    launch = read_launch(words)
    if launch is not None:
        launcher, program = _without_launcher(launch, env, notes)
        words = [*launch.wrapper, *program]
    own = OwnCommand([_matrix_word(word) for word in words], launcher, env, notes=notes)
    try:
        TypeAdapter(Words).validate_python(own.words)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise BenchError(f"--command: {reason}") from None
    own.script = _read_script(words, notes)
    if own.script and own.script.trainer == "lightning" and "nodes" not in names_in(own.words):
        notes.append(
            "Lightning must know the numbers of nodes and devices: give the script options for "
            "Trainer(num_nodes=..., devices=...), and pass {nodes} and {gpus_per_node} to them."
        )
    return own


def _environment(words: Sequence[str], notes: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split leading ``NAME=VALUE`` words, also after ``env``, from a command."""
    rest = list(words[1:] if words[:1] == ["env"] else words)
    env: dict[str, str] = {}
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        env[match[1]] = match[2]
        rest.pop(0)
    if not env or not rest or rest[0].startswith("-"):
        return {}, list(words)
    if env.pop("OMP_NUM_THREADS", None) is not None:
        notes.append("OMP_NUM_THREADS is left out: cluster.cpus_per_task sets the threads of each process.")
    for name in env:
        try:
            env_name(name)
        except ValueError as wrong:
            raise BenchError(f"--command: {wrong}", remedy=f"remove {name}= from the command") from None
    if env:
        notes.append(f"The variables before the command are in cluster.env: {', '.join(env)}.")
    return env, rest


def _matrix_word(word: str) -> str:
    """Return a word with the syntax of a matrix: if it has no known placeholder, its braces are literal."""
    known = {*CELL_VALUES, *RUN_TIME_VALUES, *WorkloadOptions.model_fields}
    try:
        names = [name for kind, name in tokens(word) if kind == "value"]
    except ValueError:
        names = []
    if names and known.issuperset(names):
        return word
    return word.replace("{", "{{").replace("}", "}}")


def _without_launcher(launch: LaunchLine, env: dict[str, str], notes: list[str]) -> tuple[str, list[str]]:
    """Return the launcher of the matrix in place of the command's launcher, and the program."""
    name = {"accelerate": "accelerate launch"}.get(launch.launcher, launch.launcher)
    if launch.program is None:
        what = f"--command: {name} has options that bench does not know, or no program"
        raise BenchError(what, remedy="give the command of one process: bench init --command 'python ...'")
    given = launch.options or {}
    reason = _why_not_replaced(launch.launcher, given)
    if reason:
        program = shlex.join([*launch.wrapper, *launch.program])
        what = f"--command: bench starts the processes itself, and cannot replace {name}: {reason}"
        remedy = f"if the program also runs under torchrun, use bench init --command {shlex.quote(program)}"
        raise BenchError(what, remedy=remedy)
    launcher = "srun" if launch.launcher == "srun" else "torchrun"
    options = shlex.join(_written(given))
    notes.append(
        f"`{name}{f' {options}' if options else ''}` is left out of the command: bench starts the processes "
        "with the launcher of the matrix. The axes set the numbers of nodes and processes, and bench sets "
        "the rendezvous."
    )
    if launch.launcher == "torchrun":
        lost = [f"--{name}: {why}" for name, why in _TORCHRUN_LOST.items() if name in given]
        notes += [f"This option changed the processes, and is not replaced: {text}." for text in lost]
    if launch.launcher == "accelerate":
        if "mixed_precision" in given:
            env["ACCELERATE_MIXED_PRECISION"] = given["mixed_precision"]
            notes.append("accelerate's --mixed_precision is in cluster.env: ACCELERATE_MIXED_PRECISION.")
        if (defaults := _accelerate_defaults()) is not None:
            notes.append(f"The settings in accelerate's configuration file do not apply: {defaults}.")
    return launcher, launch.program


def _written(options: Mapping[str, str]) -> list[str]:
    dashes = {name: f"-{name}" if len(name) == 1 else f"--{name}" for name in options}
    return [word for name, value in options.items() for word in (dashes[name], value) if word]


def _why_not_replaced(launcher: str, options: Mapping[str, str]) -> str:
    """Return the reason for which torchrun cannot replace a launcher, or an empty string."""
    if launcher == "mpirun":
        return "mpirun gives each process MPI's variables instead of RANK and WORLD_SIZE"
    if launcher == "deepspeed" and "no_local_rank" not in options:
        return "deepspeed passes --local_rank to the script, torchrun sets LOCAL_RANK only"
    if launcher == "accelerate":
        lost = [name for name in options if name not in _ACCELERATE_REPLACED.split()]
        if options.get("mixed_precision") == "fp8":
            lost.append("mixed_precision")
        if lost:
            return f"torchrun has nothing like {', '.join(f'--{name}' for name in lost)}"
    return ""


def _accelerate_defaults() -> Path | None:
    """Return accelerate's default configuration file, if it exists."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    files = [home / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "json")]
    return next((file for file in files if file.is_file()), None)


def _read_script(words: Sequence[str], notes: list[str]) -> Script | None:
    """Return the facts about the Python script of a command; None if there is none, or it is not readable."""
    path = _script_path(words)
    if path is None:
        notes.append("No Python script was found in the words of the command, so no source was read.")
        return None
    if not path.is_file():
        if not path.is_absolute():
            what = f"--command: {path} is not a file in this folder"
            raise BenchError(what, remedy="call bench init in the folder in which the command runs")
        notes.append(f"{path} is not a file on this machine.")
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        notes.append(f"{path} cannot be read as Python{line}: {getattr(error, 'msg', error)}.")
        return None
    modules, names = _imports(tree)
    recorder = any(module.split(".")[0] == "ddp_scaling_bench" for module in modules)
    recorder |= any(f"{module}.".startswith("bench.record.") for module in modules)
    trainer = ""
    if {"Trainer", "LightningCLI"} & names and {"lightning", "pytorch_lightning"} & _packages(modules):
        trainer = "lightning"
    elif {"Trainer", "Seq2SeqTrainer"} & names and "transformers" in _packages(modules):
        trainer = "transformers"
    return Script(recorder, trainer)


def _script_path(words: Sequence[str]) -> Path | None:
    """Return the path of a command's Python script, or None."""
    at = next((i for i, word in enumerate(words) if runs_python(word)), None)
    if at is None:
        return next((Path(word) for word in words[:1] if word.endswith(".py")), None)
    rest = list(words[at + 1 :])
    while rest and re.fullmatch(r"-[bBdEiIOPqsSuvx]+", rest[0]):
        rest.pop(0)
    if rest[:1] == ["-m"] and len(rest) > 1:
        module = Path(*rest[1].split("."))
        found = [path for path in (module.with_suffix(".py"), module / "__main__.py") if path.is_file()]
        return found[0] if found else None
    return Path(rest[0]) if rest and not rest[0].startswith("-") else None


def _packages(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def _imports(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the modules that a source imports, and all names and attributes that it uses."""
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return modules, names
