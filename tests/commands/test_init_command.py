"""`bench init --command`: a matrix for a user's own script, which plans as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.commands.init import cluster_matrix, local_matrix, partitions
from bench.commands.own_command import (
    LIGHTNING_LINES,
    RECORDER_LINES,
    TRANSFORMERS_LINES,
    OwnWorkload,
    read_command,
)
from bench.commands.trial import find_reading
from bench.errors import BenchError
from bench.jobs.slurm.parsing import parse_nodes
from bench.matrix.workload import filled_words
from bench.plan import make_plan
from tests.commands.command_line import bench_process
from tests.common import raised
from tests.workload.conftest import wait_for

PARTITION = partitions(parse_nodes("gpu|up|1-00:00:00|4|idle|48|512000|gpu:l40s:4|l40s|g[1-4]\n"))[0]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a script, without accelerate's configuration file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-huggingface"))
    (tmp_path / "train.py").write_text("import torch\n")
    return tmp_path


def planned(command: str):
    """Return the plan of the matrix that init writes for a partition, and the matrix itself."""
    text = cluster_matrix(PARTITION, OwnWorkload(read_command(command)))
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
        ("torchrun \\\n --nproc 2 \\\n train.py", "torchrun", "python train.py", {}),
        (
            "accelerate launch --multi_gpu --num-processes 8 --mixed_precision bf16 train.py",
            "torchrun",
            "python train.py",
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
        ("uv run torchrun --standalone train.py", "torchrun", "uv run python train.py", {}),
        ("deepspeed --no_local_rank train.py", "torchrun", "python train.py", {}),
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
            "--command: bench starts the processes itself, and cannot replace accelerate launch: torchrun has "
            "nothing like --use_fsdp; if the program also runs under torchrun, use bench init --command "
            "'python train.py'",
        ),
        (
            "deepspeed --num_gpus 2 train.py --config ds.json",
            "--command: bench starts the processes itself, and cannot replace deepspeed: deepspeed passes "
            "--local_rank to the script, torchrun sets LOCAL_RANK only; if the program also runs under "
            "torchrun, use bench init --command 'python train.py --config ds.json'",
        ),
        (
            "torchrun --unknown train.py",
            "--command: torchrun has options that bench does not know, or no program; give the command of one "
            "process: bench init --command 'python ...'",
        ),
        (
            "python missing.py",
            "--command: missing.py is not a file in this folder; call bench init in the folder in which the "
            "command runs",
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
    command = [
        "python",
        "train.py",
        "--bs",
        "{per_gpu_batch}",
        "--out",
        "{run_dir}",
        "--json",
        '{{"seed": 1}}',
    ]
    assert plan.matrix.workload.command.words == tuple(command)
    assert {mode for cell in plan.cells for mode in cell.modes} == {"strong", "weak"}
    plan, _ = planned("python train.py")
    assert {(mode, cell.per_gpu_batch) for cell in plan.cells for mode in cell.modes} == {("weak", 1)}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch\n", RECORDER_LINES),
        ("from lightning.fabric import Fabric\n", RECORDER_LINES),
        ("from lightning import Trainer\nTrainer()\n", LIGHTNING_LINES),
        ("import pytorch_lightning as pl\npl.Trainer()\n", LIGHTNING_LINES),
        ("from transformers import Trainer, AutoModel\n", TRANSFORMERS_LINES),
        ("import transformers\ntransformers.AutoModel\n", RECORDER_LINES),
        ("from ddp_scaling_bench import Recorder\n", None),
        ("from bench.record import Recorder\n", None),
        ("import bench\n", RECORDER_LINES),
        ("this is not Python\n", RECORDER_LINES),
    ],
)
def test_the_matrix_contains_the_lines_for_the_script(source, lines):
    Path("train.py").write_text(source)
    _, text = planned("python train.py")
    for known in (RECORDER_LINES, LIGHTNING_LINES, TRANSFORMERS_LINES):
        shown = "".join(f"  #     {line}".rstrip() + "\n" for line in known.splitlines())
        assert (shown in text) == (known == lines)


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ([f"iter {i}: loss 2.{i}, time 12{i}.5ms, mfu 1%" for i in range(5)], "time ([0-9.]+)ms"),
        ([f"[{i}] 1{i}.5 samples/s" for i in range(5)], "([0-9.]+) samples/s"),
        ([f"rate (all): {i} it/s" for i in range(5)], r"rate \(all\): ([0-9.]+) it/s"),
        ([f"data 1.{i} ms, step 12.{i} ms" for i in range(5)], None),
        (["time 10ms", "time 20ms"], None),
        ([*(f"time {i}ms" for i in range(5)), "total time 100ms"], None),
        ([f"epoch {i} took 12.{i}s" for i in range(5)], None),
        ([f"rate: 1,{i}00.5 samples/s" for i in range(5)], None),
        (["no number"] * 5, None),
        (
            ["{'train_runtime': 3.1, 'train_samples_per_second': 13.0}"],
            "'train_samples_per_second': '?([0-9.e+]+)",
        ),
    ],
)
def test_a_pattern_is_proposed_only_for_one_recurring_number_with_a_unit(lines, pattern):
    found = find_reading(lines)
    assert (found and found.pattern) == pattern


def test_try_reads_the_step_time_and_ends_all_processes_at_the_limit(folder):
    (folder / "train.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "for i in range(10):\n"
        "    print(f'step {i} of rank {os.environ[\"RANK\"]}: {12.5 + i} ms', flush=True)\n"
        "time.sleep(600)\n"
    )
    done = bench_process(
        "init",
        "m.yaml",
        "--command",
        "python train.py",
        "--try",
        "--try-limit",
        "5s",
        cwd=folder,
        PATH="/nowhere",
    )
    assert done.returncode == 0, done.stderr
    assert "ended at the limit of 5 s\nfound in the output: step 0 of rank 0: 12.5 ms\n" in done.stderr
    metrics = make_plan(folder / "m.yaml").matrix.workload.metrics
    assert (metrics.output, metrics.units) == ({"step_time": "([0-9.]+) ms"}, {"step_time": "ms"})
    child = int((folder / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(child), "the end of the child")


def test_try_of_a_failing_script_shows_its_last_lines_and_writes_nothing(folder):
    (folder / "train.py").write_text("print('no data')\nraise SystemExit(3)\n")
    done = bench_process(
        "init", "m.yaml", "--command", "python train.py", "--try", cwd=folder, PATH="/nowhere"
    )
    assert done.returncode == 1
    assert "  | no data\nerror: the command failed with exit code 3 after " in done.stderr
    assert not (folder / "m.yaml").exists()


def test_without_slurm_the_matrix_of_a_command_can_be_planned(folder):
    own = OwnWorkload(read_command("torchrun --nproc_per_node 2 train.py"))
    (folder / "local.yaml").write_text(local_matrix(4, own))
    assert [cell.world_size for cell in make_plan(folder / "local.yaml").cells] == [1, 2, 4]
