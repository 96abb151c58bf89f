"""`bench init --command`: a matrix for a user's own script, which plans as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.commands.init import cluster_matrix, partitions
from bench.commands.own_command import read_command
from bench.errors import BenchError
from bench.jobs.slurm.parsing import parse_nodes
from bench.matrix.workload import filled_words
from bench.plan import make_plan
from tests.common import raised

PARTITION = partitions(parse_nodes("gpu|up|1-00:00:00|4|idle|48|gpu:l40s:4|l40s\n"))[0]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder for the matrix."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(command: str):
    """Return the plan of the matrix that init writes for a partition, and the matrix itself."""
    text = cluster_matrix(PARTITION, read_command(command))
    Path("m.yaml").write_text(text, encoding="utf-8")
    return make_plan(Path("m.yaml")), text


@pytest.mark.parametrize(
    ("command", "launcher", "words", "env"),
    [
        ("python train.py --lr 1", "srun", "python train.py --lr 1", {}),
        ("srun -N2 -n8 python train.py", "srun", "python train.py", {}),
        (
            "OMP_NUM_THREADS=4 NCCL_DEBUG=INFO torchrun --nnodes=2 --nproc_per_node 4 --rdzv-backend c10d "
            "--rdzv_endpoint host:29500 --max-restarts=3 -r 3 train.py --lr 1",
            "torchrun",
            "python train.py --lr 1",
            {"NCCL_DEBUG": "INFO"},
        ),
        ("torchrun \\\n --standalone \\\n train.py", "torchrun", "python train.py", {}),
        ("accelerate launch --multi_gpu --num-processes 8 train.py", "torchrun", "python train.py", {}),
        ("uv run torchrun --standalone train.py", "torchrun", "uv run python train.py", {}),
    ],
)
def test_the_matrix_has_the_launcher_and_the_command_of_one_process(command, launcher, words, env):
    plan, _ = planned(command)
    assert {cell.launcher for cell in plan.cells} == {launcher}
    assert plan.matrix.workload.command.words == tuple(shlex.split(words))
    assert plan.matrix.cluster.env == env


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "accelerate launch --use_fsdp train.py",
            "--command: bench starts the processes itself, and cannot replace accelerate launch: option "
            "--use_fsdp is unknown, or has no counterpart; if the program also runs under torchrun, give the "
            "command of one process: bench init --command 'python ...'",
        ),
        (
            "deepspeed --num_gpus 2 train.py --config ds.json",
            "--command: bench starts the processes itself, and cannot replace deepspeed: it passes "
            "--local_rank to the script, and torchrun sets LOCAL_RANK only; if the program also runs under "
            "torchrun, give the command of one process: bench init --command 'python ...'",
        ),
        (
            "MASTER_PORT=1 python train.py",
            "--command: MASTER_PORT is set by the job's script and would be overwritten; it is derived from "
            "the job's id; remove MASTER_PORT= from the command",
        ),
        ("", "--command: the command is empty; write a command such as `python train.py`"),
    ],
)
def test_a_command_that_cannot_be_used_gives_one_error(command, message):
    assert raised(BenchError, read_command, command) == message


WORDS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), min_size=1, max_size=12)
    | st.sampled_from(["{", "}", "{}", "{{x}}", "$HOME", "a b", "'", '"', "é", "# no", ": x", "{a: 1}", "-"]),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(WORDS)
def test_awkward_words_arrive_in_the_matrix_unharmed(words):
    command = ["python", "train.py", *words]
    plan, _ = planned(shlex.join(command))
    assert filled_words(plan.matrix.workload.command.words, {}) == command


def test_placeholders_stay_and_both_scaling_modes_need_one_for_the_batch():
    plan, _ = planned("python train.py --bs {per_gpu_batch} --out {run_dir} --json '{\"seed\": 1}'")
    words = "python train.py --bs {per_gpu_batch} --out {run_dir} --json".split()
    assert plan.matrix.workload.command.words == (*words, '{{"seed": 1}}')
    assert {mode for cell in plan.cells for mode in cell.modes} == {"strong", "weak"}
    plan, _ = planned("python train.py")
    assert {(mode, cell.per_gpu_batch) for cell in plan.cells for mode in cell.modes} == {("weak", 1)}
