"""Files of a study are written whole, and other kinds of files are not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UnwritableError
from bench.study.files import read_json, read_object, read_table, write_json


@given(old=st.text(max_size=5000), new=st.text(max_size=5000))
def test_rewritten_content_is_read_back_whatever_its_length(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str
) -> None:
    path = tmp_path_factory.mktemp("layout") / "env.json"
    for text in (old, new):
        write_json(path, {"text": text})
    assert read_json(path) == {"text": new}
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    write_json(path, {"state": 1})
    with pytest.raises(TypeError):
        write_json(path, {"state": {1}})
    with pytest.raises(UnwritableError):
        write_json(tmp_path / "gone" / "env.json", {})
    assert read_json(path) == {"state": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "is missing"),
        ("fifo", "cannot be read: It is not a regular file"),
        ("device", "cannot be read: It is not a regular file"),
        ("folder", "cannot be read: Is a directory"),
        ("sparse", "cannot be read: it is larger than 1 GiB"),
        (b"", "is not valid JSON"),
        (b'{"state": "com', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_has_a_problem_in_words(
    tmp_path: Path, kind: str | bytes, problem: str
) -> None:
    path = tmp_path / "run.json"
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    assert read_object(path) == (None, problem)
    assert read_json(path) is None
    if not isinstance(kind, bytes):
        assert read_table(path) == ([], [])
