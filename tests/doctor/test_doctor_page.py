"""The list of causes in docs/doctor.md equals the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

from bench.doctor import causes
from bench.doctor.report import updated_page

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page) == page, "run: python -m bench.doctor.report docs/doctor.md"


def test_the_page_has_one_section_for_each_cause() -> None:
    headings = re.findall(r"^### (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [info.name for info in causes()]
