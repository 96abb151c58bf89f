"""Scan logs of any size and collect the lines that match signatures.

The *shape* of a line is the line in lower case without digits and punctuation. The thousands of
lines of a training loop have only a handful of shapes. Each shape is checked once for words of the
catalogue, and only lines of a shape that contains such a word are matched against expressions.
"""

from __future__ import annotations

import io
import re
import string
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from .catalogue import Catalogue, Signature

#: A log: a file's path, an open file, the whole text as str or bytes, or the lines.
Source = Path | Iterable[bytes | str]

#: Bytes read at a time.
BLOCK_BYTES = 1 << 20
#: Longer lines are cut into pieces of this size, which overlap.
PIECE_BYTES = 8192
OVERLAP_BYTES = 1024
#: Numbers of lines above and below a line that are available as its context.
ABOVE = 12
BELOW = 64
#: Number of lines of one shape that are matched. Of the further ones, only the last is matched.
LINES_PER_SHAPE = 64
#: Number of lines that are matched unconditionally. Later lines are matched only if their words have
#: been rare so far. Logs of real jobs repeat their shapes and stay far below this limit.
UNCONDITIONAL_LINES = 10_000
RARE_COUNT = 8
REMEMBERED_SHAPES = 100_000

HITS_KEPT = 64
#: Number of following lines in which a message may continue.
FOLLOWING_LINES = 3
#: Numbers of lines above and below that ``near`` searches. A time is also searched in the lines above.
NEAR_ABOVE, NEAR_BELOW = 12, 4
EVIDENCE_CHARACTERS = 2000
TRACEBACK_LINES = 60
#: Number of skipped lines kept until the end of the log, when all signatures are tried on them again.
TAIL_LINES = 512
#: Number of lines at the end of a log that are searched for all signs of failure, whatever their words.
LAST_LINES = 8
#: Number of lines at the end of a log that are searched for ordinary output.
END_LINES = 64
#: Maximum number of matched lines that contain the same words of the catalogue.
LINES_PER_WORD_SET = 1024
#: Signatures with enough hits are removed each time this many lines with the same catalogue words have
#: been matched.
CANDIDATE_REFRESH = 16
REMEMBERED_WORD_SETS = 50_000
#: Name of the sign whose hit is the last line of a traceback instead of the matching line.
TRACEBACK = "traceback"

