"""Read logs of any size quickly, and hand over the few lines worth a closer look.

A line's *shape* is its letters in lower case, without digits and punctuation: the
thousands of lines of a training loop have a handful of shapes. A shape is judged once, by
its words, and only lines of a shape that holds a wanted word are looked at.
"""

from __future__ import annotations

import io
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: A log: a file by its path, an open one, the whole as text or bytes, or its lines.
Source = Path | Iterable[bytes | str]

#: Bytes read at once, and the most that is looked at as one line; longer ones are cut, overlapping.
BLOCK_BYTES = 1 << 20
PIECE_BYTES = 8192
OVERLAP_BYTES = 1024
#: Lines around a line that a signature can see.
ABOVE = 12
BELOW = 64
#: Lines of one shape that are looked at; of the others, only the last.
SHAPE_LIMIT = 64
#: Lines that are looked at whatever they say; beyond, only those whose known words are rare so far.
#: No log of a real job comes near: it repeats its shapes.
LOOK_LIMIT = 10_000
RARE = 8
#: Shapes that are remembered; a log with more repeats little, so forgetting costs little.
REMEMBERED_SHAPES = 100_000

_LETTERS = string.ascii_letters.encode()
_SHAPE = bytes(ord(chr(code).lower()) if code in _LETTERS or code == 0x0A else 0x20 for code in range(256))
_DROPPED = string.digits.encode() + b"\0"
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class Passage:
    """Consecutive lines of a log (cut into pieces where too long), with their numbers."""

    pieces: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def text(self, index: int) -> str:
        """Return a line as readable text, without control characters."""
        return readable(self.pieces[index])

    def around(self, index: int, *, above: int, below: int) -> str:
        """Return the lines around one, joined by newlines."""
        start, stop = max(0, index - above), min(len(self.pieces), index + below + 1)
        return "\n".join(self.text(i)[:1000] for i in range(start, stop))


def readable(piece: bytes) -> str:
    """Return text that a terminal can show: no escape sequences, no NULs."""
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
        held: list[bytes] = []
        size = 0
        for line in source:
            held.append(_encoded(line).removesuffix(b"\n"))
            size += len(held[-1]) + 1
            if size >= BLOCK_BYTES:
                yield b"\n".join([*held, b""])
                held, size = [], 0
        yield b"\n".join(held)


def _encoded(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


class LineFilter:
    """Decides by its words whether a line is worth a look; remembers shapes.

    A line is worth it when it holds one of ``keys``; what is handed on with it are its
    words that are in ``vocabulary``.
    """

    def __init__(self, keys: frozenset[bytes], vocabulary: frozenset[bytes]) -> None:
        self._keys = keys
        self._vocabulary = vocabulary
        self._looked_at: dict[bytes, int] = {}
        self._looks = 0
        self._seen: dict[frozenset[bytes], int] = {}
        self.skipped_last: dict[bytes, tuple[int, bytes]] = {}

    def select(self, passage: Passage, begin: int, end: int) -> Iterator[tuple[int, frozenset[bytes]]]:
        """Yield index and known words of the pieces in [begin, end) that deserve a look."""
        shapes = b"\n".join(passage.pieces[begin:end]).translate(_SHAPE, _DROPPED).split(b"\n")
        looked_at, keys, vocabulary = self._looked_at, self._keys, self._vocabulary
        for index, shape in enumerate(shapes, begin):
            count = looked_at.get(shape, 0)
            if count < 0:
                continue
            if count >= SHAPE_LIMIT:
                self.skipped_last[shape] = (passage.numbers[index], passage.pieces[index])
                continue
            words = shape.split()
            if keys.isdisjoint(words):
                looked_at[shape] = -1
                continue
            looked_at[shape] = count + 1
            known = vocabulary.intersection(words)
            if self._is_worth_it(known):
                yield index, known
            else:  # of these, too, the last is kept
                self.skipped_last[b" ".join(sorted(known))] = (passage.numbers[index], passage.pieces[index])
        if len(looked_at) >= REMEMBERED_SHAPES:
            looked_at.clear()

    def _is_worth_it(self, known: frozenset[bytes]) -> bool:
        """Whether a line with these known words is looked at, however different its other words are."""
        self._looks += 1
        self._seen[known] = self._seen.get(known, 0) + 1
        return self._looks <= LOOK_LIMIT or self._seen[known] <= RARE

    def words_of(self, piece: bytes) -> frozenset[bytes]:
        """Return the known words of a line."""
        return self._vocabulary.intersection(piece.translate(_SHAPE, _DROPPED).split())


def passages(source: Source) -> Iterator[tuple[Passage, int, int]]:
    """Yield passages with the range of indices that is new and has its context around it."""
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
    """Add lines; one that is long or holds carriage returns becomes several pieces."""
    if max(map(len, lines), default=0) <= PIECE_BYTES and not any(b"\r" in line for line in lines):
        passage.pieces += lines
        passage.numbers += range(number, number + len(lines))
        return
    for offset, line in enumerate(lines):
        for part in line.rstrip(b"\r").split(b"\r"):
            for start in range(0, max(1, len(part) - OVERLAP_BYTES), PIECE_BYTES - OVERLAP_BYTES):
                passage.pieces.append(part[start : start + PIECE_BYTES])
                passage.numbers.append(number + offset)
