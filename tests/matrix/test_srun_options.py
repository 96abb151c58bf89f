"""Options of srun in a matrix."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from bench.errors import BenchError
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


def problems(folder: Path, cluster: dict, **axes) -> list[str]:
    """Return the messages without file and line."""
    with pytest.raises(BenchError) as caught:
        plan_of(folder, cluster, **axes)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{folder}/m.yaml:") for line in lines)
    return [line.split(": ", 1)[1] for line in lines]


def srun_words(text: str) -> list[str]:
    """Return the words after the srun that starts the ranks."""
    lines = text.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith("srun --nodes")]
    return shlex.split(line)[1:]


@pytest.mark.parametrize("value", ["0", "two", "1@", "1@soon", "1;id"])
def test_another_value_of_switches_is_one_error_that_lists_the_allowed_ones(tmp_path, value):
    (problem,) = problems(tmp_path, {"switches": value})
    assert problem.startswith(f"cluster.switches: {value!r} is not a value of sbatch --switches; allowed: ")


WORDS = {
    "mpi": "'mpi' is not an option of srun; write options and values as --name=value",
    "--comment=$(id)": "'--comment=$(id)' cannot be used as a word of srun; "
    "allowed: an option with letters, digits and _ . , : @ + = / [ ] * % -",
    "--ntasks=4": "'--ntasks=4' would override a setting of the plan; "
    "use axes.tasks_per_node or axes.gpus_per_node",
    "-ln4": "'-ln4' would override a setting of the plan; use axes.tasks_per_node or axes.gpus_per_node",
    "--job-name=x": "'--job-name=x' would override a setting of the plan; bench submit sets it for each run",
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_srun_must_not_get_is_one_error(tmp_path, word):
    assert problems(tmp_path, {"srun_options": [word]}) == [f"cluster.srun_options[0]: {WORDS[word]}"]


def test_other_words_are_accepted(tmp_path):
    words = (
        "--mem-bind=local --mpi=none --gres-flags=allow-task-sharing -v --network=x,y -mblock --distribution=*:block "
        "--cpu-bind=mask_cpu:fe000000000000,FE*4 --gpu-bind=closest --hint=nomultithread"
    ).split()
    ((_, text),) = scripts(plan_of(tmp_path, {"srun_options": words}))
    given = srun_words(text)
    first = given.index(words[0])
    assert given[first : first + len(words)] == words


def test_other_executors_ignore_the_options_with_a_warning(tmp_path):
    keys = {"switches": 1, "srun_options": ["-v"]}
    plan = plan_of(tmp_path, {"executor": "local", **keys}, device="cpu", nodes=[1])
    ignored = {
        warning.split(": ", 1)[1] for warning in plan.warnings if "ignored by executor local" in warning
    }
    assert {f"cluster.{key} is ignored by executor local" for key in keys} <= ignored


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
