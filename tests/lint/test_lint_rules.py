"""The rules find mistakes at their lines and accept near misses and correct scripts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from bench.findings import Finding, Severity
from bench.lint import all_rules, lint_script

FIXTURES = Path(__file__).parent / "fixtures"
BAD = sorted((FIXTURES / "bad").glob("*.sbatch"))
NEAR = sorted((FIXTURES / "near").glob("*.sbatch"))
GOOD = sorted((FIXTURES / "good").glob("*.sbatch"))
EXPECTED = re.compile(r"# expect: (\S+) \| (.*)")

ALL_RULES = """
arguments-split backend-device-mismatch brace-in-default container-without-gpus crlf-script first-node-only
gloo-interface-excluded gpu-per-task-isolation hardcoded-host hardcoded-port lightning-under-torchrun
loopback-master-addr malformed-directive missing-gpu-request missing-node-rank missing-srun mpirun-slots
node-list-in-one-element ntasks-conflict ntasks-not-per-node ntasks-per-node-ignored one-core-per-task
one-launcher-per-gpu output-folder port-octal-arithmetic port-range rank-expanded-early sbatch-after-command script-folder
sequential-sruns shell-syntax srun-cpus-not-inherited stray-command task-gpu-mismatch trap-delayed undefined-variable
unknown-het-group unknown-srun-option unknown-torchrun-option world-size-mismatch
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
    found = Counter((finding.rule, finding.line) for finding in lint(path))
    if path.stem != "one-core-per-task--data-loaders":  # the other scripts request no CPUs, for brevity
        found = Counter({place: count for place, count in found.items() if place[0] != "one-core-per-task"})
    assert found == expected


