"""A user's own command, for `bench init --command`: its launcher, variables, and lines of a matrix."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.train.options import OPTIONS

from .cell import shown_command
from .field_types import env_name
from .launchers import LaunchLine, read_launch
from .workload import CELL_VALUES, RUN_TIME_VALUES, Words, command_words, names_in, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
#: Options that set the samples of a step.
_BATCH = re.compile(r"(?:--?)?(?:batch|bs|(?:(?:per[_-]device[_-])?train[_-]|global[_-])?batch[_-]size)|-b")
_NUMBER = re.compile("[1-9][0-9]{0,8}")
#: A script with one of these words can use GPUs.
_GPU_WORDS = re.compile("cuda|nccl|accelerat|lightning|Trainer")


@dataclass
class OwnCommand:
    """A command for a matrix. ``notes`` are sentences for the user, about changes."""

    words: list[str]
    """The words with the syntax of a matrix: placeholders, and literal braces written twice."""
    launcher: str = ""
    """``torchrun`` or ``srun`` if it replaces a launcher in the command, ``own`` if the command keeps it."""
    command_per: str = "node"
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    batch: int | None = None
    """The batch in the user's command, which a placeholder replaces."""
    is_cpu: bool = False
    """True if the script communicates with gloo, and uses no GPU."""

    @property
    def env_line(self) -> str:
        """The `env` of the section `cluster`, or an empty string."""
        variables = ", ".join(f"{name}: {yaml_text(value)}" for name, value in self.env.items())
        return f"  env: {{{variables}}}\n" if variables else ""

    @property
    def cluster_lines(self) -> str:
        """Lines of the section `cluster`."""
        return f"""\
  stop_after_measurement: true # end a run after its last window; without this line, the script trains on
{self.env_line}"""

    def scaling(self, of_both_modes: str) -> str:
        """Return the entries of the section `scaling`; both need a command that sets the batch."""
        if {"per_gpu_batch", "global_batch"} & set(names_in(self.words)):
            return of_both_modes
        return """\
  # The command does not set the batch. The entry below is right if each process has the same batch at
  # every size: replace 1 by its samples. If the script divides a fixed batch among the processes, use the
  # other entry. For both, let the command set the batch, for example --batch-size {per_gpu_batch}.
  - {mode: weak, per_gpu_batch: [1]}
  # - {mode: strong, global_batch: [256]}
"""

    def workload(self, device: str, *, steps: int) -> str:
        """Return the section `workload`."""
        other = "cpu if it uses none" if device == "cuda" else "cuda if it uses GPUs, with axes.gpus_per_node"
        # An epoch has both windows, three steps between them, and the sampled step: see docs/recorder.md.
        needed = 10 + 3 * (steps + OPTIONS["attribution_steps"].default + 4)
        command_per = f"  command_per: {self.command_per}\n" if self.command_per != "node" else ""
        return f"""\
workload:
  device: {device}                # of the script; {other}
  # {{world_size}}, {{run_dir}} and the other names in docs/matrix.md become values of the run:
  command: {yaml_text(shown_command(self.words))}
{command_per}  metrics: recorder           # with the lines below; or read what it prints: docs/recorder.md
  #   from ddp_scaling_bench import Recorder
  #   recorder = Recorder(model)
  #   for batch in recorder.batches(loader):
  #       with recorder.step():
  #           ...                 # forward, backward and optimizer
  #           recorder.loss(loss)
  #   recorder.close()
  warmup_steps: 10            # steps before the first measurement
  steps_per_epoch: {steps}         # measured together; `epochs` times
  epochs: 3
  # The measurement needs about {needed} optimizer steps within time_limit: the script must not end before.
"""


def yaml_text(text: str) -> str:
    """Return ``text`` as a YAML scalar in double quotes; characters that YAML does not allow are escaped."""
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    quoted = "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped)
    return f'"{quoted}"'


#: What starts ranks, by the suffix of a script. A Python script may only mention torchrun, as in its help.
_STARTS_RANKS = {
    ".py": re.compile(r"\b(?:mp|multiprocessing)\.(?:spawn|start_processes)\("),
    ".sh": re.compile(
        r"^[^#\n]*\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|mpirun|"
        r"fabric run)\b",
        re.M,
    ),
}


def read_command(text: str) -> OwnCommand:
    """Read the command that a user would type: its launcher and its variables.

    Raises:
        BenchError: it is no command, or its launcher cannot be replaced.
    """
    try:
        text.encode()
        words = command_words(text.replace("\\\n", ""))
    except UnicodeEncodeError:
        raise BenchError("--command is not valid UTF-8", remedy="use a UTF-8 locale") from None
    except ValueError as wrong:
        raise BenchError(f"--command: {wrong}") from None
    own = OwnCommand([])
    words = _without_variables(words, own)
    launch = read_launch(words)
    if launch is not None:
        words = _without_launcher(launch, own)
    own.words = [_matrix_word(word) for word in words]
    try:
        TypeAdapter(Words).validate_python(own.words)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise BenchError(f"--command: {reason}") from None
    _read_script(own)
    return own


