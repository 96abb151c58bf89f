"""Files that are written again and again while others read them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.study.files import read_json, rewrite_object, write_json

texts = st.text(max_size=5000)


@given(old=texts, new=texts)
def test_rewritten_content_is_read_back_whatever_its_length(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str
) -> None:
    path = tmp_path_factory.mktemp("layout") / "run.json"
    write_json(path, {"text": old})
    rewrite_object(path, {"text": new})
    assert read_json(path) == {"text": new}
    assert list(path.parent.iterdir()) == [path]


def test_a_small_file_is_overwritten_and_a_large_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"state": "queued", "reason": "x" * 100})
    first = path.stat().st_ino
    rewrite_object(path, {"state": "completed"})
    assert path.stat().st_ino == first
    with path.open():  # so that its number is not given to the next file
        rewrite_object(path, {"state": "completed", "reason": "x" * 5000})
        assert path.stat().st_ino != first


def test_a_missing_file_is_written(tmp_path: Path) -> None:
    rewrite_object(tmp_path / "run.json", {"state": "completed"})
    assert read_json(tmp_path / "run.json") == {"state": "completed"}


@pytest.mark.parametrize("broken", [b"", b'{"state": "com', b"\xff\xfe", b'{"state": 1}{'])
def test_a_broken_file_is_read_as_none_and_replaced(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(broken)
    assert read_json(path) is None
    rewrite_object(path, {"state": "completed"})
    assert read_json(path) == {"state": "completed"}


def test_two_concurrent_rewrites_leave_one_complete_content(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    contents = [{"reason": "x" * length} for length in (10, 700)]
    for _ in range(300):
        write_json(path, {"reason": "queued"})
        together = threading.Barrier(2)

        def rewrite(content: dict[str, str], barrier: threading.Barrier = together) -> None:
            barrier.wait()
            rewrite_object(path, content)

        writers = [threading.Thread(target=rewrite, args=[content]) for content in contents]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert json.loads(path.read_text()) in contents
