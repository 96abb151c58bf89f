"""No number, verdict, state, exit code or set of causes depends on a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from analysis.report.words import WORDS
from bench import words
from bench.cli import app
from bench.matrix.cell import Cell
from tests.analysis import studies
from tests.analysis.checks.test_validity import disturb
from tests.analysis.closer_studies import write_ranks
from tests.common import read_rows

#: Keys of JSON and columns of CSV files that contain one word of a sentence.
_TEXTS = frozenset({"what", "title"})


def by_key(content: Any, key: str) -> Any:
    """Return a table of words in which each text is its key."""
    if isinstance(content, dict):
        return {name: by_key(own, f"{key}.{name}") for name, own in content.items()}
    return [key] * len(content) if isinstance(content, list) else key


def assert_equal_but_for_texts(first: Any, second: Any, place: str) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys(), place
        for name, value in first.items():
            if name not in _TEXTS:
                assert_equal_but_for_texts(value, second[name], f"{place}.{name}")
    elif isinstance(first, list):
        assert len(first) == len(second), place
        for at, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal_but_for_texts(one, other, f"{place}[{at}]")
    elif isinstance(first, str) and " " in first:
        assert isinstance(second, str), place
        assert second, place
    else:
        assert first == second, place


def results(path: Path, other: Path, output: Path) -> dict[str, Any]:
    """Return the exit codes, JSON outputs and tables of all commands about a study."""
    study = str(path)
    found: dict[str, Any] = {}
    for name, *options in (
        ("report", study, "--output", str(output)),
        ("verify", study),
        ("status", study),
        ("advise", study, "--samples", "100000", "--epochs", "3", "--wait", "0"),
        ("compare", study, str(other)),
    ):
        done = CliRunner().invoke(app, [name, *options, "--json"])
        assert done.exit_code < 2, done.output
        found[name] = {"exit code": done.exit_code, "json": json.loads(done.stdout)}
    for file in sorted(output.rglob("*.csv")):
        found[file.name] = read_rows(file)
    return found


def late_and_failed(path: Path) -> Path:
    """Write a study with failed runs, late ranks, an overlap, and a cell with a common disturbance."""

    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        failed = cell.world_size == 8 and repeat < 3
        return ("failed", "out of memory", "out-of-memory") if failed else ("completed", "", None)

    study = studies.finished(path, studies.strong(), state=state)
    write_ranks(study, late=lambda _, rank: 0.005 * (rank == 1), host=lambda rank: f"n{rank + 1}")
    for repeat in (1, 2, 3):
        disturb(study, f"n2x1-gloo-srun-b32-r{repeat}", "foreign-cpu", value=0.25, limit=0.05)
    disturb(study, "n4x1-gloo-srun-b16-r1", "study-run", value="job 7")
    return study


def shared_and_different(path: Path) -> Path:
    """Write a study with shared cores, different threads and nodes, warnings and another batch."""

    def env(cell: Cell) -> dict[str, Any]:
        own = studies.environment(cell, cores=2) | {"threads_per_rank": 8 // cell.world_size}
        texts = ["the step time was not yet stable after 20 warm-up steps", "unequal-nodes: n1: 8 cores"]
        return own | {"warnings": texts, "torch": "2.12.0" if cell.world_size == 4 else "2.13.0"}

    study = studies.finished(path, studies.strong(sizes=(1, 2, 4), per_node=4), env=env, noise=0.4)
    for file in study.glob("runs/n1x2*/attempt-1/metrics.csv"):
        studies.scale_rate(file, [1.0, 0.9, 0.7])
    return study


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("write", [late_and_failed, shared_and_different])
def test_without_words_all_commands_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    folders = (write(tmp_path / "results" / "s"), write(tmp_path / "results" / "t"), tmp_path / "report")
    expected = results(*folders)
    texts = by_key(words._words(), "")
    texts["terms"] = {table: {name: name for name in own} for table, own in texts["terms"].items()}
    monkeypatch.setattr(words, "_words", lambda: texts)
    for table, own in WORDS.items():
        for name, text in own.items():
            if isinstance(text, str):
                monkeypatch.setitem(own, name, f"{table}.{name}")
    found = results(*folders)
    assert {"scaling.csv", "runs.csv", "causes.csv"} <= found.keys()
    assert_equal_but_for_texts(expected, found, "")
    messages = {one["message"] for one in found["report"]["json"]["validity"]}
    assert messages
    assert not any(" " in message for message in messages)
