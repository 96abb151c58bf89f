"""Find known mistakes in sbatch scripts without executing them.

The docstring of each rule in :mod:`bench.lint.rules` is its documentation in docs/lint.md.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from ..findings import Edit, Finding, Remark
from .rules import REGISTRY, Rule, launching, text
from .script import Script, read_script

__all__ = ["RULES", "Rule", "edits", "launching", "lint_script", "text"]

#: All rules, sorted by name.
RULES = tuple(sorted(REGISTRY, key=lambda rule: rule.name))
#: Maximum number of findings per rule and script.
_MAX_REMARKS = 200


def lint_script(text: str, *, path: str) -> list[Finding]:
    """Return the findings for a sbatch script, sorted by line; ``path`` is the path to show in them."""
    return [replace(finding, path=path) for finding, _ in _judge(text)]


def edits(text: str) -> list[Edit]:
    """Return the edits that can be applied without a decision by the user, sorted by line."""
    return [edit for _, edit in _judge(text) if edit]


@lru_cache(maxsize=1)  # `bench lint --diff` needs findings and edits
def _judge(text: str) -> tuple[tuple[Finding, Edit | None], ...]:
    """Apply all rules to a script, keeping at most one finding per rule and line."""
    script = read_script(text)
    found: dict[tuple[int, str], tuple[Finding, Edit | None]] = {}
    for rule in RULES:
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
