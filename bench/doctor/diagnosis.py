"""Diagnose a job from its logs: find the known causes and rank them.

Every known message has a kind, which says what its author can know about the cause:

1. ``origin``: the failing process, its node or Slurm states what went wrong (out of memory, a full disk,
   a rejected request).
2. ``error``: an exception, a signal or an exit code. A program can survive it.
3. ``hint``: a warning or setting that explains why processes do not reach each other. It counts only if
   there is a message of kind ``peer`` or ``ended``.
4. ``peer``: a process noticed that others are missing, late or dead.
5. ``ended``: Slurm or a launcher reports the end (cancelled, time limit).
6. ``script``: a command of the batch script failed, and the script went on.

The first cause is the earliest message of the first of these kinds that the logs contain. If there are
several logs and all messages of the kind have a time, "earliest" refers to these times (without the year
if one of them has none). Otherwise, it refers to the order of the logs and their lines. A cause is left
out if a less general one explains the same line. For example, ``program-error`` is any exception. Of two
causes with the same line, the one whose message is longer comes first. Causes of severity ``slow`` and
``warning`` come after all others.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_scaling_bench.files import regular_file
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.failures import Failure
from ddp_scaling_bench.run_folder import RunFolder

from ..study.conditions import idle_cores
from .catalogue import ENDED, FAILURE, HINT, KINDS, PEER, load
from .scan import Hit, Scan, Source

#: Bytes of a log in which :func:`find_warnings` searches. Most warnings appear in the first steps.
HEAD_BYTES = 256 * 1024
#: Name of a fact that no log shows. :func:`find_warnings` takes it from the conditions of the run.
IDLE_CORES = "idle-cores"
#: Name of the fact that the logs are those of a run, whose reason contains the messages of bench already.
OF_RUN = "of-run"
#: Name of the fact that all ranks of a run are on one node.
ONE_NODE = "one-node"

#: A line of source code in a traceback. The exception below it is the better evidence.
_SOURCE_LINE = re.compile(r"(?:\[?\w{1,12}\]?:\s+)?raise \w")


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause with its evidence; the attributes are keys of the JSON output.

    Attributes:
        severity: "failure", "slow" if the cause makes the job slow but does not end it, or "warning" if it
            changes what the job measures.
        path, line: the line of a log that shows the cause. For a cause that measurements show, or that a rank
            recorded, ``path`` is the run's folder (or empty) and ``line`` is None.
        share: the fraction of the step that the cause takes, if measurements show it, otherwise None.
        facts: the measurements that show it.
    """

    cause: str
    severity: str
    path: str
    line: int | None
    evidence: str
    explanation: str
    remedy: str
    share: float | None = None
    facts: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log without a known cause."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The known causes in the logs of a job, the first cause first.

    Other causes follow those of severity "failure". If there is no cause of severity "failure",
    ``last_lines`` contains the last lines of each log that look like errors, or else its last lines.
    An empty diagnosis does not mean that the job succeeded. ``has_folder`` is false for a run whose folder
    was deleted.
    """

    causes: list[Cause]
    last_lines: list[LogLine]
    has_folder: bool = True

    @property
    def first_failure(self) -> Cause | None:
        """The first cause of the failure, or None if none is known."""
        return next((cause for cause in self.causes if cause.severity == FAILURE), None)

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``bench doctor --json``."""
        causes = [{**asdict(one), "facts": [fact.told() for fact in one.facts]} for one in self.causes]
        return {"causes": causes, "last_lines": list(map(asdict, self.last_lines))}


def diagnose(
    logs: Mapping[str, Source], *, facts: frozenset[str] = frozenset(), failure: Failure | None = None
) -> Diagnosis:
    """Diagnose a job.

    Args:
        logs: all logs of one job, from all ranks and nodes, by the path or name to report. A log
            is a path, an open file, the whole text as str or bytes, or its lines.
        facts: names of facts that are known from elsewhere.
        failure: what a rank of the run recorded. If it is a cause, it comes first; but if another rank failed
            before, it comes after messages of the kinds ``origin``, ``error`` and ``hint``.

    Raises:
        OSError: a log cannot be read.
    """
    scans = [Scan(path, load()).read(source) for path, source in logs.items()]
    recorded = failure if failure and failure.is_cause else None
    if recorded:
        facts |= {recorded.kind}
    hits = _counting(
        [hit for scan in scans for hit in scan.hits], facts, is_late=bool(failure and failure.effect)
    )
    ranked = [hit for hit in _ranked(hits, list(logs)) if not recorded or hit.signature.name != recorded.kind]
    found = Diagnosis([_cause(hit, hits, of_run=OF_RUN in facts) for hit in ranked], [])
    if recorded:
        before = KINDS[: KINDS.index(PEER)] if recorded.effect else ()
        number = sum(hit.signature.kind in before for hit in ranked if hit.signature.severity == FAILURE)
        found.causes.insert(number, _recorded_cause(recorded))
    if found.first_failure is None:
        found.last_lines.extend(LogLine(scan.path, *line) for scan in scans for line in scan.last_lines)
    return found


def diagnose_text(text: str) -> Diagnosis:
    """Diagnose a job from the text of its only log."""
    return diagnose({"-": text})


def find_warnings(folder: RunFolder) -> list[Cause]:
    """Return the causes that did not end a run, from the start of its logs; unreadable logs are left out."""
    logs: dict[str, Source] = {}
    for path in (folder.err, folder.out):
        try:
            with open(path, "rb", opener=regular_file) as file:
                logs[path.name] = [file.read(HEAD_BYTES)]
        except OSError:
            continue
    facts = frozenset({OF_RUN, IDLE_CORES} if idle_cores(folder) else {OF_RUN})
    return [cause for cause in diagnose(logs, facts=facts).causes if cause.severity != FAILURE]


