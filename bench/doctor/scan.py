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
from pathlib import Path

from ddp_scaling_bench.text import printable

from .catalogue import ENDED, Catalogue, Signature

#: A log: a file's path, an open file, the whole text as str or bytes, or the lines.
Source = Path | Iterable[bytes | str]

#: Bytes read at a time.
BLOCK_BYTES = 1 << 20
#: Longer lines are cut into pieces of this size, which overlap.
PIECE_BYTES = 8192
OVERLAP_BYTES = 1024
#: Numbers of lines above and below a line that are available as its context.
ABOVE, BELOW = 64, 64
#: Numbers of lines above and below that ``near`` searches. A time is also searched in the lines above.
NEAR_ABOVE, NEAR_BELOW = 12, 4
#: Number of following lines in which a message may continue.
FOLLOWING_LINES = 3
#: Number of lines in which torch reports an error of NCCL; the last of them is NCCL's last error.
NCCL_LINES = 4
#: Maximum number of matched lines that contain the same words of the catalogue.
LINES_PER_WORDS = 1024
#: Maximum number of hits of a signature in a log.
HITS_KEPT = 128
REMEMBERED_SHAPES = 20_000
EVIDENCE_CHARACTERS = 2000
#: Numbers of last lines reported for a log without a known cause: those that look like errors, or any lines.
ERROR_LINES, LAST_LINES = 5, 3

#: A time: the year (0 if the line contains none, as with glog), and a number that orders the times of a year.
Clock = tuple[int, float]