@pytest.mark.parametrize("path", NEAR, ids=lambda path: path.stem)
def test_a_near_miss_gets_no_finding_of_its_rule(path: Path) -> None:
    rule = path.stem.partition("--")[0]
    assert [str(finding) for finding in lint(path) if finding.rule == rule] == []
    assert [str(finding) for finding in lint(path) if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_correct_script_gets_neither_error_nor_warning(path: Path) -> None:
    assert [str(finding) for finding in lint(path) if finding.severity is not Severity.INFO] == []


def test_there_are_enough_correct_scripts() -> None:
    assert len(GOOD) >= 40


def test_every_rule_has_a_bad_script_and_a_near_miss() -> None:
    assert {path.stem.partition("--")[0] for path in BAD} == set(ALL_RULES)
    assert {path.stem.partition("--")[0] for path in NEAR} == set(ALL_RULES)


def test_every_rule_is_listed_and_documented() -> None:
    assert [rule.name for rule in all_rules()] == ALL_RULES
    for rule in all_rules():
        assert "\nBad:\n" in rule.doc, rule.name
        assert "\nGood:\n" in rule.doc, rule.name


def test_these_rules_yield_infos() -> None:
    infos = {rule.name for rule in all_rules() if rule.severity is Severity.INFO}
    assert infos == {
        "container-without-gpus",
        "gpu-per-task-isolation",
        "hardcoded-port",
        "lightning-under-torchrun",
        "missing-gpu-request",
        "ntasks-not-per-node",
        "one-core-per-task",
        "output-folder",
        "srun-cpus-not-inherited",
    }


def test_the_failing_script_of_four_nodes_is_explained() -> None:
    path = FIXTURES / "bad" / "missing-srun--mission.sbatch"
    (finding,) = lint(path)
    assert finding == Finding(
        path=path.name,
        line=15,
        rule="missing-srun",
        severity=Severity.ERROR,
        message=(
            "only the first node runs this command: 1 of 16 processes will start "
            "and wait for the others until the rendezvous times out"
        ),
        remedy="put srun before the command, so that it starts one process per task",
        replacement="srun python run_training_dense.py --epochs 3",
    )


def test_findings_are_sorted_by_line_and_then_by_severity() -> None:
    text = read(FIXTURES / "bad" / "malformed-directive--many.sbatch")
    lines = [finding.line for finding in lint_script(text, path="x")]
    assert lines == sorted(lines)
    text = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=4\nsrun torchrun --nnodes=2 x.py\n"
    assert [(f.severity, f.rule) for f in lint_script(text, path="x")] == [
        (Severity.ERROR, "loopback-master-addr"),
        (Severity.ERROR, "missing-node-rank"),
        (Severity.INFO, "srun-cpus-not-inherited"),
    ]


@pytest.mark.parametrize("line", ["EOF", "$ sbatch other.sh", "'''\npython a.py\n'''"])
def test_a_leftover_of_editing_is_an_error_only_if_bash_stops_there(line: str) -> None:
    for setting, severity in (("set -u", Severity.WARNING), ("set -euo pipefail", Severity.ERROR)):
        text = f"#!/bin/bash\n#SBATCH --gpus=1\n{setting}\n{line}\npython train.py\n"
        (finding,) = lint_script(text, path="x")
        assert (finding.rule, finding.line, finding.severity) == ("stray-command", 4, severity)


HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=4\n"
EIGHT = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8\n"


@pytest.mark.parametrize(
    ("rule", "certain", "uncertain"),
    [
        ("malformed-directive", "#SBATCH -n $N\nN=4\n", "#SBATCH -n $N\n"),
        ("malformed-directive", "#SBATCH -n=4\n", "#SBATCH -J=name\n"),
        ("malformed-directive", "#SBATCH -mem=4G\n", "#SBATCH -output=a.txt\n"),
        ("unknown-torchrun-option", "torchrun --num_machines=2 a.py\n", "torchrun --depth=2 a.py\n"),
        (
            "loopback-master-addr",
            "srun torchrun --nnodes=2 --node_rank=$R --master_addr=localhost a.py\n",
            "export MASTER_ADDR=localhost\nsrun python a.py\n",
        ),
    ],
)
def test_a_mistake_is_an_error_only_if_the_script_proves_it(rule: str, certain: str, uncertain: str) -> None:
    for text, severity in ((certain, Severity.ERROR), (uncertain, Severity.WARNING)):
        found = {finding.severity for finding in lint_script(HEAD + text, path="x") if finding.rule == rule}
        assert next(one for one in Severity if one in found) is severity, text


@pytest.mark.parametrize(
    "text",
    ["#SBATCH --nodes=2 -n 1\nsrun a (b)\n", "#!/bin/bash\n#SBATCH -n=2 -N {{ nodes }}\nA = {% if a %}\n"],
)
def test_a_file_that_sbatch_cannot_take_as_it_is_gets_hints_only(text: str) -> None:
    assert {finding.severity for finding in lint_script(text, path="x")} <= {Severity.INFO}


def test_directives_with_contradicting_numbers_are_replaced() -> None:
    replaced = {
        "gpu-per-task-isolation--directive": "#SBATCH --gpus-per-node=4",
        "one-launcher-per-gpu--directive": "#SBATCH --ntasks-per-node=1",
        "one-launcher-per-gpu--ntasks": "#SBATCH --ntasks-per-node=1",
        "ntasks-not-per-node--two-nodes": "#SBATCH --ntasks-per-node=4",
        "ntasks-conflict--less": "#SBATCH --ntasks=8",
    }
    for stem, line in replaced.items():
        assert line in [finding.replacement for finding in lint(FIXTURES / "bad" / f"{stem}.sbatch")]


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
        "#!/bin/bash\n#SBATCH --name={name}\n#SBATCH -N {nodes}\n#SBATCH -t {walltime}\n#SBATCH -p {queue}\n"
        "#SBATCH --gpus=v100:{(1 if gpu else 0)*nodes}\n",
        "#!/bin/bash\n${PARTITION_OPTION}\n#SBATCH --job-name=${JOB_NAME}\n",
        "#!/bin/bash\n@CONSTRAINT@\n#SBATCH --nodes=@NODES@\n",
        "#!/bin/bash\n#SBATCH -n=2\nsrun python a.py\nslurmstepd: error: *** JOB 7 CANCELLED ***\n(a b)\n",
        "#!/bin/bash\nexport SIZE=your_size(int)\n",
        "#!/bin/bash\npython your.py\n--option value..\n",
        "#!/bin/bash\nkill £(< pid)\n",
        "#!/usr/bin/env python\nscript = '''#!/bin/bash\n#SBATCH -J {name}\n'''\n",
        "#!/bin/bash\n#sbatch --startx\n",
        "#!/bin/bash\n#SBATCH -?? a_gpu\n#SBATCH -n=2\n",
        "#!/bin/bash\n!pip install a\n!unzip b.zip\n!mv b c\nx = torch.tensor([1,2]).cuda()\n",
        "#!/bin/bash\ncat $0\nrank_zero_deprecation(\nGPU available: True, used: True\n",
    ],
)
def test_templates_logs_and_blanks_get_hints_only(text: str) -> None:
    assert {finding.severity for finding in lint_script(text, path="x")} <= {Severity.INFO}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--TIME=10", "write --time"),
        ("--mem_bind=local", "write --mem-bind"),
        ("-o ${DIR}/a.out", "sbatch --output="),
        ("-o ${DIR:?set it}/a.out", "quote it"),
    ],
)
def test_the_remedy_of_a_directive_is_one_that_sbatch_accepts(line: str, message: str) -> None:
    (finding,) = lint_script(f"#!/bin/bash\n#SBATCH {line}\nDIR=/a\n", path="x")
    assert message in finding.remedy
    assert finding.severity is not Severity.INFO