_LETTERS = string.ascii_letters.encode()
_SHAPE = bytes(ord(chr(code).lower()) if code in _LETTERS or code == 0x0A else 0x20 for code in range(256))
_DROPPED = string.digits.encode() + b"\0"
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DATE = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\[?\b[IWEF](\d?\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_IN_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^(?:\[?\w+\]?:)?\s{2,}")
#: The line above a traceback of an exception that Python ignores (in Python 3.14: "ignored while ...").
_IGNORED = re.compile(rb"Exception ignored|Error in atexit\._run_exitfuncs")
#: An exception that the program logged and handled, and lines below an exception which say that it goes on.
_HANDLED = re.compile(
    r"\b(?:WARN(?:ING)?|INFO)\b.*\w(?:Error|Exception)\b.*\b(?:retry(?:ing)?|skipp(?:ed|ing)|ignored)\b|"
    r"\w(?:Error|Exception)\b.*\((?:retrying|skipp(?:ed|ing)|ignored)\b"
)
_GOES_ON = re.compile(
    r"^(?!.*(?:\.(?:cpp|cc|cu):\d|\b(?:cannot|not possible|giving up)\b)).*"
    r"\b(?:retry(?:ing)?\b|skipp(?:ed|ing)\b|ignoring\b|"
    r"fall(?:ing|s)? ?back|trying (?:again|the next)|attempt \d+ ?(?:of|/) ?\d|"
    r"continu(?:ing|es?) (?:without|with|anyway)|"
    r"not (?:available|installed|found)\b.{0,40}\b(?:only|instead|without|disabl\w+|using)\b)",
    re.IGNORECASE,
)
#: A message about an error which says that the program goes on, or that a test expects the error.
_CONTINUES = re.compile(
    r"\b(?:re-?start(?:ing|ed)?|re-?try(?:ing)?|retries|skip(?:s|ped|ping)|ignor(?:ed|ing)|expected|"
    r"x(?:fail|pass)(?:ed)?|as configured|next|again|(?:try|attempt) #?\d+)\b",
    re.IGNORECASE,
)
#: An exception within a message: the program wrote it, because nothing precedes an exception that ends it.
_INLINE_EXCEPTION = re.compile(r"[a-z](?:Error|Exception)\b: |OutOfMemoryError\b")
_LOGGED = re.compile(r"\b(?:ERROR|WARN(?:ING)?)\b|^future: <")
_CHAINED = re.compile(rb"During handling of the above exception|The above exception was the direct cause")
#: Words that seem to show a failure but do not: counts of zero, metrics, file names and options.
_NO_FAILURE = re.compile(
    r"\b(?:0|no|zero|without) (?:\w+ )?(?:errors?|fail\w*|warnings?)\b(?:\(s\))?|"
    r"(?:errors?|\bfail\w*|warnings?)(?:\(s\))?(?: ?[:=] ?(?:[-+]?\d|nan\b|inf\b|none\b)| \d*\.\d| \w+: 0\b)|"
    r"\(ignored\)|\w+[-_]errors?\b|errors?[-_=.]\w|\bfail\w*(?: \w+)? ?[:=] ?\[\]",
    re.IGNORECASE,
)
#: Words about a failure.
_COMPLAINT = re.compile(
    r"^(?!.*(?:\bwarn|\bINFO\b|\bDEBUG\b|\bNCCL\b|\bif\b|\W[IW]\d{3,4} )).*"
    r"(?:error|abort|"
    r"\b(?:fail(?:ed|ure|s)?|halted|cannot|can't|denied|not found|killed|missing|no such|unable)\b)",
    re.IGNORECASE,
)
#: A last line that announces work, or shows a command or a progress bar that is not full.
_STARTS = re.compile(
    r"^(?:\W*\d[\d:.,/ TZ-]*)?[^\w/]*(?:\w+ - )?(?:[\w ]{1,40}\W{1,4})?"
    r"(?:start|(?!warn|clean|clos|exit|finali|remov|shut|stop)[a-z]{3,}ing\b)|"
    r"^(?:\++ )?(?:srun|mpirun|torchrun|python3?|bash) |\b[1-9]?\d%\|",
    re.IGNORECASE,
)
#: Lines that show no further work of the program: details and advice that follow an error, and the words of
#: a program or script that ends.
_NO_WORK = re.compile(
    r"^\s|^[^A-Za-z]*$|^(?:\[\w+\]: ?|\d+: ?)(?:\s|$)|^(?:frame )?#\d|"
    r"^(?:\[\w+\]:|\d+: )?\W*(?:[IWEF]\d{4} |\[[IWEF]\d{3,4} )|"
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b.{0,20}\d\d:\d\d:\d\d|"
    r"^\W*(?:date|time|end(?:ed)?|stop(?:ped)?|elapsed|wall ?time|cpu|memory|cluster|job ?id)\b|"
    r"error|fail|exception|warn|abort|kill|\bexit|terminat|cancel|traceback|usage|help|hint|\bnote\b|please|"
    r"\bsee\b|\btry\b|giv(?:e|ing) up|quit|\bNCCL\b|\bO?MPI|\bPMI|^\d+\+\d+ records|bytes copied|\bclean|"
    r"shut|\bstate\b|\w+::\w|\bthread 0x|\bfile \"|^wandb\b",
    re.IGNORECASE,
)
#: A progress bar of tqdm without a label, after its first step. It has no words for the catalogue.
_BAR = re.compile(r"\s*\d{1,3}%\|[^|]{0,200}\| *[1-9]\d*/(?!1 )\d+ \[[\d:]+<[\d:?]+, +[\d.]+ ?(?:it/s|s/it)")
EXCEPTION_LINE = re.compile(
    r"\W{0,3}(?:\w{1,12}\W{1,3})?(?:\w+\.){0,8}\w+(?:Error|Exception|Exit|Interrupt|Timeout)\b"
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){1,8}\w{1,80}(?::|$)|[A-Z]\w{2,80}(?::|$)")


@dataclass(slots=True)
class Passage:
    """Consecutive lines of a log with their line numbers; long lines are split into several pieces."""

    pieces: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def text(self, index: int) -> str:
        """Return a line, or a piece of a long line, as text without control characters."""
        return readable(self.pieces[index])

    def around(self, index: int, *, above: int, below: int) -> str:
        """Return a line, or a piece of a long line, with those above and below, joined by newlines."""
        start, stop = max(0, index - above), min(len(self.pieces), index + below + 1)
        return "\n".join(self.text(i)[:1000] for i in range(start, stop))


def readable(piece: bytes) -> str:
    """Decode text and remove escape sequences, NULs and other control characters."""
    text = piece.decode("utf-8", "replace")
    return (text if text.isprintable() else _CONTROLS.sub("", text)).rstrip()


def blocks(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a log in large blocks."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield from blocks(file)
    elif isinstance(source, io.IOBase):
        while block := source.read(BLOCK_BYTES):
            yield _encoded(block)
    elif isinstance(source, bytes | str):
        yield _encoded(source)
    else:
        lines: list[bytes] = []
        size = 0
        for line in source:
            lines.append(_encoded(line).removesuffix(b"\n"))
            size += len(lines[-1]) + 1
            if size >= BLOCK_BYTES:
                yield b"\n".join([*lines, b""])
                lines, size = [], 0
        yield b"\n".join(lines)


def _encoded(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def as_words(text: bytes) -> bytes:
    """Return lower-case text without digits and punctuation, like the catalogue's words; keep line breaks."""
    return text.translate(_SHAPE, _DROPPED)


class LineFilter:
    """Select the lines of a log that contain words of the catalogue.

    A line is selected if it contains one of ``keys``. Each selected line is yielded with the words
    of ``vocabulary`` in it.
    """

    def __init__(self, keys: frozenset[bytes], vocabulary: frozenset[bytes]) -> None:
        self._keys = keys
        self._vocabulary = vocabulary
        self._lines_by_shape: dict[bytes, int] = {}
        self._lines_by_words: dict[frozenset[bytes], int] = {}
        self._checked = 0
        self.skipped_last: dict[bytes, tuple[int, bytes]] = {}

    def select(self, passage: Passage, begin: int, end: int) -> Iterator[tuple[int, frozenset[bytes]]]:
        """Yield index and catalogue words of each piece in [begin, end) that contains such words."""
        shapes = as_words(b"\n".join(passage.pieces[begin:end])).split(b"\n")
        lines_by_shape, keys, vocabulary = self._lines_by_shape, self._keys, self._vocabulary
        for index, shape in enumerate(shapes, begin):
            count = lines_by_shape.get(shape, 0)
            if count < 0:
                continue
            if count >= LINES_PER_SHAPE:
                self.skipped_last[shape] = (passage.numbers[index], passage.pieces[index])
                continue
            words = shape.split()
            if keys.isdisjoint(words):
                lines_by_shape[shape] = -1
                continue
            lines_by_shape[shape] = count + 1
            known = vocabulary.intersection(words)
            if self._within_limits(known):
                yield index, known
            else:
                self.skipped_last[b" ".join(sorted(known))] = (passage.numbers[index], passage.pieces[index])
        if len(lines_by_shape) >= REMEMBERED_SHAPES:
            lines_by_shape.clear()

    def _within_limits(self, known: frozenset[bytes]) -> bool:
        """Return False if too many lines with the words ``known`` have already been matched."""
        self._checked += 1
        self._lines_by_words[known] = self._lines_by_words.get(known, 0) + 1
        return self._checked <= UNCONDITIONAL_LINES or self._lines_by_words[known] <= RARE_COUNT

    def words_of(self, piece: bytes) -> frozenset[bytes]:
        """Return the catalogue words of a line."""
        return self._vocabulary.intersection(as_words(piece).split())


def passages(source: Source) -> Iterator[tuple[Passage, int, int]]:
    """Yield overlapping passages of a log, each with the range (begin, end) of the pieces to examine.

    A piece is a line, or a part of a long line. Each piece is examined once. Passages overlap, so that the
    lines around a piece are in its passage.
    """
    passage, begin, number, rest = Passage(), 0, 1, b""
    for block in blocks(source):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        _append(passage, lines, number)
        number += len(lines)
        if len(rest) > BLOCK_BYTES:
            _append(passage, [rest], number)
            rest = rest[-OVERLAP_BYTES:]
        end = len(passage.pieces) - BELOW
        if end > begin:
            yield passage, begin, end
            kept = max(0, end - ABOVE)
            passage = Passage(passage.pieces[kept:], passage.numbers[kept:])
            begin = end - kept
    if rest:
        _append(passage, [rest], number)
    if begin < len(passage.pieces):
        yield passage, begin, len(passage.pieces)


def _append(passage: Passage, lines: list[bytes], number: int) -> None:
    """Add lines to a passage; split long lines and lines with carriage returns into several pieces."""
    if max(map(len, lines), default=0) <= PIECE_BYTES and not any(b"\r" in line for line in lines):
        passage.pieces += lines
        passage.numbers += range(number, number + len(lines))
        return
    for offset, line in enumerate(lines):
        for part in line.rstrip(b"\r").split(b"\r"):
            for start in range(0, max(1, len(part) - OVERLAP_BYTES), PIECE_BYTES - OVERLAP_BYTES):
                passage.pieces.append(part[start : start + PIECE_BYTES])
                passage.numbers.append(number + offset)


class Line:
    """A line with its context; texts are decoded only when needed."""

    def __init__(self, passage: Passage, index: int) -> None:
        self._passage = passage
        self._index = index
        self.number = passage.numbers[index]
        self.text = passage.text(index)

    @cached_property
    def with_following(self) -> str:
        """The line and the following lines, for messages that are wrapped."""
        following = self._passage.around(self._index + 1, above=0, below=FOLLOWING_LINES - 1)
        return f"{self.text}\n{following}"

    @cached_property
    def neighbourhood(self) -> str:
        """The line with the lines above and below."""
        return self._passage.around(self._index, above=NEAR_ABOVE, below=NEAR_BELOW)

    @cached_property
    def clock_s(self) -> float | None:
        """Time of the line in seconds since the start of the year, read from the line or one above it."""
        for index in range(self._index, max(-1, self._index - NEAR_ABOVE), -1):
            text = self._passage.text(index)[:300]
            match = _DATE.search(text) or _GLOG.search(text)
            if match:
                month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
                fraction = float(f"0.{match.group(6)}") if match.group(6) else 0.0
                return ((month * 31 + day) * 24 + hour) * 3600 + minute * 60 + second + fraction
        return None

    @cached_property
    def is_ignored(self) -> bool:
        """True if the line ends a traceback that Python ignores."""
        return bool(_IGNORED.search(self._above_traceback))

    @cached_property
    def continues(self) -> bool:
        """True if the line, or the message above the traceback that it ends, says that work goes on.

        The same applies to an exception that the program logged: within a message, or with a traceback below
        a message about an error.
        """
        if _INLINE_EXCEPTION.search(self.text) and not EXCEPTION_LINE.match(self.text):
            return True
        ends_traceback = _IN_TRACEBACK.search(self._passage.pieces[max(0, self._index - 1)])
        above = readable(self._above_traceback[:500]) if ends_traceback else ""
        return bool(_CONTINUES.search(self.text) or _CONTINUES.search(above) or _LOGGED.search(above))

    @property
    def _above_traceback(self) -> bytes:
        """The line above the traceback, and above those that led to it, which the line ends."""
        pieces, chained = self._passage.pieces, False
        for index in range(self._index - 1, max(-1, self._index - TRACEBACK_LINES), -1):
            if _CHAINED.search(b"\n".join(pieces[max(0, index - 1) : index + 2])):
                chained = True
            elif not chained and not _IN_TRACEBACK.search(pieces[index]):
                return pieces[index]
            else:
                chained = False
        return b""

    @cached_property
    def is_handled(self) -> bool:
        """True if the line is an exception, and it or the next two lines say that the program goes on."""
        below = self._passage.pieces[self._index + 1 : self._index + 3]
        return bool(_HANDLED.search(self.text[:500])) or (
            bool(EXCEPTION_LINE.match(self.text[:500]))
            and any(_GOES_ON.search(readable(piece[:300])) for piece in below)
        )

    def exception_below(self) -> Line | None:
        """Return the last line of the traceback that starts in this line."""
        prefix = self.text.split("Traceback")[0]
        stop = min(len(self._passage.pieces), self._index + TRACEBACK_LINES)
        if self._index and _IGNORED.search(self._passage.pieces[self._index - 1]):
            return None
        for below in range(self._index + 1, stop):
            text = self._passage.text(below)
            rest = text[len(prefix) :]
            if text.startswith(prefix) and rest and not rest[0].isspace():
                last = Line(self._passage, below)
                return None if last.is_handled or not _EXCEPTION.match(rest) else last
        return None


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that a signature matched.

    ``line`` counts from 1. ``clock_s`` orders lines of different logs. It is the line's time in seconds since
    the start of the year, or None if neither the line nor one above it contains a time. ``continues`` is True
    if the message says that the program goes on.
    """

    signature: Signature
    path: str
    line: int
    evidence: str
    groups: dict[str, str]
    clock_s: float | None = None
    continues: bool = False

    @property
    def weight(self) -> int:
        """The weight of the signature."""
        return self.signature.weight


@dataclass(slots=True)
class SignatureHits:
    """The first hits of one signature in one log; ``count`` is the number of all matching lines."""

    signature: Signature
    hits: list[Hit] = field(default_factory=list)
    last_line: int = 0
    count: int = 0


@dataclass(slots=True)
class _Candidates:
    """The signatures for lines with certain words; ``active`` contains the signatures still in use."""

    signatures: tuple[Signature, ...]
    active: tuple[Signature, ...]
    lines: int = 0


class Scan:
    """The hits of all signatures in one log."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        self.path = path
        self.catalogue = catalogue
        #: Line numbers and texts of the last lines that are not blank.
        self.last_lines: list[tuple[int, str]] = []
        #: Number of the last line with an exception that the program handles, or 0.
        self.last_handled = 0
        #: Numbers of the lines among the last ones that show further work of the program.
        self.ordinary_lines: set[int] = set()
        #: Numbers of the lines among the last ones that contain words about a failure.
        self.complaints: set[int] = set()
        #: True if the last line announces work of the program or of its script.
        self.announces_work = False
        self._last_bar = 0
        self._hits: dict[int, SignatureHits] = {}
        self._ignored: set[int] = set()
        self._candidates: dict[frozenset[bytes], _Candidates] = {}
        self._tail: deque[tuple[int, bytes, frozenset[bytes]]] = deque(maxlen=TAIL_LINES)

    def read(self, source: Source) -> Scan:
        """Read the log once and collect the hits."""
        lines = LineFilter(frozenset(self.catalogue.index), self.catalogue.vocabulary)
        ends: deque[tuple[int, bytes]] = deque(maxlen=END_LINES)
        for passage, begin, end in passages(source):
            for index, words in lines.select(passage, begin, end):
                self._match_line(passage, index, words)
            filled = (at for at in range(end - 1, begin - 1, -1) if passage.pieces[at].strip())
            recent = [*islice(filled, END_LINES)]
            ends.extend((passage.numbers[at], passage.pieces[at]) for at in reversed(recent))
        skipped = [(number, piece, lines.words_of(piece)) for number, piece in lines.skipped_last.values()]
        for number, piece, words in sorted([*skipped, *self._tail], key=lambda line: line[0]):
            self._match_all(self._candidates_for(words).signatures, Line(Passage([piece], [number]), 0))
        last = [*ends][-LAST_LINES:]
        final = Passage([piece for _, piece in last], [number for number, _ in last])
        for index in range(len(last)):
            self._match_all(self.catalogue.signs, Line(final, index))
        self.last_lines = [(number, shortened(readable(piece), 0)) for number, piece in last]
        texts = [(number, readable(piece)[:500]) for number, piece in ends]
        rest = [(number, _NO_FAILURE.sub("", text)) for number, text in texts]
        self.ordinary_lines = {number for number, text in rest if not _NO_WORK.search(text)}
        self.complaints = {number for number, text in rest if _COMPLAINT.search(text)}
        self.announces_work = bool(self.last_lines and _STARTS.search(self.last_lines[-1][1]))
        self._last_bar = max((number for number, text in texts if _BAR.match(text)), default=0)
        return self

    def hits(self) -> list[SignatureHits]:
        """Return the hits of every signature that matched."""
        return list(self._hits.values())

    def last_line(self, fact: str) -> int:
        """Return the number of the last line that states a fact, or 0 if there is none."""
        lines = (found.last_line for found in self.hits() if found.signature.name == fact)
        return max(lines, default=0) if fact != "progress" else max(self._last_bar, *lines, 0)

    def first_line(self, fact: str) -> int:
        """Return the number of the first line that states a fact, or 0 if there is none."""
        return min(
            (hit.line for found in self.hits() if found.signature.name == fact for hit in found.hits),
            default=0,
        )

    def _match_line(self, passage: Passage, index: int, words: frozenset[bytes]) -> None:
        """Match a line against the active signatures; keep it if further signatures must be tried later."""
        candidates = self._candidates_for(words)
        candidates.lines += 1
        if candidates.lines % CANDIDATE_REFRESH == 0:
            candidates.active = tuple(s for s in candidates.active if not self._has_enough(s))
        if candidates.lines > LINES_PER_WORD_SET:
            candidates.active = ()
        if len(candidates.active) < len(candidates.signatures):
            self._tail.append((passage.numbers[index], passage.pieces[index], words))
        if candidates.active:
            self._match_all(candidates.active, Line(passage, index))

    def _match_all(self, signatures: tuple[Signature, ...], line: Line) -> None:
        if line.number in self._ignored:
            return
        if line.is_ignored or line.is_handled:
            self.last_handled = max(self.last_handled, 0 if line.is_ignored else line.number)
            self._ignored.add(line.number)
            return
        for signature in signatures:
            if signature.name == TRACEBACK:
                self._add_exception(signature, line)
            elif match := _match(signature, line):
                groups = {name: value.strip() for name, value in match.groupdict().items() if value}
                evidence = shortened(line.text, match.start())
                self._add(
                    Hit(signature, self.path, line.number, evidence, groups, line.clock_s, line.continues)
                )

    def _candidates_for(self, words: frozenset[bytes]) -> _Candidates:
        found = self._candidates.get(words)
        if found is None:
            if len(self._candidates) >= REMEMBERED_WORD_SETS:
                self._candidates.clear()
            signatures = self.catalogue.candidates(words)
            active = tuple(s for s in signatures if not self._has_enough(s))
            found = self._candidates[words] = _Candidates(signatures, active)
        return found

    def _has_enough(self, signature: Signature) -> bool:
        found = self._hits.get(id(signature))
        return found is not None and len(found.hits) >= HITS_KEPT

    def _add(self, hit: Hit) -> None:
        found = self._hits.setdefault(id(hit.signature), SignatureHits(hit.signature))
        if any(kept.line == hit.line for kept in found.hits):
            return  # pieces of a long line overlap, and the last lines are matched twice
        found.count += 1
        found.last_line = max(found.last_line, hit.line)
        if len(found.hits) < HITS_KEPT:
            found.hits.append(hit)

    def _add_exception(self, signature: Signature, line: Line) -> None:
        """Add the last line of a traceback as a sign of failure, whatever the exception's name."""
        found = line.exception_below()
        if found:
            evidence = shortened(found.text, 0)
            self._add(Hit(signature, self.path, found.number, evidence, {}, continues=found.continues))


def _match(signature: Signature, line: Line) -> re.Match[str] | None:
    """Return the signature's match that starts in this line, if the conditions on the context are met."""
    match = signature.pattern.search(line.with_following if signature.spans_lines else line.text)
    if not match or match.start() > len(line.text):
        return None
    if signature.near and not signature.near.search(line.neighbourhood):
        return None
    if signature.not_here and signature.not_here.search(line.text):
        return None
    if signature.not_near and signature.not_near.search(line.neighbourhood):
        return None
    if signature.where and not _compare(*signature.where, match.groupdict()):
        return None
    return match


def _compare(left: str, operator: str, right: str, groups: dict[str, str | None]) -> bool:
    """Compare two numbers; each is a literal or the name of a group of the pattern."""
    digits = [groups.get(side) or side for side in (left, right)]
    if max(map(len, digits)) > 18:
        return False  # Too long for a count; Python refuses to convert very long numbers.
    one, other = map(int, digits)
    return {
        "<": one < other,
        ">": one > other,
        "==": one == other,
        "!=": one != other,
        "apart": one != other and (one - other) % 8 == 0,
    }[operator]


def shortened(text: str, around: int) -> str:
    """Shorten text to a length suitable for printing, around the character position ``around``."""
    text = text.strip()
    if len(text) <= EVIDENCE_CHARACTERS:
        return text
    start = max(0, min(around - 200, len(text) - EVIDENCE_CHARACTERS))
    cut = text[start : start + EVIDENCE_CHARACTERS]
    return ("…" if start else "") + cut + ("…" if start + EVIDENCE_CHARACTERS < len(text) else "")