_LETTERS = string.ascii_letters.encode()
_SHAPE = bytes(ord(chr(code).lower()) if code in _LETTERS or code == 0x0A else 0x20 for code in range(256))
_DROPPED = string.digits.encode() + b"\0"
#: A line with one of these syllables looks like an error. Nothing is concluded from it.
_ERROR = re.compile(rb"error|exception|fail|fatal|abort|kill")
#: Lines of NCCL at level INFO, such as "Failed to initialize NET plugin IB", say nothing about a failure.
_INFO = b"NCCL INFO"
_DATE = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\[?\b[IWEF]()(\d?\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
#: The first lines of an error of NCCL, see :mod:`ddp_scaling_bench.measure.nccl_errors`.
_NCCL_ERROR = re.compile(r"\bNCCL version \d|\bnccl(?:\w{1,40}Error|Invalid\w{1,20}|Timeout): ")
_TRACEBACK = "Traceback (most recent call last)"
_IN_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^(?:\[?\w+\]?:)?\s{2,}")
#: The line above a traceback of an exception that Python ignores (in Python 3.14: "ignored while ...").
_IGNORED = re.compile(r"Exception ignored|Error in atexit\._run_exitfuncs")


@dataclass(slots=True)
class Passage:
    """Consecutive lines of a log with their line numbers; long lines are split into several pieces."""

    pieces: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def text(self, index: int) -> str:
        """Return a line, or a piece of a long line, without control characters and trailing spaces."""
        return printable(self.pieces[index].decode("utf-8", "replace")).rstrip()

    def around(self, index: int, *, above: int, below: int) -> str:
        """Return a line, or a piece of a long line, with those above and below, joined by newlines."""
        start, stop = max(0, index - above), min(len(self.pieces), index + below + 1)
        return "\n".join(self.text(i)[:1000] for i in range(start, stop))

    def with_following(self, index: int) -> str:
        """Return a line and the following lines, for messages that are wrapped."""
        return f"{self.text(index)}\n{self.around(index + 1, above=0, below=FOLLOWING_LINES - 1)}"

    def clock(self, index: int) -> Clock | None:
        """Return the time of a line, read from it or from a line above."""
        for above in range(index, max(-1, index - NEAR_ABOVE), -1):
            text = self.text(above)[:300]
            if match := _DATE.search(text) or _GLOG.search(text):
                year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
                fraction = float(f"0.{match.group(7)}") if match.group(7) else 0.0
                time_s = ((month * 31 + day) * 24 + hour) * 3600 + minute * 60 + second + fraction
                return year, time_s
        return None

    def raised(self, index: int) -> int | None:
        """Return the index of the exception below the traceback that starts in a line."""
        prefix, traceback, _ = self.text(index).partition(_TRACEBACK)
        for below in range(index + 1, min(len(self.pieces), index + BELOW) if traceback else 0):
            text = self.text(below)
            if text.startswith(prefix) and text[len(prefix) :].lstrip() == text[len(prefix) :] != "":
                return below
        return None

    def last_error(self, index: int) -> int:
        """Return the index of NCCL's last error below the first lines of an error of NCCL, else ``index``."""
        for at in range(index, min(index + NCCL_LINES, len(self.pieces)) - 1):
            if not _NCCL_ERROR.search(self.text(at)):
                prefix, heading, rest = self.text(at).partition("Last error:")
                below = self.text(at + 1)
                found = heading and not rest and below.startswith(prefix) and below[len(prefix) :].strip()
                return at + 1 if found else index
        return index

    def is_ignored(self, index: int) -> bool:
        """Return whether a line belongs to a traceback of an exception that Python ignores."""
        above = index - 1
        while above > max(0, index - ABOVE) and _IN_TRACEBACK.search(self.text(above)):
            above -= 1
        return above >= 0 and bool(_IGNORED.search(self.text(above)))


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
        for line in source:
            yield _encoded(line).removesuffix(b"\n") + b"\n"


def _encoded(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def as_words(text: bytes) -> bytes:
    """Return lower-case text without digits and punctuation, like the catalogue's words; keep line breaks."""
    return text.translate(_SHAPE, _DROPPED)


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
        if end > begin + BELOW:
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


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that a signature matched.

    ``line`` counts from 1. ``length`` is the number of characters of the message that the pattern matched.
    ``clock`` orders lines of different logs. It is None if neither the line nor one above it contains a time.
    """

    signature: Signature
    path: str
    line: int
    evidence: str
    groups: dict[str, str]
    length: int
    clock: Clock | None


@dataclass(slots=True)
class _Shape:
    """The catalogue's words in lines of one shape, signatures to try, and whether they look like errors."""

    words: frozenset[bytes]
    candidates: tuple[Signature, ...]
    is_error: bool


class Scan:
    """The hits of all signatures in one log, and its last lines by line number."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        self.path = path
        self._errors: dict[bytes, tuple[int, str]] = {}
        self._ends: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
        self._catalogue = catalogue
        self._has_ended = False
        self._hits: dict[Signature, dict[int, Hit]] = {}
        self._shapes: dict[bytes, _Shape | None] = {}
        self._candidates: dict[frozenset[bytes], tuple[Signature, ...]] = {}
        self._tried: dict[frozenset[bytes], int] = {}

    @property
    def hits(self) -> list[Hit]:
        """The first hits of every signature that matched."""
        return [hit for hits in self._hits.values() for hit in hits.values()]

    @property
    def last_lines(self) -> list[tuple[int, str]]:
        """Numbers and texts of the last lines that look like errors, or else of the last lines.

        Lines below the first report of a launcher that a process failed are left out, as are NCCL's lines at
        level INFO.
        """
        return [*self._errors.values()] or [*self._ends]

    def read(self, source: Source) -> Scan:
        """Read the log once and collect the hits and the last lines."""
        for passage, begin, end in passages(source):
            shapes = as_words(b"\n".join(passage.pieces[begin:end])).split(b"\n")
            for index, line in enumerate(shapes, begin):
                shape = self._shapes[line] if line in self._shapes else self._add_shape(line)
                if shape is None:
                    continue
                if shape.is_error and not self._has_ended:
                    self._keep_error(line, passage, index)
                if shape.candidates:
                    self._match_line(passage, index, shape)
            pieces = passage.pieces
            filled = [
                at
                for at in range(max(begin, end - 64), end)
                if pieces[at].strip() and _INFO not in pieces[at]
            ]
            self._ends.extend((passage.numbers[at], passage.text(at)) for at in filled[-LAST_LINES:])
        return self

    def _add_shape(self, line: bytes) -> _Shape | None:
        if len(self._shapes) >= REMEMBERED_SHAPES:
            self._shapes.clear()
            self._candidates.clear()
            self._tried.clear()
        words = self._catalogue.vocabulary.intersection(line.split())
        if (candidates := self._candidates.get(words)) is None:
            candidates = self._candidates[words] = self._catalogue.candidates(words)
        is_error = bool(_ERROR.search(line)) and as_words(_INFO) not in line
        shape = _Shape(words, candidates, is_error) if candidates or is_error else None
        self._shapes[line] = shape
        return shape

    def _keep_error(self, shape: bytes, passage: Passage, index: int) -> None:
        """Keep a line that looks like an error, instead of the previous line of this shape."""
        last = passage.last_error(index) if b"nccl" in shape or b"last error" in shape else index
        shape = shape if last == index else b"last error"
        self._errors.pop(shape, None)
        self._errors[shape] = passage.numbers[last], shortened(passage.text(last), 0)
        if len(self._errors) > ERROR_LINES:
            del self._errors[next(iter(self._errors))]

    def _match_line(self, passage: Passage, index: int, shape: _Shape) -> None:
        """Match a line against the signatures for its words that have not matched often enough."""
        tried = self._tried[shape.words] = self._tried.get(shape.words, 0) + 1
        if tried > LINES_PER_WORDS:
            return
        for signature in shape.candidates:
            hits = self._hits.setdefault(signature, {})
            at = passage.raised(index) if signature.traceback else index
            if at is None or len(hits) >= HITS_KEPT or passage.numbers[at] in hits:
                continue
            if match := _match(signature, passage, at):
                shown = passage.last_error(at)
                hits[passage.numbers[shown]] = self._hit(signature, passage, shown, match)
                self._has_ended |= signature.kind == ENDED

    def _hit(self, signature: Signature, passage: Passage, index: int, match: re.Match[str]) -> Hit:
        groups = match.groupdict()
        prefix = len(groups.pop("prefix", None) or "")
        return Hit(
            signature,
            self.path,
            passage.numbers[index],
            shortened(passage.text(index), match.start() + prefix),
            {name: value.strip() for name, value in groups.items() if value},
            len(match.group()) - prefix,
            passage.clock(index),
        )


def _match(signature: Signature, passage: Passage, index: int) -> re.Match[str] | None:
    """Return the signature's match that starts in a line, if the conditions on the context are met."""
    text = passage.text(index)
    searched = passage.with_following(index) if signature.spans_lines else text
    match = signature.pattern.search(searched)
    if not match or match.start() > len(text):
        return None
    if signature.near and not signature.near.search(
        passage.around(index, above=NEAR_ABOVE, below=NEAR_BELOW)
    ):
        return None
    if signature.where and not _compare(*signature.where, match.groupdict()):
        return None
    return None if passage.is_ignored(index) else match


def _compare(left: str, operator: str, right: str, groups: dict[str, str | None]) -> bool:
    """Compare two numbers; each is a literal or the name of a group of the pattern."""
    one, other = (groups.get(side) or side for side in (left, right))
    if max(len(one), len(other)) > 18:
        return False  # Too long for a count; Python refuses to convert very long numbers.
    return int(one) < int(other) if operator == "<" else int(one) > int(other)


def shortened(text: str, around: int) -> str:
    """Shorten text to a length suitable for printing, around the character position ``around``."""
    text = text.strip()
    if len(text) <= EVIDENCE_CHARACTERS:
        return text
    start = max(0, min(around - 200, len(text) - EVIDENCE_CHARACTERS))
    cut = text[start : start + EVIDENCE_CHARACTERS]
    return ("…" if start else "") + cut + ("…" if start + EVIDENCE_CHARACTERS < len(text) else "")
