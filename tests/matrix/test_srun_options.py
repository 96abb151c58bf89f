"""Options of srun in a matrix: accepted values and contradictions."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from bench.errors import BenchError
from bench.matrix.schema import json_schema
from bench.plan import Plan, make_plan, pack_script, scripts


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


ACCEPTED = {
    "cpu_bind": (
        "none verbose verbose,cores quiet,rank_ldom mask_cpu:0x1,0x2 mask_cpu:fe000000000000,FE*4 "
        "map_cpu:0,8,0x10 map_ldom:3,1,7,5"
    ).split(),
    "gpu_bind": "none closest verbose,closest map_gpu:0,1 map:3,2 mask_gpu:0x3*2 single:1".split(),
    "distribution": ["block", "cyclic", "*:block", "block:cyclic:fcyclic", "plane=4", "block:block,NoPack"],
    "hint": ["compute_bound", "memory_bound", "multithread", "nomultithread"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in ACCEPTED for value in ACCEPTED[key]])
def test_a_value_of_the_manual_is_accepted_and_reaches_srun_as_one_word(tmp_path, key, value):
    ((_, text),) = scripts(plan_of(tmp_path, {key: value}))
    assert f"--{key.replace('_', '-')}={value}" in srun_words(text)


REJECTED = {
    "cpu_bind": ["cores; id", "cores\n", "$(id)", ""],
    "gpu_bind": ["closest|id", "map_gpu:`id`", "none "],
    "distribution": ["arbitrary", "block:", "plane", "block:block:block:block", "block,pack`id`"],
    "switches": ["0", "two", "1@", "1@soon", "1;id"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in REJECTED for value in REJECTED[key]])
def test_another_value_is_one_error_that_lists_the_allowed_ones(tmp_path, key, value):
    (problem,) = problems(tmp_path, {key: value})
    command = "sbatch" if key == "switches" else "srun"
    option = key.replace("_", "-")
    assert problem.startswith(f"cluster.{key}: {value!r} is not a value of {command} --{option}; allowed: ")


@pytest.mark.parametrize("key", ["cpu_bind", "gpu_bind"])
def test_the_json_schema_lets_editors_check_bindings(key):
    text = json_schema()["$defs"]["Cluster"]["properties"][key]["anyOf"][0]
    assert all(re.search(text["pattern"], value) for value in ACCEPTED[key])
    assert not any(re.search(text["pattern"], value) for value in REJECTED[key] if "\n" not in value)


def test_an_unknown_hint_is_an_error(tmp_path):
    assert problems(tmp_path, {"hint": "multithreaded"}) == [
        "cluster.hint cannot be 'multithreaded'; did you mean 'multithread'? "
        "allowed: compute_bound, memory_bound, multithread, nomultithread"
    ]


WORDS = {
    "mpi": "'mpi' is not an option of srun; write options and values as --name=value",
    "--comment=$(id)": "'--comment=$(id)' cannot be used as a word of srun; "
    "allowed: an option with letters, digits and _ . , : @ + = / [ ] * % -",
    "--ntasks=4": "'--ntasks=4' would override a setting of the plan; "
    "use axes.tasks_per_node or axes.gpus_per_node",
    "--nt=4": "'--nt=4' would override a setting of the plan; use axes.tasks_per_node or axes.gpus_per_node",
    "-ln4": "'-ln4' would override a setting of the plan; use axes.tasks_per_node or axes.gpus_per_node",
    "-c7": "'-c7' would override a setting of the plan; use cluster.cpus_per_task",
    "--gpus-per-task=1": "'--gpus-per-task=1' would override a setting of the plan; "
    "use axes.gpus_per_node and cluster.gpu_type",
    "--output=x": "'--output=x' would override a setting of the plan; bench submit sets it for each run",
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_srun_must_not_get_is_one_error(tmp_path, word):
    assert problems(tmp_path, {"srun_options": [word]}) == [f"cluster.srun_options[0]: {WORDS[word]}"]


def test_other_words_are_accepted(tmp_path):
    words = "--mem-bind=local --mpi=none --gres-flags=allow-task-sharing -v --network=x,y -mblock".split()
    ((_, text),) = scripts(plan_of(tmp_path, {"srun_options": words}))
    given = srun_words(text)
    first = given.index(words[0])
    assert given[first : first + len(words)] == words


def test_a_word_that_srun_refuses_is_an_error_of_the_plan(tmp_path):
    with pytest.raises(BenchError) as caught:
        list(scripts(plan_of(tmp_path, {"srun_options": ["--me=local"]})))
    assert "error: srun refuses `--me=local`: it is ambiguous (--mem, --mem-bind" in str(caught.value)
    assert str(caught.value).endswith("correct the cluster section of the matrix")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"cpu_bind": "cores", "srun_options": ["--cpu-bind=none"]},
            "--cpu-bind=none in cluster.srun_options contradicts cluster.cpu_bind: cores; keep only one of these settings",
        ),
        (
            {"distribution": "block", "srun_options": ["-mcyclic"]},
            "-mcyclic in cluster.srun_options contradicts cluster.distribution: block; keep only one of these settings",
        ),
        (
            {"srun_options": ["--cpu-bind=none", "--cpu_bind=cores"]},
            "--cpu_bind=cores in cluster.srun_options contradicts --cpu-bind=none; keep only one of these options",
        ),
        (
            {"hint": "nomultithread", "cpu_bind": "cores"},
            "hint and cpu_bind exclude each other: srun derives the binding of tasks from the hint; "
            "remove hint or cpu_bind",
        ),
        (
            {"srun_options": ["--hint=nomultithread", "--threads-per-core=1"]},
            "hint and --threads-per-core=1 exclude each other: srun derives the binding of tasks from the hint; "
            "remove hint or --threads-per-core=1",
        ),
    ],
)
def test_a_contradiction_is_one_error(tmp_path, cluster, message):
    assert problems(tmp_path, cluster) == [message]


def test_other_executors_ignore_the_options_with_a_warning(tmp_path):
    keys = {"cpu_bind": "mask_cpu:0x1,0x2", "switches": 1, "srun_options": ["-v"]}
    plan = plan_of(tmp_path, {"executor": "local", **keys}, device="cpu", nodes=[1])
    ignored = {
        warning.split(": ", 1)[1] for warning in plan.warnings if "ignored by executor local" in warning
    }
    assert {f"cluster.{key} is ignored by executor local" for key in keys} <= ignored


def test_gpu_bind_has_no_effect_on_a_cpu_device(tmp_path):
    plan = plan_of(tmp_path, {"gpu_bind": "closest"}, device="cpu")
    assert any(warning.endswith("cluster.gpu_bind is ignored on device cpu") for warning in plan.warnings)
    ((_, text),) = scripts(plan)
    assert "gpu-bind" not in text


def test_switches_and_hint_are_requested_from_sbatch_also_for_packs(tmp_path):
    plan = plan_of(tmp_path, {"switches": 1, "hint": "nomultithread"})
    ((_, text),) = scripts(plan)
    for script in (text, pack_script(plan)):
        assert "\n#SBATCH --switches=1\n" in script
        assert "\n#SBATCH --hint=nomultithread\n" in script
    assert "--hint=nomultithread" in srun_words(text)


def test_directives_refer_to_the_keys(tmp_path):
    for directive, key in [
        ("--switches=1", "switches"),
        ("-m block", "distribution"),
        ("--hint=nomultithread", "hint"),
        ("--gpu-bind=none", "gpu_bind"),
    ]:
        assert problems(tmp_path, {"directives": [directive]}) == [
            f"cluster.directives[0]: {directive!r} would override a setting of the plan; use cluster.{key}"
        ]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_explicit_bindings_get_a_step_with_all_cpus_of_its_nodes(tmp_path, launcher, nodes):
    """With --cpus-per-task, a step has only these CPUs, and Slurm rejects a mask outside of them."""
    for binding, explicit in (("mask_cpu:0x3", True), ("verbose,rank", True), ("quiet,cores", False)):
        ((_, text),) = scripts(plan_of(tmp_path, {"cpu_bind": binding}, launcher=[launcher], nodes=[nodes]))
        words = srun_words(text)
        assert f"--cpu-bind={binding}" in words
        assert any(word.startswith("--cpus-per-task") for word in words) is not explicit
        assert (
            "\nunset SLURM_EXACT SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SRUN_CPUS_PER_TASK\n" in text
        ) is explicit


def test_mixed_nodes_get_the_options(tmp_path):
    cluster = {"cpu_bind": "mask_cpu:0x3", "distribution": "block"}
    ((_, text),) = scripts(plan_of(tmp_path, cluster, launcher=["torchrun"], gpus_per_node=[[2, 1]]))
    assert {"--cpu-bind=mask_cpu:0x3", "--distribution=block"} <= set(srun_words(text))