@pytest.mark.parametrize(
    ("text", "line", "new"),
    [
        (EIGHT + "srun --ntasks-per-node=1 torchrun --nnodes=2 a.py\n", 3, "--ntasks=$SLURM_NNODES --ntasks"),
        (EIGHT + "srun --ntasks-per-node=4 python a.py\n", 3, "--ntasks=$((SLURM_NNODES * 4)) --ntasks"),
        (
            EIGHT + "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$A:1 a.py\n",
            3,
            "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun",
        ),
        ("#!/bin/bash\n#SBATCH --nodes= 2\n", 2, "#SBATCH --nodes=2"),
        (EIGHT + "torchrun --nnodes=2 --master_addr=$A a.py\n", 3, None),  # all nodes would have rank 0
        (EIGHT + "python train.py --ddp-backend=no_c10d\n", 3, None),  # nothing waits: 16 separate runs
        (EIGHT + "srun torchrun --nproc_per_node=$SLURM_NTASKS_PER_NODE --nnodes=2 a.py\n", 2, None),
        ("#!/bin/bash\n#SBATCH --mem-per-task=4G\n", 2, None),
        ("#!/bin/bash\n#SBATCH --cpus-per-node=4\n", 2, None),
        ("#!/bin/bash\n#SBATCH --mem=9G\n#SBAYCH --mem-per-gpu=4G\n", 3, None),
    ],
)
def test_a_correction_is_proposed_only_if_it_works(text: str, line: int, new: str | None) -> None:
    found = [finding for finding in lint_script(text, path="x") if finding.line == line]
    replacements = [finding.replacement for finding in found if finding.severity is not Severity.INFO]
    assert replacements
    assert any(new in one for one in replacements if one) if new else set(replacements) == {None}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("echo\n#SBATCH -p ${QUEUE}\nhostname\n", "sbatch --partition=... script"),
        ("N=`1`\n", "without $(...)"),
        ("#SBATCH --mem-per-task=4G\n", "per node"),
        ("#SBATCH --mem=9G\n#SBAYCH --mem-per-gpu=4G\n", "remove this line or line 2"),
    ],
)
def test_the_remedy_works(text: str, remedy: str) -> None:
    assert any(remedy in finding.remedy for finding in lint_script(f"#!/bin/bash\n{text}", path="x"))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("missing-srun", HEAD + "python a.py -N $SLURM_JOB_NUM_NODES\n"),
        ("undefined-variable", "#!/bin/bash\necho $a\npython b.py $a $b tcp://$MASTER_ADDR\n"),
        ("undefined-variable", "#!/bin/bash\nsrun -N 1 a.sh $SLURM_CPUS_PER_TASK $SLURM_NNODES\n"),
        ("world-size-mismatch", HEAD + "export WORLD_SIZE=1\nsrun --ntasks-per-node=4 -N2 ./a.sh\n"),
        ("sbatch-after-command", "#!/bin/bash\npython a.py\n#SBATCH --mem=4G\n"),
        ("malformed-directive", "#!/bin/bash\n# Generated by start.py\n#SBATCH -J runs/${NAME}\n"),
        ("malformed-directive", "#!/bin/bash\n#SBATCH --exclude=a\n  #SBATCH --exclude=b\n"),
        ("sequential-sruns", "#!/bin/bash\nsrun python train.py & python other.py\n"),
        ("ntasks-per-node-ignored", EIGHT + "srun -N 2 --ntasks-per-node=1 torchrun --nnodes=2 a.py\n"),
        ("task-gpu-mismatch", HEAD + "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc_per_node=2 a.py\n"),
        ("task-gpu-mismatch", "#!/bin/bash\n#SBATCH --gres=gpu:2\ntorchrun train.py -DDP\n"),
        ("task-gpu-mismatch", EIGHT + "srun --ntasks=4 --gpus-per-node=4 python train.py --distributed\n"),
        ("hardcoded-host", "#!/bin/bash\n#SBATCH -N 1\ndeepspeed --master_addr=10.0.0.1 train.py\n"),
        ("hardcoded-host", HEAD + "torchrun --nnodes=4 --node_rank=3 --master_addr=10.0.0.1 train.py\n"),
        (
            "hardcoded-host",
            HEAD + "rank=$(($SLURM_PROCID+1))\nsrun python train.py --rank $rank --master_addr 10.0.0.1\n",
        ),
        ("loopback-master-addr", HEAD + "MASTER_ADDR=127.0.0.1 srun python train.py --deepspeed\n"),
        ("port-range", HEAD + "export MASTER_PORT=$UID\nsrun python train.py\n"),
        ("rank-expanded-early", EIGHT + "export RANK=$SLURM_PROCID\nsrun python train.py\n"),
        ("rank-expanded-early", EIGHT + "srun bash train.sh --node_rank=$SLURM_NODEID\n"),
        ("rank-expanded-early", EIGHT + "srun python lightning_train.py --rank $SLURM_PROCID\n"),
        (
            "undefined-variable",
            HEAD + "torchrun --nnodes=$WORLD_SIZE --nproc_per_node=$KUBERNETES_CONTAINER_GPUS train.py\n",
        ),
        (
            "undefined-variable",
            "#!/bin/bash\n#SBATCH --nodes=1\n"
            "for ((i = 1; i < SLURM_NNODES - 1; i++)); do\n  srun ray start --num-gpus $SLURM_GPUS_PER_TASK &\ndone\n",
        ),
    ],
)
def test_what_the_caller_or_another_script_may_give_is_a_hint(rule: str, text: str) -> None:
    found = [finding for finding in lint_script(text, path="x") if finding.rule == rule]
    assert found
    assert {finding.severity for finding in found} == {Severity.INFO}


