"""The table of causes in docs/doctor.md equals the catalogue; ``python tests/doctor/test_doctor_page.py`` writes it."""

from pathlib import Path

from bench.doctor.catalogue import FAILURE, load

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN = "<!-- causes: written by python tests/doctor/test_doctor_page.py -->"
END = "<!-- end of causes -->"


def row(name: str) -> str:
    severity = next(one.severity for one in load().signatures if one.name == name)
    note = f" (severity `{severity}`)" if severity != FAILURE else ""
    return f"| `{name}`{note} | {load().causes[name].explanation.replace('|', '&#124;')} |"


def updated_page(page: str) -> str:
    before, rest = page.split(BEGIN)
    rows = "\n".join(["| cause | meaning |", "|---|---|", *map(row, load().causes)])
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.split(END)[1]}"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page) == page, f"run: python {Path(__file__)}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
