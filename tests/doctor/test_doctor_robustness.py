"""Every log has a diagnosis, whatever its content, and large logs take only seconds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.doctor import diagnose
from bench.doctor.catalogue import SLOW, load
from bench.doctor.diagnosis import HEAD_BYTES, find_warnings
from bench.doctor.scan import OVERLAP_BYTES, PIECE_BYTES
from bench.study.layout import RunFolder

LOGS = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("fixtures/*.txt"))]

mutation = st.tuples(
    st.sampled_from(["cut", "insert", "repeat", "swap"]), st.integers(0, 2**32), st.binary(max_size=40)
)


def mutated(log: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, number, extra in changes:
        at = number % (len(log) + 1)
        until = min(len(log), at + number // 7 % 200)
        if kind == "cut":
            log = log[:at] + log[until:]
        elif kind == "insert":
            log = log[:at] + extra + log[at:]
        elif kind == "repeat":
            log = log[:at] + log[at:until] * 3 + log[at:]
        else:
            log = log[until:] + log[at:until] + log[:at]
    return log


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(LOGS), st.lists(mutation, min_size=1, max_size=6))
def test_mutated_logs_have_a_diagnosis(log: bytes, changes: list[tuple[str, int, bytes]]) -> None:
    check(diagnose({"log": mutated(log, changes)}))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4000))
def test_random_bytes_have_a_diagnosis(log: bytes) -> None:
    check(diagnose({"log": log}))


def test_a_number_that_is_too_long_does_not_count() -> None:
    line = f"Timed out after 9 seconds waiting for clients. 1/{'9' * 6000} clients joined.\n"
    assert diagnose({"log": line}).causes == []


def check(found: object) -> None:
    content = found.as_json()  # type: ignore[attr-defined]
    assert list(content) == ["causes", "last_lines"]
    for cause in content["causes"]:
        assert cause["line"] >= 1
        assert cause["explanation"]
        # The placeholders of the catalogue are filled; a mutated log may contain braces itself.
        assert not re.search(r"\{[a-z_]+\}", cause["explanation"])
        assert len(cause["evidence"]) <= 2002


def test_a_line_of_ten_megabytes_is_searched_in_pieces_that_overlap() -> None:
    needle = b"RuntimeError: Tensors must be CUDA and dense"
    for at in (0, PIECE_BYTES - 20, PIECE_BYTES - OVERLAP_BYTES - 5, 5_000_000, 10_000_000 - len(needle)):
        line = b"x" * at + b" " + needle + b" " + b"y" * (10_000_000 - at - len(needle))
        found = diagnose({"log": b"first\n" + line + b"\nlast\n"})
        assert [(cause.cause, cause.line) for cause in found.causes] == [("backend-device-mismatch", 2)]


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