@pytest.mark.parametrize(
    ("name", "meant"), [("JOB_NUM_GPUS", "$SLURM_GPUS_ON_NODE"), ("JOB_ID_0", "${SLURM_JOB_ID}_0")]
)
def test_the_variable_that_is_meant_is_named(name: str, meant: str) -> None:
    found = lint_script(HEAD + f"srun python a.py -n $SLURM_{name}\n", path="x")
    assert f"use {meant}" in [finding.remedy for finding in found]


def test_sbatch_reads_a_value_from_the_next_directive() -> None:
    assert (
        lint_script("#!/bin/bash\n#SBATCH -p\t# a queue\n#SBATCH\n\n#SBATCH gpu\nhostname\n", path="x") == []
    )
    found = lint_script("#!/bin/bash\n#SBATCH -p\n#SBATCH --time=9\n#SBATCH gpu\nhostname\n", path="x")
    assert [(finding.line, finding.severity) for finding in found] == [
        (2, Severity.INFO),
        (4, Severity.ERROR),
    ]


@pytest.mark.parametrize(
    ("program", "severity"),
    [
        ("train_ddp.py", Severity.WARNING),
        ("--nnodes=1 train.py", Severity.WARNING),
        ("split.py", Severity.INFO),
    ],
)
def test_one_worker_on_several_gpus_is_a_warning_only_for_data_parallel_training(program, severity):
    text = f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n\ntorchrun {program}\n"
    found = [one.severity for one in lint_script(text, path="x") if one.rule == "task-gpu-mismatch"]
    assert found == [severity]


