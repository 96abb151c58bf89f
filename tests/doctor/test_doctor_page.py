"""The list of causes in docs/doctor.md equals the catalogue; ``python tests/doctor/test_doctor_page.py`` writes it."""

import textwrap
from pathlib import Path

from bench.doctor.catalogue import FAILURE, load

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN = "<!-- causes: written by python tests/doctor/test_doctor_page.py -->"
END = "<!-- end of causes -->"


def section(name: str) -> str:
    """Return a heading, and one paragraph: a message that is recognised, the cause, and the remedy."""
    info, first = load().causes[name], next(one for one in load().signatures if one.name == name)
    message = first.example.strip().splitlines()[-1].strip().replace("`", "'")
    severity = f"Severity: {first.severity}. " if first.severity != FAILURE else ""
    text = f"{severity}{info.explanation} **Do:** {info.remedy}"
    text += f" In a run of bench: {info.of_run.explanation} {info.of_run.remedy}" if info.of_run else ""
    return "\n".join([f"### {name}", f"`{message}`\\", textwrap.fill(text, 120, break_on_hyphens=False)])


def updated_page(page: str) -> str:
    before, rest = page.split(BEGIN)
    sections = "\n\n".join(map(section, load().causes))
    return f"{before}{BEGIN}\n\n{sections}\n\n{END}{rest.split(END)[1]}"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page) == page, f"run: python {Path(__file__)}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
