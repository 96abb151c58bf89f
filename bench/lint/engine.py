"""Rules, and the one function that applies them to a script.

A rule is a generator function of a :class:`~bench.lint.script.Script` that yields a
:class:`Remark` for each finding; its docstring, with ``Bad:`` and ``Good:``, is its documentation.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from bench.findings import Finding, Severity
from bench.lint.environment import without_marks
from bench.lint.relevance import shapes
from bench.lint.script import Followed, Header, Script, follow, read_header, read_script

#: Slurm refuses scripts beyond this size (max_script_size in slurm.conf, 4 MiB unless set).
MAX_SCRIPT_SIZE = 4 * 1024 * 1024
#: What lies behind the first characters of a script is data, not commands; it is not looked at.
LOOKED_AT = 512 * 1024
#: A rule that would say more than this about one script says no more.
_MOST_REMARKS = 200
#: Larger scripts are judged each time, so that what is remembered stays small.
_REMEMBERED_SIZE = 64 * 1024
#: Warnings and infos that quote values, which the shape of a script may have lost.
_QUOTE_VALUES = frozenset({"hardcoded-host"})
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)


class Edit(NamedTuple):
    """A change to one line: its first ``old`` becomes ``new``; without ``old``, the whole line does.

    A ``new`` of None deletes the line.
    """

    line: int
    old: str
    new: str | None

    def apply(self, text: str) -> str | None:
        """Return the line as it should be; None where nothing is left of it, or nothing changes."""
        if self.new is None:
            return ""
        return text.replace(self.old, self.new, 1) if self.old else self.new


class Remark(NamedTuple):
    """What a rule has to say about a line; ``severity`` where it is not the rule's own."""

    line: int | None
    message: str
    remedy: str
    severity: Severity | None = None
    edit: Edit | None = None


Check = Callable[[Script], Iterable[Remark]]


@dataclass(frozen=True)
class Rule:
    """One rule; ``severity`` is that of its plain case."""

    name: str
    severity: Severity
    check: Check

    @property
    def doc(self) -> str:
        """What the rule is about, with an example of bad and of good."""
        return inspect.cleandoc(self.check.__doc__ or "")


_RULES: dict[str, Rule] = {}


def rule(severity: Severity) -> Callable[[Check], Check]:
    """Register a generator function as the rule of its name."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        assert name not in _RULES, f"two rules are named {name}"
        _RULES[name] = Rule(name, severity, check)
        return check

    return register


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, by name."""
    package = importlib.import_module("bench.lint.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"bench.lint.rules.{module.name}")
    return tuple(_RULES[name] for name in sorted(_RULES))


class _Said(NamedTuple):
    rule: str
    severity: Severity
    remark: Remark


class _Case(NamedTuple):
    """What the findings of a script depend on; scripts that share it share their findings."""

    header: Header
    shape: tuple[str, ...]
    arguments: tuple[str, ...]
    dos_line: int | None
    size: int


def lint_script(text: str, *, path: str, arguments: Sequence[str] = ()) -> list[Finding]:
    """Return what is wrong with a sbatch script, by line; nothing in it is run.

    Args:
        text: the script.
        path: what findings call it.
        arguments: options that sbatch is given on its command line, which override directives.
    """
    lines, case = _case(text, arguments)
    said = _judged(case) if len(text) <= _REMEMBERED_SIZE else _judge(case)
    if any(entry.severity is Severity.ERROR or entry.rule in _QUOTE_VALUES for entry in said):
        said = _judge(case._replace(shape=tuple(lines)))  # what is quoted must be the script's own words
    return [_finding(entry, path, lines) for entry in said]


def edits(text: str, *, arguments: Sequence[str] = ()) -> list[Edit]:
    """Return the changes that mend what can be mended without a choice, by line."""
    _, case = _case(text, arguments)
    return [entry.remark.edit for entry in _judge(case) if entry.remark.edit]


def _case(text: str, arguments: Sequence[str]) -> tuple[list[str], _Case]:
    size = len(text)
    text = text[:LOOKED_AT]
    lines = (text if text.isascii() else without_marks(text)).split("\n")
    dos_line = None
    if "\r" in text:
        ends = (number for number, line in enumerate(lines, start=1) if line.endswith("\r"))
        dos_line = next(ends, None)
        lines = [line.rstrip("\r") for line in lines]
    header = read_header(lines)
    head = ["" if line.startswith("#") else line for line in lines[: header.end]]
    if head and lines[0].startswith("#!"):
        head[0] = lines[0]
    shape = (*head, *shapes(lines[header.end :], text))
    return lines, _Case(header, shape, tuple(arguments), dos_line, max(size, LOOKED_AT))


def _judge(case: _Case) -> tuple[_Said, ...]:
    """Apply all rules; one remark of a rule for each line."""
    script = read_script(_followed(case), case.header, case.arguments)
    script.dos_line, script.size = case.dos_line, case.size
    said: dict[tuple[int, str], _Said] = {}
    for each in rules():
        for found in itertools.islice(each.check(script), _MOST_REMARKS):
            line = found.line or 1
            severity = found.severity or each.severity
            message, remedy = script.shown(found.message), script.shown(found.remedy)
            remark = found._replace(line=line, message=message, remedy=remedy)
            said.setdefault((line, each.name), _Said(each.name, severity, remark))
    return tuple(sorted(said.values(), key=_order))


_judged = lru_cache(maxsize=512)(_judge)


def _followed(case: _Case) -> Followed:
    complete = case.size <= LOOKED_AT
    if complete and sum(map(len, case.shape)) <= _REMEMBERED_SIZE:
        return _remembered_walk(case.shape)
    return follow(case.shape, complete=complete)


@lru_cache(maxsize=256)
def _remembered_walk(lines: tuple[str, ...]) -> Followed:
    return follow(lines, complete=True)


def _order(said: _Said) -> tuple[int, int, str]:
    return said.remark.line or 1, _SEVERITIES.index(said.severity), said.rule


def _finding(said: _Said, path: str, lines: Sequence[str]) -> Finding:
    remark, edit = said.remark, said.remark.edit
    line = remark.line or 1
    replacement = None
    if edit and edit.line == line and line <= len(lines):
        replacement = edit.apply(lines[line - 1])
        replacement = None if replacement == lines[line - 1] else replacement
    return Finding(path, line, said.rule, said.severity, remark.message, remark.remedy, replacement)
