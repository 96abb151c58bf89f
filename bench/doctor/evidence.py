"""Which of the lines that matched count: conditions across lines, and how the log ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.doctor.matching import Scan, Seen
from bench.doctor.model import Hit, Signature

#: Below this weight a line is the echo of somebody else's end, or a warning.
ECHO_WEIGHT = 28
#: From this weight on a sign tells of a failure beyond doubt.
SIGN_WEIGHT = 20
#: From this weight on it is an error of the program's own: an exception, a crash.
OWN_ERROR = 58

_SOURCE_LINE = re.compile(r"(?:^|\s)raise [\w.]+")


def ended_well(scan: Scan) -> bool:
    """Whether the log says that the run succeeded, and nothing of a failure after that."""
    success = scan.last_line("success")
    return bool(success) and not any(
        seen.last_line > success
        for seen in scan.seen()
        if seen.signature.weight >= (ECHO_WEIGHT if seen.signature.is_cause else SIGN_WEIGHT)
    )


def counting_hits(scans: Sequence[Scan]) -> list[Hit]:
    """Return the first hit of every signature in every log that counts as evidence."""
    matched = [(scan, seen) for scan in scans for seen in scan.seen()]
    everything = [seen for _, seen in matched]
    plain = {seen.signature.name for seen in everything if not seen.signature.conditional}
    names = plain | {seen.signature.name for seen in everything if _met(seen.signature, everything, plain)}
    counting: list[Hit] = []
    for scan, seen in matched:
        signature = seen.signature
        if not signature.is_cause or not _met(signature, everything, names - {signature.name}):
            continue
        hit = _disagreeing(signature, everything) if signature.disagree else _telling_most(seen.hits)
        if hit and hit.path == scan.path and not (signature.retried and _went_on(scan, seen, scans)):
            counting.append(hit)
    return counting


def _went_on(scan: Scan, seen: Seen, scans: Sequence[Scan]) -> bool:
    """Whether the job went on after these lines: by its own log, for mere warnings by any."""
    if max(scan.last_line("progress"), scan.last_line("success")) > seen.last_line:
        return True
    others = (other for other in scans if other is not scan)
    return seen.signature.weight < ECHO_WEIGHT and any(other.last_line("progress") for other in others)


def _telling_most(hits: Sequence[Hit]) -> Hit:
    """Return the first line that is no source line of a traceback, or the first."""
    return next((hit for hit in hits if not _SOURCE_LINE.search(hit.evidence)), hits[0])


def _met(signature: Signature, everything: Sequence[Seen], names: set[str]) -> bool:
    """Whether the other lines of the job, which show ``names``, allow a signature to count."""
    if signature.needs and not names.intersection(signature.needs):
        return False
    if names.intersection(signature.unless):
        return False
    if signature.disagree:
        return _disagreeing(signature, everything) is not None
    return sum(seen.count for seen in everything if seen.signature is signature) >= signature.times


def _disagreeing(signature: Signature, everything: Sequence[Seen]) -> Hit | None:
    """Return the first line that another one of this signature contradicts (or repeats)."""
    assert signature.disagree
    groups: dict[tuple[str | None, ...], list[Hit]] = {}
    for seen in everything:
        for hit in seen.hits if seen.signature is signature else ():
            groups.setdefault(tuple(hit.groups.get(name) for name in signature.disagree.same), []).append(hit)
    for members in groups.values():
        values = {tuple(hit.groups.get(name) for name in signature.disagree.differ) for hit in members}
        if len(values) > 1 or (not signature.disagree.differ and len(members) >= signature.times):
            return members[0]
    return None


def unexplained_signs(scans: Sequence[Scan]) -> list[Hit]:
    """Return the lines that tell of a failure, that no cause explains, and that nothing followed."""
    known: set[tuple[str, int]] = set()
    signs: dict[tuple[str, int], Hit] = {}
    for scan in scans:
        gone_on = scan.last_line("progress")
        for hit in (hit for seen in scan.seen() for hit in seen.hits):
            place = (hit.path, hit.line)
            if hit.signature.is_cause or hit.signature.name == "boilerplate":
                known.add(place)
            elif hit.weight >= OWN_ERROR or (hit.weight > 0 and hit.line > gone_on):
                signs[place] = max(hit, signs.get(place, hit), key=lambda hit: hit.weight)
    return [hit for place, hit in signs.items() if place not in known]
