"""bash decides which scripts are valid, and the walk finds the commands of a script with their values."""

from __future__ import annotations

import pytest

from bench.lint.launch import Launch
from bench.lint.script import read_script
from bench.lint.syntax import check_syntax
from bench.lint.walk import Command, Walk, walk


def commands(text: str) -> list[Command]:
    return walk(text).commands


def words(text: str) -> list[str]:
    """Return the words of the last command."""
    return [word.shown for word in commands(text)[-1].words]


def test_bash_decides_which_script_is_valid() -> None:
    assert check_syntax("for i in 1 2; do\n  echo\ndone\n") is None
    error = check_syntax("echo\nfor i in 1 2; do\n  if true; then\n    echo\ndone\n")
    assert error == (5, "syntax error near unexpected token `done'")
    assert check_syntax("if [[ -f x ]; then\n  :\nfi\n") == (1, "syntax error in conditional expression")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A="a b"\nrun $A "$A" x$A', ["run", "a", "b", "a b", "xa", "b"]),
        ("A=1\nA+=2\nrun $A", ["run", "12"]),
        (
            'A=(x "y z")\nA+=(w)\nrun "${A[@]}" ${A[1]} "${A[*]}"',
            ["run", "x", "y z", "w", "y", "z", "x y z w"],
        ),
        ("run a\\ b 'c d'\"e\\$f\"$'g'", ["run", "a b", "c de$fg"]),
        ("A=1\nif x; then A=2; fi\nrun $A", ["run", "$A"]),
        ("A=1\nfor i in 1 2; do A=$i; done\nrun $A", ["run", "$A"]),
        ("i=0\nfor n in a b; do\n  run $i\n  ((i++))\ndone", ["run", "$i"]),
        ("i=0\nfor n in a b; do\n  let i=i+1\n  run $i\ndone", ["run", "$i"]),
        ("A=1\nx && A=2\nrun $A", ["run", "$A"]),
        ("A=1\nread A < f\nrun $A", ["run", "$A"]),
        ("A=1\n. env.sh\nrun $A", ["run", "$A"]),
        ("f() { A=2; }\nA=1\nf\nrun $A", ["run", "$A"]),
        ("A=1\n(A=2)\nrun $A", ["run", "1"]),
        ("A=1\nif x; then run $A; fi", ["run", "1"]),
        ("A=x\nrun ${A:-y} ${B:-y} ${A%x} $1", ["run", "x", "${B:-y}", "${A%x}", "$1"]),
        ("run \\\n  a \\\n  b", ["run", "a", "b"]),
    ],
)
def test_only_straight_line_assignments_have_values(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def only(text: str) -> Launch:
    """Return the launch of the last command."""
    return commands(text)[-1].launch


@pytest.mark.parametrize(
    "command",
    [
        "srun python train.py --lr 1",
        "srun -N 2 -n8 --mpi=pmix --kill-on-bad-exit=1 -l python -u train.py --lr 1",
        "exec srun env A=b NCCL_DEBUG=INFO python3.11 -W ignore train.py --lr 1",
        "A=b srun /usr/bin/python train.py --lr 1",
        "srun bash -c 'exec python train.py --lr 1'",
        "srun sh -xeuc 'python train.py --lr 1'",
        "CMD='python train.py --lr 1'; srun $CMD",
        'A=(srun python); A+=(train.py --lr 1); "${A[@]}"',
        "if true; then\n  srun \\\n    python \\\n    train.py --lr 1\nfi",
        "f() { srun python train.py --lr 1; }",
        "cat <<EOF | srun python train.py --lr 1\n$A\nEOF",
    ],
)
def test_the_program_is_found_behind_words_of_the_shell_and_inside_bash_c(command: str) -> None:
    launch = only(command)
    assert (launch.via, launch.kind) == ("srun", "python")
    assert launch.program is not None
    assert launch.program.literal == "train.py"
    assert [argument.literal for argument in launch.arguments] == ["--lr", "1"]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --standalone --nproc_per_node=4 train.py", "torchrun"),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "torchrun"),
        ("python -m ddp_scaling_bench.start torch.distributed.run --nproc-per-node 4 x.py", "torchrun"),
        ("python3 -u -m torch.distributed.launch --use_env --nproc_per 4 train.py", "launch"),
        ("/opt/venv/bin/torchrun --nproc_per_node 4 -m package.train", "torchrun"),
        ("accelerate launch --multi_gpu --nproc_per_node 4 train.py", "accelerate"),
    ],
)
def test_launchers_are_recognised_with_their_options(command: str, launcher: str) -> None:
    launch = only(command)
    assert launch.launcher == launcher
    assert launch.options["nproc_per_node"].literal == "4"


@pytest.mark.parametrize(
    "command",
    [
        "srun $WRAPPER python train.py",
        "srun apptainer exec image.sif python train.py",
        "srun -n 1 a : -n 1 python train.py",
        "$LAUNCH python train.py",
        "env -i python train.py",
        "python -c 'print(1)'",
        "accelerate config",
    ],
)
def test_a_command_behind_an_unknown_word_or_program_is_unknown(command: str) -> None:
    assert only(command).kind == "unknown"


def test_options_in_an_unknown_variable_make_a_launcher_opaque() -> None:
    assert only("srun torchrun --nnodes=2 $MORE train.py").opaque
    assert only('srun torchrun --nnodes=2 "$@"').opaque
    assert not only('srun torchrun --nnodes=2 "$PROGRAM"').opaque


@pytest.mark.parametrize(
    ("command", "late"),
    [
        ("srun torchrun --node_rank=$SLURM_NODEID x.py", False),
        ('srun bash -c "torchrun --node_rank=$SLURM_NODEID x.py"', False),
        ('srun bash -c "torchrun --node_rank=\\$SLURM_NODEID x.py"', True),
        ("srun bash -c 'torchrun --node_rank=$SLURM_NODEID x.py'", True),
        ('A="--node_rank $SLURM_NODEID"; srun torchrun $A x.py', False),
        ('A="--node_rank \\$SLURM_NODEID"; srun bash -c "torchrun $A x.py"', True),
    ],
)
def test_variables_expanded_in_the_task_are_recognised(command: str, late: bool) -> None:
    (unknown,) = only(command).options["node_rank"].unknowns()
    assert (unknown.source, unknown.in_task) == ("$SLURM_NODEID", late)


def test_lines_inside_strings_are_lines_of_the_script() -> None:
    launch = only("srun bash -c 'torchrun \\\n  --nnodes 2 \\\n  train.py \\\n  --lr 1'\n")
    assert launch.options["nnodes"].line == 2
    assert launch.program is not None
    assert launch.program.line == 3
    assert launch.arguments[0].line == 4


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("P=$((10#$X + 1))\n", False),
        ("cat <<A <<B\n1\nA\n2\nB\n", True),
        ("srun a `# a comment` \\\n  --b\n", True),
        ("echo 'open\n", True),
        ("for i in 1 2; do echo; done\n", False),
    ],
)
def test_text_of_unknown_structure_is_known_to_be_unknown(text: str, broken: bool) -> None:
    found: Walk = walk(text)
    assert found.broken == broken


def test_the_commands_below_an_exit_are_not_read() -> None:
    script = read_script("#!/bin/bash\na\nif b; then exit; fi\nexit 0\nc\n")
    assert [command.name for command in script.commands] == ["a", "b", "exit", "exit"]
