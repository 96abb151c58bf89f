"""Find known mistakes in sbatch scripts without executing them.

The docstring of each rule in :mod:`bench.lint.rules` is its documentation in docs/lint.md.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import replace
from functools import cache, lru_cache

from ..findings import Edit, Finding, Remark
from . import rules
from .rules import REGISTRY, Rule
from .script import Script, read_script
from .walk import VARIABLES

__all__ = ["VARIABLES", "Rule", "all_rules", "edits", "lint_script"]

#: Maximum number of findings per rule and script.
_MAX_REMARKS = 200


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return all rules, sorted by name."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
    return tuple(REGISTRY[name] for name in sorted(REGISTRY))


def lint_script(text: str, *, path: str) -> list[Finding]:
    """Return the findings for a sbatch script, sorted by line; ``path`` is the path to show in them."""
    return [replace(finding, path=path) for finding, _ in _judge(text)]


def edits(text: str) -> list[Edit]:
    """Return the edits that can be applied without a decision by the user, sorted by line."""
    return [edit for _, edit in _judge(text) if edit]


# Cached: `bench lint --diff` needs findings and edits, and a repeated plan lints the same scripts again.
@lru_cache(maxsize=64)
def _judge(text: str) -> tuple[tuple[Finding, Edit | None], ...]:
    """Apply all rules to a script, keeping at most one finding per rule and line."""
    script = read_script(text)
    found: dict[tuple[int, str], tuple[Finding, Edit | None]] = {}
    for rule in all_rules():
        for remark in itertools.islice(rule.check(script), _MAX_REMARKS):
            finding = _finding(script, rule, remark)
            found.setdefault((finding.line, rule.name), (finding, remark.edit))
    return tuple(sorted(found.values(), key=lambda one: (one[0].line, one[0].severity, one[0].rule)))


def _finding(script: Script, rule: Rule, remark: Remark) -> Finding:
    line = min(max(remark.line, 1), len(script.lines))
    text = script.line(line)
    changed = remark.edit.apply(text) if remark.edit and remark.edit.line == line else text
    new = None if changed == text else changed
    return Finding("", line, rule.name, rule.severity, remark.message, remark.remedy, new)
