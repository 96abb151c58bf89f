"""The rules find mistakes at their lines and accept near misses and correct scripts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.findings import Finding, Severity
from bench.lint import all_rules, lint_script

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
BAD = sorted((FIXTURES / "bad").glob("*.sbatch"))
NEAR = sorted((FIXTURES / "near").glob("*.sbatch"))
GOOD = sorted((FIXTURES / "good").glob("*.sbatch"))
EXPECTED = re.compile(r"# expect: (\S+) \| (.*)")

ALL_RULES = """
arguments-split crlf-script gloo-interface-excluded hardcoded-host hardcoded-port
loopback-master-addr malformed-directive missing-node-rank missing-srun node-list-in-one-element ntasks-conflict
ntasks-per-node-ignored one-launcher-per-gpu port-octal-arithmetic rank-expanded-early sbatch-after-command
script-folder sequential-sruns shell-syntax stray-command task-gpu-mismatch trap-delayed
undefined-variable unknown-srun-option unknown-torchrun-option world-size-mismatch
""".split()


def read(path: Path) -> str:
    return path.read_bytes().decode("utf-8")


def expected_in(text: str) -> Counter[tuple[str, int]]:
    """Count the findings expected by ``# expect: RULE | START``, where START is the start of the line."""
    lines = text.replace("\r", "").split("\n")
    found: Counter[tuple[str, int]] = Counter()
    for line in lines:
        match = EXPECTED.fullmatch(line)
        if match:
            rule, start = match.groups()
            places = [
                n
                for n, other in enumerate(lines, 1)
                if other.strip().startswith(start) and "# expect" not in other
            ]
            assert places, f"no line starts with {start!r}"
            found[rule, places[0]] += 1
    return found


def lint(path: Path) -> list[Finding]:
    return lint_script(read(path), path=path.name)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_exactly_the_expected_mistakes_are_found_at_their_lines(path: Path) -> None:
    expected = expected_in(read(path))
    assert path.stem.partition("--")[0] in {rule for rule, _ in expected}
    assert Counter((finding.rule, finding.line) for finding in lint(path)) == expected


