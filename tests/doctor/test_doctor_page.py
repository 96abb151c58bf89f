"""docs/doctor.md says of every cause what the catalogue says."""

from __future__ import annotations

import re
from pathlib import Path

from bench.doctor import causes
from bench.doctor.page import rewritten

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_page_is_what_the_catalogue_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page, "run: python -m bench.doctor.page docs/doctor.md"


def test_every_cause_stands_under_its_name_once() -> None:
    headings = re.findall(r"^### (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [info.name for info in causes()]
