"""Fixed words of the report's page, read from template/words.toml.

The sentences of findings stand in their classes. The other sentences about one study are composed in
:mod:`analysis.report.decision`, :mod:`analysis.report.page` and :mod:`analysis.report.proposal`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from analysis.stats.scaling import GUIDE
from ddp_scaling_bench.units import MISSING

#: The fixed words: table of words.toml -> name -> text (in some tables, a list of texts).
WORDS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).resolve().parent / "template" / "words.toml").read_text(encoding="utf-8")
)
WORDS["decision"] |= {
    "rule": (
        f"Efficient: P is at least 0.975; probably efficient: at least 0.8; below {GUIDE}: at most 0.025. "
        f"At {GUIDE}: the whole interval is within 5 % of it. Use it: the largest efficient size that is "
        "faster than each smaller one."
    ),
}
WORDS["terms_of_answers"] = {
    "efficiency": (
        f"Efficiency: rate per rank relative to the baseline, with its 95 % interval; {GUIDE} or more is "
        "efficient."
    ),
    "p": f"P: the probability that the efficiency is {GUIDE} or more.",
    "p-of-settings": "P of a setting: that it is faster.",
    "lost": "Lost: what part of each step costs efficiency.",
    "cannot-tell": "Cannot tell: P is between 0.025 and 0.8, or too few runs are undisturbed.",
}
WORDS["verdicts"] |= {"at-the-guide": f"at {GUIDE}", "inefficient": f"below {GUIDE}"}
WORDS["notes"]["cells"] = f"{MISSING}: not measured."
#: Captions of the figures.
CAPTIONS: dict[str, str] = WORDS["captions"]


def mode_title(mode: str) -> str:
    """Return the title of a scaling mode, such as ``Strong scaling``."""
    return f"{mode.capitalize()} scaling"
