"""Each matrix in ``mistakes/`` is rejected with the messages and lines in the comments at its end.

A line ``# expect: LINE: MESSAGE`` stands for one message; three dots at its end, for any further text.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.plan import make_plan

MISTAKES = sorted(Path(__file__).with_name("mistakes").glob("*.yaml"))


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_each_mistake_gets_its_message(path, tmp_path):
    text, *expected = path.read_text(encoding="utf-8").rstrip("\n").split("\n# expect: ")
    assert expected
    matrix = tmp_path / "m.yaml"
    matrix.write_text(f"{text}\n", encoding="utf-8")
    with pytest.raises(BenchError) as caught:
        make_plan(matrix)
    assert caught.value.exit_code == 2
    found = str(caught.value).splitlines()
    ends = [len(message) - 3 if message.endswith("...") else None for message in expected]
    assert [f"{matrix}:{message[:end]}" for message, end in zip(expected, ends, strict=True)] == [
        message[: end and end + len(f"{matrix}:")] for message, end in zip(found, ends, strict=True)
    ]
