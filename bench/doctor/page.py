"""The causes as Markdown: ``python -m bench.doctor.page docs/doctor.md`` rewrites them there."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.doctor.catalogue import causes
from bench.doctor.model import CauseInfo

BEGIN = "<!-- causes: written by python -m bench.doctor.page -->"
END = "<!-- end of causes -->"


def causes_markdown() -> str:
    """Return every cause under its name, with explanation, remedy and an example line."""
    return "\n\n".join(_section(info) for info in causes())


def _section(info: CauseInfo) -> str:
    lines = [f"### {info.name}", "", info.explanation, "", f"**Do:** {info.remedy}"]
    if info.example:
        lines += ["", "```text", *(line.rstrip() for line in info.example.splitlines()), "```"]
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """Return a page with the causes between its two markers brought up to date."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{causes_markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(rewritten(target.read_text(encoding="utf-8")), encoding="utf-8")
