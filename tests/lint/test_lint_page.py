"""The rules in docs/lint.md are their docstrings; ``python tests/lint/test_lint_page.py`` writes them."""

from __future__ import annotations

import inspect
from pathlib import Path

from bench.lint import all_rules
from bench.lint.rules import Rule

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"
TABLE = "| rule | severity |\n|---|---|\n"


def updated_page(page: str) -> str:
    """Return the page with the introduction of ``page``, the table, and a section for each rule."""
    table = "".join(f"| [{rule.name}](#{rule.name}) | {rule.severity} |\n" for rule in all_rules())
    return page.partition(TABLE)[0] + TABLE + table + "".join(map(section, all_rules()))


def section(rule: Rule) -> str:
    """Return the section of a rule: its docstring, with each example as a block of code."""
    description, _, examples = inspect.cleandoc(rule.check.__doc__ or "").partition("\nBad:")
    bad, _, good = examples.partition("\nGood:")
    rows = [f"\n## {rule.name}\n", description.replace("``", "`")]
    for title, example in (("Bad", bad), ("Good", good)):
        rows += [f"**{title}**", "", "```bash", inspect.cleandoc(example).strip(), "```", ""]
    return "\n".join(rows)


def test_the_page_of_rules_is_generated_from_their_docstrings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated_page(page), f"run: python {Path(__file__)}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
