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


def test_far_too_many_cells_are_counted_and_not_made(tmp_path):
    many = list(range(1, 1001))
    axes = f"nodes: {many}\n  bucket_cap_mb: {many}\n  tasks_per_node: {many}"
    text = changed("nodes: [1, 2]\n  tasks_per_node: [2]", axes)
    assert problems(tmp_path, text) == [
        "m.yaml:3: the axes span 1000000000 cells (nodes 1000 x tasks_per_node 1000 x bucket_cap_mb 1000 x "
        "batches 1), 3000000000 runs; a study can have 100000 cells and 1000000 runs at most; split it"
    ]


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
