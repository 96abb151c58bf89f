"""run.json is read and changed by several programs at the same time."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from analysis.data.load import load_study
from bench.study.layout import RunFolder
from bench.study.run_json import update_run, write_run
from tests.analysis import studies


def test_the_loader_waits_for_the_end_of_a_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    run_json = sorted(path.glob("runs/*/attempt-1/run.json"))[0]
    content, half_written, reader_waits = run_json.read_bytes(), threading.Event(), threading.Event()

    def rewrite_slowly() -> None:
        with run_json.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b" " * len(content))
            half_written.set()
            assert reader_waits.wait(60)
            file.seek(0)
            file.write(content)

    def flock(file: Any, operation: int) -> None:
        reader_waits.set()
        lock(file, operation)

    lock = fcntl.flock
    writer = threading.Thread(target=rewrite_slowly)
    writer.start()
    assert half_written.wait(60)
    monkeypatch.setattr("bench.study.files.fcntl.flock", flock)
    try:
        assert set(load_study(path).runs["state"]) == {"completed"}
    finally:
        reader_waits.set()
        writer.join()


def test_a_missing_or_broken_file_is_replaced_only_with_a_fallback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    update_run(folder, {"state": "failed"})
    assert not folder.run_json.exists()
    folder.run_json.write_text("{")
    update_run(folder, {"state": "failed"})
    assert folder.run_json.read_text() == "{"
    update_run(folder, {"state": "failed"}, fallback={"run_id": "r1"})
    assert json.loads(folder.run_json.read_text()) == {"run_id": "r1", "state": "failed"}


def test_an_unchanged_file_is_not_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_run(folder, {"state": "queued"})
    before = folder.run_json.stat().st_mtime_ns
    update_run(folder, {"state": "queued"})
    assert folder.run_json.stat().st_mtime_ns == before
