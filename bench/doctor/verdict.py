"""Decide from what the logs say: the causes in their order, or what is most telling."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from bench.doctor.catalogue import Catalogue, load
from bench.doctor.evidence import ECHO_WEIGHT, OWN_ERROR, counting_hits, ended_well, unexplained_signs
from bench.doctor.matching import scan_all
from bench.doctor.model import Cause, Diagnosis, Hit, TellingLine
from bench.doctor.reading import Source

TELLING_LINES = 5
HARMLESS = "harmless-retry"
#: Below this weight a cause is a symptom: somebody waited in vain, for a reason told elsewhere.
SYMPTOM_WEIGHT = 60


def diagnose(logs: Mapping[str, Source]) -> Diagnosis:
    """Say why a job failed.

    Args:
        logs: the logs of one job (all its ranks and nodes together), by the path or name
            that the diagnosis is to give; each a file's path, an open file, the whole as
            text or bytes, or its lines.

    Raises:
        OSError: a log cannot be read.
    """
    catalogue = load()
    scans = [scan for scan in scan_all(logs.items(), catalogue) if not ended_well(scan)]
    hits = counting_hits(scans)
    order = {scan.path: place for place, scan in enumerate(scans)}
    ranked = _ranked(hits, order)
    signs = unexplained_signs(scans)
    if ranked and ranked[0].weight < ECHO_WEIGHT and any(sign.weight >= OWN_ERROR for sign in signs):
        ranked = []  # an error of the program's own stands where only its echoes are known
    causes = [_cause(hit, catalogue) for hit in _without_harmless(ranked)]
    if not causes:
        return Diagnosis("unknown" if signs else "ok", [], _telling(signs, order))
    if causes[0].cause == HARMLESS:
        return Diagnosis("harmless", causes, [])
    return Diagnosis("cause", causes, _telling(_before(ranked[0], signs), order))


def diagnose_text(text: str) -> Diagnosis:
    """Say what one log, given as text, shows."""
    return diagnose({"-": text})


def _before(first: Hit, signs: Sequence[Hit]) -> list[Hit]:
    """Return the program's own errors that may be why the first cause, if a symptom, came about."""
    if first.weight >= SYMPTOM_WEIGHT:
        return []
    return [
        sign
        for sign in signs
        if sign.weight >= OWN_ERROR and (sign.path != first.path or sign.line < first.line)
    ]


def _ranked(hits: Sequence[Hit], order: Mapping[str, int]) -> list[Hit]:
    """Return one hit per cause: by closeness to the root, then by time, then by place.

    Weights within ten are taken for equal. The time counts only between several logs, and
    where all lines of such a weight tell it: within one log the place is the surer order.
    """
    untimed = {hit.weight // 10 for hit in hits if hit.clock_s is None}

    def when(hit: Hit) -> tuple[float, int, int]:
        timed = len(order) > 1 and hit.weight // 10 not in untimed
        return ((hit.clock_s or 0.0) if timed else 0.0, order[hit.path], hit.line)

    best: dict[str, Hit] = {}
    for hit in sorted(hits, key=lambda hit: (-hit.weight, *when(hit))):
        best.setdefault(hit.signature.name, hit)
    return sorted(best.values(), key=lambda hit: (-(hit.weight // 10), *when(hit), -hit.weight))


def _without_harmless(ranked: list[Hit]) -> list[Hit]:
    """Keep the harmless warnings only where nothing weighs more, and then alone."""
    if ranked and ranked[0].signature.name == HARMLESS:
        return ranked[:1]
    return [hit for hit in ranked if hit.signature.name != HARMLESS]


def _telling(signs: Sequence[Hit], order: Mapping[str, int]) -> list[TellingLine]:
    """Return the weightiest signs, each text once, in the order of the logs."""
    texts: dict[str, Hit] = {}
    for hit in sorted(signs, key=lambda hit: (-hit.weight, order[hit.path], hit.line)):
        bare = hit.evidence.lstrip("[]:0123456789 rank")
        texts.setdefault(bare, hit)
    chosen = list(texts.values())[:TELLING_LINES]
    chosen.sort(key=lambda hit: (order[hit.path], hit.line))
    return [TellingLine(hit.path, hit.line, hit.evidence) for hit in chosen]


def _cause(hit: Hit, catalogue: Catalogue) -> Cause:
    info = catalogue.causes[hit.signature.name]
    explanation = _filled(hit.signature.explanation, hit.groups) or info.explanation
    remedy = _filled(hit.signature.remedy, hit.groups) or info.remedy
    return Cause(info.name, hit.path, hit.line, hit.evidence, explanation, remedy, hit.weight)


def _filled(text: str, groups: Mapping[str, str]) -> str:
    """Return text with its ``{name}`` filled from the log; empty where one is not known."""
    try:
        return string.Template(text.replace("$", "$$").replace("{", "${")).substitute(groups)
    except (KeyError, ValueError):
        return ""