def test_the_remedy_names_what_is_expanded_too_early_and_where() -> None:
    text = EIGHT + "RANK=$SLURM_PROCID\nexport RANK LOCAL_RANK=$SLURM_LOCALID\ncat > a.sh <<EOF\n"
    text += "torchrun --nnodes=2 --master_addr=$A --node_rank=$SLURM_NODEID train.py\nEOF\nsrun bash a.sh\n"
    found = [one for one in lint_script(text, path="x") if one.rule == "rank-expanded-early"]
    remedies = {one.line: one.remedy for one in found}
    assert "srun bash -c '... $SLURM_PROCID ...'" in remedies[3]
    assert "srun bash -c '... $SLURM_LOCALID ...'" in remedies[4]
    assert "<<'EOF'" in remedies[6]
    assert "\\$SLURM_NODEID" in remedies[6]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("arguments-split--bash-c", 'write bash -c \'... "$@"\' bash "$@"'),
        ("loopback-master-addr--alternative", "`export` in its own line"),
        ("unknown-torchrun-option--of-accelerate", "accelerate launch"),
        ("task-gpu-mismatch--smaller-component", "--ntasks-per-node=4"),
        ("world-size-mismatch--components", "WORLD_SIZE=8"),
        ("trap-delayed--pipe", "srun ... | ... & wait"),
        ("one-launcher-per-gpu--both-counts", "--ntasks-per-node=1, without --ntasks"),
        ("unknown-torchrun-option--of-distributed-launch", "LOCAL_RANK"),
        ("missing-node-rank--in-a-loop", "count the nodes in the loop"),
        ("mpirun-slots--two", "request --ntasks=6, or"),
        ("mpirun-slots--per-node", "request --ntasks-per-node=3, or"),
        ("mpirun-slots--both-counts", "request --ntasks-per-node=4 and --ntasks=8, or"),
        ("world-size-mismatch--number-of-gpus", "one task per GPU"),
        ("first-node-only--local-storage", "the commands that make and fill it"),
        ("stray-command--comment-behind-backslash", "move the comment after the backslash in line 7"),
        ("stray-command--directive-without-sbatch", "write `#SBATCH --gres=gpu:v100-32gb:4`"),
        ("missing-srun--number-of-nodes-as-option", "unless the program starts the other processes itself"),
    ],
)
def test_the_remedy_of_a_bad_script_works(name: str, part: str) -> None:
    found = [one for one in lint(FIXTURES / "bad" / f"{name}.sbatch") if one.rule == name.partition("--")[0]]
    assert {one.replacement for one in found} == {None}
    assert part in found[0].remedy
    assert found[0].severity is not Severity.INFO


def test_a_script_with_empty_options_gets_hints_only() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --partition=\n#SBATCH --qos=\n#SBATCH --gres=[4 A100]\nsrun python train.py\n"
    )
    assert {one.severity for one in lint_script(text, path="x")} == {Severity.INFO}


def test_a_program_that_gets_the_number_of_nodes_may_start_its_processes() -> None:
    found = lint(FIXTURES / "bad" / "missing-srun--number-of-nodes-as-option.sbatch")
    assert [one.severity for one in found if one.rule == "missing-srun"] == [Severity.WARNING]


def test_a_directive_in_place_of_the_interpreter_stops_the_job() -> None:
    (found, *_) = lint_script("#!BATCH -A project\n#SBATCH --nodes=1\nhostname\n", path="x")
    assert (found.severity, found.line) == (Severity.ERROR, 1)
    assert found.remedy == "write `#!/bin/bash`, and below it `#SBATCH -A project`"


