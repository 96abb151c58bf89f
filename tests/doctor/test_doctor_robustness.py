"""Every log has a diagnosis, whatever its content, and large logs take only seconds."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.doctor import diagnose
from bench.doctor.scan import OVERLAP_BYTES, PIECE_BYTES

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
