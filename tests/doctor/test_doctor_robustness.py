"""Every log has a diagnosis, whatever its content, and large logs take only seconds."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.doctor import diagnose
from bench.doctor.scan import OVERLAP_BYTES, PIECE_BYTES

LOGS = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("fixtures/*.txt"))]
LARGE_BYTES = 50_000_000
#: Processor time for a large log; wall time would include other work of the machine.
LARGE_LIMIT_S = 30.0  # four on a quiet machine; a search that is not linear takes minutes

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


def test_thousands_of_mutated_logs_have_a_diagnosis_in_seconds() -> None:
    chance = random.Random(5)
    kinds = ("cut", "insert", "repeat", "swap")
    for _ in range(5_000):
        lines = chance.choice(LOGS).split(b"\n")
        start = chance.randrange(len(lines))
        log = b"\n".join(lines[start : start + 12])
        changes = [(chance.choice(kinds), chance.getrandbits(32), chance.randbytes(9)) for _ in range(3)]
        check(diagnose({"log": mutated(log, changes)}))


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
        began = time.process_time()
        found = diagnose({"log": b"first\n" + line + b"\nlast\n"})
        assert [(cause.cause, cause.line) for cause in found.causes] == [("backend-device-mismatch", 2)]
        assert time.process_time() - began < 20.0


def training(chance: random.Random, words: list[bytes]) -> bytes:
    return b"[rank%d]: 2025-03-09 02:11:%02d step %d/100000 loss=%.4f 1234.5 samples/s\n" % (
        chance.randrange(8),
        chance.randrange(60),
        chance.randrange(100_000),
        chance.random(),
    )


def hostile(chance: random.Random, words: list[bytes]) -> bytes:
    """Return a line of a unique shape with words of many signatures."""
    return b"error: connection failed " + b" ".join(chance.choices(words, k=10)) + b" timed out\n"


def failures(chance: random.Random, words: list[bytes]) -> bytes:
    return chance.choice(LOGS)


@pytest.mark.parametrize("line", [training, hostile, failures], ids=lambda line: line.__name__)
def test_a_log_of_fifty_megabytes_takes_seconds(
    line: Callable[[random.Random, list[bytes]], bytes], tmp_path: Path
) -> None:
    chance = random.Random(3)
    words = [bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(5000)]
    block = b"".join(line(chance, words) for _ in range(60_000 if line is hostile else 300))
    path = tmp_path / "large.log"
    with path.open("wb") as file:
        while file.tell() < LARGE_BYTES:
            file.write(block)
        file.write(b"RuntimeError: Tensors must be CUDA and dense\n")
    began = time.process_time()
    found = diagnose({"log": path})
    spent_s = time.process_time() - began
    assert "backend-device-mismatch" in [cause.cause for cause in found.causes]
    assert spent_s < LARGE_LIMIT_S
