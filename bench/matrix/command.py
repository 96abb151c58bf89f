"""A command in place of the built-in training, with values of the cell in braces.

A command is words, never shell: a text is split at spaces and quotes as a shell would, and
then nothing in it is expanded. ``{name}`` stands for a value of the cell, ``{{`` and ``}}``
for braces. Whoever writes a word into a script quotes it (:func:`shell_word`).
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from bench.matrix.cell import Cell
from bench.matrix.cell import word as spoken_word
from bench.matrix.field_types import shell_words

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
#: What a script knows only when it runs, as a quoted expansion of its own variable.
AT_RUN_TIME = {
    "run_dir": '"$run_dir"',
    "master_addr": '"$MASTER_ADDR"',
    "master_port": '"$MASTER_PORT"',
}
#: What belongs to a cell beside its workload options.
OF_CELL = (
    "study",
    "cell_id",
    "nodes",
    "tasks_per_node",
    "gpus_per_node",
    "world_size",
    "global_batch",
    "per_gpu_batch",
    "backend",
    "launcher",
)
#: Values that can hold any text: in a word that an interpreter reads as a program they would be code.
_FREE_TEXT = ("run_dir", "data")
_OF_A_RANK = ("rank", "local_rank", "node_rank", "group_rank", "local_world_size")
_INTERPRETER = re.compile(r"(?:ba|z|da|k|)sh|python[0-9.]*|perl|ruby")
#: Stands for the script's own variable; no matrix can hold it.
PYTHON = "\0python"
_NULL_OR_LINE = re.compile(r"[\x00\r\n]")


def tokens(word: str) -> Iterator[tuple[str, str]]:
    """Yield ``("text", literal)`` and ``("value", name)`` in their order.

    Raises:
        ValueError: a brace that is neither doubled nor around a name.
    """
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
            raise ValueError(f"{word!r} has a single {match[0]!r}; write it twice where a brace is meant")
    if at < len(word):
        yield "text", word[at:]


def names_in(words: Sequence[str]) -> list[str]:
    """Return the names in braces, each once, in their order."""
    return list(dict.fromkeys(text for word in words for kind, text in tokens(word) if kind == "value"))


def shell_word(word: str, values: Mapping[str, Any]) -> str:
    """Return a word with its values, quoted for a shell script."""
    pieces = []
    for kind, text in tokens(word):
        if kind == "value" and text in AT_RUN_TIME:
            pieces.append(AT_RUN_TIME[text])
        elif text == PYTHON:
            pieces.append('"$python"')
        else:
            pieces.append(shlex.quote(spoken_word(values[text]) if kind == "value" else text))
    return "".join(pieces) or "''"


def command_values(cell: Cell, study: str) -> dict[str, Any]:
    """Return every value that a cell's command may name, but for those of run time."""
    own = {"tasks_per_node": cell.tasks_per_node, "gpus_per_node": cell.tasks_per_node, "study": study}
    of_cell = {name: getattr(cell, name) for name in OF_CELL if name not in own}
    env = {f"env.{name}": value for name, value in cell.env.items()}
    return {**cell.workload, **env, **of_cell, **own}


def uses_python(words: Sequence[str]) -> bool:
    """Whether a command begins with ``python``: the one that set-up lines provide, or the submitter's."""
    return words[0] in ("python", "python3")


def torchrun_words(words: Sequence[str]) -> list[str]:
    """Return what stands after torchrun's own options: a script, ``-m MODULE``, or ``--no-python COMMAND``.

    torchrun starts scripts with its own python, unbuffered: the word ``python`` (and ``-u``) goes.
    """
    if uses_python(words):
        rest = list(words[2:]) if words[1:2] == ["-u"] else list(words[1:])
        if rest and (not rest[0].startswith("-") or (rest[0] == "-m" and len(rest) > 1)):
            return rest
    return ["--no-python", *task_words(words)]


def task_words(words: Sequence[str]) -> list[str]:
    """Return what a task of srun runs: the same, with the script's own python."""
    return [PYTHON, *words[1:]] if uses_python(words) else list(words)


def _words(value: Any) -> Any:
    return shell_words(value) if isinstance(value, str) else value


def _checked(words: list[str]) -> list[str]:
    if not words or not words[0]:
        raise ValueError("names no program; write the words of a command, such as `python train.py`")
    for at, word in enumerate(words):
        if _NULL_OR_LINE.search(word):
            raise ValueError(f"{word!r} has a line break or NUL; put a longer program into a file")
        for kind, name in tokens(word):
            if kind == "value":
                _check_name(name)
                if name in _FREE_TEXT or name.startswith("env."):
                    _check_no_code(words[:at], word, name)
    return words


def _check_no_code(before: list[str], word: str, name: str) -> None:
    programs = [word for word in before if _INTERPRETER.fullmatch(word.rpartition("/")[2])]
    if programs and re.fullmatch(r"-[a-z]*[ce]", before[-1]):
        raise ValueError(
            f"{{{name}}} stands in {word!r}, which {programs[-1]} runs as a program: the value would "
            f"be code; give it as a word of its own after the program ($1), or write the program into a file"
        )


def _check_name(name: str) -> None:
    allowed = value_names()
    if name in allowed or name.startswith("env."):
        return
    if name in _OF_A_RANK:
        raise ValueError(f"{{{name}}} differs from rank to rank; the command reads ${name.upper()} itself")
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"unknown value {{{name}}}; {hint}allowed: {', '.join(allowed)}, env.NAME")


def value_names() -> list[str]:
    """Return every name that may stand in braces, but for ``env.NAME``."""
    from bench.matrix.workload import WorkloadOptions

    return [*OF_CELL, *AT_RUN_TIME, *WorkloadOptions.model_fields]


#: A command: a text that is split into words, or the words.
Command = Annotated[
    list[Annotated[str, Field(strict=True)]],
    BeforeValidator(_words),
    AfterValidator(_checked),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
]
