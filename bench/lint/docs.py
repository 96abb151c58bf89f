"""Generate docs/lint.md from the rules' docstrings: ``python -m bench.lint.docs > docs/lint.md``."""

from __future__ import annotations

from bench.lint import all_rules
from bench.lint.rules import Rule

_HEAD = """# Rules of `bench lint`

`bench lint SCRIPT...` checks sbatch scripts for common mistakes in multi-node jobs before the jobs
are submitted. If SCRIPT is `-`, the script is read from standard input. `bench lint` never executes
a script. It reads directives as sbatch does and commands as bash does, including variables, arrays,
functions, here-documents, containers and `bash -c`.

Each finding describes the effect of a mistake at run time and the change that fixes it. `--diff`
prints a patch with all changes that need no decision by the user. `--json` prints
`{"findings": [{path, line, rule, severity, message, remedy}]}`.

A finding has one of three severities:

- **error**: the job fails, hangs, is rejected by Slurm, or requests nodes that stay idle.
  `bench lint` then exits with code 1.
- **warning**: the script is probably wrong, but this depends on something that the script does not
  show, such as the code of the training program.
- **info**: a hint.

Some mistakes involve two lines. For example, one line requests 8 tasks per node, and another line
only 4 GPUs per node. Such a mistake is reported at the line to change. A second finding, with
severity info, marks the other line.

## How often it is right

The table counts the findings in public scripts (22 November 2026), at most one per rule and script.
The scripts are 278 from 176 repositories, most with several nodes or GPUs, and one each from 2,500
other repositories, of which few train a network. For the first row, the rules had been written
without these scripts.

| | errors true / arguable / false | warnings true / arguable / false |
|---|---|---|
| rules before | 117 / 35 / 26 (66 % true) | 40 / 12 / 21 (55 % true) |
| rules corrected with the same scripts | 117 / 15 / 0 (89 %) | 36 / 8 / 3 (77 %) |

Most false alarms were in files that sbatch cannot read as they are: templates, scripts with
placeholders, and several scripts in one file. In the 278 scripts alone, all 21 errors and 4 of 6
warnings are true after the corrections. The second row overestimates the accuracy, because the
rules were corrected with these scripts. In 88 other scripts of 28 repositories, the corrected rules
reported 1 error and 1 warning, both true. In one script each of about 1,500 further repositories,
they reported 81 errors (68 true, 11 arguable, 2 false; 84 % true) and 20 warnings (14 true, 1
arguable, 5 false; 70 % true). Three of these false warnings have been corrected since.

One mistake at a time was added to copies of 14 of the 278 scripts. Of these 32 mistakes, 28 were
found at first, and all 32 after the corrections (2 of them only as a hint). Twelve correct but unusual
scripts got neither an error nor a warning.

## The rules

`python -m bench.lint.docs > docs/lint.md` generates this page from the docstrings of the rules.

| rule | usual severity |
|---|---|
"""


def page() -> str:
    """Return the content of docs/lint.md."""
    table = "".join(f"| [{rule.name}](#{rule.name}) | {rule.severity} |\n" for rule in all_rules())
    return _HEAD + table + "".join(_section(rule) for rule in all_rules())


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
