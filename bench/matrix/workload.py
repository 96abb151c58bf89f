"""The `workload` section of a matrix: options of the built-in training, or a command in its place.

The options are defined in :mod:`ddp_scaling_bench.train.options`. Each can also be an axis of the matrix.

A command is a list of words, never shell code; it can have a name. A string is split at spaces and
quotes as in a shell, but nothing is expanded. ``{name}`` is replaced by a value of the cell; ``{{``
and ``}}`` are literal braces. :func:`shell_word` quotes the words for a script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from ddp_scaling_bench.train.options import OPTIONS, Option
from ddp_scaling_bench.units import parse_count, parse_duration_s

from .cell import BUILT_IN, Cell, Command, value_text
from .field_types import Form, Forms, Section, did_you_mean, shell_words

#: Options whose number can also be a text in a matrix (``10M``, ``5m``), with the function that parses it.
_TEXT_FORMS: dict[str, Callable[[str], float]] = {
    "parameters": parse_count,
    **dict.fromkeys(("sweep_time", "join_timeout"), parse_duration_s),
}


class WrittenInt(int):
    """A whole number with its ``text`` in the matrix: 25M."""

    text: str


class WrittenFloat(float):
    """A number with its ``text`` in the matrix: 5m."""

    text: str


def _keeping_text(parse: Callable[[str], float]) -> WrapValidator:
    """Return a validator that parses a text and keeps it, for placeholders of commands."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str):
            return validate(value)
        number = validate(parse(value))
        written = WrittenFloat(number) if isinstance(number, float) else WrittenInt(number)
        written.text = value.strip()
        return written

    return WrapValidator(check)


def _option_type(option: Option) -> Any:
    """Return the type with which a matrix validates an option of the built-in training."""
    checks: list[Any] = []
    if parse := _TEXT_FORMS.get(option.name):
        checks += [_keeping_text(parse), WithJsonSchema({"type": ["number", "string"]})]
    limits: dict[str, Any] = dict(option.limits)
    if option.type is str:
        checks.append(Field(min_length=1))
    elif option.type is float:
        checks.append(Field(allow_inf_nan=False, **limits))
    elif option.type in (int, bool):
        checks.append(Field(strict=True, **limits))
    kind = Annotated[(option.type, *checks)] if checks else option.type
    return kind | None if option.default is None else kind


#: The types of all options by name.
OPTION_TYPES = {name: _option_type(option) for name, option in OPTIONS.items()}
#: Options that control the recorder.
RECORDER_OPTIONS = ("warmup_steps", "steps_per_epoch", "attribution_steps", "epochs")
#: Options that control the recorder or the launch, and so have an effect on every program.
COMMON_OPTIONS = ("device", *RECORDER_OPTIONS, "grad_accum", "join_timeout")