def test_the_index_of_an_array_is_one_of_the_array() -> None:
    text = (
        HEAD
        + "#SBATCH --array=0,7-30:5%2\nexport MASTER_PORT=$((SLURM_ARRAY_TASK_ID * 10))\nsrun python a.py\n"
    )
    (found,) = [one for one in lint_script(text, path="x") if one.rule == "port-range"]
    assert "from 0 to 300," in found.message


def test_one_process_for_several_gpus_is_counted_per_node() -> None:
    text = HEAD.replace("gpus-per-node=1", "gpus-per-node=4") + "srun python train.py\n"
    (found,) = [one for one in lint_script(text, path="x") if one.rule == "task-gpu-mismatch"]
    assert "1 process on each node for 4 GPUs" in found.message


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("singularity exec a.sif torchrun train.py", Severity.WARNING),
        ("singularity exec a.sif python train.py --device cuda", Severity.WARNING),
        ("singularity exec a.sif python train.py", Severity.INFO),
        ("singularity exec a.sif torchrun train.py --backend gloo", Severity.INFO),
        ("singularity exec -B /lib/driver:/mnt/driver a.sif torchrun train.py", Severity.INFO),
    ],
)
def test_a_container_without_nv_is_a_warning_if_its_program_uses_gpus(command, severity):
    text = f"#!/bin/bash\n#SBATCH --nodes=1 --gpus=1\n{command}\n"
    found = [one.severity for one in lint_script(text, path="x") if one.rule == "container-without-gpus"]
    assert found == [severity]


def test_a_lightning_program_without_srun_waits_for_the_other_tasks() -> None:
    found = lint(FIXTURES / "bad" / "missing-srun--lightning-cli.sbatch")
    assert [one.severity for one in found] == [Severity.WARNING]
    assert "Lightning expects a process for each task" in found[0].message


@pytest.mark.parametrize(
    ("job", "step", "severities"),
    [  # as on clusters with Slurm 22.05, 24.11 and 26.05
        ("--nodes=2 --ntasks=2", "-N3", []),  # "can't run 2 processes on 3 nodes, setting nnodes to 2"
        ("--nodes=2 --ntasks-per-node=1", "-N3", []),
        ("--nodes=2 --ntasks=2", "-N3 -n6", [Severity.ERROR]),
        ("--nodes=2 --ntasks-per-node=4", "-N3", [Severity.ERROR]),
        ("--nodes=2", "-N3", [Severity.ERROR]),
        ("--nodes=2 --ntasks-per-node=4", "-N2 -n8 --ntasks-per-node=2", [Severity.WARNING]),  # by release
        ("--nodes=2 --ntasks=8 --ntasks-per-node=2", "-n8", [Severity.ERROR]),
    ],
)
def test_a_conflict_of_a_step_is_an_error_only_if_all_releases_refuse_it(job, step, severities) -> None:
    text = f"#!/bin/bash\n#SBATCH {job}\nsrun {step} python train.py\n"
    found = [one.severity for one in lint_script(text, path="x") if one.rule == "ntasks-conflict"]
    assert [severity for severity in found if severity is not Severity.INFO] == severities


@pytest.mark.parametrize("option", ["test-only", "resv-ports", "external", "parsable"])
@pytest.mark.parametrize("line", ["#SBATCH --{}\nsrun python train.py", "srun --{} python train.py"])
def test_an_option_that_some_release_has_is_not_refused(line: str, option: str) -> None:
    found = lint_script(f"#!/bin/bash\n{line.format(option)}\n", path="x")
    assert [one for one in found if option in one.message] == []


@pytest.mark.parametrize(
    ("lines", "severity"),
    [
        ("#SBTACH --nodes=4", Severity.WARNING),
        ("#SBTACH --nodes=1", Severity.INFO),  # the default
        ("#SBATCH --ntasks=8\n#SBTACH --nodes=1", Severity.WARNING),
        ("#SBATCH --qos=high\n#SBTACH --qos=low", Severity.INFO),
        ("#SBATCH --mem=100G\n#SBTACH --mem-per-gpu=39G", Severity.WARNING),
        ("#SBATCH --exclude=n1\n#SBTACH --nodelist=n1", Severity.WARNING),
        ("#SBATCH --nodelist=n1\n#SBTACH --nodes=1", Severity.INFO),
        ("#SBATCH --mail-type=END\n#SBTACH --mail-user=a@b.c", Severity.WARNING),
    ],
)
def test_a_misspelt_directive_is_a_warning_if_it_changes_the_job(lines: str, severity: Severity) -> None:
    (found,) = lint_script(f"#!/bin/bash\n{lines}\nhostname\n", path="x")
    assert (found.rule, found.severity) == ("malformed-directive", severity)


