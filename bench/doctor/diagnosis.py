"""Diagnose a job from the scans of its logs: rank the causes, or list the most informative lines.

:func:`find_warnings` explains why a successful run is slow. Almost all logs contain no such warning.
Therefore the function reads only the start and the end of a log. It applies the catalogue only if these
parts contain all words of a message about a slow job.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..study.conditions import idle_cores
from ..study.layout import RunFolder
from .catalogue import FAILURE, SLOW, Catalogue, Signature, load
from .scan import BLOCK_BYTES, EXCEPTION_LINE, Hit, Scan, SignatureHits, Source, as_words

TELLING_LINES = 5
#: Number of last lines reported for logs that show neither a failure nor success.
LAST_LINES = 3
HARMLESS = "harmless-retry"
#: Name of the general cause for exceptions. A more specific cause of the same line is preferred.
PROGRAM_ERROR = "program-error"
#: Name of the sign that recognizes a launcher's report of a failed process. Every failure leads to this
#: report.
BOILERPLATE = "boilerplate"
#: Causes below this weight are symptoms: a process waited in vain for another process, which had failed.
SYMPTOM_WEIGHT = 60
#: Signs (lines that show a failure without its cause) from this weight on are exceptions or crashes.
OWN_ERROR_WEIGHT = 58
#: Causes below this weight are consequences of another failure, or warnings.
ECHO_WEIGHT = 28
#: Signs from this weight on prove a failure if they follow the success message.
SIGN_WEIGHT = 19
#: Signs from this weight on prove a failure if they are in the last lines of a log.
END_WEIGHT = 20
#: Signs from this weight on prove a failure even if the success message follows them: many scripts print
#: this message although their program failed.
PROOF_WEIGHT = 30
#: Numbers of ordinary lines of output below a sign of failure that make the failure doubtful: one if the sign
#: is weak or says itself that the program goes on.
#: Messages of a launcher about the end of its processes need more.
ORDINARY_LINES, ORDINARY_LINES_WEAK, ORDINARY_LINES_LAUNCHER = 3, 1, 5
#: Maximum number of ordinary lines below a message of success, such as where the results are.
#: At most one if the training makes progress there.
ORDINARY_LINES_SUCCESS, ORDINARY_LINES_TRAINED = 5, 1
#: Name of the fact that the program itself or its launcher reports success; a script rarely prints this.
FINISHED = "finished"
#: Causes that say who ended the job, but not why it had not ended before.
ENDED_BY_SLURM = ("time-limit", "cancelled")
#: Causes that describe a module or environment that was not loaded, and causes that can be its consequences.
NOT_LOADED = ("module-missing", "wrong-python-env")
CONSEQUENCES = (*NOT_LOADED, "library-mismatch", "command-not-found")
#: Names of the signs that recognize Slurm's messages about tasks and steps.
SLURM_SIGNS = ("slurm", "ended")

#: Messages about the end of the whole job or of all its tasks, if not quoted from another log.
_CONCLUSIVE = re.compile(
    r"^(?!\S+\.(?:log|out|err|txt):).*(?:\b(?:srun|slurmstepd|slurmd)\b.{0,60}: |CANCELLED AT|DUE TO |"
    r"ChildFailedError|mpi(?:run|exec) noticed|BAD TERMINATION|"
    r"\b(?:State|JobState)[ :=]+(?:FAILED|TIMEOUT|NODE_FAIL|OUT_OF_ME))"
)
#: A warning of a library: it does not show that a job failed which wrote other output.
_WARNING = re.compile(r"(?:^|\[)W\d* |\bWARN(?:ING)?\b")
_SOURCE_LINE = re.compile(r"(?:^|\s)raise [\w.]+")
#: Most warnings appear in the first steps.
HEAD_BYTES, TAIL_BYTES = 256 * 1024, 64 * 1024
#: Name of a fact that no program logs. :func:`find_warnings` adds it from the conditions of the run.
IDLE_CORES = "idle-cores"


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause with its evidence; the attributes are keys of the JSON output.

    Attributes:
        severity: "failure", or "slow" if the cause makes the job slow but does not end it.
        path, line: the line of a log that shows the cause. For a cause that measurements show, ``path`` is
            the run's folder and ``line`` is None.
        share: the fraction of the step that the cause takes, if measurements show it, otherwise None.
    """

    cause: str
    severity: str
    path: str
    line: int | None
    evidence: str
    explanation: str
    remedy: str
    share: float | None = None


