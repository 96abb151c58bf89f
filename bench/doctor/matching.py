"""Match the lines of one log against the signatures, and keep what later decisions need."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from bench.doctor.catalogue import Catalogue
from bench.doctor.model import Hit, Signature
from bench.doctor.reading import LineFilter, Passage, Source, passages

#: Hits of one signature in one log that are kept; the last is kept besides.
HITS_KEPT = 64
#: What a signature sees of the lines around: a message may wrap over the lines below,
#: ``near`` and ``apart`` look further.
WRAP_LINES = 3
NEAR_ABOVE, NEAR_BELOW = 12, 4
EVIDENCE_CHARACTERS = 2000
TRACEBACK_LINES = 60
#: Lines that wait for the end of the log, because what they may show was seen often enough.
TAIL_LINES = 512
#: Lines of the same known words that are looked at, and after how many to see who rests.
LOOKS = 1024
RECHECK = 16
DUE_KEPT = 50_000
#: The sign that is not a line of its own, but the end of the traceback below.
TRACEBACK = "traceback"

_DATE = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\[?\b[IWEF](\d?\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){1,8}\w{1,80}(?::|$)|[A-Z]\w{2,80}(?::|$)")


@dataclass(slots=True)
class Seen:
    """The hits of one signature in one log: the first ones, the last line, and how many."""

    signature: Signature
    hits: list[Hit] = field(default_factory=list)
    last_line: int = 0
    count: int = 0


@dataclass(slots=True)
class Due:
    """The signatures for lines of certain words, those of them that still look, and how often they did."""

    signatures: tuple[Signature, ...]
    awake: tuple[Signature, ...]
    looks: int = 0


class Line:
    """One line with what is around it, made readable only when it is asked for."""

    def __init__(self, passage: Passage, index: int) -> None:
        self._passage = passage
        self._index = index
        self.number = passage.numbers[index]
        self.text = passage.text(index)

    @cached_property
    def wrapped(self) -> str:
        """The line and those below, into which its message may be wrapped."""
        below = self._passage.around(self._index + 1, above=0, below=WRAP_LINES - 1)
        return f"{self.text}\n{below}"

    @cached_property
    def around(self) -> str:
        """The lines above and below, with this one."""
        return self._passage.around(self._index, above=NEAR_ABOVE, below=NEAR_BELOW)

    @cached_property
    def clock_s(self) -> float | None:
        """When it was written, in seconds of the year: by it or a line above."""
        for index in range(self._index, max(-1, self._index - NEAR_ABOVE), -1):
            text = self._passage.text(index)[:300]
            match = _DATE.search(text) or _GLOG.search(text)
            if match:
                month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
                fraction = float(f"0.{match.group(6)}") if match.group(6) else 0.0
                return ((month * 31 + day) * 24 + hour) * 3600 + minute * 60 + second + fraction
        return None

    def exception_below(self) -> tuple[int, str] | None:
        """Return number and text of the line that ends the traceback which begins here."""
        prefix = self.text.split("Traceback")[0]
        stop = min(len(self._passage.pieces), self._index + TRACEBACK_LINES)
        for below in range(self._index + 1, stop):
            text = self._passage.text(below)
            rest = text[len(prefix) :]
            if text.startswith(prefix) and rest and not rest[0].isspace():
                return (self._passage.numbers[below], text) if _EXCEPTION.match(rest) else None
        return None


class Scan:
    """What one log says: per signature its hits."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        self.path = path
        self.catalogue = catalogue
        self._seen: dict[int, Seen] = {}
        self._due: dict[frozenset[bytes], Due] = {}
        self._tail: deque[tuple[int, bytes, frozenset[bytes]]] = deque(maxlen=TAIL_LINES)

    def read(self, source: Source) -> Scan:
        """Go through the log once."""
        lines = LineFilter(frozenset(self.catalogue.index), self.catalogue.vocabulary)
        for passage, begin, end in passages(source):
            for index, words in lines.select(passage, begin, end):
                self._look(passage, index, words)
        skipped = [(number, piece, lines.words_of(piece)) for number, piece in lines.skipped_last.values()]
        for number, piece, words in sorted([*skipped, *self._tail], key=lambda line: line[0]):
            self._match_all(self._due_for(words).signatures, Line(Passage([piece], [number]), 0))
        return self

    def seen(self) -> list[Seen]:
        """Return the hits of every signature that matched."""
        return list(self._seen.values())

    def last_line(self, fact: str) -> int:
        """Return the last line that states a fact, 0 where none does."""
        return max((seen.last_line for seen in self.seen() if seen.signature.name == fact), default=0)

    def _look(self, passage: Passage, index: int, words: frozenset[bytes]) -> None:
        """Match a line, unless lines of its words, or its signatures, were seen often enough."""
        due = self._due_for(words)
        due.looks += 1
        if due.looks % RECHECK == 0:
            due.awake = tuple(signature for signature in due.awake if not self._rests(signature))
        if due.looks > LOOKS:
            due.awake = ()
        if len(due.awake) < len(due.signatures):
            self._tail.append((passage.numbers[index], passage.pieces[index], words))
        if due.awake:
            self._match_all(due.awake, Line(passage, index))

    def _match_all(self, signatures: tuple[Signature, ...], line: Line) -> None:
        for signature in signatures:
            if signature.name == TRACEBACK:
                self._keep_exception(signature, line)
            elif match := _match(signature, line):
                self._keep(_hit(signature, self.path, line, match))

    def _due_for(self, words: frozenset[bytes]) -> Due:
        due = self._due.get(words)
        if due is None:
            if len(self._due) >= DUE_KEPT:
                self._due.clear()
            signatures = self.catalogue.candidates(words)
            due = self._due[words] = Due(signatures, tuple(s for s in signatures if not self._rests(s)))
        return due

    def _rests(self, signature: Signature) -> bool:
        seen = self._seen.get(id(signature))
        return seen is not None and len(seen.hits) >= HITS_KEPT

    def _keep(self, hit: Hit) -> None:
        seen = self._seen.setdefault(id(hit.signature), Seen(hit.signature))
        if any(kept.line == hit.line for kept in seen.hits):
            return  # the pieces of a long line overlap, and the last lines are looked at again
        seen.count += 1
        seen.last_line = max(seen.last_line, hit.line)
        if len(seen.hits) < HITS_KEPT:
            seen.hits.append(hit)

    def _keep_exception(self, signature: Signature, line: Line) -> None:
        """Keep the line that ends a traceback as a sign, whatever the exception is called."""
        found = line.exception_below()
        if found:
            self._keep(Hit(signature, self.path, found[0], shortened(found[1], 0), {}))


