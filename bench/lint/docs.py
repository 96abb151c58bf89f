"""Update the rules in docs/lint.md from their docstrings: ``python -m bench.lint.docs docs/lint.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from . import all_rules
from .rules import Rule

_TABLE = "| rule | usual severity |\n|---|---|\n"


def page(written: str) -> str:
    """Return docs/lint.md with the introduction of ``written``, the table, and a section for each rule."""
    table = "".join(f"| [{rule.name}](#{rule.name}) | {rule.severity} |\n" for rule in all_rules())
    return written.partition(_TABLE)[0] + _TABLE + table + "".join(_section(rule) for rule in all_rules())


def _section(rule: Rule) -> str:
    rows = [f"\n## {rule.name}\n"]
    in_example = False
    for row in rule.doc.split("\n"):
        if in_example and not row:
            rows += ["```", ""]
            in_example = False
        elif row in ("Bad:", "Good:"):
            rows += [f"**{row[:-1]}**", "", "```bash"]
            in_example = True
        else:
            rows.append(row.removeprefix("    ") if in_example else row.replace("``", "`"))
    return "\n".join([*rows, "```"] if in_example else rows) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
