"""Rules about single commands and variables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from bench.findings import Severity
from bench.lint.builtins import Builtins
from bench.lint.engine import Edit, Remark, rule
from bench.lint.nodes import Simple, Word
from bench.lint.programs import HELPERS
from bench.lint.script import Script
from bench.lint.variables import needs_option, of_slurm, usual
from bench.lint.walk import Step, Use

_QUIET = frozenset({"echo", "printf", "[", "test", "[[", "cat", "unset", "logger", ":", "mkdir", "ls", "cd"})
_FOR_TASKS = re.compile(r"(?:MASTER_ADDR|MASTER_PORT|WORLD_SIZE|(?:NCCL|GLOO|TORCH|OMP|UCX|FI)_[A-Z0-9_]+)\Z")
_PROSE = re.compile(r"[A-Z][a-z]+[,:]?\Z")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_PYTHON_WORDS = frozenset({"import", "from", "print", "def", "elif", "class"})
#: Ends of here-documents, prompts, rulers, bare numbers: what editing and pasting leave behind.
_LEFT_OVER = re.compile(r"EO[FTL]|END|\$|[-=*~]{3,}|\d+")
_OTHER_SHELL = frozenset({"setenv", "unsetenv"})


@rule(Severity.WARNING)
def undefined_variable(script: Script) -> Iterator[Remark]:
    """A variable is used that nothing has set, or that the tasks do not see.

    It expands to nothing: an option loses its value, an address its host. Where a file is sourced
    that may set it, nothing is said.

    Bad:
        head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        srun torchrun --rdzv_endpoint=$head_node_ip:29500 ...

    Good:
        head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        srun torchrun --rdzv_endpoint=$head_node:29500 ...
    """
    if script.walk.opaque:
        return
    given = script.job.value("export") or ""
    told: set[str] = set()
    for use in script.walk.uses:
        if use.name in told or use.command in _QUIET or use.guarded:
            continue
        reason = _undefined(script, use)
        if reason and f"{use.name}=" not in given:
            told.add(use.name)
            yield Remark(use.line, *reason)
    yield from _kept_from_tasks(script)


def _undefined(script: Script, use: Use) -> tuple[str, str] | None:
    """Return what is wrong with a use (message, remedy), or None."""
    name = use.name
    if use.line <= len(script.lines) and script.lines[use.line - 1].lstrip().startswith(f"${name}="):
        return None  # an assignment with a $ too many, which stray-command reports
    if name.startswith("SLURM"):
        return _of_slurm(script, name)
    if use.known or not _NAME.match(name) or usual(name) or name in script.walk.expected:
        return None
    assigned = script.assigned_to.get(name, ())
    if use.place.task is not None and any(not one.in_task and one.line < use.line for one in assigned):
        return (
            f"${name} is set in the batch shell but not exported: the task sees nothing",
            f"write export {name}=...",
        )
    if any(use.place.loops or one.line < use.line for one in assigned):
        return None
    if assigned and all(one.line == use.line for one in assigned):
        return (
            f"${name} is set from itself, and nothing has set it before: it stays empty",
            f"give {name} a value, or a default: ${{{name}:-...}}",
        )
    if assigned:
        return (
            f"${name} is used here but set only later, in line {assigned[0].line}",
            "set it before this line",
        )
    close = difflib.get_close_matches(name, script.assigned_to, n=1, cutoff=0.8)
    meant = f"; is ${close[0]} meant?" if close else ""
    return (
        f"nothing sets ${name}, so it expands to nothing{meant}",
        f"use ${close[0]}" if close else f"set {name} in the script, or give a default: ${{{name}:-...}}",
    )


def _of_slurm(script: Script, name: str) -> tuple[str, str] | None:
    close = of_slurm(name)
    if close:
        return f"Slurm sets no ${name}: it expands to nothing; is ${close} meant?", f"use ${close}"
    options = needs_option(name)
    asked = set(script.job.options) | {option.name for step in script.sruns for option in step.launch.srun}
    if options and not asked & set(options) and name not in script.assigned_to:
        return (
            f"Slurm sets ${name} only in jobs submitted with --{options[0]}, which this one is not",
            f"add --{options[0]}, or write ${{{name}:-NUMBER}}",
        )
    return None


def _kept_from_tasks(script: Script) -> Iterator[Remark]:
    """Find variables meant for the tasks that are neither exported nor used."""
    used = {use.name for use in script.walk.uses}
    for name, assigned in script.assigned_to.items():
        first = assigned[0]
        if not _FOR_TASKS.match(name) or name in used or name in script.walk.exported or first.in_task:
            continue
        if script.sruns:
            message = f"{name} is set, but neither exported nor used: the tasks do not see it"
            text = script.lines[first.line - 1] if first.line <= len(script.lines) else ""
            written = f"{name}="
            edit = Edit(first.line, written, f"export {written}") if text.startswith(written) else None
            yield Remark(first.line, message, f"write export {name}=...", edit=edit)


@rule(Severity.ERROR)
def stray_command(script: Script) -> Iterator[Remark]:
    r"""A line that was left over, or broken off its command, runs as a command of its own.

    A backslash joins lines only as the very last character. Behind a blank, or with a comment
    between, the command ends, and the next line is taken for a command that does not exist.

    Bad:
        srun python train.py \  # the data
            --data /scratch
        MASTER_PORT = 29500

    Good:
        srun python train.py \
            --data /scratch
        MASTER_PORT=29500
    """
    for step in script.walk.steps:
        if step.place.condition:
            continue
        found = _stray(script, step)
        if found:
            yield found
    yield from _never_reached(script)


def _stray(script: Script, step: Step) -> Remark | None:
    words, line = step.node.words, step.line
    first = words[0].literal or ""
    bare = words[0].bare or ""
    start = words[0].parts[0]
    if start.kind == "text" and not start.quoted and re.match(r"--?[A-Za-z]", start.text):
        return _option(script, start.text, line)
    if bare in Builtins.declarations:
        return Remark(line, f"{bare} takes no blanks around =", f"write {bare} NAME=VALUE")
    spaced = len(words) > 1 and (words[1].bare or "").startswith("=") and bool(_NAME.match(bare))
    if spaced and not step.place.piped and bare not in HELPERS and not step.place.task:
        return _spaced_assignment(script, step.node)
    if _assigns_to_expansion(words[0]):
        return Remark(
            line, "bash runs this as a command: a $ stands before the variable's name", "leave the $ out"
        )
    if re.match(r"!?#?!?SBATCH\b|!#|!/", first) or first in ("#SBATCH",):
        return Remark(
            line, f"bash runs `{first}` as a command, which does not exist", "start the line with #"
        )
    if first in _OTHER_SHELL or (first in _PYTHON_WORDS and len(words) > 1 and "import" in _texts(words)):
        return Remark(line, f"`{first}` is no command of bash", "write it in bash, or in the right file")
    if _LEFT_OVER.fullmatch(first) or (words[0].bare is None and _is_text(first)):
        return Remark(line, f"bash runs `{first[:40]}` as a command, which does not exist", "remove the line")
    if len(words) == 1 and start.kind == "param" and start.text.startswith("SLURM"):
        return Remark(
            line, f"bash runs the value of ${start.text} as a command", "put echo before it, or remove it"
        )
    plain = [word.bare for word in words]
    if len(words) >= 3 and all(plain) and _PROSE.match(bare) and not script.walk.opaque:
        return Remark(
            line, f"bash runs `{bare}` as a command", "make the line a comment: #", Severity.WARNING
        )
    if any(option.name == "pty" for option in step.launch.srun) and step.launch.via == "srun":
        return Remark(
            line,
            "an interactive srun --pty in a batch script: there is no terminal, and the shell ends at once",
            "remove the line",
            Severity.WARNING,
        )
    return None


def _is_text(word: str) -> bool:
    """Return whether a quoted word is a sentence rather than a program's path."""
    return word != "" and (not word.strip() or (" " in word.strip() and "/" not in word))


