"""A mistake is found in other spellings, and its correction is accepted.

Each script in ``fixtures/spellings`` contains one mistake. Its lines ``# near miss: OLD => NEW`` correct it
(``\\n`` is a line end).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.lint import lint_script

SPELLINGS = sorted((Path(__file__).parent / "fixtures" / "spellings").glob("*.sbatch"))
CORRECTION = re.compile(r"# near miss: (.*?) =>(?: (.*))?\n")


def certain(text: str) -> set[str]:
    found = lint_script(text, path="x")
    return {finding.rule for finding in found}


@pytest.mark.parametrize("path", SPELLINGS, ids=lambda path: path.stem)
def test_a_mistake_is_found_and_its_correction_is_accepted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    bad = CORRECTION.sub("", text)
    assert path.stem.partition("--")[0] in certain(bad)
    near = bad
    for old, new in CORRECTION.findall(text):
        old, new = old.replace("\\n", "\n"), new.replace("\\n", "\n")
        assert old in near
        near = near.replace(old, new)
    assert certain(near) == set()


def test_there_are_spellings() -> None:
    assert len(SPELLINGS) >= 10