def _counting(hits: Sequence[Hit], facts: frozenset[str], *, is_late: bool) -> list[Hit]:
    """Return the hits of causes whose conditions on the rest of the logs are met.

    ``is_late`` is true if a rank recorded that another one was lost or late.
    """
    names, variants = facts.union(hit.signature.name for hit in hits), _variants(hits)
    met = [
        hit
        for hit in hits
        if hit.signature.is_cause
        and not names.intersection(hit.signature.unless)
        and (not hit.signature.needs or names.intersection(hit.signature.needs))
        and (not hit.signature.disagree or len(variants[_variant_key(hit)]) > 1)
        and (not hit.signature.repeated or _is_repeated(hit, hits))
    ]
    least: dict[tuple[str, int], int] = {}
    for hit in met:
        place = hit.path, hit.line
        least[place] = min(hit.signature.general, least.get(place, hit.signature.general))
    failed = is_late or any(hit.signature.kind in (PEER, ENDED) for hit in hits)
    return [
        hit
        for hit in met
        if (hit.signature.kind != HINT or failed) and hit.signature.general == least[hit.path, hit.line]
    ]


def _variants(hits: Sequence[Hit]) -> dict[object, set[tuple[str | None, ...]]]:
    """Return the values of the groups that may disagree, for each signature and each value of the others."""
    variants: dict[object, set[tuple[str | None, ...]]] = {}
    for hit in hits:
        if hit.signature.disagree:
            values = tuple(map(hit.groups.get, hit.signature.disagree[1]))
            variants.setdefault(_variant_key(hit), set()).add(values)
    return variants


def _variant_key(hit: Hit) -> object:
    same = hit.signature.disagree[0] if hit.signature.disagree else ()
    return hit.signature, *map(hit.groups.get, same)


def _is_repeated(hit: Hit, hits: Sequence[Hit]) -> bool:
    which, expected = hit.signature.repeated or ("", "")
    values = Counter(one.groups[which] for one in hits if one.signature is hit.signature)
    return values[hit.groups[which]] > 1 and len(values) < int(hit.groups[expected])


def _calls(hit: Hit, hits: Sequence[Hit]) -> str:
    """Return what the lines that belong together say, such as "ALLREDUCE on ranks 0, 1, REDUCE on rank 2"."""
    ranks: dict[str, dict[str, None]] = {}
    for one in hits:
        keys = hit.signature.combined
        if one.signature is hit.signature and all(one.groups.get(k) == hit.groups.get(k) for k in keys):
            size = f" of {one.groups['numel']} elements" if "numel" in one.groups else ""
            ranks.setdefault(f"{one.groups['op']}{size}", {})[one.groups["rank"]] = None
    return ", ".join(
        f"{call} on rank{'s' * (len(own) > 1)} {', '.join([*own][:8])}{' and others' * (len(own) > 8)}"
        for call, own in ranks.items()
    )


def _ranked(hits: Sequence[Hit], paths: list[str]) -> list[Hit]:
    """Return one hit per cause, the first cause first; the module's docstring gives the rule."""
    untimed = {hit.signature.kind for hit in hits if hit.clock is None or len(paths) == 1}
    without_year = {hit.signature.kind for hit in hits if hit.clock and not hit.clock[0]}

    def rank(hit: Hit) -> tuple[bool, int, bool, int, float, int, int, int]:
        kind = hit.signature.kind
        source = bool(_SOURCE_LINE.match(hit.evidence))
        year, time_s = (0, 0.0) if kind in untimed or hit.clock is None else hit.clock
        year = 0 if kind in without_year else year
        place = paths.index(hit.path), hit.line, -hit.length
        return (hit.signature.severity != FAILURE, KINDS.index(kind), source, year, time_s, *place)

    best: dict[str, Hit] = {}
    for hit in sorted(hits, key=rank):
        best.setdefault(hit.signature.name, hit)
    return list(best.values())


def _cause(hit: Hit, hits: Sequence[Hit], *, of_run: bool) -> Cause:
    own = hit.signature
    info, severity = load().causes[own.name], own.severity or FAILURE
    groups = {**hit.groups, "calls": _calls(hit, hits)} if own.combined else hit.groups
    explanation = _filled(own.explanation, groups) or info.explanation
    remedy = _filled(own.remedy, groups) or info.remedy
    if of_run and info.of_run:
        explanation, remedy = info.of_run.explanation or explanation, info.of_run.remedy
    return Cause(own.name, severity, hit.path, hit.line, hit.evidence, explanation, remedy)


def cause_of_end(name: str, evidence: str) -> Cause:
    """Return a cause that the end of a run shows, but no line of its logs."""
    info = load().causes[name]
    told = info.of_run or info
    return Cause(name, FAILURE, "", None, evidence, told.explanation or info.explanation, told.remedy)


def _recorded_cause(failure: Failure) -> Cause:
    """Return a recorded failure as a cause, which no line of a log shows."""
    return Cause(failure.kind, FAILURE, "", None, "", failure.message, failure.remedy)


def _filled(text: str, groups: Mapping[str, str]) -> str:
    """Fill the ``{name}`` placeholders of a text; return ``""`` if a placeholder has no value."""
    try:
        return string.Template(text.replace("$", "$$").replace("{", "${")).substitute(groups)
    except (KeyError, ValueError):
        return ""
