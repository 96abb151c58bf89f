"""Update the rules in docs/lint.md from their docstrings: ``python -m bench.lint.docs docs/lint.md``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from . import all_rules
from .rules import Rule

_TABLE = "| rule | severity |\n|---|---|\n"


def page(written: str) -> str:
    """Return docs/lint.md with the introduction of ``written``, the table, and a section for each rule."""
    table = "".join(f"| [{rule.name}](#{rule.name}) | {rule.severity} |\n" for rule in all_rules())
    return written.partition(_TABLE)[0] + _TABLE + table + "".join(_section(rule) for rule in all_rules())


def _section(rule: Rule) -> str:
    """Return the section of a rule: its docstring, with each example as a block of code."""
    description, _, examples = rule.doc.partition("\nBad:")
    bad, _, good = examples.partition("\nGood:")
    rows = [f"\n## {rule.name}\n", description.replace("``", "`")]
    for title, example in (("Bad", bad), ("Good", good)):
        rows += [f"**{title}**", "", "```bash", inspect.cleandoc(example).strip(), "```", ""]
    return "\n".join(rows)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
