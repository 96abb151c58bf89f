"""The parser agrees with bash, and the walk finds the programs that a script starts."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.lint.launch import Launch
from bench.lint.parser import parse_shell
from bench.lint.syntax import ShellError, TooDeepError
from bench.lint.walk import Walk, walk

FIXTURES = Path(__file__).parent / "fixtures"
SCRIPTS = sorted(path for path in FIXTURES.glob("*/*.sbatch") if "crlf" not in path.name)
BASH = shutil.which("bash") or ""
needs_bash = pytest.mark.skipif(not BASH, reason="needs bash")

VALID = [
    'if [[ $1 =~ ^(a|b)[0-9]+$ && ! -f x ]]; then echo "it\'s (fine)"; fi',
    "case $1 in (a) echo ')';; b|c) : ;; *) esac",
    "x=$(case a in a) echo '1)';; esac)",
    "for ((i=0; i<3; i++)) { echo $i; }",
    "a=( [0]='x y' [1]=$'it\\'s' $((2<<1)) )\na+=(b\n# comment\nc)",
    'echo "${x:-"$(echo \'}\')"}" `echo \\`date\\`` $(( (1+2) * ${#a[@]} )) # don\'t',
    "cat <<-'EOT' | tr a b > >(cat) 2>&1\n\tit's $(unclosed\n\tEOT\n",
    "cat <<A <<B\n1\nA\n2\nB\n",
    "f() { local v=$1; } ; g() ( echo sub )\nfunction h { f; }",
    "[[ a < b || ( c > d ) ]] && { f; g; } || true",
    "until false; do break; done; select s in a b; do break; done < /dev/null",
    "coproc NAME { cat; }",
    "(( i = i << 2 )); let 'i += 1'; echo {1..3} ${!a[@]} $'\\t' $\"locale\"",
    "${arr[$(( n - 1 ))]} a |& b; ! c; time -p d & e",
    'while read -r x; do echo; done <<< "$y"',
    "echo a=b",
    "if a; then :; elif b; then :; else :; fi >x 2>&1 &",
    "echo \\\n  continued \\\n  # a comment behind a continuation\necho",
    "",
    "\n# only a comment",
]
INVALID = [
    "if true; then",
    "if true; then fi",
    "for i in a b; echo; done",
    "for i in a b; do echo",
    "while :; do :; done done",
    "fi",
    "echo (",
    "echo )",
    "echo 'unclosed",
    'echo "unclosed',
    "x=$(echo",
    "case a in b) echo ;",
    "f() echo",
    "{ echo",
    "[[ -f x ]; then",
    "a && && b",
    "| a",
    "a ;; b",
    "echo ${x",
    "cat <",
    "a=(b",
]


@pytest.mark.parametrize("text", VALID)
def test_the_parser_accepts_valid_commands(text: str) -> None:
    parse_shell(text)


@pytest.mark.parametrize("text", INVALID)
def test_the_parser_rejects_invalid_commands(text: str) -> None:
    with pytest.raises(ShellError):
        parse_shell(text)


def bash_refuses(text: str) -> bool:
    environment = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [BASH, "-n"], input=text.encode(), capture_output=True, check=False, env=environment
    )
    return done.returncode != 0 or bool(done.stderr)  # bash -n exits with 0 after some errors


def parser_refuses(text: str) -> bool:
    try:
        parse_shell(text)
    except TooDeepError:
        return False
    except ShellError:
        return True
    return False


@needs_bash
@pytest.mark.parametrize("text", [*VALID, *INVALID])
def test_bash_agrees_which_commands_are_valid(text: str) -> None:
    assert bash_refuses(text) == (text in INVALID)


@needs_bash
def test_the_parser_agrees_with_bash_on_intact_and_damaged_scripts() -> None:
    damage = ["", '"', "'", "(", ")", "{", "}", "\n", "fi", "done", ";", "&", "|", "<", "$("]
    candidates = []
    for path in SCRIPTS:
        if path.stem in ("csh", "python-shebang", "placeholders"):
            continue
        text = path.read_text(encoding="utf-8")
        draw = random.Random(path.stem)  # a new script does not change the damage of the others
        place = draw.randrange(len(text))
        candidates += [text, text[:place] + draw.choice(damage) + text[place + 1 :]]
    # bash -n does not parse the commands in backquotes
    comparable = [text for text in candidates if "`" not in text]
    disagreed = [text for text in comparable if bash_refuses(text) != parser_refuses(text)]
    assert disagreed == []


def test_a_syntax_error_has_its_line_and_the_line_of_the_open_command() -> None:
    with pytest.raises(ShellError) as caught:
        parse_shell("echo\nfor i in 1 2; do\n  if true; then\n    echo\ndone\n")
    error = caught.value
    assert (error.line, error.message, error.opened) == (5, "syntax error near unexpected token `done'", 3)


def launches(text: str) -> list[Launch]:
    return [step.launch for step in walk(parse_shell(text)).steps if step.launch.is_training]


def only(text: str) -> Launch:
    (launch,) = launches(text)
    return launch


@pytest.mark.parametrize(
    "command",
    [
        "srun python train.py --lr 1",
        "srun -N 2 -n8 --mpi=pmix --kill-on-bad-exit=1 -l python -u train.py --lr 1",
        "exec srun env A=b NCCL_DEBUG=INFO python3.11 -W ignore train.py --lr 1",
        "time A=b srun numactl -N 0 --membind=0 nsys profile -o out -t cuda python train.py --lr 1",
        "srun singularity exec --nv -B /a:/b image.sif python train.py --lr 1",
        "srun --container-image=x --container-mounts a:b podman-hpc run --rm --gpu img /opt/bin/python train.py --lr 1",
        "srun bash -c 'source env.sh; exec python train.py --lr 1'",
        "srun sh -xeuc 'python train.py --lr 1'",
        "CMD='python train.py --lr 1'; srun $CMD",
        "CMD='srun python train.py'; CMD+=' --lr 1'; eval $CMD",
        'A=(srun python); A+=(train.py --lr 1); "${A[@]}"',
        'run() { srun "$PYTHON" train.py --lr 1; }; run',
        "srun ./select_gpu python train.py --lr 1",
        "srun timeout -k 5 2h taskset -c 0-3 python train.py --lr 1",
        "srun uv run --no-sync python train.py --lr 1",
        "srun conda run -n env --no-capture-output python train.py --lr 1",
        "cat > t.sh <<EOF\npython train.py --lr 1\nEOF\nsrun bash t.sh",
        "cat <<'EOF' > t.sh\npython train.py --lr 1\nEOF\nchmod +x t.sh\nsrun ./t.sh",
        "srun bash <<'EOF'\npython train.py --lr 1\nEOF",
        "read -r -d '' cmd <<EOF\npython train.py --lr 1\nEOF\nsrun bash -c \"$cmd\"",
        'C=$(cat <<EOF\npython train.py --lr 1\nEOF\n)\nsrun bash -c "$C"',
        "if true; then\n  srun \\\n    python \\\n    train.py --lr 1\nfi",
    ],
)
def test_the_program_is_found_behind_wrappers_and_inside_inner_shells(command: str) -> None:
    launch = only(command)
    assert launch.via == "srun"
    assert launch.kind == "python"
    assert launch.program is not None
    assert launch.program.text == "train.py"
    assert [argument.text for argument in launch.arguments] == ["--lr", "1"]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --standalone --nproc_per_node=4 train.py", "torchrun"),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "torchrun"),
        ("python3 -u -m torch.distributed.launch --use_env --nproc_per_node 4 train.py", "launch"),
        ("/opt/venv/bin/torchrun --nproc_per_node 4 -m package.train", "torchrun"),
        ("deepspeed --num_gpus 4 train.py --deepspeed", "deepspeed"),
    ],
)
def test_launchers_are_recognised_with_their_options(command: str, launcher: str) -> None:
    launch = only(command)
    assert launch.launcher == launcher
    options = launch.options.get("nproc_per_node") or launch.options["num_gpus"]
    assert options.text == "4"


@pytest.mark.parametrize(
    "command",
    [
        "srun hostname",
        "srun --nodes=1 -w $n nvidia-smi -L",
        "srun bash -c 'mkdir -p /tmp/x; hostname'",
        "python -c 'print(1)'",
        "python -m pip install torch",
        "python --version",
        "singularity pull image.sif docker://x",
        "conda activate env",
        "accelerate config",
        "cat <<EOF\npython train.py\nEOF",
        "echo python train.py",
        "# python train.py",
        "f() { python train.py; }",
    ],
)
def test_helpers_and_text_are_not_the_training_program(command: str) -> None:
    assert launches(command) == []


@pytest.mark.parametrize(
    ("command", "via"),
    [
        ("mpirun -np 4 python train.py", "remote"),
        ("pdsh -w a,b python train.py", "remote"),
        ("ssh n1 python train.py", "remote"),
        ("$LAUNCH python train.py", "unknown"),
        ("python train.py", ""),
    ],
)
def test_launchers_that_reach_other_nodes_are_recognised(command: str, via: str) -> None:
    assert only(command).via == via


def ranks(text: str) -> list[tuple[str, bool]]:
    """Return the node rank of each launcher, and whether the task expands it."""
    seen: Walk = walk(parse_shell(text))
    found = []
    for step in seen.steps:
        value = step.launch.options.get("node_rank")
        if value:
            found += [(unknown.source, unknown.in_task) for unknown in seen.unknowns.within(value.text)]
    return found


@pytest.mark.parametrize(
    ("command", "late"),
    [
        ("srun torchrun --node_rank=$SLURM_NODEID x.py", False),
        ('srun bash -c "torchrun --node_rank=$SLURM_NODEID x.py"', False),
        ('srun bash -c "torchrun --node_rank=\\$SLURM_NODEID x.py"', True),
        ("srun bash -c 'torchrun --node_rank=$SLURM_NODEID x.py'", True),
        ('A="--node_rank $SLURM_NODEID"; srun torchrun $A x.py', False),
        ('A="--node_rank \\$SLURM_NODEID"; srun bash -c "torchrun $A x.py"', True),
        ("cat >t.sh <<EOF\ntorchrun --node_rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh", False),
        ("cat >t.sh <<'EOF'\ntorchrun --node_rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh", True),
        ("cat >t.sh <<EOF\ntorchrun --node_rank=\\$SLURM_NODEID x.py\nEOF\nsrun bash t.sh", True),
    ],
)
def test_variables_expanded_in_the_task_are_recognised(command: str, late: bool) -> None:
    assert ranks(command) == [("$SLURM_NODEID", late)]


def test_lines_inside_strings_and_here_documents_are_lines_of_the_script() -> None:
    text = (
        'A="torchrun \\\n  --nnodes 2 \\\n  --node_rank 1"\nsrun bash -c "$A \\\n  train.py \\\n  --lr 1"\n'
    )
    launch = only(text)
    assert launch.options["nnodes"].line == 2
    assert launch.options["node_rank"].line == 3
    assert launch.arguments[0].line == 6