def used_options(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the options that have an effect on a program."""
    if tuple(argv) == BUILT_IN:
        return tuple(OPTIONS)
    return tuple(name for name in OPTIONS if name in {*COMMON_OPTIONS, *names_in(argv)})


def options_in_file(cell: Cell) -> dict[str, Any]:
    """Return the options that the processes of a run read from cell.json."""
    if tuple(cell.argv) == BUILT_IN:
        return cell.workload
    names = ("device",) if cell.is_unrecorded else ("device", *RECORDER_OPTIONS)
    stated: dict[str, Any] = {"exchange": "rare"} if cell.is_exchange_rare else {}
    if cell.model_parallel > 1:
        stated["model_parallel"] = cell.model_parallel
    return {name: cell.workload[name] for name in names} | stated


_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
#: Placeholders whose values become known when the script runs, with the quoted shell variable of each.
RUN_TIME_VALUES = {
    "run_dir": '"$run_dir"',
    "package": '"$package"',
    "master_addr": '"$MASTER_ADDR"',
    "master_port": '"$MASTER_PORT"',
    "node_rank": '"$NODE_RANK"',
    "hosts": '"$BENCH_HOSTS"',
    "hostfile": '"$BENCH_HOSTFILE"',
}
#: Placeholders for values of a cell that are not workload options.
CELL_VALUES = (
    *("study", "cell_id", "nodes", "tasks_per_node", "gpus_per_node", "world_size", "model_parallel"),
    *("replicas", "global_batch", "per_gpu_batch", "per_replica_batch", "backend", "launcher"),
)
#: Placeholders for arbitrary text. In the word after `bash -c`, for example, the text would run as code.
_FREE_TEXT = re.compile(r"run_dir|package|hostfile|data|(?:env|args)\..*")
_RANK_VALUES = ("rank", "local_rank", "group_rank", "local_world_size")
INTERPRETER = re.compile(r"(?:ba|z|da|k|a|c|tc|fi|)sh|python[0-9.]*|perl|ruby|node|lua|php|Rscript|su|ssh")
#: Stands for the script's variable $python. No matrix can contain this text, because of the NUL.
PYTHON = "\0python"
_NUL_OR_LINE_BREAK = re.compile(r"[\x00\r\n]")


def tokens(word: str) -> Iterator[tuple[str, str]]:
    """Split a word at its placeholders; yield ``("text", literal)`` and ``("value", name)`` pairs."""
    at = 0
    for match in _TOKEN.finditer(word):
        if match.start() > at:
            yield "text", word[at : match.start()]
        at = match.end()
        if match[0] in ("{{", "}}"):
            yield "text", match[0][0]
        elif match[1] is not None:
            yield "value", match[1]
        else:
            raise ValueError(f"{word!r} has a single {match[0]!r}; write it twice for a literal brace")
    if at < len(word):
        yield "text", word[at:]


def names_in(words: Sequence[str]) -> list[str]:
    """Return the distinct placeholder names in a command, in order of first use."""
    return list(dict.fromkeys(text for word in words for kind, text in tokens(word) if kind == "value"))


def quote(text: str) -> str:
    r"""Quote a text for bash; a carriage return becomes ``\r``, because sbatch refuses CR LF in a script."""
    return shlex.quote(text).replace("\r", "'$'\\r''")


def shell_word(word: str, values: Mapping[str, Any]) -> str:
    """Replace the placeholders of a word by their values, and quote it for a shell script."""
    pieces = []
    for kind, text in tokens(word):
        if kind == "value" and text in RUN_TIME_VALUES:
            pieces.append(RUN_TIME_VALUES[text])
        elif text == PYTHON:
            pieces.append('"$python"')
        else:
            pieces.append(quote(value_text(values[text]) if kind == "value" else text))
    return "".join(pieces) or "''"


def command_values(cell: Cell, study: str) -> dict[str, Any]:
    """Return the values of all placeholders for a cell's command, except :data:`RUN_TIME_VALUES`."""
    own = {"gpus_per_node": cell.tasks_per_node, "study": study}
    of_cell = {name: getattr(cell, name) for name in CELL_VALUES if name not in own}
    env = {f"env.{name}": value for name, value in cell.env.items()}
    return {**cell.workload, **cell.texts, **env, **of_cell, **own}


def filled_words(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Replace the placeholders of a command by their values, except those in :data:`RUN_TIME_VALUES`."""
    return [
        "".join(
            text if kind == "text" else f"{{{text}}}" if text in RUN_TIME_VALUES else value_text(values[text])
            for kind, text in tokens(word)
        )
        for word in words
    ]


def runs_python(word: str) -> bool:
    """Return whether a word of a command is a Python interpreter, by its name."""
    return re.fullmatch(r"python[0-9.]*", word.rpartition("/")[2]) is not None


def uses_python(words: Sequence[str]) -> bool:
    """Return whether a command begins with ``python``, which the script replaces by its own interpreter."""
    return words[0] in ("python", "python3")


def task_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with :data:`PYTHON` in place of a leading ``python``."""
    return [PYTHON, *words[1:]] if uses_python(words) else list(words)


#: What a shell quotes; or the end of a line that goes on, which YAML may have joined to the next line.
_LINE_GOES_ON = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\\S)|\\\n|(?<!\S)\\ (?=\S)""", re.DOTALL)
#: A statement of a shell in a line above the program.
_STATEMENT = re.compile(r"\A\s*((?:module|ml|source|\.|cd|export|\w+ activate) .{,40}).*\n\s*\S")


def command_words(text: str) -> list[str]:
    """Split a command into words as a shell does; raise ValueError if only a shell could execute it."""
    text = _LINE_GOES_ON.sub(lambda found: found[1] or " ", text)
    words = shell_words(text)
    operators = [word for word in words if re.fullmatch(r"\d?[&|;<>]+\d?|.*;", word)]
    for code in [*_STATEMENT.findall(text), *operators]:
        remedy = "put it into a script, or lines such as cd into cluster.setup (a list of words is literal)"
        raise ValueError(f"{code!r} has a meaning for a shell only, which does not read it; {remedy}")
    return words


def _check_command(words: list[str]) -> list[str]:
    if not words or not words[0]:
        raise ValueError("the command is empty; write a command such as `python train.py`")
    if assigned := re.match(r"[A-Za-z_]\w*(?==)", words[0]):
        remedy = "set it in cluster.env, or begin with env"
        raise ValueError(f"{assigned[0]} is set before the program, which only a shell can do; {remedy}")
    if re.match(r"[^/\s]+\s", words[0]):
        remedy = f"write {words[0]!r} without a list" + ", or several commands in axes.command" * (
            len(words) > 1
        )
        raise ValueError(f"the list has a whole command as one word; {remedy}")
    if words[0].endswith(".py") and "/" not in words[0]:
        remedy = f"write python {words[0]}, or ./{words[0]} if it is executable"
        raise ValueError(f"{words[0]!r} is a Python file without its interpreter; {remedy}")
    code = _code_words(words)
    for at, word in enumerate(words):
        if _NUL_OR_LINE_BREAK.search(word):
            raise ValueError(f"{word!r} contains a line break or NUL; put a longer program into a file")
        for kind, name in tokens(word):
            if kind == "value":
                _check_name(name)
                if _FREE_TEXT.fullmatch(name) and at in code:
                    raise ValueError(
                        f"{code[at]} would execute the value of {{{name}}} as code; pass it as a separate "
                        "word after the code ($1), or put the code into a file"
                    )
    return words


def _code_words(words: Sequence[str]) -> dict[int, str]:
    """Return the positions of words that an interpreter executes as code, as after ``bash -c``."""
    found: dict[int, str] = {}
    for start, program in enumerate(words):
        if not INTERPRETER.fullmatch(program.rpartition("/")[2]):
            continue
        is_next = False
        for at in range(start + 1, len(words)):
            if re.match(r"-[A-Za-z]*[ceE]|--(?:command|eval|init-command)", words[at]):
                is_next = True
                found[at] = program  # the code can follow in the same word
            elif not words[at].startswith(("-", "+")):
                if is_next:
                    found[at] = program
                break
    return found


def _check_name(name: str) -> None:
    allowed = [*CELL_VALUES, *RUN_TIME_VALUES, *OPTIONS, "env.NAME", "args.NAME"]
    if name in allowed or name.startswith(("env.", "args.")):
        return
    if name in _RANK_VALUES:
        raise ValueError(f"{{{name}}} differs between ranks; read ${name.upper()} in the command")
    hint = did_you_mean(name, allowed, cutoff=0.6)
    raise ValueError(
        f"unknown placeholder {{{name}}}; {hint}; for an axis args.{name}, write {{args.{name}}}"
    )


#: A list of words, or a text that is split into words.
Words = Annotated[
    list[Annotated[str, Field(strict=True)]],
    BeforeValidator(lambda value: command_words(value) if isinstance(value, str) else value),
    AfterValidator(_check_command),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
]
WORDS: TypeAdapter[list[str]] = TypeAdapter(Words)
_COMMAND_NAME = Form(
    "a name of a command",
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}"),
    "letters, digits, '.', '_' and '-', at most 40, beginning with a letter or digit",
)


class NamedCommand(Section):
    """A command with a name, which is part of the names of its cells."""

    name: Annotated[
        str,
        Field(strict=True),
        AfterValidator(_COMMAND_NAME.check),
        WithJsonSchema({"type": "string", "pattern": f"^{_COMMAND_NAME.pattern.pattern}$"}),
    ]
    """A short name: letters, digits, '.', '_' and '-'."""
    run: Words
    """The command: a string, or a list of words."""


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not value.keys().isdisjoint(NamedCommand.model_fields)


def _command(value: Any) -> Command:
    if isinstance(value, dict):
        named = NamedCommand.model_validate(value)
        return Command(tuple(named.run), named.name)
    if isinstance(value, list) and any(isinstance(word, list) or _is_named(word) for word in value):
        raise ValueError(
            "a command is a string, a list of words, or {name: NAME, run: COMMAND}; list several commands in "
            "axes.command"
        )
    return Command(tuple(WORDS.validate_python(value)))


#: The type of `command`: a string, a list of words, or a mapping with the keys of :class:`NamedCommand`.
CommandOption = Annotated[
    Command,
    PlainValidator(_command),
    Forms(
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        NamedCommand,
    ),
]


Quantity = Literal["throughput", "step_time", "loss"]
#: The allowed units of each quantity; the first is the default.
UNITS: dict[str, tuple[str, ...]] = {
    "throughput": ("samples/s", "it/s", "tokens/s", "samples/s/GPU", "tokens/s/GPU"),
    "step_time": ("s", "ms", "us"),
}
_PER = r"[ _-]*(?:/|per)[ _-]*"
_TOKEN_RATE = re.compile(
    rf"(?<![a-z])(?:k?(?:tok(?:en)?|word)s?(?:{_PER}(?:gpu|device|rank))?{_PER}s(?:ec(?:ond)?)?|t[gp]s|wps|"
    r"tokens?[ _-]throughput)(?![a-z])",
    re.IGNORECASE,
)
_OF_ONE_RANK = re.compile(rf"{_PER}(?:gpu|device|rank)s?(?![a-z])|(?<![a-z])tgs(?![a-z])", re.IGNORECASE)
_FLOPS = re.compile(r"(?<![a-z])(?:[kmgtp]?flops?(?![a-z])|mfu(?![a-z]))", re.IGNORECASE)


def says_tokens(text: str) -> bool:
    """Return whether a text, or a regular expression for it, names a rate of tokens (``tokens/s``)."""
    return _TOKEN_RATE.search(re.sub(r"\\s[*+?]?", " ", text).replace("\\", "")) is not None


def says_one_rank(text: str) -> bool:
    """Return whether a text, or a regular expression for it, names a rate of one rank (``tokens/s/GPU``)."""
    return _OF_ONE_RANK.search(text.replace("\\", "")) is not None


def says_flops(text: str) -> bool:
    """Return whether a text, or a regular expression for it, names FLOP/s or their share (MFU)."""
    return _FLOPS.search(text.replace("\\", "")) is not None


def _check_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        remedy = r"correct it, or write \[ and \( for a literal [ and ("
        raise ValueError(f"'{text}' is not a regular expression: {error}; {remedy}") from None
    if groups != 1:
        raise ValueError(
            f"{text!r} has {groups} groups; put ( ) around the number, and use (?: ) for other groups"
        )
    return text


def _check_path(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise ValueError(f"{text!r} is not a path")
    if "{" in text:
        raise ValueError(f"{text!r} has a placeholder; write only the path below the run's folder")
    if text.startswith("/") or ".." in text.split("/"):
        raise ValueError(f"{text!r} is not in the run's folder; give a path relative to this folder")
    return text


Pattern = Annotated[str, AfterValidator(_check_pattern)]
Path = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]


class Metrics(Section):
    """The source of a command's metrics, and their units."""

    source: Literal["recorder", "none"] | None = None
    """recorder: the command uses the recorder. none: nothing is measured."""
    csv: Path | None = None
    """A CSV file with a header, written by the command; relative to the run's folder."""
    columns: dict[Quantity, Annotated[str, Field(min_length=1)]] | None = None
    """The columns of csv that contain throughput, step_time and loss."""
    output: dict[Quantity, Pattern] | None = None
    """Regular expressions with one group, searched for in each line of the command's output."""
    kind: Literal["per_step", "average"] = "per_step"
    """per_step: values during the run. average: one value for the whole run, as in a summary."""
    units: dict[Literal["throughput", "step_time"], str] = Field(default={})
    """throughput: samples/s, it/s, tokens/s, samples/s/GPU or tokens/s/GPU; step_time: s, ms or us."""
    tokens_per_sample: Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = None
    """With tokens/s: the number of tokens of a sample; default: seq_len."""
    scope: Literal["global", "per_gpu", "per_replica"] = "global"
    """Whether the throughput is the sum of all ranks (global) or that of one rank or one replica."""
    skip: Annotated[int, Field(strict=True, ge=0, le=10**9)] = 0
    """The number of values to ignore at the beginning (warm-up)."""
    ranks: Literal["one", "all"] = "one"
    """Whether the lines of one rank count (one), if they name their ranks, or those of all ranks."""

    @model_validator(mode="after")
    def _check(self) -> Metrics:
        if message := next(self._problems(), ""):
            raise ValueError(message)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield a message for each setting that is missing, not possible or without effect."""
        given = [name for name in ("source", "csv", "output") if getattr(self, name) is not None]
        read, unit = self.columns or self.output or {}, self.units.get("throughput", "")
        rates = {"throughput", "step_time"} & set(read)
        if len(given) != 1:
            yield f"give exactly one of source, csv and output; given: {' and '.join(given) or 'nothing'}"
        if self.csv is None and self.columns is not None:
            yield "columns is only used with csv; remove it"
        if self.csv is not None and self.columns is None:
            yield "csv needs columns; add columns: {throughput: NAME}"
        if self.source is None and not rates:
            yield "neither throughput nor step_time is given; add the one that the command reports"
        for quantity, name in self.units.items():
            if name not in UNITS[quantity]:
                yield f"units.{quantity} cannot be {name!r}; allowed: {', '.join(UNITS[quantity])}"
            if self.source == "recorder" and name != "tokens/s":
                yield "with the recorder, units can only be {throughput: tokens/s}; remove the others"
            if self.source != "recorder" and quantity not in read:
                yield f"units.{quantity} has no effect: {quantity} is not read; read it, or remove its unit"
        if self.scope != "global" and ("throughput" not in read or unit == "it/s"):
            yield f"scope {self.scope} applies only to a throughput in samples/s or tokens/s; remove it"
        if unit.endswith("/GPU") and "scope" in self.model_fields_set:
            yield f"the unit {unit} has scope per_gpu; remove scope, or write {unit.removesuffix('/GPU')}"
        if self.tokens_per_sample and not self.counts_tokens:
            yield "tokens_per_sample has no effect; add units: {throughput: tokens/s}, or remove it"
        if self.skip and not read:
            yield "skip has no effect: no values are read; remove it (for the recorder, set warmup_steps)"
        if self.ranks == "all" and (self.output is None or self.kind == "average"):
            yield "ranks all applies only to values per step that are read from the output; remove it"
        if self.kind == "average":
            if not read:
                yield "kind average has no effect: no values are read; remove it"
            if self.skip:
                yield "skip has no effect with kind average, which reads one value; remove it"
            if len(rates) == 2:
                yield "kind average reads throughput or step_time, which follow from each other; remove one"

    @property
    def counts_tokens(self) -> bool:
        """True if the throughput is one of tokens."""
        return self.units.get("throughput", "").startswith("tokens")

    def as_json(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, for plan.json and run.json.

        A unit per GPU is returned as the unit of the sum, with scope ``per_gpu``.
        """
        content = self.model_dump(exclude_none=True, exclude_defaults=True)
        unit = self.units.get("throughput", "")
        if unit.endswith("/GPU"):
            units = {**self.units, "throughput": unit.removesuffix("/GPU")}
            content |= {"units": units, "scope": "per_gpu"}
        return content


def _source_from_text(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("recorder", "none"):
            form = "a mapping such as {output: {throughput: 'speed: ([0-9.]+)'}}"
            raise ValueError(f"{value!r} is not a source of metrics; allowed: recorder, none, or {form}")
        return {"source": value}
    return value


#: The type of `workload.metrics`: ``recorder``, ``none``, or a mapping.
MetricsOption = Annotated[
    Metrics,
    BeforeValidator(_source_from_text),
    Forms({"enum": ["recorder", "none"]}, Metrics),
]
RECORDER = Metrics(source="recorder")
