"""The YAML reader: accepted files, and the messages for rejected ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.errors import BenchError
from bench.matrix.document import read_document


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "m.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BenchError) as caught:
        read_document(path)
    return str(caught.value)


def test_every_key_and_item_has_its_line(tmp_path):
    document = read_document(write(tmp_path, "a: 1\nb:\n  c:\n    - 5\n    - 6\n"))
    assert document.content == {"a": 1, "b": {"c": [5, 6]}}
    assert document.line(("b", "c", 1)) == 5
    assert document.line(("b", "c", 9)) == 3, "a missing value has the line of the value around it"


def test_words_with_a_special_meaning_in_yaml_1_1_stay_text(tmp_path):
    text = "on: yes\ntime: 20:00\noctal: 010\ndate: 2026-11-20\nhex: 0x10\nquoted: '5'\nnothing:\nflag: true\nf: 1e3\n"
    assert read_document(write(tmp_path, text)).content == {
        "on": "yes",
        "time": "20:00",
        "octal": 10,
        "date": "2026-11-20",
        "hex": "0x10",
        "quoted": "5",
        "nothing": None,
        "flag": True,
        "f": 1000.0,
    }


def test_anchors_and_merges_work_and_own_keys_win(tmp_path):
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\n"
    assert read_document(write(tmp_path, text)).content["own"] == {"x": 1, "y": 3}


def test_an_alias_bomb_is_rejected_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    message = refusal(write(tmp_path, "\n".join(lines)))
    assert message.endswith(
        "the file expands to more than 200000 values, probably because of aliases; write the values instead of aliases"
    )


def test_a_tag_that_would_build_objects_is_only_reported(tmp_path):
    document = read_document(write(tmp_path, "a: !!python/object/apply:os.system ['true']\nb: !x 1\n"))
    assert [str(problem) for problem in document.problems] == [
        f"{document.path}:2: the YAML tag !x is not supported in a matrix; remove it"
    ]
    assert document.content["a"] == ["true"], "built as plain data, never called"


def test_a_missing_file_and_a_directory_give_different_errors(tmp_path):
    remedy = "give the path of a YAML file, or the name of a shipped example"
    assert refusal(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: matrix file does not exist; {remedy}"
    assert refusal(tmp_path) == f"{tmp_path}: matrix file is a directory; {remedy}"


def test_deep_nesting_is_rejected(tmp_path):
    assert "is nested more than 50 levels deep" in refusal(write(tmp_path, "[" * 200 + "]" * 200))
    assert refusal(write(tmp_path, "[" * 100_000))


def test_an_empty_and_a_binary_file_are_rejected(tmp_path):
    path = write(tmp_path, "")
    assert refusal(path) == f"{path}: is empty; start from `bench init`, or from an example in matrices/"
    write(tmp_path, b"study: \xff\xfe\n")
    assert refusal(path) == f"{path}:1: is not text in UTF-8 (binary data?); is it the right file?"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
