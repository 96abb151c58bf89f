"""The rules of `bench lint`.

A rule is a generator function with the decorator :func:`rule`. Its docstring, with the sections ``Bad:`` and
``Good:``, is its documentation in docs/lint.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...findings import Remark, Severity
from ..script import Script

Check = Callable[[Script], Iterable[Remark]]


class Rule(NamedTuple):
    """A rule and the severity of its findings."""

    name: str
    severity: Severity
    check: Check


#: The registered rules.
REGISTRY: list[Rule] = []


def rule(severity: Severity) -> Callable[[Check], Check]:
    """Register the decorated generator function as a rule; the function's name becomes the rule's name."""

    def register(check: Check) -> Check:
        REGISTRY.append(Rule(check.__name__.replace("_", "-"), severity, check))
        return check

    return register
