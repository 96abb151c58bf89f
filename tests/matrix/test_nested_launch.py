"""Launchers are recognised in the words of a command, and the program after their options."""

from __future__ import annotations

import shlex

import pytest

from bench.matrix import nested_launch
from bench.matrix.nested_launch import read_launch

#: (command, launcher, program); the program None is not certain.
FOUND = [
    ("torchrun train.py", "torchrun", "python train.py"),
    ("torchrun --standalone --nproc-per-node 2 t.py --nnodes 3", "torchrun", "python t.py --nnodes 3"),
    ("torchrun --nnodes=2 --nproc=4 -m pkg.train --lr 1", "torchrun", "python -m pkg.train --lr 1"),
    ("/opt/bin/torchrun -r3 -t 3 --no-python bash run.sh", "torchrun", "bash run.sh"),
    ("torchrun --no-python --run-path /a/t.py", "torchrun", "python /a/t.py"),
    ("torchrun --nproc_per_node {tasks_per_node} -- t.py", "torchrun", "python t.py"),
    ("torchrun --n 2 t.py", "torchrun", None),
    ("torchrun --not-an-option t.py", "torchrun", None),
    ("torchrun --standalone=1 t.py", "torchrun", None),
    ("torchrun -m --no-python t", "torchrun", None),
    ("torchrun --help t.py", "torchrun", None),
    ("torchrun", "torchrun", None),
    ("python -m torch.distributed.run --nnodes=2 t.py", "torchrun", "python t.py"),
    ("/env/bin/python3 -um torch.distributed.run t.py", "torchrun", "/env/bin/python3 t.py"),
    ("python -X dev /env/bin/torchrun t.py", "torchrun", "python t.py"),
    ("python -m torch.distributed.launch --use-env t.py", "torchrun", "python t.py"),
    ("python -m torch.distributed.launch t.py", "torchrun", None),
    ("env -u A B=1 torchrun t.py", "torchrun", "env -u A B=1 python t.py"),
    ("A=1 B='x y' torchrun t.py", "torchrun", "env A=1 'B=x y' python t.py"),
    ("uv run torchrun t.py", "torchrun", "uv run python t.py"),
    ("conda run -n e --live-stream torchrun t.py", "torchrun", "conda run -n e --live-stream python t.py"),
    ("poetry run env A=1 accelerate launch t.py", "accelerate", "poetry run env A=1 python t.py"),
    ("accelerate launch --multi-gpu --num_processes 8 t.py --lr 1", "accelerate", "python t.py --lr 1"),
    ("accelerate-launch --num 8 t.py", "accelerate", None),
    ("python -m accelerate.commands.launch --config_file c.yaml t.py", "accelerate", "python t.py"),
    ("deepspeed --num_gpus=4 t.py --deepspeed ds.json", "deepspeed", "python t.py --deepspeed ds.json"),
    ("mpirun -np 4 -x A --mca btl tcp --bind-to core python t.py", "mpirun", "python t.py"),
    ("mpiexec -gtool x python t.py", "mpirun", None),
    ("mpirun -n 1 python a.py : -n 1 python b.py", "mpirun", None),
    ("srun -N2 --ntasks 4 -u --exclusive --mpi=pmix python t.py", "srun", "python t.py"),
    ("srun --het-group 1 python t.py", "srun", None),
    ("srun --nodes=2 torchrun --nnodes 2 t.py", "torchrun", "python t.py"),
]
NONE = [
    "python train.py --launcher torchrun",
    "python torchrun.py",
    "python -c 'import torch' torchrun",
    "bash -c 'torchrun t.py'",
    "bash run.sh torchrun",
    "env -S 'torchrun t.py'",
    "uv run --new-option x torchrun t.py",
    "uv pip install torchrun",
    "accelerate config",
    "env",
    "A=1",
    "python",
]


@pytest.mark.parametrize(("command", "launcher", "program"), FOUND)
def test_a_launcher_and_its_program_are_found(command, launcher, program):
    found = read_launch(shlex.split(command))
    words = None if found.program is None else [*found.wrapper, *found.program]
    assert (found.launcher, words) == (launcher, None if program is None else shlex.split(program))


@pytest.mark.parametrize("command", NONE)
def test_other_commands_have_no_launcher(command):
    assert read_launch(shlex.split(command)) is None


def test_the_options_of_torchrun_are_those_of_the_installed_torch():
    from torch.distributed.run import get_args_parser

    options = {
        string.lstrip("-").replace("-", "_"): "" if action.nargs == 0 else "="
        for action in get_args_parser()._actions
        for string in action.option_strings
    }
    assert options == nested_launch._TORCHRUN