def _read_script(own: OwnCommand) -> None:
    """Let the command set the batch if an option is known for it; find out who starts ranks, and on what."""
    named = (word for word in own.words if word.endswith((".py", ".sh")))
    script = next((path for path in map(Path, named) if path.is_file()), None)
    source = script.read_text(encoding="utf-8", errors="replace") if script else ""
    starts = _STARTS_RANKS[script.suffix].search(source) if script and not own.launcher else None
    if starts:
        own.launcher = "own"
        own.notes.append(
            f"{script} starts processes ({starts[starts.re.groups]}): with launcher own, bench starts the "
            "command once on each node. Pass it the sizes, such as {nodes}, {tasks_per_node}, {node_rank} "
            "and {master_addr} (docs/recipes.md)."
        )
    if script and script.suffix == ".sh":
        return
    if "gloo" in source and not _GPU_WORDS.search(" ".join([source, *own.words])):
        own.is_cpu = True
        own.notes.append(f"{script} uses gloo and no GPU: the matrix is for CPUs.")
    if {"per_gpu_batch", "global_batch"} & set(names_in(own.words)):
        return
    for at, word in enumerate(own.words):
        option, equals, value = word.partition("=")
        number = value if equals else "".join(own.words[at + 1 : at + 2])
        if _BATCH.fullmatch(option) and (equals or option.startswith("-")) and _NUMBER.fullmatch(number):
            break
    else:
        at, option, equals, number = len(own.words), next(_batch_options(source), ""), "", ""
    if not option:
        return
    name = "global_batch" if "global" in option else "per_gpu_batch"
    own.batch = int(number) if number and name == "per_gpu_batch" else None
    own.words[at : at + (1 if equals else 2)] = (
        [f"{option}={{{name}}}"] if equals else [option, f"{{{name}}}"]
    )
    own.notes.append(
        f"The matrix sets the batch: {option} is {{{name}}}. Write {{global_batch}} if the option is the "
        "batch of all processes together, and {per_gpu_batch} if it is that of one."
    )


def _batch_options(source: str) -> Iterator[str]:
    """Yield the options of a script for its batch: of argparse, click, typer, fire and HfArgumentParser."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Call):
            texts = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            options = [text for text in texts if text.startswith("-") and _BATCH.fullmatch(text)]
            if options:
                yield max(options, key=len)
    called = re.findall(r"\b(?:typer\.run|fire\.Fire)\(\s*(\w+)", source)
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            is_called = node.name in called or ("typer" in source and ".command" in decorators)
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                if is_called and _BATCH.fullmatch(option := f"--{argument.arg}"):
                    yield option.replace("_", "-") if "typer" in source else option
    if "HfArgumentParser" in source and "TrainingArguments" in source:
        yield "--per_device_train_batch_size"


def _without_variables(words: Sequence[str], own: OwnCommand) -> list[str]:
    """Move leading ``NAME=VALUE`` words, also after ``env``, to ``own``; return the other words."""
    rest = list(words[1:] if words[:1] == ["env"] else words)
    env: dict[str, str] = {}
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        env[match[1]] = match[2]
        rest.pop(0)
    if not env or not rest or rest[0].startswith("-"):
        return list(words)
    if env.pop("OMP_NUM_THREADS", None) is not None:
        own.notes.append(
            "OMP_NUM_THREADS is left out: cluster.cpus_per_task sets the threads of each process."
        )
    for name in env:
        try:
            env_name(name)
        except ValueError as wrong:
            raise BenchError(f"--command: {wrong}") from None
    if env:
        own.notes.append(f"The variables before the command are in cluster.env: {', '.join(env)}.")
    own.env = env
    return rest


def _without_launcher(launch: LaunchLine, own: OwnCommand) -> list[str]:
    """Set the launcher of the matrix; return the words of the program, or with launcher own, of all."""
    launcher = launch.launcher
    if launcher.refusal or not launch.rest:
        reason = launcher.refusal or "it has no program"
        raise BenchError(
            f"--command: bench cannot use {launcher.name}: {reason}",
            remedy="give the command of the program: bench init --command 'python ...'",
        )
    if not launcher.replacement or not launch.program:
        own.launcher, own.command_per = "own", launcher.starts[0]
        where = {"node": "on each node", "job": "once per job, on its first node"}[own.command_per]
        own.notes.append(
            f"`{launcher.name}` starts the processes: with launcher own, bench starts the command {where}. "
            "Its options for sizes and hosts have placeholders; see docs/recipes.md."
        )
        return launch.for_sizes()
    own.launcher = launcher.replacement
    own.notes.append(
        f"`{shlex.join(launch.words)}` is left out of the command: bench starts the processes with the "
        "launcher of the matrix. The axes set the numbers of nodes and processes, and bench sets the "
        "rendezvous."
    )
    return [*launch.wrapper, *launch.program]


def _matrix_word(word: str) -> str:
    """Return a word with the syntax of a matrix: if it has no known placeholder, its braces are literal."""
    known = {*CELL_VALUES, *RUN_TIME_VALUES, *OPTIONS}
    try:
        names = [name for kind, name in tokens(word) if kind == "value"]
    except ValueError:
        names = []
    if names and known.issuperset(names):
        return word
    return word.replace("{", "{{").replace("}", "}}")
