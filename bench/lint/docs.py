"""``python -m bench.lint.docs``: the page of the rules, made of their docstrings."""

from __future__ import annotations

from bench.lint.engine import Rule, rules

_HEAD = """# Rules of `bench lint`

`bench lint SCRIPT...` looks for known mistakes of multi-node jobs in any sbatch script, before it is
submitted (`-` reads standard input). Nothing in a script is ever run: directives are read as sbatch
reads them, commands as bash would, through variables, arrays, functions, here-documents, containers and
`bash -c`.

Each finding says what happens at run time and what to change; `--diff` prints the changes that need no
choice as a patch, `--json` prints `{"findings": [{path, line, rule, severity, message, remedy}]}`. The
command exits with 1 where a finding is an **error**: the job fails, hangs or is refused. A **warning**
depends on what the script does not show, such as the program; an **info** is worth knowing.

A mistake that takes two lines to make, such as too many tasks for the GPUs, is reported at the line to
change, and as an info at the other.

This page is made by `python -m bench.lint.docs > docs/lint.md`; a test compares them.

| rule | usually |
|---|---|
"""


def page() -> str:
    """Return the page of all rules, as Markdown."""
    table = "".join(f"| [{each.name}](#{each.name}) | {each.severity} |\n" for each in rules())
    return _HEAD + table + "".join(_section(each) for each in rules())


def _section(each: Rule) -> str:
    rows = [f"\n## {each.name}\n"]
    fenced = False
    for row in each.doc.split("\n"):
        if fenced and not row:
            rows += ["```", ""]
            fenced = False
        elif row in ("Bad:", "Good:"):
            rows += [f"**{row[:-1]}**", "", "```bash"]
            fenced = True
        else:
            rows.append(row.removeprefix("    ") if fenced else row.replace("``", "`"))
    return "\n".join([*rows, "```"] if fenced else rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