@dataclass(frozen=True, slots=True)
class TellingLine:
    """One of the most informative lines about a failure without a known cause."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of one job.

    ``verdict`` is one of:

    - ``cause``: ``causes`` lists the causes found; fix the first cause first.
    - ``unknown``: no known cause explains the failure, or the logs show neither a failure nor success, or
      both; see ``telling_lines``. If ``failed`` is False, ``causes`` of severity "failure" are possible
      causes: the program wrote ordinary output below their lines.
    - ``harmless``: the logs contain only warnings about operations that are retried.
    - ``ok``: the logs show that the job succeeded.

    ``failed`` is True if the logs show a failure. With every verdict, ``causes`` ends with the causes of
    severity "slow".
    """

    verdict: str
    failed: bool
    causes: list[Cause]
    telling_lines: list[TellingLine]

    def of_failed_job(self) -> Diagnosis:
        """Return the diagnosis if it is known that the job failed: possible causes become causes."""
        if self.verdict == "unknown" and any(cause.severity == FAILURE for cause in self.causes):
            return replace(self, verdict="cause", failed=True)
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``bench doctor --json``."""
        return asdict(self)


def diagnose(logs: Mapping[str, Source]) -> Diagnosis:
    """Diagnose a job.

    Args:
        logs: all logs of one job, from all ranks and nodes, by the path or name to report. A log
            is a path, an open file, the whole text as str or bytes, or its lines.

    Raises:
        OSError: a log cannot be read.
    """
    catalogue = load()
    scans = [Scan(path, catalogue).read(source) for path, source in logs.items()]
    order = {scan.path: place for place, scan in enumerate(scans)}
    met = _met_causes(scans)
    ended = any(scan.last_line("work-ended") >= scan.last_line("progress") > 0 for scan in scans)
    doubts = {scan.path: _doubts(scan, met, ended=ended) for scan in scans}
    unfinished = [scan for scan in scans if doubts[scan.path] is None]
    hits = _evidence(scans, met)
    warnings = _causes(_ranked([hit for hit in hits if hit.signature.severity == SLOW], order))
    failures = [hit for hit in hits if hit.signature.severity == FAILURE]
    ranked = _ranked([hit for hit in failures if hit.path in {scan.path for scan in unfinished}], order)
    signs = _unexplained_signs(unfinished, met)
    if ranked and ranked[0].weight < ECHO_WEIGHT and any(sign.weight >= OWN_ERROR_WEIGHT for sign in signs):
        ranked = []  # The program's own error is unknown; the known lines are its consequences.
    causes = _causes(_without_harmless(ranked))
    if causes and causes[0].cause == HARMLESS:
        return Diagnosis("harmless", False, causes + warnings, [])
    proven = _proves_end(unfinished, met, succeeded=len(unfinished) < len(scans))
    if causes and not proven:
        return Diagnosis("unknown", False, causes + warnings, [])
    if causes:
        return Diagnosis(
            "cause", True, causes + warnings, _telling_lines(_preceding_errors(ranked[0], signs), order)
        )
    if signs:
        failed = proven and _prove_failure(signs, unfinished)
        return Diagnosis("unknown", failed, warnings, _telling_lines(signs, order))
    if doubtful := [hit for hits in doubts.values() for hit in hits or ()]:
        return Diagnosis("unknown", False, warnings, _telling_lines(doubtful, order))
    if len(unfinished) < len(scans):
        return Diagnosis("ok", False, warnings, [])
    return Diagnosis("unknown", False, warnings, _last_lines(scans))


def diagnose_text(text: str) -> Diagnosis:
    """Diagnose a job from the text of its only log."""
    return diagnose({"-": text})


def _doubts(scan: Scan, met: Sequence[tuple[Scan, SignatureHits]], *, ended: bool) -> list[Hit] | None:
    """Return the lines that make the success of a log doubtful, or None if the log shows no success.

    A log also shows no success if a line proves a failure, or if nothing shows that the program continued
    after an exception that it handled. Without a message of success, the doubtful lines are signs with
    progress of the training both above and below.
    """
    causes = [found for of, found in met if of is scan and found.signature.severity == FAILURE]
    signs = [found for found in scan.hits() if not found.signature.is_cause]
    proofs = [(found, _contradicts(found, scan, ended=ended)) for found in (*causes, *signs)]
    if any(proof is True for _, proof in proofs):
        return None
    doubtful = [hit for found, proof in proofs if proof is False for hit in found.hits]
    end = max(scan.last_line("progress"), scan.last_line(FINISHED))
    if doubtful or (_success(scan) and scan.last_handled <= end and not _is_open(scan)):
        return doubtful
    return None


def _is_open(scan: Scan) -> bool:
    """Return whether the success of a log may concern only a part of the job.

    The program of the log, or the next one of its script, went on after the success, or a line about a
    failure is directly above a success that only a script reports.
    """
    success = _success(scan)
    below = sum(line > success for line in scan.ordinary_lines)
    trains = scan.last_line("progress") > success
    most = ORDINARY_LINES_TRAINED if trains else ORDINARY_LINES_SUCCESS
    failed = max((line for line in scan.complaints if line < success), default=0)
    works = scan.announces_work and success < scan.last_lines[-1][0]
    return works or below > most or (failed > scan.last_line(FINISHED) and not _output_between(scan, failed))


def _success(scan: Scan) -> int:
    """Return the number of the last line that states success, or 0 if there is none."""
    return max(scan.last_line("success"), scan.last_line(FINISHED))


def _contradicts(found: SignatureHits, scan: Scan, *, ended: bool) -> bool | None:
    """Return True if hits disprove success, False if they make it doubtful, otherwise None.

    Hits below the message of success disprove it, except messages about processes that the script itself
    may have ended. A script can print such a message although its program failed, and the output of a program
    may be delayed. Therefore a sign of failure above the message makes the success doubtful if the log shows
    progress or the program's own end below the sign. It disproves success if the log shows neither. Warnings
    and logged errors make the success doubtful if no output is between them and the message.
    """
    signature, success, progress = found.signature, _success(scan), scan.last_line("progress")
    continued = max(progress, scan.last_line(FINISHED)) > found.last_line
    if found.last_line > success:
        success = success or (ended and signature.helper)
        if signature.weight < (ECHO_WEIGHT if signature.is_cause else SIGN_WEIGHT):
            return None
        if success:
            return not signature.helper
        if continued and signature.weight < PROOF_WEIGHT:
            return None
        survived = continued and 0 < scan.first_line("progress") < found.hits[0].line
        return signature.is_cause or signature.name in SLURM_SIGNS or not survived
    if signature.weight < PROOF_WEIGHT or signature.retried or (signature.is_cause and continued):
        worked = max(progress, scan.last_line(FINISHED) if found.hits[-1].continues else 0) > found.last_line
        idle = signature.weight >= SIGN_WEIGHT and not _output_between(scan, found.last_line)
        return False if idle and not worked else None
    return not (continued or signature.helper or signature.name in SLURM_SIGNS)


def _output_between(scan: Scan, line: int) -> bool:
    """Return whether ordinary output is between a line and the last message of success."""
    messages = [found for found in scan.hits() if found.signature.name in ("success", FINISHED)]
    ordinary = scan.ordinary_lines - {hit.line for found in messages for hit in found.hits}
    return any(line < number < _success(scan) for number in ordinary)


def _met_causes(scans: Sequence[Scan]) -> list[tuple[Scan, SignatureHits]]:
    """Return the hits of every cause signature whose conditions are met, with their logs."""
    matched = [(scan, found) for scan in scans for found in scan.hits()]
    everything = [found for _, found in matched]
    unconditional = {found.signature.name for found in everything if not found.signature.conditional}
    names = unconditional | {
        found.signature.name for found in everything if _is_met(found.signature, everything, unconditional)
    }
    return [
        (scan, found)
        for scan, found in matched
        if found.signature.is_cause
        and _is_met(found.signature, everything, names - {found.signature.name})
        and not (found.signature.retried and _continued(scan, found, scans))
    ]


def _evidence(scans: Sequence[Scan], met: Sequence[tuple[Scan, SignatureHits]]) -> list[Hit]:
    """Return, for each log, one hit of every cause signature whose conditions are met."""
    everything = [found for scan in scans for found in scan.hits()]
    evidence: list[Hit] = []
    for scan, found in met:
        signature = found.signature
        hit = _disagreeing(signature, everything) if signature.disagree else _best_line(found.hits)
        if hit and hit.path == scan.path:
            evidence.append(hit)
    return evidence


def _is_met(signature: Signature, everything: Sequence[SignatureHits], names: set[str]) -> bool:
    """Return whether a signature's conditions on other lines hold; ``names``: all causes and facts found."""
    if signature.needs and not names.intersection(signature.needs):
        return False
    if names.intersection(signature.unless):
        return False
    if signature.disagree:
        return _disagreeing(signature, everything) is not None
    return sum(found.count for found in everything if found.signature is signature) >= signature.times


