"""Warnings in the logs of runs that succeeded: each is found at its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.doctor.catalogue import SLOW, load
from bench.doctor.diagnosis import HEAD_BYTES, find_warnings
from bench.study.layout import RunFolder

EXAMPLES = {one.name: one.example for one in load().signatures if one.severity == SLOW}
STRIDES = EXAMPLES["slow-gradient-strides"]
NOTICE = EXAMPLES["slow-one-thread"].splitlines()[0]
PROGRESS = "epoch 3 step {} loss 2.3412 1234.5 samples/s\n"


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "job.out").write_text(PROGRESS.format(1) + "Training finished\n")
    return RunFolder(tmp_path)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "slow-one-thread"])
def test_every_warning_of_the_catalogue_is_found(folder, name):
    folder.err.write_text(f"loading\n{EXAMPLES[name]}\n")
    (found,) = find_warnings(folder)
    assert (found.cause, found.path) == (name, "job.err")
    assert found.evidence in [line.strip() for line in folder.err.read_text().splitlines()]


def test_logs_without_a_warning_have_none(folder):
    assert find_warnings(folder) == []  # there is no job.err
    folder.err.write_text("the config of the network: socket, DataLoader, strides\n")
    assert find_warnings(folder) == []


def test_only_the_start_of_a_long_log_is_read(folder):
    text = "".join(map(PROGRESS.format, range(HEAD_BYTES // len(PROGRESS) + 1)))
    folder.err.write_text(f"loading\n{STRIDES}\n{text}")
    assert [(warning.line, warning.evidence) for warning in find_warnings(folder)] == [(2, STRIDES)]
    folder.err.write_text(f"{text}{STRIDES}\n")
    assert find_warnings(folder) == []


def conditions(folder: Path, *, threads: int, cores: int) -> None:
    ranks = [{"rank": rank, "threads": threads} for rank in range(2)]
    window: dict[str, Any] = {"epoch": 1, "start": "2026-01-01T00:00:00Z", "end": "2026-01-01T00:00:05Z"}
    content = {"schema": 1, "windows": [{**window, "nodes": [], "ranks": ranks}]}
    (folder / "conditions.json").write_text(json.dumps(content))
    env = {"hosts": [{"host": "n1", "ranks": [0, 1], "cores": cores}]}
    (folder / "env.json").write_text(json.dumps(env))


def test_one_thread_per_rank_counts_only_if_cores_are_idle(folder):
    folder.err.write_text(f"{NOTICE}\n")
    assert find_warnings(folder) == []  # without conditions, nobody knows
    for threads, cores, expected in ((1, 8, ["slow-one-thread"]), (1, 3, []), (4, 8, [])):
        conditions(folder.path, threads=threads, cores=cores)
        assert [found.cause for found in find_warnings(folder)] == expected
