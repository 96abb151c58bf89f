"""Fixed words of the report's page, read from template/words.toml.

The sentences about findings are in bench/words.toml. The other sentences about one study are composed in
:mod:`analysis.report.decision`, :mod:`analysis.report.page` and :mod:`analysis.report.proposal`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from analysis.stats.scaling import GUIDE
from bench.units import MISSING


def _read() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).resolve().parent / "template" / "words.toml").read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{guide}", str(GUIDE)).replace("{missing}", MISSING))


#: The fixed words: table of words.toml -> name -> text (in some tables, a list of texts).
WORDS = _read()
#: Captions of the figures.
CAPTIONS: dict[str, str] = WORDS["captions"]


def mode_title(mode: str) -> str:
    """Return the title of a scaling mode, such as ``Strong scaling``."""
    return f"{mode.capitalize()} scaling"