def test_an_ignored_directive_with_another_value_of_the_header_is_possibly_a_note() -> None:
    header = "#!/bin/bash\n#SBATCH --output=a.out\nmodule load cuda\n"
    for ignored, severity in (("--output=b.out", Severity.INFO), ("--array=0-3", Severity.ERROR)):
        found = lint_script(f"{header}#SBATCH {ignored}\npython train.py\n", path="x")
        assert [one.severity for one in found if one.rule == "sbatch-after-command"] == [severity]


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("DATA = /scratch", Severity.ERROR),
        ("DATA = # enter the folder", Severity.INFO),
        ('"""\n`import torch` fails\n"""', None),
        ("import torch", Severity.ERROR),
    ],
)
def test_a_line_to_be_filled_in_and_a_word_in_a_note_are_no_stray_commands(line, severity) -> None:
    found = lint_script(f"#!/bin/bash\n{line}\npython train.py\n", path="x")
    severities = {one.severity for one in found if one.rule == "stray-command"}
    assert severities - {Severity.WARNING} == ({severity} if severity else set())


@pytest.mark.parametrize("path", ["job.template", "templates/job.sh", "a/template_gpu.sbatch", "job.sh.in"])
def test_a_file_named_as_a_template_gets_hints_only(path: str) -> None:
    text = "#!/bin/bash\n#SBATCH --job-name=$NAME\n#SBATCH --time=24h\npython train.py\n"
    for other in ("job.sh", "lightning-template/job.sh", "templates/a/job.sh"):
        assert {one.severity for one in lint_script(text, path=other)} == {Severity.ERROR, Severity.WARNING}
    assert {one.severity for one in lint_script(text, path=path)} == {Severity.INFO}