def _disagreeing(signature: Signature, everything: Sequence[SignatureHits]) -> Hit | None:
    """Return the first of the hits that meet the condition ``signature.disagree``, or None."""
    assert signature.disagree
    groups: dict[tuple[str | None, ...], list[Hit]] = {}
    for found in everything:
        for hit in found.hits if found.signature is signature else ():
            groups.setdefault(tuple(hit.groups.get(name) for name in signature.disagree.same), []).append(hit)
    for members in groups.values():
        values = {tuple(hit.groups.get(name) for name in signature.disagree.differ) for hit in members}
        if len(values) > 1 or (not signature.disagree.differ and len(members) >= signature.times):
            return members[0]
    return None


def _continued(scan: Scan, found: SignatureHits, scans: Sequence[Scan]) -> bool:
    """Return whether the job continued after ``found``, according to its log or, for a warning, any log."""
    silent = found.signature.weight >= ECHO_WEIGHT and not _output_between(scan, found.last_line)
    silent = silent or bool(EXCEPTION_LINE.match(found.hits[0].evidence))
    end = scan.last_line(FINISHED) if silent else _success(scan)
    if max(scan.last_line("progress"), end) > found.last_line:
        return True
    others = (other for other in scans if other is not scan)
    return found.signature.weight < ECHO_WEIGHT and any(other.last_line("progress") for other in others)