def _match(signature: Signature, line: Line) -> re.Match[str] | None:
    """Return the match that begins in this line, if the lines around agree."""
    match = signature.pattern.search(line.wrapped if signature.wraps else line.text)
    if not match or match.start() > len(line.text):
        return None
    if signature.near and not signature.near.search(line.around):
        return None
    if signature.not_here and signature.not_here.search(line.text):
        return None
    if signature.not_near and signature.not_near.search(line.around):
        return None
    if signature.where and not _compares(*signature.where, match.groupdict()):
        return None
    return match


def _compares(left: str, operator: str, right: str, groups: dict[str, str | None]) -> bool:
    """Compare two numbers, each written out or named after a group of the pattern."""
    written = [groups.get(side) or side for side in (left, right)]
    if max(map(len, written)) > 18:
        return False  # no count of anything; Python refuses to read very long ones
    one, other = map(int, written)
    return {
        "<": one < other,
        ">": one > other,
        "==": one == other,
        "!=": one != other,
        "apart": one != other and (one - other) % 8 == 0,
    }[operator]


def _hit(signature: Signature, path: str, line: Line, match: re.Match[str]) -> Hit:
    groups = {name: value.strip() for name, value in match.groupdict().items() if value}
    evidence = shortened(line.text, match.start())
    return Hit(signature, path, line.number, evidence, groups, line.clock_s)


def shortened(text: str, around: int) -> str:
    """Return text cut to a length that can be shown, with the match in it."""
    text = text.strip()
    if len(text) <= EVIDENCE_CHARACTERS:
        return text
    start = max(0, min(around - 200, len(text) - EVIDENCE_CHARACTERS))
    cut = text[start : start + EVIDENCE_CHARACTERS]
    return ("…" if start else "") + cut + ("…" if start + EVIDENCE_CHARACTERS < len(text) else "")


def scan_all(logs: Iterable[tuple[str, Source]], catalogue: Catalogue) -> list[Scan]:
    """Read every log."""
    return [Scan(path, catalogue).read(source) for path, source in logs]
