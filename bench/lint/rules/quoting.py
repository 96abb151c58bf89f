"""Rules about quotes and braces that make bash form other words than intended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.findings import Edit, Remark, Severity
from bench.lint.rules import rule
from bench.lint.script import Script
from bench.lint.syntax import Part, Word

_HOST_LIST = re.compile(r"scontrol show host")
_QUOTED_ELEMENT = re.compile(r"\(\"(\$\w+|\$\{\w+\})\"\)")
_RUNS_TEXT = re.compile(r"-[a-z]*c\Z")


@rule(Severity.ERROR)
def node_list_in_one_element(script: Script) -> Iterator[Remark]:
    """An array of the job's hosts has a single element, because the list is quoted.

    bash splits an unquoted expansion into words, and ``("$nodes")`` makes one element of all hosts.
    ``${nodes_array[0]}`` is then the whole list, and ``${nodes_array[1]}`` is empty.

    Bad:
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        nodes_array=("$nodes")

    Good:
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        nodes_array=($nodes)
    """
    for assigned in script.walk.assigned:
        if not assigned.quoted or assigned.items is None:
            continue
        item = assigned.items[0]
        if not _HOST_LIST.search(script.unknowns.shown(item.text)):
            continue
        indexed = script.mentions(re.compile(rf"\$\{{{assigned.name}\[\d"))
        single = not indexed or (not script.job.several_nodes and "nodes" in script.job.options)
        message = f"the quotes make one element of all hosts: ${{{assigned.name}[0]}} is the whole list"
        match = _QUOTED_ELEMENT.search(script.line(assigned.line))
        edit = Edit(assigned.line, match.group(), f"({match.group(1)})") if match else None
        yield Remark(assigned.line, message, "remove the quotes", Severity.INFO if single else None, edit)


@rule(Severity.WARNING)
def arguments_split(script: Script) -> Iterator[Remark]:
    """``"$@"`` within a text for ``bash -c`` passes only the first argument.

    bash splits ``bash -c "train.sh $@"`` into several words: the text up to the first argument is the
    command, and the other arguments become $0, $1 and so on of that command, which does not use them.

    Bad:
        srun bash -c "python train.py $@"

    Good:
        srun bash -c 'python train.py "$@"' bash "$@"
    """
    for step in script.walk.steps + [step for step in script.training if step.place.origin]:
        for before, word in zip(step.outer.words, step.outer.words[1:], strict=False):
            if _RUNS_TEXT.match(before.literal or "") and _splits(word):
                message = "bash -c gets only the first argument: $@ within a text becomes several words"
                remedy = 'write $* instead of $@, or: bash -c \'... "$@"\' bash "$@"'
                edit = Edit(word.line, "$@", "$*") if "$@" in script.line(word.line) else None
                yield Remark(_line_of(word.parts, word.line), message, remedy, edit=edit)


def _splits(word: Word) -> bool:
    return len(word.parts) > 1 and any(_is_arguments(part) for part in word.parts)


def _is_arguments(part: Part) -> bool:
    return part.kind == "param" and part.text == "@" and part.quoted


def _line_of(parts: Sequence[Part], line: int) -> int:
    return next((part.line for part in parts if _is_arguments(part)), line)


@rule(Severity.ERROR)
def brace_in_default(script: Script) -> Iterator[Remark]:
    """The default ``{}`` in ``${name:-{}}`` ends at its first brace.

    bash takes ``{`` as the default, and the second brace as text after the expansion. If the variable
    is set, its value is followed by a stray brace.

    Bad:
        CONFIG="${2:-{}}"

    Good:
        EMPTY='{}'
        CONFIG="${2:-$EMPTY}"
    """
    for unknown in script.unknowns:
        if unknown.kind == "param" and unknown.op in (":-", "-") and unknown.default == "{":
            message = f"if {unknown.name or 'the argument'} is set, a stray }} follows its value"
            remedy = "put the braces in a variable: EMPTY='{}', and then ${...:-$EMPTY}"
            yield Remark(unknown.line, f"{message}: the default ends at the first }}", remedy)