def _best_line(hits: Sequence[Hit]) -> Hit:
    """Return the first hit that is not source code in a traceback, or else the first hit."""
    return next((hit for hit in hits if not _SOURCE_LINE.search(hit.evidence)), hits[0])


def _ranked(hits: Sequence[Hit], order: Mapping[str, int]) -> list[Hit]:
    """Return one hit per cause, sorted by weight, then by time, then by position.

    Weights from 70 to 79, for example, count as equal. Hits of equal weight are sorted by time if there are
    several logs and all these hits have a time. Otherwise, they are sorted by position in the logs.
    """
    untimed = {hit.weight // 10 for hit in hits if hit.clock_s is None}

    def position(hit: Hit) -> tuple[float, int, int]:
        timed = len(order) > 1 and hit.weight // 10 not in untimed
        return ((hit.clock_s or 0.0) if timed else 0.0, order[hit.path], hit.line)

    best: dict[str, Hit] = {}
    explained = {(hit.path, hit.line) for hit in hits if hit.signature.name != PROGRAM_ERROR}
    for hit in sorted(hits, key=lambda hit: (-hit.weight, *position(hit))):
        if hit.signature.name != PROGRAM_ERROR or (hit.path, hit.line) not in explained:
            best.setdefault(hit.signature.name, hit)
    ranked = sorted(best.values(), key=lambda hit: (-(hit.weight // 10), *position(hit), -hit.weight))
    return sorted(ranked, key=lambda hit: _is_survived(hit, ranked))  # stable: keeps the order of the others


def _is_survived(hit: Hit, ranked: Sequence[Hit]) -> bool:
    """Return whether a message is one of the shell, and the script went on to a later failure of its own.

    A missing package or command can be a consequence of the message. A time limit can be the consequence of a
    command that did not start.
    """
    consequences = CONSEQUENCES if hit.signature.name in NOT_LOADED else (*CONSEQUENCES, *ENDED_BY_SLURM)
    return hit.signature.shell and any(
        later.path == hit.path
        and later.line > hit.line
        and later.weight >= OWN_ERROR_WEIGHT
        and later.signature.name not in consequences
        for later in ranked
    )


def _without_harmless(ranked: list[Hit]) -> list[Hit]:
    """Remove harmless warnings; if such a warning ranks first, return only this warning."""
    if ranked and ranked[0].signature.name == HARMLESS:
        return ranked[:1]
    return [hit for hit in ranked if hit.signature.name != HARMLESS]


def _unexplained_signs(scans: Sequence[Scan], met: Sequence[tuple[Scan, SignatureHits]]) -> list[Hit]:
    """Return the signs of failure that no cause explains, except weak signs that are followed by progress.

    The launcher's reports are left out if a program's own error is known.
    """
    explained = {(hit.path, hit.line) for _, found in met for hit in found.hits}
    boilerplate: dict[tuple[str, int], Hit] = {}
    signs: dict[tuple[str, int], Hit] = {}
    for scan in scans:
        last_progress = scan.last_line("progress")
        for hit in (hit for found in scan.hits() for hit in found.hits):
            place = (hit.path, hit.line)
            if hit.signature.is_cause:
                explained.update([place] if hit.signature.retried else [])
            elif hit.signature.name == BOILERPLATE:
                boilerplate[place] = hit
            elif hit.weight >= OWN_ERROR_WEIGHT or (hit.weight > 0 and hit.line > last_progress):
                signs[place] = max(hit, signs.get(place, hit), key=lambda hit: hit.weight)
    own = [hit for place, hit in signs.items() if place not in explained and place not in boilerplate]
    if any(hit.weight >= OWN_ERROR_WEIGHT for hit in own):
        return own
    return own + [hit for place, hit in boilerplate.items() if place not in explained]


def _prove_failure(signs: Sequence[Hit], scans: Sequence[Scan]) -> bool:
    """Return whether a sign of failure is a proof: it has a high weight, or is in the last lines of a log."""
    end = {(scan.path, number) for scan in scans for number, _ in scan.last_lines}
    return any(
        sign.weight >= PROOF_WEIGHT or (sign.weight >= END_WEIGHT and (sign.path, sign.line) in end)
        for sign in signs
    )


def _proves_end(scans: Sequence[Scan], met: Sequence[tuple[Scan, SignatureHits]], *, succeeded: bool) -> bool:
    """Return whether a failure concerns the end of a job: its program wrote no ordinary output afterwards.

    A program can handle an exception, and a script can continue after a command that failed. Messages about
    the end of the whole job, such as those of srun, need no such evidence, unless the training goes on.
    If another log shows success, messages of the shell and warnings prove nothing.
    """
    for scan in scans:
        causes = [found for of, found in met if of is scan and found.signature.severity == FAILURE]
        signs = [
            one for one in scan.hits() if not one.signature.is_cause and one.signature.weight >= END_WEIGHT
        ]
        failures = {hit.line for found in (*causes, *signs) for hit in found.hits}
        of_shell = {hit.line for found in causes if found.signature.shell for hit in found.hits}
        for found in (*causes, *signs):
            warning = found.signature.weight < ECHO_WEIGHT and _WARNING.search(found.hits[-1].evidence)
            if (warning and scan.ordinary_lines - failures) or (warning and succeeded):
                continue
            if succeeded and found.last_line in of_shell:
                continue
            needed, trained = ORDINARY_LINES, scan.last_line("progress") > found.last_line
            weak = found.signature.helper or found.signature.weight < PROOF_WEIGHT
            if weak or found.hits[-1].continues:
                needed = ORDINARY_LINES_WEAK
            elif any(_CONCLUSIVE.search(hit.evidence) for hit in found.hits) and not trained:
                needed = ORDINARY_LINES_LAUNCHER
            if sum(line > found.last_line for line in scan.ordinary_lines - failures) < needed:
                return True
    return False


def _preceding_errors(first: Hit, signs: Sequence[Hit]) -> list[Hit]:
    """Return the program's own errors that may have led to the first cause, if that cause is a symptom.

    A job that Slurm ended may have waited for a process that had failed.
    """
    if first.weight >= SYMPTOM_WEIGHT and first.signature.name not in ENDED_BY_SLURM:
        return []
    return [
        sign
        for sign in signs
        if sign.weight >= OWN_ERROR_WEIGHT and (sign.path != first.path or sign.line < first.line)
    ]


def _telling_lines(signs: Sequence[Hit], order: Mapping[str, int]) -> list[TellingLine]:
    """Return the log lines with the highest weight, each text once, in the order of the logs."""
    texts: dict[str, Hit] = {}
    for hit in sorted(signs, key=lambda hit: (-hit.weight, order[hit.path], hit.line)):
        texts.setdefault(hit.evidence.lstrip("[]:0123456789 rank"), hit)
    chosen = list(texts.values())[:TELLING_LINES]
    chosen.sort(key=lambda hit: (order[hit.path], hit.line))
    return [TellingLine(hit.path, hit.line, hit.evidence) for hit in chosen]


def _last_lines(scans: Sequence[Scan]) -> list[TellingLine]:
    """Return the last lines of each log."""
    return [
        TellingLine(scan.path, number, text)
        for scan in scans
        for number, text in scan.last_lines[-LAST_LINES:]
        if text
    ]


def _causes(hits: Sequence[Hit]) -> list[Cause]:
    catalogue = load()
    return [_cause(hit, catalogue) for hit in hits]


def _cause(hit: Hit, catalogue: Catalogue) -> Cause:
    info = catalogue.causes[hit.signature.name]
    explanation = _filled(hit.signature.explanation, hit.groups) or info.explanation
    remedy = _filled(hit.signature.remedy, hit.groups) or info.remedy
    return Cause(info.name, info.severity, hit.path, hit.line, hit.evidence, explanation, remedy)


def _filled(text: str, groups: Mapping[str, str]) -> str:
    """Fill the ``{name}`` placeholders of a text; return ``""`` if a placeholder has no value."""
    try:
        return string.Template(text.replace("$", "$$").replace("{", "${")).substitute(groups)
    except (KeyError, ValueError):
        return ""


def find_warnings(folder: RunFolder) -> list[Cause]:
    """Return the causes of severity "slow" in a run's logs; logs that cannot be read are left out."""
    logs = {path.name: _Ends.read(path) for path in (folder.err, folder.out)}
    words = [as_words(log.text) for log in logs.values() if log.text]
    found = {
        name for name, needed in _messages() if any(all(one in text for one in needed) for text in words)
    }
    if not found:
        return []
    sources = {name: [log.text] for name, log in logs.items() if log.text}
    if idle := idle_cores(folder):
        sources["conditions.json"] = [f"bench: {idle}".encode()]
    elif found <= _needing_idle_cores():
        return []
    slow = [cause for cause in diagnose(sources).causes if cause.severity == SLOW]
    return [logs[cause.path].located(cause) for cause in slow if cause.path in logs]


@cache
def _messages() -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    """Return the name of each message about a slow job with its words, the longest (rarest) word first."""
    return tuple(
        (one.name, tuple(sorted(words, key=len, reverse=True)))
        for one in load().signatures
        if one.severity == SLOW
        for words in one.words
    )


@cache
def _needing_idle_cores() -> frozenset[str]:
    return frozenset(one.name for one in load().signatures if IDLE_CORES in one.needs)


@dataclass(frozen=True)
class _Ends:
    """The first ``head`` bytes and the end of a log; ``omitted`` is the number of bytes between them."""

    path: Path
    text: bytes
    head: int
    omitted: int

    @classmethod
    def read(cls, path: Path) -> _Ends:
        try:
            with open(path, "rb", buffering=0) as file:
                text = file.read(HEAD_BYTES)
                if len(text) < HEAD_BYTES:  # the whole log, as almost always
                    return cls(path, text, len(text), 0)
                head, size = len(text), file.seek(0, 2)
                omitted = max(0, size - head - TAIL_BYTES)
                file.seek(head + omitted)
                return cls(path, text + file.read(TAIL_BYTES), head, omitted)
        except OSError:
            return cls(path, b"", 0, 0)

    def located(self, cause: Cause) -> Cause:
        """Return a cause with its line number in the whole log."""
        assert cause.line is not None, "a cause of a log has a line"
        if not self.omitted or cause.line <= self.text.count(b"\n", 0, self.head) + 1:
            return cause
        with self.path.open("rb") as file:
            file.seek(self.head)
            left, lines = self.omitted, 0
            while left and (block := file.read(min(left, BLOCK_BYTES))):
                left, lines = left - len(block), lines + block.count(b"\n")
            return replace(cause, line=cause.line + lines)