def _texts(words: tuple[Word, ...]) -> list[str | None]:
    return [word.literal for word in words]


def _option(script: Script, bare: str, line: int) -> Remark:
    before = script.lines[line - 2] if 2 <= line <= len(script.lines) + 1 else ""
    broken = re.search(r"\\[ \t]+\Z", before)
    message = f"bash runs `{bare[:40]}` as a command: it is an option broken off the command above"
    if broken:
        edit = Edit(line - 1, broken.group(), "\\")
        return Remark(
            line, f"{message}", f"remove the blanks behind the backslash in line {line - 1}", edit=edit
        )
    return Remark(
        line, message, "end every line of the command above with a backslash, without comments between"
    )


def _spaced_assignment(script: Script, node: Simple) -> Remark:
    name = node.words[0].bare
    text = script.lines[node.line - 1] if node.line <= len(script.lines) else ""
    match = re.search(rf"\b{name}[ \t]*=[ \t]*", text)
    edit = Edit(node.line, match.group(), f"{name}=") if match else None
    message = f"bash runs `{name}` as a command: an assignment has no blanks around ="
    return Remark(node.line, message, f"write {name}=VALUE", edit=edit)


def _assigns_to_expansion(word: Word) -> bool:
    if len(word.parts) < 2:
        return False
    first, second = word.parts[:2]
    is_plain = first.kind == "param" and not first.op and not first.quoted and bool(_NAME.match(first.text))
    return is_plain and second.kind == "text" and not second.quoted and second.text.startswith("=")


def _never_reached(script: Script) -> Iterator[Remark]:
    """Find an unconditional ``exit`` before the program is started."""
    last = max((step.line for step in script.training if step.place.task is None), default=0)
    for step in script.walk.steps:
        place, words = step.place, step.node.words
        outermost = not (place.branches or place.loops or place.function or place.substitution or place.piped)
        if words[0].literal == "exit" and outermost and not place.task and step.line < last:
            behind = [other for other in script.training if other.line > step.line]
            if len(behind) == len(script.training):
                yield Remark(
                    step.line, "the script ends here, and what follows never runs", "remove the line"
                )
            return
