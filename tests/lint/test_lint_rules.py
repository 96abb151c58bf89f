"""The rules find mistakes at their lines, and accept near misses and correct scripts.

A script in ``fixtures/bad`` contains its expectations: ``# expect: RULE | START`` for each finding, where
START is the start of the line. ``python tests/lint/test_lint_rules.py`` writes the rules in docs/lint.md.
"""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.lint import RULES, Rule, lint_script
from bench.lint.mistakes import Severity

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
BAD = sorted((FIXTURES / "bad").glob("*.sbatch"))
NEAR = sorted((FIXTURES / "near").glob("*.sbatch"))
GOOD = sorted([*(FIXTURES / "good").glob("*.sbatch"), *(ROOT / "tests/planning/golden").glob("*.sbatch")])
EXPECTED = re.compile(r"# expect: (\S+) \| (.*)")
PAGE = ROOT / "docs" / "lint.md"
TABLE = "| rule | severity | meaning | bad | good |\n|---|---|---|---|---|\n"
HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1\n"


def read(path: Path) -> str:
    return path.read_bytes().decode("utf-8")


def rules(text: str) -> set[str]:
    return {finding.rule for finding in lint_script(text, path="x")}


def expected_in(text: str) -> Counter[tuple[str, int]]:
    lines = text.replace("\r", "").split("\n")
    found: Counter[tuple[str, int]] = Counter()
    for match in filter(None, map(EXPECTED.fullmatch, lines)):
        places = [
            n
            for n, line in enumerate(lines, 1)
            if line.strip().startswith(match[2]) and "# expect" not in line
        ]
        found[match[1], places[0]] += 1
    return found


def test_exactly_the_expected_mistakes_are_found_at_their_lines() -> None:
    assert BAD
    for path in BAD:
        expected = expected_in(read(path))
        assert path.stem.partition("--")[0] in {rule for rule, _ in expected}, path.stem
        findings = lint_script(read(path), path=path.name)
        assert Counter((finding.rule, finding.line) for finding in findings) == expected, path.stem


def test_a_near_miss_gets_no_finding_of_its_rule_and_no_error_and_a_correct_script_none() -> None:
    assert NEAR
    for path in NEAR:
        rule = path.stem.partition("--")[0]
        findings = lint_script(read(path), path=path.name)
        assert [str(one) for one in findings if one.rule == rule or one.severity is Severity.ERROR] == []
    assert [str(one) for path in GOOD for one in lint_script(read(path), path=path.name)] == []


def test_every_rule_has_a_bad_script_a_near_miss_and_examples() -> None:
    names = {rule.name for rule in RULES}
    for paths in (BAD, NEAR):
        assert {path.stem.partition("--")[0] for path in paths} == names
    for rule in RULES:
        assert re.search(r"\n *Bad:.*\n *Good:", rule.check.__doc__ or "", re.DOTALL), rule.name


def test_commands_are_checked_only_if_a_shell_like_bash_runs_them() -> None:
    body, bad = "#SBATCH --nodes=2\n#SBATCH --time=1h\npython train.py\n", {"malformed-directive"}
    for shebang in ("#!/bin/bash", "#!/usr/bin/env -S bash -l", "#! /bin/sh -e", ""):
        assert rules(f"{shebang}\n{body}") == bad | {"missing-srun"}, shebang
    for shebang in ("#!/bin/tcsh -f", "#!/usr/bin/env python3"):
        assert rules(f"{shebang}\n{body}") == bad, shebang


def test_what_is_not_known_is_not_judged() -> None:
    for text in read(FIXTURES / "unknown.txt").rstrip("\n").split("\n\n"):
        assert rules(f"{HEAD}{text}\n") == set(), text


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("A=localhost\nexport MASTER_ADDR=$A\nsrun python x.py", "loopback-master-addr", 4),
        ("MASTER_ADDR=localhost srun python x.py", "loopback-master-addr", 3),
        ("srun sh -xeuc 'export MASTER_ADDR=localhost\npython x.py'", "loopback-master-addr", 3),
        ("srun bash -c 'exec torchrun \\\n --nnodes 2 \\\n --master_addr $H x.py'", "missing-node-rank", 4),
        (
            'srun bash -c "torchrun --nnodes=2 --node_rank \\$R --master_addr=127.0.0.1 x.py"',
            "loopback-master-addr",
            3,
        ),
        ("exec python -u x.py", "missing-srun", 3),
    ],
)
def test_straight_assignments_have_values_in_commands_and_in_texts_for_a_shell(text, rule, line):
    assert (rule, line) in {(one.rule, one.line) for one in lint_script(f"{HEAD}{text}\n", path="x")}


@pytest.mark.parametrize(
    ("options", "workers", "expected"),
    [  # (nodes, tasks per node, GPUs per node) as Slurm computes them, seen by the workers that fit
        ("--nodes=2 --gpus=8", 4, False),
        ("--nodes=2 --gpus=8", 5, True),
        ("--nodes=2 --gres=gpu:a100:2,nvme:200", 3, True),
        ("--nodes=2 --gpus-per-node=a:2,b:1", 3, False),
        ("--nodes=2 --gres=gpu:<number>", 9, False),
        ("--ntasks=2 --ntasks-per-node=1 --gpus-per-node=1", 2, True),
        ("--nodes=1-2 --gpus=2", 9, False),
    ],
)
def test_gpus_of_a_node_are_computed_like_slurm_does(options: str, workers: int, expected: bool) -> None:
    text = f"#!/bin/bash\n#SBATCH {options}\nsrun torchrun --nnodes=1 --nproc_per_node={workers} x.py\n"
    assert ("task-gpu-mismatch" in rules(text)) == expected


def test_an_ignored_directive_that_repeats_the_header_changes_nothing() -> None:
    header = "#!/bin/bash\n#SBATCH --output=a.out\nmodule load cuda\n"
    for ignored, expected in (("--output=a.out", set()), ("--array=0-3", {"sbatch-after-command"})):
        assert rules(f"{header}#SBATCH {ignored}\npython train.py\n") == expected


def test_an_error_below_an_exit_is_never_read() -> None:
    assert rules("#!/bin/bash\nhostname\nexit 0\nnotes (of mine\n") == set()
    assert rules("#!/bin/bash\nhostname\nnotes (of mine\n") == {"shell-syntax"}


def updated_page(page: str) -> str:
    """Return the page with the introduction of ``page``, and a row for each rule."""
    return page.partition(TABLE)[0] + TABLE + "".join(map(row, RULES))


def row(rule: Rule) -> str:
    """Return the row of a rule: the first sentences of its docstring, and its examples."""
    description, _, examples = inspect.cleandoc(rule.check.__doc__ or "").partition("\nBad:")
    bad, good = (inspect.cleandoc(example).strip() for example in examples.split("\nGood:"))
    assert "\n" not in bad + good, rule.name
    words = (f"`{rule.name}`", rule.severity, " ".join(description.split()).replace("``", "`"))
    codes = (f"`` {one} ``" if "`" in one else f"`{one}`" for one in (bad, good))
    cells = (cell.replace("|", r"\|") for cell in (*words, *codes))
    return f"| {' | '.join(cells)} |\n"


def test_the_page_of_rules_is_generated_from_their_docstrings() -> None:
    page = read(PAGE)
    assert page == updated_page(page), f"run: python {Path(__file__)}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(read(PAGE)), encoding="utf-8")
