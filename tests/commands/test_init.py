"""`bench init`: its matrices can be planned without changes, and it overwrites nothing."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.commands.init import cluster_matrix, partitions
from bench.jobs.slurm.parsing import parse_nodes
from bench.matrix.own_command import read_command
from bench.matrix.workload import filled_words
from bench.plan import make_plan
from ddp_scaling_bench.errors import BenchError
from tests.commands.command_line import bench, refusal
from tests.common import raised, write_program
from tests.matrices import plan_of

SINFO = """\
cpu*|up|2-00:00:00|20|idle|64|(null)|(null)
gpu|up|1-00:00:00|3|idle|48|gpu:l40s:4(S:0-1)|l40s
gpu|up|1-00:00:00|1|mixed|48|gpu:l40s:4(S:0-1)|l40s
gpu|up|1-00:00:00|1|down*|48|gpu:l40s:4|l40s
debug|up|10:00|2|allocated|16|gpu:2|(null)
odd|up|infinite|3|idle|40|gpu:a100:3|(null)
closed|down|infinite|9|idle|8|gpu:8|(null)
broken|up|infinite|9|drained|8|(null)|(null)
"""


def test_partitions_out_of_service_are_omitted_and_gpus_come_first():
    found = partitions(parse_nodes(SINFO))
    assert [str(partition) for partition in found] == [
        "gpu: 4 nodes (3 free), 4 x l40s, 48 CPUs each, limit 1-00:00:00",
        "odd: 3 nodes (3 free), 3 x a100, 40 CPUs each, limit none",
        "debug: 2 nodes (0 free), 2 x GPU, 16 CPUs each, limit 00:10:00",
        "cpu: 20 nodes (20 free), no GPU, 64 CPUs each, limit 2-00:00:00",
    ]


def test_the_matrix_of_each_partition_can_be_planned(tmp_path):
    for partition in partitions(parse_nodes(SINFO)):
        plan = plan_of(tmp_path, cluster_matrix(partition))
        cluster = plan.matrix.cluster
        assert (cluster.partition, cluster.gpu_type) == (partition.name, partition.gpu_type)
        assert (cluster.exclusive, cluster.node_gpus) == (True, partition.gpus or None)
        assert cluster.time_limit <= (partition.time_limit_s or 1200)
        assert max(cell.nodes for cell in plan.cells) <= partition.nodes
        assert {max(cell.ranks_per_node) for cell in plan.cells} == {partition.gpus or 8}
        assert cluster.cpus_per_task * max(plan.cells[0].ranks_per_node) <= partition.cpus
        assert {mode for cell in plan.cells for mode in cell.modes} == {"strong", "weak"}


def init(*words: str, cwd: Path, path: str = "/nowhere", **env: str) -> subprocess.CompletedProcess[str]:
    return bench("init", *words, cwd=cwd, PATH=path, **env)


def test_without_slurm_init_writes_a_matrix_for_this_machine_and_overwrites_no_file(tmp_path):
    said = "sinfo: error: Could not establish a configuration source"
    write_program(tmp_path / "sinfo", f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    for path in (
        "/nowhere",
        f"{tmp_path}:{os.environ['PATH']}",
    ):  # without sinfo, and without a configuration
        (tmp_path / "local.yaml").unlink(missing_ok=True)
        done = init(cwd=tmp_path, path=path)
        shown = (done.returncode, done.stdout, done.stderr)
        assert shown[:2] == (0, "local.yaml\n")
        assert re.fullmatch(
            "the matrix is for this machine: sinfo: .*\nnext: bench plan local.yaml\n", shown[2]
        )
        assert make_plan(tmp_path / "local.yaml").cells
    (tmp_path / "local.yaml").write_text("mine")
    assert refusal("init", cwd=tmp_path, PATH="/nowhere") == (
        "local.yaml exists and is not overwritten; give another file: bench init PATH"
    )
    assert (tmp_path / "local.yaml").read_text() == "mine"


def test_the_partition_is_the_named_one_or_that_of_the_site_file_or_the_first(tmp_path):
    write_program(tmp_path / "sinfo", f"#!/bin/sh\ncat <<'EOF'\n{SINFO}EOF\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert init("--partition", "odd", cwd=tmp_path, path=path).stdout == "odd.yaml\n"
    assert init(cwd=tmp_path, path=path).stdout == "gpu.yaml\n"
    assert refusal("init", "--partition", "nope", cwd=tmp_path, PATH=path) == (
        "no partition 'nope' is in service; available: gpu, odd, debug, cpu"
    )
    site = tmp_path / "site.yaml"
    site.write_text("cluster: {partition: cpu, account: users}\n")
    done = init("m.yaml", cwd=tmp_path, path=path, BENCH_SITE=str(site))
    assert done.returncode == 0, done.stderr
    assert "  partition: cpu\n" in (tmp_path / "m.yaml").read_text()
    assert make_plan(tmp_path / "m.yaml", site=site).matrix.cluster.account == "users"


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
        (
            "NCCL_DEBUG=INFO fabric run --devices 8 train.py",
            "own",
            "fabric run --num-nodes {nodes} --node-rank {node_rank} --main-address {master_addr} --main-port "
            "{master_port} --devices {tasks_per_node} train.py",
            {"NCCL_DEBUG": "INFO"},
        ),
        ("mpirun -np 8 ./train", "own", "mpirun --hostfile {hostfile} -np {world_size} ./train", {}),
    ],
)
def test_the_matrix_has_the_launcher_and_the_command_of_one_process(command, launcher, words, env):
    plan, _ = planned(command)
    assert {cell.launcher for cell in plan.cells} == {launcher}
    assert plan.matrix.workload.command.words == tuple(shlex.split(words))
    assert plan.matrix.cluster.env == env


def test_a_command_that_cannot_be_used_gives_one_error():
    assert raised(BenchError, read_command, "ray job submit -- python train.py") == (
        "--command: bench cannot use ray job submit: it submits a job to another cluster, which has resources "
        "and time of its own; give the command of the program: bench init --command 'python ...'"
    )
    assert raised(BenchError, read_command, "") == (
        "--command: the command is empty; write a command such as `python train.py`"
    )


CPU = "import torch.distributed as d\nd.init_process_group('gloo')\n"
CLICK = CPU + "# cuda\n@click.option('--batch')\ndef main(batch): ..."
HF = "HfArgumentParser(TrainingArguments)"


@pytest.mark.parametrize(
    ("words", "script", "added", "batches", "device"),
    [
        ("--batch-size 12 --lr 1", "", "--batch-size {per_gpu_batch} --lr 1", {12}, "cuda"),
        ("--batch_size=12", CPU, "--batch_size={per_gpu_batch}", {12}, "cpu"),
        ("--global-batch-size 64", "", "--global-batch-size {global_batch}", {32}, "cuda"),
        ("--test-batch-size 12 --batch auto", "", "--test-batch-size 12 --batch auto", {1}, "cuda"),
        ("", f"{CPU}p.add_argument('-b', '--bs', type=int)", "--bs {per_gpu_batch}", {32}, "cpu"),
        ("", CLICK, "--batch {per_gpu_batch}", {32}, "cuda"),
        ("", "def main(batch_size=8): ...\ntyper.run(main)", "--batch-size {per_gpu_batch}", {32}, "cuda"),
        ("", HF, "--per_device_train_batch_size {per_gpu_batch}", {32}, "cuda"),
        ("", "def load(batch_size): ...\n# p.add_argument('--batch-size')", "", {1}, "cuda"),
    ],
)
def test_the_batch_and_the_device_of_a_script_are_found(words, script, added, batches, device):
    Path("train.py").write_text(script)
    plan, text = planned(f"python train.py {words}")
    assert plan.matrix.workload.command.words == tuple(f"python train.py {added}".split())
    assert {cell.per_gpu_batch for cell in plan.cells if "weak" in cell.modes} == batches
    assert (plan.matrix.workload.device, plan.cells[0].backend) in ((device, "gloo"), ("cuda", "nccl"))
    assert plan.matrix.cluster.stop_after_measurement
    assert "recorder.loss(loss)" in text
    assert not {"ignored-setting", "shared-output"} & {one.kind for one in plan.warnings}


#: A word of these characters alone is refused as an operator of a shell.
OPERATORS = "&|;<>"
WORDS = st.lists(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n" + OPERATORS),
        min_size=1,
        max_size=12,
    )
    | st.sampled_from(["{", "}", "{}", "{{x}}", "$HOME", "a b", "'", '"', "é", "# no", ": x", "{a: 1}", "-"])
    | st.sampled_from([f"a{one}b" for one in OPERATORS]),
    max_size=5,
)


@settings(max_examples=15, deadline=None)
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


@pytest.mark.parametrize(
    ("name", "text", "launcher"),
    [
        ("run.sh", "#!/bin/bash\n# torchrun is not used\npython train.py\n", ""),
        ("run.sh", '#!/bin/bash\nNGPU=8 torchrun --nproc_per_node "$NGPU" train.py\n', "own"),
        ("train.py", '"""Start it with torchrun."""\n', ""),
        ("train.py", "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=4)\n", "own"),
    ],
)
def test_a_script_that_starts_ranks_is_started_once_per_node(name, text, launcher):
    Path(name).write_text(text)
    own = read_command(f"{'bash' if name.endswith('.sh') else 'python'} {name}")
    assert own.launcher == launcher
    assert bool(own.notes) is bool(launcher)
