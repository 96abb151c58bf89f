"""Diagnoses of the logs in ``fixtures/``.

The first lines of a log name the expected first cause and its evidence. For a new cause or message,
add an entry to the catalogue and a log to ``fixtures/``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.doctor import diagnose
from bench.doctor.catalogue import load

FIXTURES = sorted(Path(__file__).parent.glob("fixtures/*.txt"))


def read(path: Path) -> tuple[str, str, bytes]:
    """Return the expected cause (or verdict), the expected evidence, and the log."""
    content = path.read_bytes()
    header: dict[str, str] = {}
    while content.startswith((b"# expect: ", b"# evidence: ")):
        line, _, content = content.partition(b"\n")
        key, _, value = line.decode().removeprefix("# ").partition(": ")
        header[key] = value
    return header["expect"], header.get("evidence", ""), content


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_first_cause_and_its_evidence_are_found(path: Path) -> None:
    expected, evidence, log = read(path)
    found = diagnose({path.name: log})
    if found.causes:
        assert found.causes[0].cause == expected
        assert found.causes[0].evidence.startswith(evidence)
        assert evidence in log.decode().split("\n")[found.causes[0].line - 1]
    else:
        assert found.verdict == expected
        assert any(line.text.startswith(evidence) for line in found.telling_lines) == bool(evidence)


def test_every_cause_has_at_least_two_logs() -> None:
    logs = Counter(read(path)[0] for path in FIXTURES)
    shown = {signature.name for signature in load().signatures if signature.is_cause}
    assert {name: logs[name] for name in shown if logs[name] < 2} == {}
