"""Diagnoses of the logs in ``fixtures/``.

The first lines of a log name the expected first cause of the failure (or none), its evidence, and the
expected slow causes. For a new cause or message, add an entry to the catalogue and a log to ``fixtures/``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.doctor import diagnose
from bench.doctor.catalogue import SLOW, load
from bench.doctor.diagnosis import IDLE_CORES

FIXTURES = sorted(Path(__file__).parent.glob("fixtures/*.txt"))


def read(path: Path) -> tuple[dict[str, str], bytes]:
    """Return what is expected (keys expect, evidence, slow), and the log."""
    content = path.read_bytes()
    header = {"evidence": "", "slow": ""}
    while content.startswith((b"# expect: ", b"# evidence: ", b"# slow: ")):
        line, _, content = content.partition(b"\n")
        key, _, value = line.decode().removeprefix("# ").partition(": ")
        header[key] = value
    return header, content


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_first_cause_and_its_evidence_are_found(path: Path) -> None:
    header, log = read(path)
    found = diagnose({path.name: log})
    first = found.first_failure
    assert (first.cause if first else "none") == header["expect"]
    if first:
        assert first.evidence.startswith(header["evidence"])
        assert header["evidence"] in log.decode().split("\n")[(first.line or 0) - 1]
    assert [cause.cause for cause in found.causes if cause.severity == SLOW] == header["slow"].split()


def test_every_cause_has_at_least_two_logs() -> None:
    headers = [read(path)[0] for path in FIXTURES]
    logs = Counter(name for header in headers for name in (header["expect"], *header["slow"].split()))
    # A log cannot show idle cores: tests/doctor/test_log_warnings.py.
    signatures = (one for one in load().signatures if IDLE_CORES not in one.needs)
    shown = {signature.name for signature in signatures if signature.is_cause}
    assert {name: logs[name] for name in shown if logs[name] < 2} == {}
