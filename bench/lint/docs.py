"""The page docs/lint.md, generated from the docstrings of the rules by ``python -m bench.lint.docs``."""

from __future__ import annotations

from bench.lint.rules import Rule, rules

_HEAD = """# Rules of `bench lint`

`bench lint SCRIPT...` finds known mistakes of multi-node jobs in any sbatch script before it is
submitted (`-` reads standard input). It never executes anything in a script. It reads directives
like sbatch and commands like bash, including variables, arrays, functions, here-documents,
containers and `bash -c`.

Each finding describes the effect at run time and the change that fixes it. `--diff` prints the
changes that need no decision as a patch. `--json` prints
`{"findings": [{path, line, rule, severity, message, remedy}]}`. An **error** means that the job
fails, hangs or is refused; the command then exits with 1. A **warning** depends on something that
the script does not show, such as the program. An **info** is a hint.

Some mistakes involve two lines, such as too many tasks for the GPUs. They are reported at the line to
change, and as an info at the other line.

`python -m bench.lint.docs > docs/lint.md` generates this page from the docstrings of the rules.

| rule | usual severity |
|---|---|
"""


def page() -> str:
    """Return the page of all rules as Markdown."""
    table = "".join(f"| [{rule.name}](#{rule.name}) | {rule.severity} |\n" for rule in rules())
    return _HEAD + table + "".join(_section(rule) for rule in rules())


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
    print(page(), end="")
