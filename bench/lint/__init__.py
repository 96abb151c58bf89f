"""Find known mistakes in sbatch scripts without executing them.

A rule is a public generator function in ``rules``. Its docstring is its section in docs/lint.md.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .mistakes import Mistake, Remark, Severity
from .options import names
from .rules import launching, text
from .script import Script, read_script

#: The rules whose effect depends on the program, the site or the caller.
_WARNINGS = names("deepspeed-nodes hardcoded-host task-gpu-mismatch undefined-variable world-size-mismatch")


class Rule(NamedTuple):
    """A rule and the severity of its findings."""

    name: str
    severity: Severity
    check: Callable[[Script], Iterable[Remark]]


def _rules() -> Iterable[Rule]:
    for function, check in sorted({**vars(launching), **vars(text)}.items()):
        name = function.replace("_", "-")
        if inspect.isgeneratorfunction(check) and not function.startswith("_"):
            yield Rule(name, Severity.WARNING if name in _WARNINGS else Severity.ERROR, check)


#: All rules, sorted by name.
RULES = tuple(_rules())


def lint_script(text: str, *, path: str) -> list[Mistake]:
    """Return the mistakes in a script, at most one per rule and line, sorted by line; ``path`` is shown."""
    script = read_script(text)
    found: dict[tuple[int, str], Mistake] = {}
    for rule in RULES:
        for remark in itertools.islice(rule.check(script), 200):
            line = min(max(remark.line, 1), len(script.lines))
            mistake = Mistake(path, line, rule.name, rule.severity, remark.message, remark.remedy)
            found.setdefault((line, rule.name), mistake)
    return sorted(found.values(), key=lambda one: (one.line, one.severity, one.rule))
