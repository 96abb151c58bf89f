"""Launchers are recognised in the words of a command, and the program after their options."""

from __future__ import annotations

import shlex

import pytest

from bench.matrix.launchers import LAUNCHERS, read_launch

#: (command, launcher, program); an empty program is not certain.
FOUND = [
    ("torchrun train.py", "torchrun", "python train.py"),
    ("torchrun --standalone --nproc-per-node 2 t.py --nnodes 3", "torchrun", "python t.py --nnodes 3"),
    ("torchrun --nnodes=2 --nproc_per_node=4 -m pkg.train --lr 1", "torchrun", "python -m pkg.train --lr 1"),
    ("/opt/bin/torchrun -r3 -t 3 --no-python bash run.sh", "torchrun", "bash run.sh"),
    ("torchrun --no-python --run-path /a/t.py", "torchrun", "python /a/t.py"),
    ("torchrun", "torchrun", ""),
    ("python -m torch.distributed.run --nnodes=2 t.py", "torchrun", "python t.py"),
    ("python -m torch.distributed.launch t.py", "torch.distributed.launch", "python t.py"),
    ("env -u A torchrun t.py", "torchrun", "env -u A python t.py"),
    ("conda run -n e --live-stream torchrun t.py", "torchrun", "conda run -n e --live-stream python t.py"),
    ("poetry run env A=1 accelerate launch t.py", "accelerate launch", "poetry run env A=1 python t.py"),
    ("accelerate launch --multi_gpu --num_processes 8 t.py --l 1", "accelerate launch", "python t.py --l 1"),
    ("accelerate-launch --use_fsdp t.py", "accelerate launch", ""),
    ("deepspeed --num_gpus=4 t.py --deepspeed ds.json", "deepspeed", ""),
    ("mpiexec.hydra -np 4 python t.py", "mpirun", ""),
    ("srun -N2 --ntasks 4 -u --exclusive --mpi=pmix python t.py", "srun", "python t.py"),
    ("srun --het-group 1 python t.py", "srun", ""),
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
    "accelerate config",
]


@pytest.mark.parametrize(("command", "launcher", "program"), FOUND)
def test_a_launcher_and_its_program_are_found(command, launcher, program):
    found = read_launch(shlex.split(command))
    words = [*found.wrapper, *found.program] if found.program else []
    assert (found.launcher.name, words) == (launcher, shlex.split(program))


@pytest.mark.parametrize("command", NONE)
def test_other_commands_have_no_launcher(command):
    assert read_launch(shlex.split(command)) is None


def test_the_options_of_torchrun_are_those_of_the_installed_torch():
    from torch.distributed.run import get_args_parser

    found: dict[bool, set[str]] = {True: set(), False: set()}
    for action in get_args_parser()._actions:
        found[action.nargs == 0] |= {text.lstrip("-").replace("-", "_") for text in action.option_strings}
    torchrun = LAUNCHERS[0]
    assert found == {True: {*torchrun.flags.split()}, False: {*torchrun.values.split()}}
