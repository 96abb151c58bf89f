"""Messages for mistakes in a matrix: file, line, mistake, allowed values, remedy; and the plan's warnings.

A line ``# expect: LINE: MESSAGE`` at the end of a matrix in ``mistakes/`` or ``warnings/`` stands for one message;
three dots at its end, for any further text. Without the user's own command, a message has at most 200 characters.
"""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.matrix.document import read_document
from bench.matrix.expansion import expand
from bench.matrix.load import load_matrix
from bench.matrix.schema import json_schema
from bench.plan import make_plan
from bench.shipped import shipped
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.train.options import OPTIONS

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


KEYS_OF_MATRIX = (
    "study, cluster, axes, scaling, workload, repeats, max_running, seed, expected, exclude, include, targets"
)


def test_a_study_or_file_name_that_is_not_a_safe_folder_is_rejected(tmp_path):
    for name in ("a/b", "..", "a..b", "a b", "a'b", "a\nb", "", "-a", ".a", "ä", "a" * 65, "$(x)"):
        (message,) = problems(tmp_path, changed("study: good", f"study: {json.dumps(name)}"))
        assert message.startswith(f"m.yaml:1: study: {name!r} is not a safe folder name; allowed: letters, ")
    (message,) = problems(tmp_path, GOOD.replace("study: good\n", ""), name="my matrix.yaml")
    start = "my matrix.yaml:1: the file name 'my matrix' is not a valid study name; allowed: "
    assert message.startswith(start)
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
    assert len(found) == 51
    assert found[-1] == "and 9 more problems"


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
    assert set(axes["properties"]) >= OPTIONS.keys() - {"device"} | {"nodes", "backend"}
    assert axes["additionalProperties"] is False
    patterns = [r"^env\.[A-Za-z_][A-Za-z0-9_]*$", r"^args\.[A-Za-z_][A-Za-z0-9_.-]*$"]
    assert list(axes["patternProperties"]) == patterns
    for option in schema["$defs"]["Workload"]["properties"].values():
        assert option["description"], "an editor shows it"


MISTAKES, WARNINGS = (
    sorted(Path(__file__).with_name(name).glob("*.yaml")) for name in ("mistakes", "warnings")
)


def read(path, folder):
    """Write a matrix without its comments; return the matrix, and the messages in the comments."""
    text, *expected = path.read_text(encoding="utf-8").rstrip("\n").split("\n# expect: ")
    folder.mkdir()
    matrix = folder / "m.yaml"
    matrix.write_text(f"{text}\n", encoding="utf-8")
    return matrix, expected


def test_each_plan_has_exactly_its_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.matrix.load.usable_cores", lambda: 4)
    assert WARNINGS
    for path in WARNINGS:
        matrix, expected = read(path, tmp_path / path.stem)
        monkeypatch.chdir(matrix.parent)
        for script in re.findall(r"\S+\.py\b", matrix.read_text()):
            if "missing" not in script:
                Path(script).parent.mkdir(parents=True, exist_ok=True)
                Path(script).touch()
        found = [str(one).removeprefix(f"{matrix}:") for one in make_plan(matrix).warnings]
        assert found == expected, path.stem


def test_each_mistake_gets_its_message(tmp_path):
    assert MISTAKES
    for path in MISTAKES:
        matrix, expected = read(path, tmp_path / path.stem)
        assert expected, path.stem
        with pytest.raises(BenchError) as caught:
            make_plan(matrix)
        assert caught.value.exit_code == 2
        found = [message.removeprefix(f"{matrix}:") for message in str(caught.value).splitlines()]
        assert [text for text in found if len(re.sub("`command: .*`", "", text)) > 200] == []
        assert len(found) == len(expected), path.stem
        for message, text in zip(found, expected, strict=True):
            start = text.removesuffix("...")
            assert message.startswith(start) if start != text else message == text, path.stem


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "m.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BenchError) as caught:
        read_document(path)
    return str(caught.value)


def test_every_key_and_item_has_its_line_and_words_with_a_special_meaning_in_yaml_1_1_stay_text(tmp_path):
    document = read_document(write(tmp_path, "a: 1\nb:\n  c:\n    - 5\n    - 6\n"))
    assert document.content == {"a": 1, "b": {"c": [5, 6]}}
    assert document.line(("b", "c", 1)) == 5
    assert document.line(("b", "c", 9)) == 3, "a missing value has the line of the value around it"
    text = "on: yes\ntime: 20:00\noctal: 010\ndate: 2026-11-20\nhex: 0x10\nquoted: '5'\nnothing:\nflag: true\nf: 1e3\n"
    texts = {"on": "yes", "time": "20:00", "date": "2026-11-20", "hex": "0x10", "quoted": "5"}
    others = {"octal": "010", "nothing": None, "flag": True, "f": 1000.0}
    assert read_document(write(tmp_path, text)).content == texts | others
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\n"
    assert read_document(write(tmp_path, text)).content["own"] == {"x": 1, "y": 3}, "own keys win"


def test_a_tag_that_would_build_objects_is_only_reported(tmp_path):
    document = read_document(write(tmp_path, "a: !!python/object/apply:os.system ['true']\nb: !x 1\n"))
    assert [str(problem) for problem in document.problems] == [
        f"{document.path}:2: the YAML tag !x is not supported in a matrix; remove it"
    ]
    assert document.content["a"] == ["true"], "built as plain data, never called"


def test_what_is_no_matrix_is_rejected(tmp_path):
    remedy = "give the path of a YAML file, or the name of a shipped example"
    assert refusal(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: matrix file does not exist; {remedy}"
    assert refusal(tmp_path) == f"{tmp_path}: matrix file is a directory; {remedy}"
    assert "is nested more than 50 levels deep" in refusal(write(tmp_path, "[" * 200 + "]" * 200))
    assert refusal(write(tmp_path, "[" * 1_000))
    path = write(tmp_path, "")
    assert refusal(path) == f"{path}: is empty; start from `bench init`, or from an example in matrices/"
    write(tmp_path, b"study: \xff\xfe\n")
    assert refusal(path) == f"{path}:1: is not text in UTF-8 (binary data?); is it the right file?"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300) | st.text(alphabet="abc:-[]{}&*!|>'\"#%@,\n \t0", max_size=200).map(str.encode)
)
def test_no_bytes_make_the_reader_crash(tmp_path, data):
    path = write(tmp_path, data)
    try:
        document = read_document(path)
    except BenchError as error:
        said = str(error)
    else:
        said = document.path
    assert said.startswith(str(path))
