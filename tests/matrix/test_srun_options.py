"""Options of srun in a matrix."""

import shlex
from pathlib import Path

import pytest
import yaml

from bench.plan import Plan, make_plan, scripts


def plan_of(folder: Path, cluster: dict, *, device: str = "cuda", **axes) -> Plan:
    per_node = "gpus_per_node" if device == "cuda" else "tasks_per_node"
    matrix = {
        "study": "m",
        "cluster": {"exclusive": True, "cpus_per_task": 2, **cluster},
        "axes": {"nodes": [2], per_node: [2], **axes},
        "scaling": [{"mode": "weak", "per_gpu_batch": [8]}],
        "workload": {"device": device},
        "repeats": 1,
    }
    path = folder / "m.yaml"
    path.write_text(yaml.safe_dump(matrix, sort_keys=False, width=1000))
    return make_plan(path)


def srun_words(text: str) -> list[str]:
    """Return the words after the srun that starts the ranks."""
    step = text.partition("\nstep=(\n")[2].partition("\n)\n")[0]
    return shlex.split(step, comments=True)[1:]


def test_other_words_are_accepted(tmp_path):
    words = (
        "--mem-bind=local --mpi=none --gres-flags=allow-task-sharing -v --network=x,y -mblock --distribution=*:block "
        "--cpu-bind=mask_cpu:fe000000000000,FE*4 --gpu-bind=closest --hint=nomultithread"
    ).split()
    ((_, text),) = scripts(plan_of(tmp_path, {"srun_options": words}))
    given = srun_words(text)
    first = given.index(words[0])
    assert given[first : first + len(words)] == words


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_explicit_bindings_get_a_step_with_all_cpus_of_its_nodes(tmp_path, launcher, nodes):
    """With --cpus-per-task, a step has only these CPUs, and Slurm rejects a mask outside of them."""
    for binding, explicit in (("mask_cpu:0x3", True), ("verbose,rank", True), ("quiet,cores", False)):
        cluster = {"srun_options": [f"--cpu-bind={binding}"]}
        ((_, text),) = scripts(plan_of(tmp_path, cluster, launcher=[launcher], nodes=[nodes]))
        words = srun_words(text)
        assert f"--cpu-bind={binding}" in words
        assert any(word.startswith("--cpus-per-task") for word in words) is not explicit
        assert (
            "\nunset SLURM_EXACT SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SRUN_CPUS_PER_TASK\n" in text
        ) is explicit
