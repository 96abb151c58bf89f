"""The rules of `bench lint`, one module per topic.

A rule is a generator function with the decorator :func:`rule`. It takes a
:class:`~bench.lint.script.Script` and yields a :class:`~bench.findings.Remark` for each finding. Its
docstring, with the sections ``Bad:`` and ``Good:``, is copied to docs/lint.md.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from bench.findings import Remark, Severity
from bench.lint.script import Script

Check = Callable[[Script], Iterable[Remark]]


@dataclass(frozen=True)
class Rule:
    """A rule and the default severity of its findings."""

    name: str
    severity: Severity
    check: Check

    @property
    def doc(self) -> str:
        """The description of the rule with a bad and a good example."""
        return inspect.cleandoc(self.check.__doc__ or "")


_RULES: dict[str, Rule] = {}


def rule(severity: Severity) -> Callable[[Check], Check]:
    """Register the decorated generator function as a rule that is named after it."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        assert name not in _RULES, f"two rules are named {name}"
        _RULES[name] = Rule(name, severity, check)
        return check

    return register


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, sorted by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return tuple(_RULES[name] for name in sorted(_RULES))
