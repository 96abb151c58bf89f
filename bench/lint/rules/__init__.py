"""The rules of `bench lint`, one module per topic.

A rule is a generator function with the decorator :func:`rule`. It takes a
:class:`~bench.lint.script.Script` and yields a :class:`~bench.findings.Remark` for each finding. Its
docstring, with the sections ``Bad:`` and ``Good:``, is copied to docs/lint.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...findings import Remark, Severity
from ..script import Script

Check = Callable[[Script], Iterable[Remark]]


@dataclass(frozen=True)
class Rule:
    """A rule and the severity of its findings."""

    name: str
    severity: Severity
    check: Check


#: The registered rules by name; ``bench.lint.all_rules`` imports the modules that register them.
REGISTRY: dict[str, Rule] = {}


def rule(severity: Severity) -> Callable[[Check], Check]:
    """Register the decorated generator function as a rule; the function's name becomes the rule's name."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        REGISTRY[name] = Rule(name, severity, check)
        return check

    return register