@pytest.mark.parametrize("path", NEAR, ids=lambda path: path.stem)
def test_a_near_miss_gets_no_finding_of_its_rule(path: Path) -> None:
    rule = path.stem.partition("--")[0]
    assert [str(finding) for finding in lint(path) if finding.rule == rule] == []
    assert [str(finding) for finding in lint(path) if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_correct_script_gets_no_finding(path: Path) -> None:
    assert [str(finding) for finding in lint(path)] == []


def test_there_are_enough_correct_scripts() -> None:
    assert len(GOOD) >= 40


def test_every_rule_has_a_bad_script_and_a_near_miss() -> None:
    assert {path.stem.partition("--")[0] for path in BAD} == set(ALL_RULES)
    assert {path.stem.partition("--")[0] for path in NEAR} == set(ALL_RULES)


def test_every_rule_is_listed_and_documented() -> None:
    assert [rule.name for rule in all_rules()] == ALL_RULES
    for rule in all_rules():
        assert re.search(r"\n *Bad:.*\n *Good:", rule.check.__doc__, re.DOTALL), rule.name


def test_these_rules_yield_warnings() -> None:
    warnings = {rule.name for rule in all_rules() if rule.severity is Severity.WARNING}
    assert warnings == set(
        (
            "arguments-split gloo-interface-excluded hardcoded-host hardcoded-port task-gpu-mismatch "
            "undefined-variable world-size-mismatch"
        ).split()
    )


def test_the_failing_script_of_four_nodes_is_explained() -> None:
    path = FIXTURES / "bad" / "missing-srun--mission.sbatch"
    (finding,) = lint(path)
    assert finding == Finding(
        path=path.name,
        line=15,
        rule="missing-srun",
        severity=Severity.ERROR,
        message="only the first node runs this command: 1 of 16 processes will start",
        remedy="put srun before the command: it starts one process per task",
        replacement="srun python run_training_dense.py --epochs 3",
    )


def test_findings_are_sorted_by_line_and_then_by_severity() -> None:
    text = read(FIXTURES / "bad" / "malformed-directive--many.sbatch")
    lines = [finding.line for finding in lint_script(text, path="x")]
    assert lines == sorted(lines)
    text = "#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun --nnodes=2 --master_port=29500 x.py\n"
    assert [(f.severity, f.rule) for f in lint_script(text, path="x")] == [
        (Severity.ERROR, "loopback-master-addr"),
        (Severity.ERROR, "missing-node-rank"),
        (Severity.WARNING, "hardcoded-port"),
    ]


HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --exclusive\n"
EIGHT = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive\n"


def rules(text: str) -> set[str]:
    return {finding.rule for finding in lint_script(text, path="x")}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_replacement_fixes_its_finding(path: Path) -> None:
    text = read(path)
    for finding in lint(path):
        if finding.replacement is None:
            continue
        lines = text.split("\n")
        lines[finding.line - 1] = finding.replacement
        after = lint_script("\n".join(lines), path=path.name)
        assert (finding.rule, finding.line) not in {(other.rule, other.line) for other in after}


@pytest.mark.parametrize(
    ("shebang", "is_shell"),
    [
        ("#!/bin/bash", True),
        ("#!/usr/bin/env bash", True),
        ("#!/usr/bin/env -S bash -l", True),
        ("#! /bin/sh -e", True),
        ("", True),
        ("#!/bin/csh", False),
        ("#!/bin/tcsh -f", False),
        ("#!/usr/bin/env python3", False),
        ("#!/usr/bin/perl", False),
    ],
)
def test_commands_are_checked_only_if_a_shell_like_bash_runs_them(shebang: str, is_shell: bool) -> None:
    text = f"{shebang}\n#SBATCH --nodes=2\n#SBATCH --time=1h\npython train.py\n"
    found = {finding.rule for finding in lint_script(text, path="x")}
    assert found == ({"malformed-directive", "missing-srun"} if is_shell else {"malformed-directive"})


@pytest.mark.parametrize(
    "text",
    [
        "srun $WRAPPER torchrun --nnodes=2 --node_rank=$SLURM_NODEID train.py",
        'srun torchrun --nnodes=2 "$@"',
        "if a; then NODES=2; fi\nsrun torchrun --nnodes=$NODES train.py",
        ". settings.sh\nsrun torchrun --nnodes=$NODES train.py",
        "export PET_NODE_RANK=1\nsrun torchrun --nnodes=2 train.py",
        "srun apptainer exec image.sif torchrun --nnodes=2 train.py",
        "./start.sh\npython evaluate.py",
        "run() { torchrun --nnodes=2 --node_rank=$RANK train.py; }\nexport -f run\nsrun bash -c run",
        "echo $((10#$X)) `# a comment` \\\n  --option\npython train.py",
        "srun torchrun --nnodes=2 `# c` --rdzv_backend=c10d --rdzv_endpoint=$HOST:$PORT train.py",
        "python prepare.py\nbash -c 'echo; exit 0'\nsrun python train.py",
        "python prepare.py\n(exit 0)\necho | exit 0\nsrun python train.py",
        "python prepare.py\ntimeout 3h srun python train.py",
        "python prepare.py\nnextflow run main.nf",
        "shopt -s extglob\nrm -f !(*.py)",
        "export MASTER_ADDR=localhost\nset_up() { source env.sh; }\nset_up\nsrun python train.py",
        "export MASTER_ADDR=localhost\nbuiltin source env.sh\nsrun python train.py",
        "export MASTER_ADDR=localhost\ndeclare -n ref=MASTER_ADDR; ref=$(hostname)\nsrun python train.py",
        "export MASTER_ADDR=localhost\nexport -n MASTER_ADDR\nsrun python train.py",
        "export MASTER_ADDR=localhost\nsrun --export=ALL,MASTER_ADDR=$HOST python train.py",
        "srun -K1 -lI60 python train.py",
        "ls a\\ \necho b",
    ],
)
def test_what_is_not_known_is_not_judged(text: str) -> None:
    assert rules(f"{HEAD}{text}\n") == set()


@pytest.mark.parametrize(
    ("text", "line", "new"),
    [
        (EIGHT + "srun --ntasks-per-node=1 torchrun --nnodes=2 a.py\n", 3, "--ntasks=$SLURM_NNODES --ntasks"),
        (EIGHT + "srun --ntasks-per-node=4 python a.py\n", 3, "--ntasks=$((SLURM_NNODES * 4)) --ntasks"),
        ("#!/bin/bash\n#SBATCH --nodes= 2\n", 2, "#SBATCH --nodes=2"),
        (EIGHT + "python train.py\n", 3, "srun python train.py"),
        (EIGHT + "cd python-src && python train.py\n", 3, None),
        ("#!/bin/bash\n#SBATCH -J t24h --time=24h\n", 2, None),
        (EIGHT + "torchrun --nnodes=2 --master_addr=$A a.py\n", 3, None),  # all nodes would have rank 0
        ("#!/bin/bash\n#SBATCH --mem-per-cpus=4G\n", 2, None),
        ("#!/bin/bash\n#SBATCH --cpus-per-node=4\n", 2, None),
    ],
)
def test_a_correction_is_proposed_only_if_it_works(text: str, line: int, new: str | None) -> None:
    replacements = [finding.replacement for finding in lint_script(text, path="x") if finding.line == line]
    assert replacements
    assert any(new in one for one in replacements if one) if new else set(replacements) == {None}


@pytest.mark.parametrize(
    ("job", "step", "count"),
    [  # as on clusters with Slurm 22.05, 24.11 and 26.05
        ("--nodes=2 --ntasks=2", "-N3", 0),  # "can't run 2 processes on 3 nodes, setting nnodes to 2"
        ("--nodes=2 --ntasks=2", "-N3 -n6", 1),
        ("--nodes=2 --ntasks-per-node=4", "-N3", 1),
        ("--nodes=2 --ntasks=8 --ntasks-per-node=2", "-n8", 1),
    ],
)
def test_a_conflict_of_a_step_is_reported_only_if_all_releases_refuse_it(job, step, count) -> None:
    text = f"#!/bin/bash\n#SBATCH {job}\nsrun {step} python train.py\n"
    assert sum(one.rule == "ntasks-conflict" for one in lint_script(text, path="x")) == count


@pytest.mark.parametrize("option", ["test-only", "resv-ports", "external", "parsable"])
@pytest.mark.parametrize("line", ["#SBATCH --{}\nsrun python train.py", "srun --{} python train.py"])
def test_an_option_that_some_release_has_is_not_refused(line: str, option: str) -> None:
    found = lint_script(f"#!/bin/bash\n{line.format(option)}\n", path="x")
    assert [one for one in found if option in one.message] == []


def test_an_ignored_directive_that_repeats_the_header_changes_nothing() -> None:
    header = "#!/bin/bash\n#SBATCH --output=a.out\nmodule load cuda\n"
    for ignored, expected in (("--output=a.out", set()), ("--array=0-3", {"sbatch-after-command"})):
        assert rules(f"{header}#SBATCH {ignored}\npython train.py\n") == expected


def test_an_error_below_an_exit_is_never_read() -> None:
    assert rules("#!/bin/bash\nhostname\nexit 0\nnotes (of mine\n") == set()
    assert rules("#!/bin/bash\nhostname\nnotes (of mine\n") == {"shell-syntax"}


def test_several_programs_of_one_srun_start_together_in_any_job() -> None:
    one = "-N1 -n1 torchrun --nnodes=2 --node_rank={} --master_addr=$H --master_port=$P train.py"
    text = f"{HEAD}srun {one.format(0)} : {one.format(1)}\n"
    assert rules(text) == set()
    assert rules(text.replace(" : ", "\nsrun ")) == {"sequential-sruns"}


# Every regular expression follows what a program documents; a list of words would be a guess.
EXPRESSIONS = {
    "directives._TOKEN": "src/sbatch/opt.c, _get_next_opt",
    "directives._COUNT": "src/common/proc_args.c, parse_int",
    "directives._NODES": "src/common/proc_args.c, verify_node_count",
    "directives._SIZE": "src/common/proc_args.c, str_to_mbytes",
    "directives._TIME": "src/common/parse_time.c, time_str2secs",
    "directives._SIGNAL": "src/common/proc_args.c, get_signal_opts",
    "directives._MAIL": "src/common/proc_args.c, parse_mail_type",
    "directives._HUMAN_TIME": "src/common/parse_time.c, time_str2secs",
    "directives._FORMS": "src/common/slurm_opt.c, arg_set_open_mode and arg_set_exclusive",
    "expand._ESCAPED_IN_WORD": "bash(1), QUOTING",
    "expand._ESCAPED_IN_STRING": "bash(1), QUOTING",
    "expand._IFS": "bash(1), Word Splitting",
    "expand._MARK": "marks of this package in the text of an inner shell",
    "geometry._EXPRESSION": "bash(1), ARITHMETIC EVALUATION",
    "geometry._RANGE": "sbatch(1), --nodes",
    "options.EXPANSION": "bash(1), EXPANSION",
    "rules.rendezvous._CUT_DIGITS": "bash(1), ARITHMETIC EVALUATION; tail(1), cut(1)",
    "rules.rendezvous._HOST_LIST": "scontrol(1), show hostnames",
    "rules.rendezvous._LAST_DIGITS": "bash(1), ARITHMETIC EVALUATION and Substring Expansion",
    "rules.rendezvous._LOOPBACK": "RFC 1122 and RFC 6761",
    "rules.rendezvous._OCTAL": "bash(1), ARITHMETIC EVALUATION",
    "rules.rendezvous._OWN_NAME": "hostname(1)",
    "rules.rendezvous._PORT": "torch/distributed/elastic/rendezvous/utils.py, parse_rendezvous_endpoint",
    "rules.text._NOT_LAST": "bash(1), QUOTING",
    "rules.text._OPTION": "bash(1), SIMPLE COMMANDS",
    "script._BASH": "execve(2), Interpreter scripts",
    "syntax._MESSAGE": "bash, error.c, parser_error",
}


def test_every_regular_expression_follows_a_manual_or_source() -> None:
    found = set()
    for path in sorted((ROOT / "bench" / "lint").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "bench" / "lint").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
                names = [
                    name for name, owner in owners(path) if owner.lineno <= node.lineno <= owner.end_lineno
                ]
                found.add(f"{module}.{names[0] if names else 'line ' + str(node.lineno)}")
    assert found == set(EXPRESSIONS)


def owners(path: Path) -> list[tuple[str, ast.stmt]]:
    """Return the module's constants, by name."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found.append((ast.unparse(node.targets[0]), node))
        elif isinstance(node, ast.AnnAssign):
            found.append((ast.unparse(node.target), node))
    return found
