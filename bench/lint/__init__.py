"""Find known mistakes in sbatch scripts without executing them.

The docstring of each rule in :mod:`bench.lint.rules` is its documentation in docs/lint.md.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from dataclasses import replace
from functools import cache, lru_cache

from ..findings import Edit, Finding, Remark, Severity
from . import rules
from .expansion import without_marks
from .rules import REGISTRY, Rule
from .script import ANALYSED_SIZE, Script, read_script

__all__ = ["Rule", "all_rules", "edits", "lint_script"]

#: A file that a program fills in, by its name or its folder.
_NAME_OF_TEMPLATE = re.compile(
    r"(?:\A|/)templates?/[^/]*\Z|(?<![a-z])(?:template|tmpl)[^/]*\Z|\.(?:in|j2|jinja2?|erb|tpl|mustache)\Z",
    re.I,
)
#: Maximum number of findings per rule and script.
_MAX_REMARKS = 200
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return all rules, sorted by name."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
    return tuple(REGISTRY[name] for name in sorted(REGISTRY))


def lint_script(text: str, *, path: str) -> list[Finding]:
    """Return the findings for a sbatch script, sorted by line; ``path`` is the path to show in them."""
    found = [replace(finding, path=path) for finding, _ in _judge(text)]
    if _NAME_OF_TEMPLATE.search(path):
        return [replace(finding, severity=Severity.INFO) for finding in found]
    return found


def edits(text: str) -> list[Edit]:
    """Return the edits that can be applied without a decision by the user, sorted by line."""
    return [edit for _, edit in _judge(text) if edit]


def _judge(text: str) -> tuple[tuple[Finding, Edit | None], ...]:
    return _apply_rules(text[:ANALYSED_SIZE], len(text))


# Cached: `bench lint --diff` needs findings and edits, and a repeated plan lints the same scripts again.
@lru_cache(maxsize=64)
def _apply_rules(text: str, size: int) -> tuple[tuple[Finding, Edit | None], ...]:
    """Apply all rules to a script, keeping at most one finding per rule and line."""
    script = read_script(without_marks(text), size=size)
    found: dict[tuple[int, str], tuple[Finding, Edit | None]] = {}
    for rule in all_rules():
        for remark in itertools.islice(rule.check(script), _MAX_REMARKS):
            finding = _finding(script, rule, remark)
            found.setdefault((finding.line, rule.name), (finding, remark.edit))
    return tuple(sorted(found.values(), key=_order))


def _finding(script: Script, rule: Rule, remark: Remark) -> Finding:
    line = remark.line or 1
    text = script.line(line)
    severity = remark.severity or rule.severity
    replacement = remark.edit.apply(text) if remark.edit and remark.edit.line == line else None
    return Finding(
        path="",
        line=line,
        rule=rule.name,
        severity=Severity.INFO if script.is_draft else severity,
        message=script.unknowns.shown(remark.message),
        remedy=script.unknowns.shown(remark.remedy),
        replacement=None if replacement == text else replacement,
    )


def _order(judged: tuple[Finding, Edit | None]) -> tuple[int, int, str]:
    finding = judged[0]
    return finding.line, _SEVERITIES.index(finding.severity), finding.rule