@pytest.mark.parametrize(
    ("rank", "effect"),
    [("$SLURM_PROCID", "so every task gets rank 0"), ("$((SLURM_PROCID + 1))", "gets the same rank")],
)
def test_a_rank_that_is_computed_too_early_is_the_same_for_all_tasks(rank: str, effect: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun python train.py --rank {rank}\n"
    (found,) = [one for one in lint_script(text, path="x") if one.rule == "rank-expanded-early"]
    assert effect in found.message


def test_a_launcher_in_a_branch_may_be_the_exception() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8\n"
    launcher = "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$H:1 a.py"
    branch = f"if command -v all_reduce_perf; then all_reduce_perf -g 1; else {launcher}; fi"
    for command, severity in ((launcher, Severity.ERROR), (f"bash -c '{branch}'", Severity.WARNING)):
        found = lint_script(f"{text}srun {command}\n", path="x")
        assert next(one.severity for one in found if one.rule == "one-launcher-per-gpu") is severity


@pytest.mark.parametrize(("nodes", "severity"), [(1, Severity.INFO), (2, Severity.WARNING)])
def test_devices_of_lightning_and_a_fixed_host_matter_on_several_nodes(nodes, severity) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes={nodes} --ntasks-per-node=1 --gpus-per-node=4\n"
    text += "export MASTER_ADDR=node001\nsrun python train.py --trainer.devices 4\n"
    found = {one.rule: one.severity for one in lint_script(text, path="x") if "1 process" not in one.message}
    assert found["hardcoded-host"] is found["task-gpu-mismatch"] is severity


def test_a_command_among_the_directives_is_an_error_also_beside_an_alternative() -> None:
    text = "#!/bin/bash\n#SBATCH --mem=4G\nSBATCH --mem=8G\n#SBATCH --gpus=1\nhostname\n"
    assert (Severity.ERROR, "malformed-directive", 3) in [
        (one.severity, one.rule, one.line) for one in lint_script(text, path="x")
    ]


@pytest.mark.parametrize(
    ("command", "severity"),
    [("echo $HERE", Severity.INFO), ("export HERE", Severity.WARNING), ("cd $HERE/..", Severity.WARNING)],
)
def test_the_folder_of_the_copy_matters_only_if_a_command_uses_it(command, severity) -> None:
    text = f'#!/bin/bash\n#SBATCH --nodes=1\nHERE=$(cd "$(dirname "$0")" && pwd)\n{command}\npython a.py\n'
    assert [one.severity for one in lint_script(text, path="x") if one.rule == "script-folder"] == [severity]


@pytest.mark.parametrize(
    ("option", "severity"),
    [("-A=name", Severity.WARNING), ("-qos=name", Severity.WARNING), ("-p=name", Severity.ERROR)],
)
def test_a_misread_account_is_refused_only_where_the_site_checks_accounts(option, severity) -> None:
    (found,) = lint_script(f"#!/bin/bash\n#SBATCH {option}\nhostname\n", path="x")
    assert (found.rule, found.severity) == ("malformed-directive", severity)


@pytest.mark.parametrize(
    ("setup", "severity"),
    [("export MASTER_ADDR=$HEAD", Severity.ERROR), ("module load lightning", Severity.WARNING)],
)
def test_a_module_alone_does_not_prove_that_the_processes_wait(setup: str, severity: Severity) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4\n{setup}\npython train.py\n"
    assert [one.severity for one in lint_script(text, path="x") if one.rule == "missing-srun"] == [severity]


@pytest.mark.parametrize(
    ("option", "severity"), [("--gpus-per-task=1", Severity.ERROR), ("--gpu-bind=closest", Severity.WARNING)]
)
def test_the_closest_gpus_may_be_several(option: str, severity: Severity) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=4 --gpus-per-node=4 {option}\n"
    text += "srun bash -c 'python train.py --device cuda:$SLURM_LOCALID'\n"
    found = [one.severity for one in lint_script(text, path="x") if one.rule == "gpu-per-task-isolation"]
    assert found[0] is severity


def test_several_programs_of_one_srun_start_together_in_any_job() -> None:
    one = "-N1 -n1 torchrun --nnodes=2 --node_rank={} --master_addr=$H --master_port=29500 train.py"
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun {one.format(0)} : {one.format(1)}\n"
    found = lint_script(text, path="x")
    assert [one for one in found if one.rule in ("unknown-het-group", "sequential-sruns")] == []
    text = text.replace(" : ", "\nsrun ")
    assert "sequential-sruns" in {one.rule for one in lint_script(text, path="x")}


def test_the_world_size_of_each_call_of_a_function_belongs_to_the_srun_of_that_call() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=4\n"
    text += 'pass() {\n  srun --nodes=$1 --ntasks=$(($1 * 4)) --ntasks-per-node=4 bash -c "\n'
    text += '    export WORLD_SIZE={}\n    python train.py"\n}}\npass 4\npass 2\n'
    for size, rules in (("$(($1 * 4))", set()), ("5", {"world-size-mismatch"})):
        found = {one.rule for one in lint_script(text.replace("{}", size).replace("}}", "}"), path="x")}
        assert found & {"world-size-mismatch"} == rules


def test_the_folder_of_the_copy_as_a_default_is_a_hint() -> None:
    text = '#!/bin/bash\n#SBATCH --nodes=1\nD="${D:-$(cd "$(dirname "$0")" && pwd)}"\ncd $D\npython a.py\n'
    assert [one.severity for one in lint_script(text, path="x") if one.rule == "script-folder"] == [
        Severity.INFO
    ]


@pytest.mark.parametrize(("line", "found"), [('[ "$B" = nccl ] && export NCCL_DEBUG=INFO', 0), ("B=nccl", 1)])
def test_a_test_for_nccl_does_not_show_that_the_program_uses_gpus(line: str, found: int) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\nsrun python train.py\n"
    assert sum(one.rule == "missing-gpu-request" for one in lint_script(text, path="x")) == found
