"""Messages for mistakes in a matrix: file, line, mistake, allowed values, remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.matrix.expansion import expand
from bench.matrix.load import load_matrix
from bench.matrix.schema import json_schema
from bench.matrix.workload import WorkloadOptions
from bench.shipped import shipped

GOOD = """\
study: good
cluster: {executor: slurm}
axes:
  nodes: [1, 2]
  tasks_per_node: [2]
workload: {device: cpu}
scaling:
  - {mode: weak, per_gpu_batch: [8]}
"""


def problems(tmp_path: Path, text: str, name: str = "m.yaml") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        expand(*load_matrix(path))
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path}", name).splitlines()


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


KEYS_OF_MATRIX = "study, cluster, axes, scaling, workload, repeats, max_running, seed, exclude, include"

CASES = {
    "an unknown key": (
        GOOD + "repeat: 3\n",
        f"m.yaml:9: unknown key 'repeat' in the matrix; did you mean 'repeats'? allowed: {KEYS_OF_MATRIX}",
    ),
    "a key of another section": (
        GOOD + "seq_len: 64\n",
        "m.yaml:9: unknown key 'seq_len' in the matrix; write it below `workload:`",
    ),
    "a wrong type": (
        changed("nodes: [1, 2]", 'nodes: [1, "2"]'),
        "m.yaml:4: axes.nodes[1] must be a whole number, not '2'; remove the quotes",
    ),
    "a scalar for a list": (
        changed("nodes: [1, 2]", "nodes: 2"),
        "m.yaml:4: axes.nodes must be a list, not 2; write [2]",
    ),
    "an unknown backend": (
        changed("tasks_per_node: [2]", "tasks_per_node: [2]\n  backend: [mpi]"),
        "m.yaml:6: axes.backend[0] cannot be 'mpi'; allowed: nccl, gloo",
    ),
    "nccl on cpu": (
        changed("tasks_per_node: [2]", "tasks_per_node: [2]\n  backend: [gloo, nccl]"),
        "m.yaml:6: backend nccl needs GPUs, but workload.device is cpu; use gloo, or device: cuda",
    ),
    "no exchange of gradients between ranks": (
        changed("nodes: [1, 2]", "nodes: [1]\n  strategy: [ddp, none]"),
        "m.yaml:5: strategy none does not exchange gradients, so it needs one rank, not 2; exclude {nodes: 1, tasks_per_node: 2, strategy: none}, or use ddp",
    ),
    "torch's bf16 hook without nccl": (
        changed("tasks_per_node: [2]", "tasks_per_node: [2]\n  comm_hook: [none, bf16]"),
        "m.yaml:6: strategy ddp sends bf16 with torch's bf16 hook, which needs nccl, not gloo; exclude {comm_hook: bf16}",
    ),
    "hsdp that runs as ddp": (
        changed("tasks_per_node: [2]", "tasks_per_node: [1]")
        .replace("[1, 2]\n", "[2]\n", 1)
        .replace("device: cpu", "device: cpu, strategy: hsdp, precision: bf16, comm_dtype: bf16"),
        "m.yaml:6: strategy ddp sends bf16 with torch's bf16 hook, which needs nccl, not gloo (hsdp runs as ddp on 2 nodes); use fp16 or fp32",
    ),
    "batch normalisation beside another model": (
        changed(
            "tasks_per_node: [2]", "tasks_per_node: [2]\n  model: [mlp, resnet50]\n  comm_dtype: [bf16, fp32]"
        ).replace("device: cpu", "device: cpu, strategy: fsdp, precision: bf16"),
        "m.yaml:7: model resnet50 has batch normalisation, which needs weights in fp32, not bf16; exclude {comm_dtype: bf16, model: resnet50}",
    ),
    "replicas of different sizes": (
        changed("tasks_per_node: [2]", "tasks_per_node: [[1, 2]]\n  launcher: [torchrun]")
        .replace("[1, 2]\n", "[2]\n", 1)
        .replace("device: cpu", "device: cpu, strategy: hsdp"),
        "m.yaml:7: strategy hsdp needs the same number of ranks on every node, not [1, 2]; use strategy fsdp",
    ),
    "an indivisible batch": (
        changed("{mode: weak, per_gpu_batch: [8]}", "{mode: strong, global_batch: [1001]}"),
        "m.yaml:8: global_batch 1001 is not divisible by 2 ranks (nodes 1 x tasks_per_node 2); try 1000 or 1004",
        "m.yaml:8: global_batch 1001 is not divisible by 4 ranks (nodes 2 x tasks_per_node 2); try 1000 or 1004",
    ),
    "accumulation that does not divide": (
        changed("{mode: weak, per_gpu_batch: [8]}", "{mode: strong, global_batch: [16]}").replace(
            "device: cpu", "device: cpu, grad_accum: 3"
        ),
        "m.yaml:8: global_batch 16 is not divisible by 2 ranks (nodes 1 x tasks_per_node 2) x grad_accum 3; try 12 or 24",
        "m.yaml:8: global_batch 16 is not divisible by 4 ranks (nodes 2 x tasks_per_node 2) x grad_accum 3; try 12 or 24",
    ),
    "a batch that must divide at several sizes": (
        changed("{mode: weak, per_gpu_batch: [8]}", "{mode: strong, global_batch: [64]}").replace(
            "[1, 2]", "[1, 2, 3, 7]"
        ),
        "m.yaml:8: global_batch 64 is not divisible by 6 ranks (nodes 3 x tasks_per_node 2); try 84",
        "m.yaml:8: global_batch 64 is not divisible by 14 ranks (nodes 7 x tasks_per_node 2); try 84",
    ),
    "a variable that the script sets": (
        changed("tasks_per_node: [2]", "tasks_per_node: [2]\n  env.OMP_NUM_THREADS: [1, 2]"),
        "m.yaml:6: axes.env.OMP_NUM_THREADS: OMP_NUM_THREADS is set by the job's script and would be overwritten; "
        "use cluster.cpus_per_task, which sets the threads of every rank",
    ),
    "a variable that the script's shell works with": (
        changed("executor: slurm", "executor: slurm, env: {run_dir: /tmp, IFS: ';'}"),
        "m.yaml:2: cluster.env.run_dir: run_dir is a variable of the job's script; choose another name",
        "m.yaml:2: cluster.env.IFS: IFS is a variable of the job's script; choose another name",
    ),
    "directives that sbatch reads as ones that the plan counts with": (
        changed(
            "executor: slurm",
            'executor: slurm, directives: ["--arr=1-9", "--hold --nodes=9", "-Hn9", "--comment=a -N 9"]',
        ),
        "m.yaml:2: cluster.directives[0]: '--arr=1-9' would override a setting of the plan; every run is one job that starts once",
        "m.yaml:2: cluster.directives[1]: '--hold --nodes=9' would override a setting of the plan; use axes.nodes",
        "m.yaml:2: cluster.directives[2]: '-Hn9' would override a setting of the plan; "
        "use axes.tasks_per_node or axes.gpus_per_node",
        "m.yaml:2: cluster.directives[3]: '--comment=a -N 9' would override a setting of the plan; use axes.nodes",
    ),
    "a value twice in an axis": (
        changed("nodes: [1, 2]", "nodes: [1, 2, 1]"),
        "m.yaml:4: axes.nodes contains 1 twice; remove one of these values",
    ),
    "a key twice": (
        GOOD + "study: again\n",
        "m.yaml:9: key 'study' is given twice (first in line 1); keep only one of these lines",
    ),
    "far too many cells": (
        changed("nodes: [1, 2]", f"nodes: {list(range(1, 1001))}").replace(
            "tasks_per_node: [2]",
            f"tasks_per_node: {list(range(1, 1001))}\n  bucket_cap_mb: {list(range(1, 1001))}",
        ),
        "m.yaml:3: the axes span 1000000000 cells (nodes 1000 x tasks_per_node 1000 x bucket_cap_mb 1000 x batches 1), "
        "3000000000 runs; a study can have 100000 cells and 1000000 runs at most; split it",
    ),
    "no scaling": (
        GOOD[: GOOD.index("scaling")],
        "m.yaml:1: key 'scaling' is missing in the matrix; "
        "add `scaling: [{mode: strong, global_batch: [352]}]`, or mode weak with per_gpu_batch",
    ),
    "a bare number as time": (
        changed("executor: slurm", "executor: slurm, time_limit: 20"),
        "m.yaml:2: cluster.time_limit: 20 has no unit (Slurm would read minutes); "
        "write a duration such as 20m, 1h30m, 45s, or Slurm's [days-]hours:minutes:seconds",
    ),
    "a partition with a command in it": (
        changed("executor: slurm", 'executor: slurm, partition: "p; rm -rf x"'),
        "m.yaml:2: cluster.partition: 'p; rm -rf x' cannot be used in an #SBATCH line; "
        "allowed: letters, digits and _ . , : @ + = / [ ] | & * ! ( ) % -",
    ),
    "a set-up line that would swallow the rest": (
        changed("executor: slurm", 'executor: slurm, setup: ["source \'env/bin/activate"]'),
        'm.yaml:2: cluster.setup[0]: "source \'env/bin/activate" has a quote that is never closed; '
        "each entry must be a complete shell line",
    ),
    "a boolean as a variable": (
        changed("executor: slurm", "executor: slurm, env: {A: true}"),
        "m.yaml:2: cluster.env.A: true is a YAML boolean; quote it to set the variable to that word",
    ),
    "a list that does not fit the nodes": (
        changed("tasks_per_node: [2]", "tasks_per_node: [[4, 2]]\n  launcher: [torchrun]"),
        "m.yaml:5: tasks_per_node [4, 2] is for 2 nodes, but is combined with nodes 1; "
        "exclude {nodes: 1, tasks_per_node: [4, 2]}, or change axes.nodes",
    ),
    "mixed nodes under srun": (
        changed("tasks_per_node: [2]", "tasks_per_node: [[4, 2]]").replace("[1, 2]", "[2]"),
        "m.yaml:5: tasks_per_node [4, 2] differs per node, which launcher srun does not support; "
        "use launcher [torchrun] for mixed nodes",
    ),
    "two nodes on one machine": (
        changed("slurm", "local"),
        "m.yaml:4: nodes 2: executor local runs on one node, this machine; use nodes [1] and vary tasks_per_node, or use executor slurm",
    ),
    "an include that is there": (
        GOOD + "include: [{nodes: 2, mode: weak, per_gpu_batch: 8}]\n",
        "m.yaml:9: include[0] adds a cell that the matrix already contains; remove it",
    ),
    "everything excluded": (
        GOOD + "exclude: [{mode: weak}]\n",
        "m.yaml:9: the matrix has no cell left; remove entries of exclude, or add values to the axes",
    ),
    "a list for the whole file": (
        "- a\n- b\n",
        "m.yaml:1: a matrix must be a mapping (key: value); start from `bench init`, or from an example",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_gets_its_message(tmp_path, case):
    text, *messages = CASES[case]
    assert problems(tmp_path, text) == messages


@pytest.mark.parametrize(
    "name", ["a/b", "..", "a..b", "a b", "a'b", 'a"b', "a\nb", "", "-a", ".a", "ä", "a" * 65, "$(x)"]
)
def test_a_study_name_that_is_not_a_safe_folder_is_rejected(tmp_path, name):
    (message,) = problems(tmp_path, changed("study: good", f"study: {json.dumps(name)}"))
    allowed = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"
    assert message == f"m.yaml:1: study: {name!r} is not a safe folder name; allowed: {allowed}"


def test_a_file_name_that_is_not_a_safe_folder_needs_a_study_name(tmp_path):
    (message,) = problems(tmp_path, GOOD.replace("study: good\n", ""), name="my matrix.yaml")
    assert message.startswith(
        "my matrix.yaml:1: the file name 'my matrix' is not a valid study name; allowed: "
    )
    assert message.endswith("; add `study: NAME`")


def test_all_problems_of_a_file_are_reported_in_the_order_of_lines(tmp_path):
    text = (
        changed("[1, 2]", "[0, 2]").replace("device: cpu", "device: gpu").replace("study: good", "study: a b")
    )
    text += "study: again\nrepeats: many\n"
    found = problems(tmp_path, text)
    assert [line.split(": ")[0] for line in found] == "m.yaml:1 m.yaml:4 m.yaml:6 m.yaml:9 m.yaml:10".split()


def test_many_problems_of_one_kind_are_counted_not_listed(tmp_path):
    text = changed("[1, 2]", str(list(range(1, 60)))).replace(
        "{mode: weak, per_gpu_batch: [8]}", "{mode: strong, global_batch: [1]}"
    )
    found = problems(tmp_path, text)
    assert len(found) == 21
    assert found[-1] == "m.yaml: and 39 more problems"


@pytest.mark.parametrize("path", sorted(shipped("matrices").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_examples_have_no_problems(path):
    matrix, document = load_matrix(path)
    assert expand(matrix, document)
    assert document.warnings == []
    assert matrix.study == path.stem


def test_the_json_schema_has_every_key_and_rejects_others():
    schema = json_schema()
    assert set(schema["properties"]) == set(KEYS_OF_MATRIX.split(", "))
    assert schema["required"] == ["scaling"]
    assert schema["additionalProperties"] is False
    axes = schema["$defs"]["Axes"]
    assert set(axes["properties"]) >= set(WorkloadOptions.model_fields) - {"device"} | {"nodes", "backend"}
    assert axes["additionalProperties"] is False
    assert list(axes["patternProperties"]) == [r"^env\.[A-Za-z_][A-Za-z0-9_]*$"]
    for option in schema["$defs"]["Workload"]["properties"].values():
        assert option["description"], "an editor shows it"
